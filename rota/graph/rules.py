"""How each op may be cut: its dims in notation, and how a part of it is computed.

The rule of an op says which dims of its inputs and outputs are the same (see notation.py). Rules are forward only:
autograd differentiates what is computed on each device. An op without a rule can be replicated but not cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rota.errors import RuleError
from rota.graph.functional import overload
from rota.graph.graph import Op, Ref, Tensor
from rota.graph.notation import Letters, Shape, Signature, Words, parse

Shapes = Sequence[Shape]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An op with its shapes: what a rule looks at."""

    op: Op
    reads: tuple[Shape, ...]
    """The shape of each tensor among the arguments, in order; a tensor that is read twice is there twice."""
    makes: tuple[Shape | None, ...]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, by its position or name."""
        if position < len(self.op.args):
            return self.op.args[position]
        return self.op.kwargs.get(name, default)

    @property
    def made(self) -> Shape:
        """The shape of the only output."""
        assert self.makes[0] is not None
        return self.makes[0]


@dataclass(frozen=True, kw_only=True)
class LocalCut:
    """The part of an op that is to be computed."""

    reads: tuple[Shape, ...]
    """The local shapes."""
    makes: tuple[Shape | None, ...]
    ranges: Mapping[str, tuple[int, int]]
    """word -> range, of the words of the rule that are cut (a composed dim whose factors are cut is not here)."""
    first: bool
    """Whether it is the first part along every summed dim."""


Compute = Callable[[Sequence[Any]], Any]
"""The tensors of a part, in the order of the reads -> its result, as the op returns it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is known of a kind of op."""

    signature: Callable[[Case], Signature]
    local: Callable[[Case, LocalCut], Compute] | None = None
    """How a part is computed, where that is not the op itself on smaller tensors."""
    positional: bool = False
    """The result depends on where an element is in the whole tensor, as random numbers and arange do."""
    linear_in: frozenset[int] | None = None
    """The reads in which the op is linear together: partial sums go through it unchanged."""


_RULES: dict[str, Rule] = {}


def register_rule(target: str, notation: str) -> None:
    """Tell how a custom op may be cut, in one line: ``register_rule("mylib::swish", "* n, n -> * n")``."""
    _RULES[target.replace("::", ".")] = Rule(signature=_noted(notation))


def rule_of(op: Op) -> Rule | None:
    """The rule of an op, or None."""
    namespace, name = op.target.split(".")[:2]
    if namespace != "aten":
        return _RULES.get(op.target) or _RULES.get(f"{namespace}.{name}")
    return _RULES.get(op.kind)


def kinds() -> list[str]:
    """The kinds that have a rule."""
    return sorted(_RULES)


def case_of(op: Op, tensors: Mapping[str, Tensor]) -> Case:
    """An op with the shapes of what it reads and makes."""
    return Case(
        op=op,
        reads=tuple(tensors[name].shape for name in occurrences(op)),
        makes=tuple(None if name is None else tensors[name].shape for name in op.outputs),
    )


def occurrences(op: Op) -> tuple[str, ...]:
    """The tensors among the arguments in order, one that is read twice twice."""
    found: list[str] = []

    def visit(value: Any) -> None:
        if isinstance(value, Ref):
            found.append(value.name)
        elif isinstance(value, tuple | list):
            for item in value:
                visit(item)

    visit(op.args)
    for value in op.kwargs.values():
        visit(value)
    return tuple(found)


def signature_of(case: Case) -> Signature:
    """How the op's dims belong together; none may be cut if it has no rule, or a rule that does not fit it."""
    rule = rule_of(case.op)
    if rule is not None:
        try:
            return rule.signature(case)
        except RuleError:
            if not case.op.target.startswith("aten."):
                raise
    return _uncut(case)


def _uncut(case: Case) -> Signature:
    words = Words()
    return words.signature([_privates(words, one) for one in case.reads], [_maybe(words, one) for one in case.makes])


def _privates(words: Words, shape: Shape) -> tuple[Letters, ...]:
    return tuple(words.private(size) for size in shape)


def _maybe(words: Words, shape: Shape | None) -> tuple[Letters, ...] | None:
    return None if shape is None else _privates(words, shape)


def _optional_reads(case: Case) -> list[Shape | None]:
    """The shapes by the op's schema: a tensor argument that is None keeps its place."""
    shapes = iter(case.reads)
    found: list[Shape | None] = []
    schema = overload(case.op.target)._schema.arguments  # type: ignore[attr-defined]
    for position, argument in enumerate(schema):
        if "Tensor" not in str(argument.type):
            continue
        value = case.argument(position, argument.name)
        if isinstance(value, tuple | list):
            found += [next(shapes) for _ in value]
        else:
            found.append(next(shapes) if isinstance(value, Ref) else None)
    return found


# ---- the ways to write a rule ----


def _rule(*kinds: str, **settings: Any) -> Callable[[Callable[[Case], Signature]], Callable[[Case], Signature]]:
    def add(signature: Callable[[Case], Signature]) -> Callable[[Case], Signature]:
        for kind in kinds:
            _RULES[kind] = Rule(signature=signature, **settings)
        return signature

    return add


def _lines(text: str) -> None:
    """One rule per line: kinds, a colon, notation."""
    for line in text.strip().splitlines():
        names, _, notation = line.partition(":")
        for kind in names.split():
            _RULES[kind] = Rule(signature=_noted(notation.strip()))


def _noted(notation: str) -> Callable[[Case], Signature]:
    parsed = parse(notation)
    return lambda case: parsed.signature(_optional_reads(case), case.makes)


def _names(count: int) -> list[str]:
    return [f"d{i}" for i in range(count)]


def _broadcast(words: Words, shapes: Sequence[Shape], rank: int) -> list[tuple[Letters, ...]]:
    """The words of tensors that broadcast to one of this rank."""
    names = _names(rank)
    return [words.all(names[rank - len(shape) :], shape) for shape in shapes]


def _call(case: Case, args: Sequence[Any], kwargs: Mapping[str, Any], target: str | None = None) -> Compute:
    """Call the op with other arguments; its tensors are bound in order."""
    function = overload(target or case.op.target)

    def compute(values: Sequence[Any]) -> Any:
        rest = iter(values)
        return function(*(_bind(one, rest) for one in args), **{name: _bind(one, rest) for name, one in kwargs.items()})

    return compute


def _bind(value: Any, rest: Any) -> Any:
    if isinstance(value, Ref):
        return next(rest)
    if isinstance(value, tuple | list):
        return type(value)(_bind(item, rest) for item in value)
    return value


def compute_of(case: Case, cut: LocalCut | None) -> Compute:
    """How a part of an op is computed; None for all of it."""
    rule = rule_of(case.op)
    if cut is None or rule is None or rule.local is None:
        dropped = signature_of(case).once if cut is not None and not cut.first else frozenset()
        if dropped:
            return _without(case, dropped)
        return _call(case, case.op.args, case.op.kwargs)
    return rule.local(case, cut)


def _without(case: Case, dropped: frozenset[int]) -> Compute:
    """The op without some of its tensors, which another part adds."""
    counter = itertools.count()

    def drop(value: Any) -> Any:
        if isinstance(value, Ref):
            return None if next(counter) in dropped else value
        if isinstance(value, tuple | list):
            return type(value)(drop(item) for item in value)
        return value

    args = [drop(one) for one in case.op.args]
    return _call(case, args, {name: drop(one) for name, one in case.op.kwargs.items()})


# ---- pointwise ----

_POINTWISE = """
abs add sub mul div neg pow exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan tanh sigmoid relu relu6 gelu
silu elu leaky_relu hardswish hardsigmoid hardtanh mish softplus selu celu erf floor ceil round trunc sign clamp
clamp_min clamp_max where masked_fill eq ne lt le gt ge and or xor logical_and logical_or logical_not logical_xor
bitwise_and bitwise_or bitwise_not maximum minimum fmod remainder floor_divide isnan isinf isfinite to _to_copy clone
contiguous detach type_as zeros_like ones_like full_like empty_like fill rsub addcmul addcdiv lerp square atan2 logit
log_sigmoid isneginf isposinf nan_to_num float double half bool int long
"""


def _linear_reads(case_kind: str) -> frozenset[int] | None:
    both = frozenset({0, 1})
    only = frozenset({0})
    return {
        "add": both, "sub": both, "neg": only, "mul": only, "div": only, "to": only, "_to_copy": only, "clone": only,
        "contiguous": only,
    }.get(case_kind)  # fmt: skip


def _pointwise(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    return words.signature(_broadcast(words, case.reads, rank), _broadcast(words, [case.made], rank))


for _kind in _POINTWISE.split():
    _RULES[_kind] = Rule(signature=_pointwise, linear_in=_linear_reads(_kind))


@_rule("min", "max")
def _extremes(case: Case) -> Signature:
    if case.op.target.endswith(".other"):
        return _pointwise(case)
    return _along(case, (case.argument(1, "dim", None),), "^")


# ---- products ----

_lines(
    """
    linear: * k+, n k+, n? -> * n
    mm: m k+, k+ n -> m n
    bmm: b m k+, b k+ n -> b m n
    mv: m k+, k+ -> m
    dot: k+, k+ ->
    """
)


@_rule("matmul")
def _matmul(case: Case) -> Signature:
    a, b = case.reads
    left = ["k+"] if len(a) == 1 else ["*", "m", "k+"]
    right = ["k+"] if len(b) == 1 else ["*", "k+", "n"]
    made = [*(["*"] if max(len(a), len(b)) > 2 else []), *(["m"] if len(a) > 1 else []), *(["n"] if len(b) > 1 else [])]
    left, right = (w if len(s) > 2 else [x for x in w if x != "*"] for w, s in ((left, a), (right, b)))
    return parse(f"{' '.join(left)}, {' '.join(right)} -> {' '.join(made)}").signature(case.reads, case.makes)


def _addmm_local(case: Case, cut: LocalCut) -> Compute:
    if cut.first:
        return _call(case, case.op.args, case.op.kwargs)
    alpha = case.op.kwargs.get("alpha", 1)

    def compute(values: Sequence[Any]) -> Any:
        product = torch.mm(*values)
        return product if alpha == 1 else alpha * product

    return compute


@_rule("addmm", local=_addmm_local)
def _addmm(case: Case) -> Signature:
    words = Words()
    bias = words.all(["m", "n"][2 - len(case.reads[0]) :], case.reads[0])
    return words.signature(
        [bias, words.all(["m", "k+"], case.reads[1]), words.all(["k+", "n"], case.reads[2])],
        [words.all(["m", "n"], case.made)],
        once=[0],
    )


@_rule("einsum")
def _einsum(case: Case) -> Signature:
    left, arrow, right = case.op.args[0].replace(" ", "").partition("->")
    if not arrow or "." in left or any(len(set(one)) != len(one) for one in left.split(",")):
        raise RuleError(f"the equation {case.op.args[0]!r} has no rule")
    words = Words()
    mark = {letter: letter if letter in right else letter + "+" for letter in left if letter != ","}
    reads = [words.all([mark[x] for x in one], shape) for one, shape in zip(left.split(","), case.reads, strict=True)]
    return words.signature(reads, [words.all(list(right), case.made)])


def _embedding_local(case: Case, cut: LocalCut) -> Compute:
    if "v" not in cut.ranges:
        return _call(case, case.op.args, case.op.kwargs)
    start, stop = cut.ranges["v"]
    padding = case.argument(2, "padding_idx", -1)
    padding = padding - start if start <= padding < stop else -1

    def compute(values: Sequence[Any]) -> Any:
        weight, index = values
        outside = (index < start) | (index >= stop)
        rows = torch.embedding(weight, (index - start).masked_fill(outside, 0), padding)
        return rows.masked_fill(outside.unsqueeze(-1), 0)

    return compute


@_rule("embedding", local=_embedding_local)
def _embedding(case: Case) -> Signature:
    # Negative padding_idx means none; a padding row gets no gradient from any part.
    return parse("v+ e, * -> * e").signature(case.reads, case.makes)


@_rule("conv1d", "conv2d", "conv3d")
def _conv(case: Case) -> Signature:
    space = " ".join("." for _ in case.made[2:])
    position = 6
    if case.argument(position, "groups", 1) != 1:
        inputs = ", ".join(" ".join("." for _ in shape) for shape in case.reads[1:])
        return parse(f"b . {space}, {inputs} -> b . {space}").signature(case.reads, case.makes)
    bias = ", n?" if len(case.reads) == 3 else ""
    return parse(f"b k+ {space}, n k+ {space}{bias} -> b n {space}").signature(case.reads, case.makes)


def _attention(case: Case) -> Signature:
    words = Words()
    q, k, v, *mask = case.reads
    causal = bool(case.argument(5, "is_causal", False))
    grouped = bool(case.argument(7, "enable_gqa", False))
    leading = len(case.made) - 2
    names = [*_names(leading - 1), "h"] if leading else []
    tail = {"q": ["l^" if causal else "l", "e^"], "k": ["s^", "e^"], "v": ["s^", "f"]}
    reads = []
    for which, shape in (("q", q), ("k", k), ("v", v)):
        own = len(shape) - 2
        heads = names[len(names) - own :]
        lead = list(words.all(heads, shape[:own])) if not grouped else list(words.all(heads[:-1], shape[: own - 1]))
        if grouped:  # query heads are groups that share a key-value head
            group = k[-3]
            lead.append(words.use("h", group) + (words.use("g", shape[-3] // group) if which == "q" else ()))
        reads.append((*lead, *words.all(tail[which], shape[own:])))
    for shape in mask:
        full = [*names, *(["l^"] if causal else ["l"]), "s^"]
        if grouped and len(shape) > 2 and shape[-3] > 1:
            raise RuleError("a mask for each head with grouped heads")
        reads.append(words.all(full[len(full) - len(shape) :], shape))
    made = (*reads[0][:-1], reads[2][-1])
    return words.signature(reads, [made])


_rule("scaled_dot_product_attention")(_attention)


# ---- along a dim ----


def _dims(case: Case, given: Any, rank: int) -> set[int]:
    """The dims that an argument names; all of them for none."""
    if given is None or given == []:
        return set(range(rank))
    listed = given if isinstance(given, tuple | list) else [given]
    return {dim % rank for dim in listed} if rank else set()


def _along(case: Case, given: Any, mark: str) -> Signature:
    """An op along some dims that keeps, drops or shrinks them."""
    words = Words()
    (shape, *others) = case.reads
    dims = _dims(case, given[0] if isinstance(given, tuple) else given, len(shape))
    names = [f"d{i}{mark}" if i in dims else f"d{i}" for i in range(len(shape))]
    read = words.all(names, shape)
    made: list[tuple[Letters, ...] | None] = []
    for out in case.makes:
        if out is None:
            made.append(None)
        elif len(out) == len(shape):
            kept = [
                words.use(names[i], size)
                if i not in dims or (mark == "^" and size == shape[i])
                else words.private(size)
                for i, size in enumerate(out)
            ]
            made.append(tuple(kept))
        else:
            rest = [names[i] for i in range(len(shape)) if i not in dims]
            made.append(words.all(rest, out))
    return words.signature([read, *(_privates(words, one) for one in others)], made)


def _keep(position: int) -> Callable[[Case], Signature]:
    return lambda case: _along(case, (case.argument(position, "dim", -1),), "^")


for _kind in ("softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort", "topk", "flip", "logsumexp"):
    _RULES[_kind] = Rule(signature=_keep(2 if _kind == "topk" else 1))


@_rule("amax", "amin", "argmax", "argmin", "all", "any", "var", "std", "prod")
def _reduce_whole(case: Case) -> Signature:
    return _along(case, (case.argument(1, "dim", None),), "^")


def _sum_signature(case: Case) -> Signature:
    return _along(case, (case.argument(1, "dim", None),), "+")


_RULES["sum"] = Rule(signature=_sum_signature, linear_in=frozenset({0}))


def _mean_local(case: Case, cut: LocalCut) -> Compute:
    """A part of a mean is the sum of its part over the number of all."""
    dims = case.argument(1, "dim", None)
    keep = bool(case.argument(2, "keepdim", False))
    over = sorted(_dims(case, dims, len(case.reads[0])))
    if all(cut.reads[0][dim] == case.reads[0][dim] for dim in over):
        return _call(case, case.op.args, case.op.kwargs)
    count = math.prod(case.reads[0][dim] for dim in over)
    return lambda values: values[0].sum(over, keepdim=keep) / count


_RULES["mean"] = Rule(signature=_sum_signature, local=_mean_local, linear_in=frozenset({0}))


@_rule("layer_norm", "rms_norm")
def _layer_norm(case: Case) -> Signature:
    count = len(case.op.args[1])
    words = Words()
    rank = len(case.made)
    names = [f"d{i}" if i < rank - count else f"d{i}^" for i in range(rank)]
    reads = [words.all(names[rank - len(shape) :], shape) for shape in case.reads]
    return words.signature(reads, [words.all(names, case.made)])


@_rule("batch_norm")
def _batch_norm(case: Case) -> Signature:
    words = Words()
    training = bool(case.op.args[5])
    mark = "^" if training else ""
    names = ["b" + mark, "c", *(f"s{i}{mark}" for i in range(len(case.made) - 2))]
    reads = [words.all(names, case.reads[0]), *(words.all(["c"], shape) for shape in case.reads[1:])]
    return words.signature(reads, [words.all(names, case.made)])


@_rule("group_norm", "instance_norm")
def _group_norm(case: Case) -> Signature:
    words = Words()
    names = ["b", *(f"s{i}^" for i in range(len(case.made) - 1))]
    reads = [words.all(names, case.reads[0]), *(words.all(["s0^"], shape) for shape in case.reads[1:])]
    return words.signature(reads, [words.all(names, case.made)])


@_rule("cross_entropy_loss", "nll_loss_nd", "nll_loss")
def _cross_entropy(case: Case) -> Signature:
    """A sum over rows, or a value for each; the mean was turned into a sum and a division when it was captured."""
    words = Words()
    scores, target, *weight = case.reads
    reduction = case.argument(3, "reduction", 1)
    if reduction == 1:
        raise RuleError("the mean depends on how many targets are ignored")
    mark = "+" if reduction == 2 else ""
    rows = [f"b{mark}"] if len(scores) > 1 else []
    space = [f"s{i}{mark}" for i in range(len(scores) - 2)]
    by_class = [*rows, "c^", *space]
    plain = [*rows, *space]
    reads = [words.all(by_class, scores), words.all(by_class if len(target) == len(scores) else plain, target)]
    reads += [words.all(["c^"], one) for one in weight]
    return words.signature(reads, [words.all(plain, case.made) if reduction == 0 else ()])


@_rule(
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "avg_pool1d",
    "avg_pool2d",
    "max_pool1d",
    "max_pool2d",
    "max_pool2d_with_indices",
)
def _pool(case: Case) -> Signature:
    words = Words()
    space = 1 if "1d" in case.op.kind else 2
    shape = case.reads[0]
    lead = _names(len(shape) - space)
    read = (*words.all(lead, shape[:-space]), *_privates(words, shape[-space:]))
    made = [
        None if one is None else (*words.all(lead, one[:-space]), *_privates(words, one[-space:])) for one in case.makes
    ]
    return words.signature([read], made)


# ---- views ----


def _regroup_local(case: Case, cut: LocalCut) -> Compute:
    shape = cut.makes[0]
    assert shape is not None
    return lambda values: values[0].reshape(shape)


@_rule(
    *("view", "reshape", "flatten", "unflatten", "_unsafe_view", "unsqueeze", "squeeze", "view_as", "reshape_as"),
    local=_regroup_local,
    linear_in=frozenset({0}),
)
def _regroup(case: Case) -> Signature:
    words = Words()
    if case.op.kind.endswith("_as") or len(case.reads) != 1:
        raise RuleError("the shape comes from another tensor")
    return words.signature([_privates(words, case.reads[0])], [_privates(words, case.made)], regroups=True)


@_rule("permute", "transpose", "t", "movedim", "swapaxes", "mT", "numpy_T")
def _permute(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    names = _names(rank)
    if case.op.kind == "permute":
        order = [dim % rank for dim in case.argument(1, "dims")]
    elif case.op.kind in ("transpose", "swapaxes"):
        one, other = case.argument(1, "dim0") % rank, case.argument(2, "dim1") % rank
        order = list(range(rank))
        order[one], order[other] = other, one
    elif case.op.kind in ("t", "numpy_T"):
        order = list(reversed(range(rank)))
    elif case.op.kind == "mT":
        order = [*range(rank - 2), rank - 1, rank - 2]
    else:
        raise RuleError("movedim has no rule")
    return words.signature([words.all(names, case.reads[0])], [words.all([names[i] for i in order], case.made)])


def _expand_local(case: Case, cut: LocalCut) -> Compute:
    shape = cut.makes[0]
    assert shape is not None
    return lambda values: values[0].expand(shape)


@_rule("expand", "expand_as", "broadcast_to", local=_expand_local)
def _expand(case: Case) -> Signature:
    if case.op.kind == "expand_as":
        raise RuleError("the shape comes from another tensor")
    return _pointwise(case)


def _repeat_local(case: Case, cut: LocalCut) -> Compute:
    shape = cut.makes[0]
    assert shape is not None
    padded = (1,) * (len(shape) - len(cut.reads[0])) + cut.reads[0]
    repeats = [out // size for out, size in zip(shape, padded, strict=True)]
    return lambda values: values[0].repeat(repeats)


@_rule("repeat", local=_repeat_local)
def _repeat(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    offset = rank - len(case.reads[0])
    padded = (1,) * offset + case.reads[0]
    made = [words.use(f"r{i}", case.made[i] // size) + words.use(f"d{i}", size) for i, size in enumerate(padded)]
    return words.signature([words.all(_names(rank)[offset:], case.reads[0])], [tuple(made)])


def _repeat_interleave_local(case: Case, cut: LocalCut) -> Compute:
    dim = case.argument(2, "dim")
    shape = cut.makes[0]
    assert shape is not None
    return lambda values: values[0].repeat_interleave(shape[dim] // cut.reads[0][dim], dim)


@_rule("repeat_interleave", local=_repeat_interleave_local)
def _repeat_interleave(case: Case) -> Signature:
    repeats, dim = case.argument(1, "repeats"), case.argument(2, "dim")
    if not isinstance(repeats, int) or dim is None:
        raise RuleError("only a number of repeats along a dim has a rule")
    words = Words()
    rank = len(case.made)
    names = _names(rank)
    made = []
    for i, size in enumerate(case.reads[0]):
        made.append(words.use(names[i], size) + (words.use("r", repeats) if i == dim % rank else ()))
    return words.signature([words.all(names, case.reads[0])], [tuple(made)])


def _except(case: Case, dims: set[int], rank: int) -> Signature:
    """Pointwise but for some dims, which cannot be cut."""
    words = Words()
    names = ["." if i in dims else f"d{i}" for i in range(rank)]
    reads = [words.all(names[rank - len(shape) :], shape) for shape in case.reads]
    return words.signature(reads, [None if one is None else words.all(names, one) for one in case.makes])


@_rule("slice", "narrow", "diff", "slice_scatter", "roll", "tril", "triu")
def _window(case: Case) -> Signature:
    rank = len(case.made)
    if case.op.kind in ("tril", "triu"):
        return _except(case, {rank - 2, rank - 1}, rank)
    if case.op.kind == "roll":
        return _except(case, _dims(case, case.argument(2, "dims", None), rank), rank)
    position, default = {"diff": (2, -1), "slice_scatter": (2, 0)}.get(case.op.kind, (1, 0))
    dim = case.argument(position, "dim", default) % rank
    if case.op.kind == "slice" and case.made == case.reads[0]:
        return _pointwise(case)
    return _except(case, {dim}, rank)


@_rule("select", "unbind")
def _select(case: Case) -> Signature:
    words = Words()
    shape = case.reads[0]
    dim = case.argument(1, "dim", 0) % len(shape)
    names = _names(len(shape))
    read = words.all([*names[:dim], ".", *names[dim + 1 :]], shape)
    rest = [*names[:dim], *names[dim + 1 :]]
    return words.signature([read], [None if one is None else words.all(rest, one) for one in case.makes])


@_rule("select_scatter")
def _select_scatter(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    dim = case.argument(2, "dim") % rank
    names = [*_names(rank)[:dim], ".", *_names(rank)[dim + 1 :]]
    rest = [name for name in names if name != "."]
    reads = [words.all(names, case.reads[0]), words.all(rest, case.reads[1])]
    return words.signature(reads, [words.all(names, case.made)])


def _chunks_local(case: Case, cut: LocalCut) -> Compute:
    dim = case.argument(2, "dim", 0) % len(case.reads[0])
    sizes = [None if one is None else one[dim] for one in cut.makes]
    known = next(size for size in sizes if size is not None)
    count = cut.reads[0][dim] // known
    if all(size in (None, known) for size in sizes) and count == len(sizes):
        return lambda values: torch.split(values[0], known, dim)
    return _call(case, case.op.args, case.op.kwargs)


@_rule("split", "chunk", "split_with_sizes", local=_chunks_local)
def _chunks(case: Case) -> Signature:
    words = Words()
    shape = case.reads[0]
    rank = len(shape)
    dim = case.argument(2, "dim", 0) % rank
    names = _names(rank)
    sizes = {one[dim] for one in case.makes if one is not None}
    even = len(sizes) == 1 and next(iter(sizes)) * len(case.makes) == shape[dim]
    if not even:
        names[dim] = "."
        return words.signature([words.all(names, shape)], [_with(words, names, one) for one in case.makes])
    read = list(words.all(names, (*shape[:dim], 1, *shape[dim + 1 :])))
    read[dim] = words.use("part^", len(case.makes)) + words.use(names[dim], next(iter(sizes)))
    return words.signature([tuple(read)], [_with(words, names, one) for one in case.makes])


def _with(words: Words, names: Sequence[str], shape: Shape | None) -> tuple[Letters, ...] | None:
    return None if shape is None else words.all(names, shape)


@_rule("cat", "concat")
def _cat(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    dim = case.argument(1, "dim", 0) % rank
    names = _names(rank)
    if any(len(shape) != rank for shape in case.reads):
        raise RuleError("an empty tensor is concatenated")
    if len({shape[dim] for shape in case.reads}) > 1:
        names[dim] = "."
        return words.signature([words.all(names, shape) for shape in case.reads], [words.all(names, case.made)])
    reads = [words.all(names, shape) for shape in case.reads]
    made = list(words.all(names, (*case.made[:dim], 1, *case.made[dim + 1 :])))
    made[dim] = words.use("part^", len(case.reads)) + words.use(names[dim], case.reads[0][dim])
    return words.signature(reads, [tuple(made)])


@_rule("stack")
def _stack(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    dim = case.argument(1, "dim", 0) % rank
    names = _names(rank)
    names[dim] = "."
    rest = [name for name in names if name != "."]
    return words.signature([words.all(rest, shape) for shape in case.reads], [words.all(names, case.made)])


@_rule("pad", "constant_pad_nd")
def _pad(case: Case) -> Signature:
    rank = len(case.made)
    padding = case.argument(1, "pad")
    padded = {rank - 1 - i // 2 for i, width in enumerate(padding) if width}
    return _except(case, padded, rank)


@_rule("gather", "take_along_dim")
def _gather(case: Case) -> Signature:
    words = Words()
    source, index = case.reads
    rank = len(index)
    dim = case.argument(1, "dim") % rank
    free = [i != dim and source[i] == index[i] for i in range(rank)]
    names = [f"d{i}" if free[i] else "." for i in range(rank)]
    by_index = [f"d{i}" if free[i] or i == dim else "." for i in range(rank)]
    reads = [words.all(names, source), words.all(by_index, index)]
    return words.signature(reads, [words.all(by_index, case.made)])


@_rule("index")
def _index(case: Case) -> Signature:
    words = Words()
    indices = case.op.args[1]
    source, *index_shapes = case.reads
    positions = [i for i, one in enumerate(indices) if one is not None]
    if positions != list(range(positions[0], positions[0] + len(positions))) or any(
        isinstance(one, Ref) is False for one in indices if one is not None
    ):
        raise RuleError("indices that are not side by side have no rule")
    first, count = positions[0], len(positions)
    rank = max(len(shape) for shape in index_shapes)
    picked = [f"i{j}" for j in range(rank)]
    outer = [f"d{i}" if not first <= i < first + count else "." for i in range(len(source))]
    reads = [words.all(outer, source), *(words.all(picked[rank - len(shape) :], shape) for shape in index_shapes)]
    made = [*outer[:first], *picked, *outer[first + count :]]
    return words.signature(reads, [words.all(made, case.made)])


# ---- tensors out of nothing ----


def _creator(case: Case) -> Signature:
    words = Words()
    return words.signature(
        [_privates(words, one) for one in case.reads], [words.all(_names(len(case.made)), case.made)]
    )


def _filled_local(case: Case, cut: LocalCut) -> Compute:
    shape = list(cut.makes[0] or ())
    args = list(case.op.args)
    args[1 if case.op.kind.startswith("new_") else 0] = shape
    return _call(case, args, case.op.kwargs)


for _kind in ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"):
    _RULES[_kind] = Rule(signature=_creator, local=_filled_local)
_RULES["scalar_tensor"] = Rule(signature=_creator)


for _kind in ("arange", "rand", "randn"):
    _RULES[_kind] = Rule(signature=_creator, positional=True)
for _kind in ("dropout", "bernoulli"):
    _RULES[_kind] = Rule(signature=_pointwise, positional=True)
