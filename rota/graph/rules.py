"""How each op may be cut: its dims in notation, and how a part of it is computed.

The rule of an op says which dims of its inputs and outputs are the same (see notation.py). Rules are forward only:
autograd differentiates what is computed on each device. An op without a rule can be replicated but not cut.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rota.errors import RuleError
from rota.graph.functional import overload
from rota.graph.graph import Op, Ref, Tensor
from rota.graph.notation import Letters, Shape, Signature, Words, parse

_SUM, _MEAN = 2, 1
"""The numbers that ATen has for the reductions of losses; 0 is none."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An op with its shapes: what a rule looks at."""

    op: Op
    reads: tuple[Shape, ...]
    """The shape of each tensor among the arguments, in order; a tensor that is read twice is there twice."""
    makes: tuple[Shape | None, ...]
    dtypes: tuple[str, ...]
    """Of the reads."""

    def argument(self, name: str) -> Any:
        """An argument of the op, by the name that its schema has for it."""
        return argument_of(self.op, name)

    @property
    def made(self) -> Shape:
        """The shape of the only output."""
        if len(self.makes) != 1 or self.makes[0] is None:
            raise RuleError(f"{self.op.kind} makes {len(self.makes)} tensors and not one")
        return self.makes[0]


@dataclass(frozen=True, kw_only=True)
class LocalCut:
    """The part of an op that is to be computed."""

    reads: tuple[Shape, ...]
    """The local shapes."""
    makes: tuple[Shape | None, ...]
    sizes: Mapping[str, int]
    """The dims of the op: the words of its rule, or ``n.0``, ``n.1`` for the factors of n."""
    ranges: Mapping[str, tuple[int, int]]
    """dim -> range, of the dims that are cut"""
    first: bool
    """Whether it is the first part along every summed dim."""

    @property
    def made(self) -> Shape:
        """The local shape of the only output."""
        (shape,) = self.makes
        assert shape is not None
        return shape

    def positions(self, word: str, size: int) -> torch.Tensor:
        """Which indices of a word of the rule, which is so large, the part has."""
        names = [name for name in self.sizes if name == word or name.startswith(f"{word}.")]
        if not names:
            return torch.arange(size)
        index = torch.zeros(1, dtype=torch.int64)
        for name in names:
            start, stop = self.ranges.get(name, (0, self.sizes[name]))
            index = (index.unsqueeze(1) * self.sizes[name] + torch.arange(start, stop)).flatten()
        return index


Compute = Callable[[Sequence[Any]], Any]
"""The tensors of a part, in the order of the reads -> its result, as the op returns it."""


class Linear(enum.Enum):
    """In which of its reads an op is linear."""

    FIRST = "first"
    """In the first, whatever the others are."""
    EACH = "each"
    """In each alone, as a product is."""
    TOGETHER = "together"
    """In all of them together, as a sum is; a number among the arguments counts as one more."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is known of a kind of op."""

    signature: Callable[[Case], Signature]
    local: Callable[[Case, LocalCut], Compute] | None = None
    """How a part is computed, where that is not the op itself on smaller tensors."""
    positional: bool = False
    """The result depends on where an element is in the whole tensor, as random numbers and arange do."""
    linear: Linear | None = None
    """In which of its reads the op is linear: partial sums of these go through it unchanged."""


_RULES: dict[str, Rule] = {}


def register_rule(target: str, notation: str) -> None:
    """Tell how a custom op may be cut, in one line: ``register_rule("mylib::swish", "* n, n -> * n")``."""
    if not isinstance(target, str) or not isinstance(notation, str):
        raise RuleError(f"a rule is the name of an op and a line of notation, not {target!r} and {notation!r}")
    rule = Rule(signature=_noted(notation))
    namespace, _, name = target.partition("::")
    if not name or not hasattr(getattr(torch.ops, namespace), name.partition(".")[0]):
        raise RuleError(f"there is no op {target!r}; register it first, and name it as torch does: 'mylib::swish'")
    _RULES[name if namespace == "aten" else f"{namespace}.{name}"] = rule


def rule_of(op: Op) -> Rule | None:
    """The rule of an op, or None; that of an overload, such as div.Tensor_mode, is preferred to that of its kind."""
    namespace, name, overload_name = op.target.split(".")
    if namespace != "aten":
        return _RULES.get(op.target) or _RULES.get(f"{namespace}.{name}")
    if op.kind == _ATTENTION and argument_of(op, "dropout_p"):
        return _RULES[f"{_ATTENTION}.dropout"]
    return _RULES.get(f"{op.kind}.{overload_name}") or _RULES.get(op.kind)


def kinds() -> list[str]:
    """The kinds that have a rule."""
    return sorted(_RULES)


def case_of(op: Op, tensors: Mapping[str, Tensor]) -> Case:
    """An op with the shapes of what it reads and makes."""
    return Case(
        op=op,
        reads=tuple(tensors[name].shape for name in occurrences(op)),
        makes=tuple(None if name is None else tensors[name].shape for name in op.outputs),
        dtypes=tuple(tensors[name].dtype for name in occurrences(op)),
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


@functools.cache
def _schema(target: str) -> tuple[Any, ...]:
    return tuple(overload(target)._schema.arguments)  # type: ignore[attr-defined]


def argument_of(op: Op, name: str) -> Any:
    """An argument as it is given, or its default; None if the overload has no such argument."""
    for position, one in enumerate(_schema(op.target)):
        if one.name == name:
            return op.args[position] if position < len(op.args) else op.kwargs.get(name, one.default_value)
    return None


def _optional_reads(case: Case) -> list[Shape | None]:
    """The shapes by the op's schema: a tensor argument that is None keeps its place."""
    shapes = iter(case.reads)
    found: list[Shape | None] = []
    for one in _schema(case.op.target):
        if "Tensor" not in str(one.type):
            continue
        value = case.argument(one.name)
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


def _lines(text: str, *, linear: Linear | None = None) -> None:
    """One rule per line: kinds, a colon, notation."""
    for line in text.strip().splitlines():
        names, _, notation = line.partition(":")
        for kind in names.split():
            _RULES[kind] = Rule(signature=_noted(notation.strip()), linear=linear)


def _noted(notation: str) -> Callable[[Case], Signature]:
    parsed = parse(notation)
    return lambda case: parsed.signature(_optional_reads(case), case.makes)


def _names(count: int) -> list[str]:
    return [f"d{i}" for i in range(count)]


def _broadcast(words: Words, shapes: Sequence[Shape], rank: int) -> list[tuple[Letters, ...]]:
    """The words of tensors that broadcast to one of this rank."""
    names = _names(rank)
    return [words.all(names[rank - len(shape) :], shape) for shape in shapes]


def _call(case: Case, **changes: Any) -> Compute:
    """Call the op, some of its arguments replaced; its tensors are bound in order."""
    function = overload(case.op.target)
    args, kwargs = case.op.args, case.op.kwargs
    if changes:
        given = {one.name: changes.get(one.name, case.argument(one.name)) for one in _schema(case.op.target)}
        args = tuple(given[one.name] for one in _schema(case.op.target) if not one.kwarg_only)
        kwargs = {one.name: given[one.name] for one in _schema(case.op.target) if one.kwarg_only}

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


_KEEP_THEIR_TERMS = ("mse_loss", "smooth_l1_loss")
"""PyTorch returns their sum in memory as large as all terms: a copy of the sum lets go of it."""


def compute_of(case: Case, cut: LocalCut | None) -> Compute:
    """How a part of an op is computed; None for all of it."""
    rule = rule_of(case.op)
    if case.op.kind in _KEEP_THEIR_TERMS and argument_of(case.op, "reduction") in (_MEAN, _SUM):
        whole = _call(case) if cut is None or rule is None or rule.local is None else rule.local(case, cut)
        return lambda values: whole(values).clone()
    if cut is None or rule is None:
        return _call(case)
    if not cut.first:
        case = _without(case, signature_of(case).once)
    return _call(case) if rule.local is None else rule.local(case, cut)


def added_number(op: Op) -> bool:
    """Whether a number is added to what an op reads."""
    return op.kind in _SUMS and len(op.args) > 1 and isinstance(op.args[1], int | float | complex) and op.args[1] != 0


def divide_offsets(case: Case, compute: Callable[[Case], Compute], offsets: Collection[int], count: int) -> Compute:
    """Compute a sum of which these reads, and a number, are there only in so many equal parts."""
    if added_number(case.op):
        first, number, *rest = case.op.args
        case = replace(case, op=replace(case.op, args=(first, number / count, *rest)))
    whole = compute(case)
    return lambda values: whole([value / count if i in offsets else value for i, value in enumerate(values)])


def _without(case: Case, dropped: frozenset[int]) -> Case:
    """The op without some of its tensors, which another part adds."""
    counter = itertools.count()

    def drop(value: Any) -> Any:
        if isinstance(value, Ref):
            return None if next(counter) in dropped else value
        if isinstance(value, tuple | list):
            return type(value)(drop(item) for item in value)
        return value

    args = tuple(drop(one) for one in case.op.args)
    return replace(case, op=replace(case.op, args=args, kwargs={k: drop(v) for k, v in case.op.kwargs.items()}))


# ---- pointwise ----

_POINTWISE = """
abs add sub mul div neg pow exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan tanh sigmoid relu relu6 gelu
silu elu leaky_relu hardswish hardsigmoid hardtanh mish softplus selu celu erf floor ceil round trunc sign clamp
clamp_min clamp_max where masked_fill eq ne lt le gt ge and or xor logical_and logical_or logical_not logical_xor
bitwise_and bitwise_or bitwise_not maximum minimum fmod remainder floor_divide isnan isinf isfinite to _to_copy clone
contiguous detach zeros_like ones_like full_like empty_like fill rsub addcmul addcdiv lerp square atan2 logit
log_sigmoid isneginf isposinf nan_to_num expand_as sinh cosh asin acos atan asinh acosh atanh erfc erfinv lgamma digamma
log10 frac sgn positive hypot xlogy copysign logaddexp threshold hardshrink softshrink clip real imag
"""


_SUMS = ("add", "sub", "rsub")
_LINEAR = {
    **dict.fromkeys(_SUMS, Linear.TOGETHER),
    **dict.fromkeys(("neg", "div", "to", "_to_copy", "clone", "contiguous", "expand_as"), Linear.FIRST),
    "mul": Linear.EACH,
}


def _pointwise(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    return words.signature(_broadcast(words, case.reads, rank), _broadcast(words, [case.made], rank))


for _kind in _POINTWISE.split():
    _RULES[_kind] = Rule(signature=_pointwise, linear=_LINEAR.get(_kind))
for _kind in ("div.Tensor_mode", "div.Scalar_mode", "max.other", "min.other"):
    _RULES[_kind] = Rule(signature=_pointwise)


@_rule("type_as", "to.other")
def _typed(case: Case) -> Signature:
    """The second tensor may have any shape: only its type counts."""
    words = Words()
    names = _names(len(case.made))
    reads = [words.all(names, case.reads[0]), _privates(words, case.reads[1])]
    return words.signature(reads, [words.all(names, case.made)])


# ---- products ----

_lines("linear: * k+, n k+, n? -> * n")
_lines(
    """
    mm: m k+, k+ n -> m n
    bmm: b m k+, b k+ n -> b m n
    mv: m k+, k+ -> m
    dot: k+, k+ ->
    """,
    linear=Linear.EACH,
)
_lines(
    """
    bilinear: * i+, * j+, n i+ j+, n? -> * n
    cdist: * p e^, * r e^ -> * p r
    """
)


@_rule("matmul", linear=Linear.EACH)
def _matmul(case: Case) -> Signature:
    a, b = case.reads
    left = ["k+"] if len(a) == 1 else ["*", "m", "k+"]
    right = ["k+"] if len(b) == 1 else ["*", "k+", "n"]
    made = [*(["*"] if max(len(a), len(b)) > 2 else []), *(["m"] if len(a) > 1 else []), *(["n"] if len(b) > 1 else [])]
    left, right = (w if len(s) > 2 else [x for x in w if x != "*"] for w, s in ((left, a), (right, b)))
    return parse(f"{' '.join(left)}, {' '.join(right)} -> {' '.join(made)}").signature(case.reads, case.makes)


def _add_product_local(case: Case, cut: LocalCut) -> Compute:
    """Only the first part along the summed dim adds what the product is added to."""
    if cut.first:
        return _call(case)
    alpha = case.argument("alpha")

    def compute(values: Sequence[Any]) -> Any:
        product = torch.matmul(*values)
        return product if alpha == 1 else alpha * product

    return compute


@_rule("addmm", "baddbmm", local=_add_product_local)
def _add_product(case: Case) -> Signature:
    words = Words()
    batch = ["b"] if case.op.kind == "baddbmm" else []
    made = [*batch, "m", "n"]
    added, left, right = case.reads
    reads = [
        words.all(made[len(made) - len(added) :], added),
        words.all([*batch, "m", "k+"], left),
        words.all([*batch, "k+", "n"], right),
    ]
    return words.signature(reads, [words.all(made, case.made)], once=[0])


@_rule("einsum")
def _einsum(case: Case) -> Signature:
    equation = case.op.args[0].replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        right = "".join(["..." if "..." in left else "", *sorted(one for one in letters if letters.count(one) == 1)])
    inputs = [_subscripts(one) for one in left.split(",")]
    made = _subscripts(right)
    if any(len(set(one)) != len(one) for one in inputs) or ("*" not in made and any("*" in one for one in inputs)):
        raise RuleError(f"the equation {equation!r} takes a diagonal or sums over '...', which has no rule")
    marked = [" ".join(one if one in made else f"{one}+" for one in words) for words in inputs]
    return parse(f"{', '.join(marked)} -> {' '.join(made)}").signature(case.reads, case.makes)


def _subscripts(text: str) -> list[str]:
    return list(text.replace("...", "*"))


def _embedding_local(case: Case, cut: LocalCut) -> Compute:
    """Rows that the part does not have are zeros, and so are their gradients."""
    count = case.reads[0][0]
    held = cut.positions("v", count)
    if len(held) == count:
        return _call(case)
    padding = (held == case.argument("padding_idx")).nonzero().flatten().tolist()

    def compute(values: Sequence[Any]) -> Any:
        weight, index = values
        local = torch.full((count,), -1, device=index.device)
        local[held.to(index.device)] = torch.arange(len(held), device=index.device)
        row = local[index]
        found = torch.embedding(weight, row.clamp_min(0), padding[0] if padding else -1)
        return found.masked_fill((row < 0).unsqueeze(-1), 0)

    return compute


@_rule("embedding", local=_embedding_local)
def _embedding(case: Case) -> Signature:
    if case.argument("scale_grad_by_freq") or case.argument("sparse"):
        raise RuleError("gradients that are scaled by frequency, or sparse, depend on all indices")
    return parse("v+ e, * -> * e").signature(case.reads, case.makes)


def _conv_local(case: Case, cut: LocalCut) -> Compute:
    source, weight, *_ = cut.reads
    channels = source[1 - len(weight)]
    return _call(case, groups=channels // weight[1])


@_rule("conv1d", "conv2d", "conv3d", local=_conv_local)
def _conv(case: Case) -> Signature:
    """The places of the output can be cut only where each has a tile of the input for itself."""
    words = Words()
    source, weight, *bias = case.reads
    groups, count = case.argument("groups"), len(weight) - 2
    stride, padding, dilation = (_each(case.argument(name), count) for name in ("stride", "padding", "dilation"))
    group = words.use("g", groups)
    summed = words.use("k+", weight[1])
    filters = group + words.use("n", weight[0] // groups)
    spaces: list[tuple[Letters, Letters, Letters]] = []
    for i, (size, width, out) in enumerate(zip(source[-count:], weight[2:], case.made[-count:], strict=True)):
        alone = stride[i] == width and padding[i] == 0 and (dilation[i] == 1 or width == 1) and size == out * width
        if alone:
            place, within = words.use(f"s{i}", out), words.use(f"w{i}^", width)
            spaces.append((place + within, within, place))
        else:
            spaces.append((words.private(size), words.private(width), words.private(out)))
    of_source, of_weight, of_made = zip(*spaces, strict=True)
    batch = [words.use("b", size) for size in source[: -count - 1]]
    reads = [(*batch, group + summed, *of_source), (filters, summed, *of_weight), *((filters,) for _ in bias)]
    return words.signature(reads, [(*batch, filters, *of_made)], once=[2] if bias else [])


def _conv_transpose_local(case: Case, cut: LocalCut) -> Compute:
    return _call(case, groups=len(cut.positions("g", case.argument("groups"))))


@_rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", local=_conv_transpose_local)
def _conv_transpose(case: Case) -> Signature:
    words = Words()
    source, weight, *bias = case.reads
    count, groups = len(weight) - 2, case.argument("groups")
    group = words.use("g", groups)
    summed, filters = group + words.use("k+", weight[0] // groups), group + words.use("n", weight[1])
    batch = words.all(["b"][: len(source) - count - 1], source[: -count - 1])
    reads = [
        (*batch, summed, *_privates(words, source[-count:])),
        (summed, filters[len(group) :], *_privates(words, weight[2:])),
        *((filters,) for _ in bias),
    ]
    made = (*batch, filters, *_privates(words, case.made[-count:]))
    return words.signature(reads, [made], once=[2] if bias else [])


def _each(value: Any, count: int) -> list[Any]:
    """An argument of a convolution for each dim of space; 'same' and 'valid' are for all."""
    listed = list(value) if isinstance(value, tuple | list) else [value]
    return listed * count if len(listed) == 1 else listed


_ATTENTION = "scaled_dot_product_attention"


def _attention_local(case: Case, cut: LocalCut) -> Compute:
    """A part of the queries has its own rows of the causal mask."""
    length = case.reads[0][-2]
    rows = cut.positions("l", length)
    if not case.argument("is_causal") or len(rows) == length:
        return _call(case)
    mask = causal_mask(rows, case.reads[1][-2])
    return lambda values: _call(case, attn_mask=mask.to(values[0].device), is_causal=False)(values)


def causal_mask(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Which of so many keys the queries at these positions see."""
    return torch.arange(length) <= rows.unsqueeze(1)


@_rule(_ATTENTION, local=_attention_local)
def _attention(case: Case) -> Signature:
    words = Words()
    q, k, v, *mask = case.reads
    leading = len(case.made) - 2
    names = [*_names(leading - 1), "h"][:leading]
    grouped = leading > 0 and bool(case.argument("enable_gqa"))
    if grouped and k[-3] != v[-3]:
        raise RuleError("keys and values have different numbers of heads")

    def heads(size: int) -> Letters:  # a group of query heads shares a head of keys and values
        shared = k[-3] if grouped and size > 1 else size
        return words.use("h", shared) + words.use("g", size // max(shared, 1))

    def letters(shape: Shape, tail: Sequence[str]) -> tuple[Letters, ...]:
        outer, inner = shape[:-2], shape[-2:]
        lead = zip(names[leading - len(outer) :], outer, strict=True)
        of_outer = [heads(size) if name == "h" else words.use(name, size) for name, size in lead]
        return (*of_outer, *words.all(tail[2 - len(inner) :], inner))

    reads = [letters(q, ("l", "e^")), letters(k, ("s^", "e^")), letters(v, ("s^", "f"))]
    reads += [letters(shape, ("l", "s^")) for shape in mask]
    return words.signature(reads, [letters(case.made, ("l", "f"))])


_rule(f"{_ATTENTION}.dropout", positional=True)(_attention)


# ---- along a dim ----


def _dims(given: Any, rank: int) -> set[int]:
    """The dims that an argument names; all of them for none."""
    if given is None or given == []:
        return set(range(rank))
    listed = given if isinstance(given, tuple | list) else [given]
    return {_dim(dim, rank) for dim in listed} if rank else set()


def _dim(given: int, rank: int) -> int:
    """A dim, counted from the front; a scalar has a dim 0 for this."""
    return given % max(rank, 1)


def _along(case: Case, mark: str) -> Signature:
    """An op along some dims that keeps, drops or shrinks them."""
    words = Words()
    (shape,) = case.reads
    dims = _dims(case.argument("dims" if case.op.kind == "flip" else "dim"), len(shape))
    names = [f"d{i}{mark}" if i in dims else f"d{i}" for i in range(len(shape))]

    def made(out: Shape) -> tuple[Letters, ...]:
        if len(out) != len(shape):
            return words.all([name for i, name in enumerate(names) if i not in dims], out)
        kept = [i not in dims or (mark == "^" and size == shape[i]) for i, size in enumerate(out)]
        return words.all([name if keep else "." for name, keep in zip(names, kept, strict=True)], out)

    return words.signature([words.all(names, shape)], [None if out is None else made(out) for out in case.makes])


@_rule(
    *("softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort", "topk", "flip", "logsumexp", "min", "max"),
    *("amax", "amin", "argmax", "argmin", "all", "any", "var", "std", "prod", "var_mean", "std_mean"),
    *("norm", "linalg_vector_norm", "logcumsumexp", "cummax", "cummin", "median", "count_nonzero"),
)
def _whole_along(case: Case) -> Signature:
    return _along(case, "^")


def _summed(case: Case) -> Signature:
    return _along(case, "+")


_RULES["sum"] = Rule(signature=_summed, linear=Linear.FIRST)


def _mean_local(case: Case, cut: LocalCut) -> Compute:
    """A part of a mean is the sum of its part over the number of all."""
    over = sorted(_dims(case.argument("dim"), len(case.reads[0])))
    if all(cut.reads[0][dim] == case.reads[0][dim] for dim in over):
        return _call(case)
    count = math.prod(case.reads[0][dim] for dim in over)
    keep, dtype = bool(case.argument("keepdim")), case.argument("dtype")
    return lambda values: values[0].sum(over, keepdim=keep, dtype=dtype) / count


_RULES["mean"] = Rule(signature=_summed, local=_mean_local, linear=Linear.FIRST)


@_rule("layer_norm", "rms_norm")
def _layer_norm(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    free = rank - len(case.argument("normalized_shape"))
    names = [f"d{i}" if i < free else f"d{i}^" for i in range(rank)]
    reads = [words.all(names[rank - len(shape) :], shape) for shape in case.reads]
    return words.signature(reads, [words.all(names, case.made)])


@_rule("batch_norm", "instance_norm")
def _batch_norm(case: Case) -> Signature:
    """With statistics of the input, all that is averaged must be there, also for the running average."""
    words = Words()
    by_batch = case.op.kind == "batch_norm"
    from_input = bool(case.argument("training" if by_batch else "use_input_stats"))
    batch = "b^" if from_input and (by_batch or case.argument("running_mean") is not None) else "b"
    names = [batch, "c", *(f"s{i}^" if from_input else f"s{i}" for i in range(len(case.made) - 2))]
    reads = [words.all(names, case.reads[0]), *(words.all(["c"], shape) for shape in case.reads[1:])]
    statistics = [_with(words, ["c"], shape) for shape in case.makes[1:]]
    return words.signature(reads, [words.all(names, case.made), *statistics])


def _group_norm_local(case: Case, cut: LocalCut) -> Compute:
    channels = case.reads[0][1] // case.argument("num_groups")
    return _call(case, num_groups=cut.reads[0][1] // channels)


@_rule("group_norm", local=_group_norm_local)
def _group_norm(case: Case) -> Signature:
    words = Words()
    groups = case.argument("num_groups")
    batch, count, *space = case.made
    channels = words.use("g", groups) + words.use("c^", count // groups)
    made = (words.use("b", batch), channels, *words.all([f"s{i}^" for i in range(len(space))], tuple(space)))
    return words.signature([made, *((channels,) for _ in case.reads[1:])], [made])


def _loss_local(case: Case, cut: LocalCut) -> Compute:
    """A part of a mean is the sum of its part over the number of all."""
    if case.argument("reduction") != _MEAN:
        return _call(case)
    signature = _pointwise_loss(case)
    total, count = _call(case, reduction=_SUM), math.prod(signature.sizes.values())
    return lambda values: total(values) / count


@_rule(
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss", "hinge_embedding_loss"),
    "margin_ranking_loss",
    local=_loss_local,
)
def _pointwise_loss(case: Case) -> Signature:
    if case.argument("reduction") not in (_MEAN, _SUM):
        return _pointwise(case)
    words = Words()
    rank = max(len(shape) for shape in case.reads)
    names = [f"d{i}+" for i in range(rank)]
    return words.signature([words.all(names[rank - len(shape) :], shape) for shape in case.reads], [()])


def _row_loss_local(case: Case, cut: LocalCut) -> Compute:
    """A part of a mean over rows is the sum of its rows over the number of all."""
    if case.argument("reduction") != _MEAN:
        return _call(case)
    total, count = _call(case, reduction=_SUM), math.prod(case.reads[0][:-1])
    return lambda values: total(values) / count


@_rule(
    *("multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss", "triplet_margin_loss"),
    local=_row_loss_local,
)
def _row_loss(case: Case) -> Signature:
    """A loss for each row of features: their mean, their sum or all of them."""
    words = Words()
    rows = len(case.reads[0]) - 1
    by_row = case.reads[: 2 if case.op.kind.startswith("multi") else 3]
    if any(shape[:rows] != case.reads[0][:rows] for shape in by_row):
        raise RuleError("rows that are broadcast have no number of their own")
    mark = "" if case.argument("reduction") == 0 else "+"
    names = [f"d{i}{mark}" for i in range(rows)]
    reads = [(*words.all(names, shape[:rows]), *_privates(words, shape[rows:])) for shape in by_row]
    reads += [_privates(words, shape) for shape in case.reads[len(by_row) :]]
    return words.signature(reads, [words.all([] if mark else names, case.made)])


@_rule("rota.ctc_terms")
def _ctc_terms(case: Case) -> Signature:
    """Each sequence for itself, if their targets do not lie behind each other."""
    log_probs, targets, *lengths = case.reads
    if len(log_probs) != 3 or len(targets) != 2:
        raise RuleError("the sequences have no dim of their own")
    words = Words()
    reads = [words.all([".", "b", "."], log_probs), words.all(["b", "."], targets)]
    return words.signature([*reads, *(words.all(["b"], one) for one in lengths)], [words.all(["b"], case.made)])


@_rule("pairwise_distance", "cosine_similarity")
def _distance(case: Case) -> Signature:
    """Of two vectors along a dim, the last one if none is named."""
    words = Words()
    rank = max(len(shape) for shape in case.reads)
    dim = _dim(-1 if case.op.kind == "pairwise_distance" else case.argument("dim"), rank)
    names = ["." if i == dim else f"d{i}" for i in range(rank)]
    reads = [words.all(names[rank - len(shape) :], shape) for shape in case.reads]
    kept = names if case.argument("keepdim") else [name for name in names if name != "."]
    return words.signature(reads, [words.all(kept, case.made)])


@_rule("cross_entropy_loss", "nll_loss_nd", "nll_loss")
def _cross_entropy(case: Case) -> Signature:
    """A sum over rows, or a value for each; the mean was turned into a sum and a division when it was captured."""
    words = Words()
    scores, target, *weight = case.reads
    reduction = case.argument("reduction")
    if reduction == _MEAN:
        raise RuleError("the mean depends on how many targets are ignored")
    mark = "+" if reduction == _SUM else ""
    rows = [f"b{mark}"] if len(scores) > 1 else []
    space = [f"s{i}{mark}" for i in range(len(scores) - 2)]
    by_class = [*rows, "c^", *space]
    plain = [*rows, *space]
    reads = [words.all(by_class, scores), words.all(by_class if len(target) == len(scores) else plain, target)]
    reads += [words.all(["c^"], one) for one in weight]
    return words.signature(reads, [() if reduction == _SUM else words.all(plain, case.made)])


@_rule(
    *(
        f"{kind}{space}d"
        for kind in ("adaptive_avg_pool", "avg_pool", "max_pool", "adaptive_max_pool")
        for space in (1, 2, 3)
    ),
    *("max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_bicubic2d", "upsample_trilinear3d"),
)
def _resampled(case: Case) -> Signature:
    """Each image and each channel for itself."""
    words = Words()
    space = next(count for count in (1, 2, 3) if f"{count}d" in case.op.kind)
    shape = case.reads[0]
    lead = _names(len(shape) - space)
    read = (*words.all(lead, shape[:-space]), *_privates(words, shape[-space:]))
    made = [
        None if one is None else (*words.all(lead, one[:-space]), *_privates(words, one[-space:])) for one in case.makes
    ]
    return words.signature([read], made)


@_rule("pixel_shuffle")
def _pixel_shuffle(case: Case) -> Signature:
    words = Words()
    *batch, channels, height, width = case.reads[0]
    factor = case.argument("upscale_factor")
    lead = words.all(_names(len(batch)), tuple(batch))
    channel = words.use("c", channels // factor**2)
    place, within = (
        [words.use(*one) for one in (("h", height), ("w", width))],
        [words.use(n, factor) for n in ("u^", "v^")],
    )
    made = (*lead, channel, place[0] + within[0], place[1] + within[1])
    return words.signature([(*lead, channel + within[0] + within[1], *place)], [made])


@_rule("glu")
def _glu(case: Case) -> Signature:
    words = Words()
    (shape,) = case.reads
    dim, names = _dim(case.argument("dim"), len(shape)), _names(len(shape))
    return words.signature([_in_blocks(words, names, shape, dim, 2)], [words.all(names, case.made)])


@_rule("prelu")
def _prelu(case: Case) -> Signature:
    """A slope for each channel, which is the second dim, or one for all."""
    words = Words()
    names = _names(len(case.made))
    return words.signature(
        [words.all(names, case.made), words.all(names[1:2], case.reads[1])], [words.all(names, case.made)]
    )


@_rule("grid_sampler")
def _grid_sampler(case: Case) -> Signature:
    words = Words()
    source, grid = case.reads
    places = [f"s{i}" for i in range(len(grid) - 2)]
    reads = [(*words.all(["b", "c"], source[:2]), *_privates(words, source[2:])), words.all(["b", *places, "."], grid)]
    return words.signature(reads, [words.all(["b", "c", *places], case.made)])


@_rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(case: Case) -> Signature:
    """Each sequence for itself, if no random numbers are drawn on the way."""
    if case.argument("batch_first") is None:
        raise RuleError("the sequences are packed")
    words = Words()
    source, state = case.reads[0], case.argument("hx")
    states = len(state) if isinstance(state, tuple | list) else 1
    random = case.argument("dropout") and case.argument("train")
    batch = "b^" if random else "b"
    names = ["."] * len(source)
    if len(source) == 3:
        names[0 if case.argument("batch_first") else 1] = batch
    carried = ["."] if len(source) < 3 else [".", batch]
    reads = [words.all(names, source)]
    for i, shape in enumerate(case.reads[1:]):
        reads.append(words.all([*carried, "."], shape) if i < states else _privates(words, shape))
    made = [_with(words, [".", batch, "."] if i else names, shape) for i, shape in enumerate(case.makes)]
    return words.signature(reads, made if len(source) == 3 else [_maybe(words, shape) for shape in case.makes])


# ---- views ----


def _regroup_local(case: Case, cut: LocalCut) -> Compute:
    return lambda values: values[0].reshape(cut.made)


@_rule(
    *("view", "reshape", "flatten", "unflatten", "_unsafe_view", "unsqueeze", "squeeze"),
    local=_regroup_local,
    linear=Linear.FIRST,
)
def _regroup(case: Case) -> Signature:
    if case.argument("dtype") is not None:
        raise RuleError("a view of another type has other elements")
    if 0 in case.reads[0] or 0 in case.made:
        raise RuleError("nothing has no factors")
    words = Words()
    return words.signature([_privates(words, case.reads[0])], [_privates(words, case.made)], regroups=True)


@_rule("permute", "transpose", "t", "movedim", "swapaxes", "mT", "numpy_T", linear=Linear.FIRST)
def _permute(case: Case) -> Signature:
    words = Words()
    names = _names(len(case.made))
    made = [names[i] for i in _order(case, len(names))]
    return words.signature([words.all(names, case.reads[0])], [words.all(made, case.made)])


def _order(case: Case, rank: int) -> list[int]:
    """For each dim of the output, the dim of the input that it is."""
    order = list(range(rank))
    if case.op.kind == "permute":
        return [_dim(dim, rank) for dim in case.argument("dims")]
    if case.op.kind == "movedim":
        source, target = ([_dim(dim, rank) for dim in _listed(case.argument(n))] for n in ("source", "destination"))
        rest = iter(dim for dim in order if dim not in source)
        return [source[target.index(dim)] if dim in target else next(rest) for dim in order]
    if case.op.kind in ("t", "numpy_T"):
        return order[::-1]
    pair = {"transpose": ("dim0", "dim1"), "swapaxes": ("axis0", "axis1")}.get(case.op.kind)
    one, other = (_dim(case.argument(name), rank) for name in pair) if pair else (rank - 1, rank - 2)
    if rank:
        order[one], order[other] = other, one
    return order


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _expand_local(case: Case, cut: LocalCut) -> Compute:
    return lambda values: values[0].expand(cut.made)


_rule("expand", "broadcast_to", local=_expand_local, linear=Linear.FIRST)(_pointwise)


def _broadcast_local(case: Case, cut: LocalCut) -> Compute:
    shape = next(one for one in cut.makes if one is not None)
    return lambda values: [value.expand(shape) for value in values]


@_rule("broadcast_tensors", local=_broadcast_local)
def _broadcast_tensors(case: Case) -> Signature:
    words = Words()
    rank = max(len(shape) for shape in case.reads)
    reads = _broadcast(words, case.reads, rank)
    return words.signature(reads, [None if one is None else words.all(_names(rank), one) for one in case.makes])


def _repeat_local(case: Case, cut: LocalCut) -> Compute:
    padded = (1,) * (len(cut.made) - len(cut.reads[0])) + cut.reads[0]
    repeats = [out // max(size, 1) for out, size in zip(cut.made, padded, strict=True)]
    return lambda values: values[0].repeat(repeats)


@_rule("repeat", local=_repeat_local, linear=Linear.FIRST)
def _repeat(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    padded = (1,) * (rank - len(case.reads[0])) + case.reads[0]
    repeats = case.argument("repeats")
    made = tuple(words.use(f"r{i}", repeats[i]) + words.use(f"d{i}", size) for i, size in enumerate(padded))
    return words.signature([words.all(_names(rank)[rank - len(case.reads[0]) :], case.reads[0])], [made])


def _repeat_interleave_local(case: Case, cut: LocalCut) -> Compute:
    dim = case.argument("dim")
    return lambda values: values[0].repeat_interleave(cut.made[dim] // max(cut.reads[0][dim], 1), dim)


@_rule("repeat_interleave", local=_repeat_interleave_local, linear=Linear.FIRST)
def _repeat_interleave(case: Case) -> Signature:
    repeats, dim = case.argument("repeats"), case.argument("dim")
    if not isinstance(repeats, int) or dim is None:
        raise RuleError("only a number of repeats along a dim has a rule")
    words = Words()
    names = _names(len(case.made))
    made = list(words.all(names, case.reads[0]))
    made[dim] += words.use("r", repeats)
    return words.signature([words.all(names, case.reads[0])], [tuple(made)])


def _except(case: Case, dims: set[int], rank: int) -> Signature:
    """Pointwise but for some dims, which cannot be cut."""
    words = Words()
    names = ["." if i in dims else f"d{i}" for i in range(rank)]
    reads = [words.all(names[rank - len(shape) :], shape) for shape in case.reads]
    return words.signature(reads, [None if one is None else words.all(names, one) for one in case.makes])


@_rule("tril", "triu", linear=Linear.FIRST)
def _triangle(case: Case) -> Signature:
    rank = len(case.made)
    return _except(case, {rank - 2, rank - 1}, rank)


@_rule("roll", linear=Linear.FIRST)
def _roll(case: Case) -> Signature:
    rank = len(case.made)
    return _except(case, _dims(case.argument("dims"), rank), rank)


@_rule("diff", "slice_scatter")
def _neighbours(case: Case) -> Signature:
    rank = len(case.made)
    return _except(case, {_dim(case.argument("dim"), rank)}, rank)


def _window(case: Case) -> tuple[int, int, int]:
    """The dim that is sliced, where the slice starts and its length."""
    dim = _dim(case.argument("dim"), len(case.made))
    start, size = case.argument("start") or 0, case.reads[0][dim]
    return dim, min(max(start + size if start < 0 else start, 0), size), case.made[dim]


def _in_blocks(words: Words, names: Sequence[str], shape: Shape, dim: int, count: int) -> tuple[Letters, ...]:
    """The words of a tensor of which one dim is so many equal blocks: what is cut is each block."""
    letters = [() if i == dim else words.use(names[i], size) for i, size in enumerate(shape)]
    letters[dim] = words.use("part^", count) + words.use(names[dim], shape[dim] // count)
    return tuple(letters)


def _slice_local(case: Case, cut: LocalCut) -> Compute:
    dim, start, length = _window(case)
    width = cut.made[dim]
    if width == length:
        return _call(case)
    return lambda values: values[0].narrow(dim, start // length * width, width)


@_rule("slice", "narrow", local=_slice_local, linear=Linear.FIRST)
def _slice(case: Case) -> Signature:
    """One of several equal blocks, as a third of queries, keys and values is, can be cut inside of it."""
    if len(case.reads) > 1:
        raise RuleError("where it starts is in a tensor")
    dim, start, length = _window(case)
    size = case.reads[0][dim]
    if length == 0 or start % length or size % length or case.argument("step") not in (None, 1):
        return _except(case, {dim}, len(case.made))
    words = Words()
    names = _names(len(case.made))
    return words.signature(
        [_in_blocks(words, names, case.reads[0], dim, size // length)], [words.all(names, case.made)]
    )


@_rule("select", "unbind", linear=Linear.FIRST)
def _select(case: Case) -> Signature:
    words = Words()
    shape = case.reads[0]
    dim = _dim(case.argument("dim"), len(shape))
    names = [name if i != dim else "." for i, name in enumerate(_names(len(shape)))]
    rest = [name for name in names if name != "."]
    return words.signature([words.all(names, shape)], [_with(words, rest, one) for one in case.makes])


@_rule("select_scatter")
def _select_scatter(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    dim = _dim(case.argument("dim"), rank)
    names = [name if i != dim else "." for i, name in enumerate(_names(rank))]
    rest = [name for name in names if name != "."]
    reads = [words.all(names, case.reads[0]), words.all(rest, case.reads[1])]
    return words.signature(reads, [words.all(names, case.made)])


def _blocks(case: Case, dim: int) -> int:
    """How many equal blocks a dim is split into; 0 if they are not equal."""
    sizes = {one[dim] for one in case.makes if one is not None}
    return len(case.makes) if len(sizes) == 1 and sizes.pop() * len(case.makes) == case.reads[0][dim] else 0


def _chunks_local(case: Case, cut: LocalCut) -> Compute:
    dim = _dim(case.argument("dim"), len(case.reads[0]))
    if cut.reads[0][dim] == case.reads[0][dim]:
        return _call(case)
    width = cut.reads[0][dim] // _blocks(case, dim)
    return lambda values: torch.split(values[0], width, dim)


@_rule("split", "chunk", "split_with_sizes", local=_chunks_local, linear=Linear.FIRST)
def _chunks(case: Case) -> Signature:
    words = Words()
    (shape,) = case.reads
    dim = _dim(case.argument("dim"), len(shape))
    names = _names(len(shape))
    count = _blocks(case, dim)
    if not count:
        names[dim] = "."
    read = _in_blocks(words, names, shape, dim, count) if count else words.all(names, shape)
    return words.signature([read], [_with(words, names, one) for one in case.makes])


def _with(words: Words, names: Sequence[str], shape: Shape | None) -> tuple[Letters, ...] | None:
    return None if shape is None else words.all(names, shape)


@_rule("cat", "concat", linear=Linear.TOGETHER)
def _cat(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    dim = _dim(case.argument("dim"), rank)
    names = _names(rank)
    even = len({shape[dim : dim + 1] for shape in case.reads}) == 1
    if not even:
        names[dim] = "."
    reads = [words.all(names, shape) for shape in case.reads]
    made = _in_blocks(words, names, case.made, dim, len(reads)) if even else words.all(names, case.made)
    return words.signature(reads, [made])


@_rule("stack", linear=Linear.TOGETHER)
def _stack(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    dim = _dim(case.argument("dim"), rank)
    names = [name if i != dim else "." for i, name in enumerate(_names(rank))]
    rest = [name for name in names if name != "."]
    return words.signature([words.all(rest, shape) for shape in case.reads], [words.all(names, case.made)])


@_rule("pad", "constant_pad_nd")
def _pad(case: Case) -> Signature:
    rank = len(case.made)
    padding = case.argument("pad")
    padded = {rank - 1 - i // 2 for i, width in enumerate(padding) if width}
    return _except(case, padded, rank)


@_rule("gather", "take_along_dim")
def _gather(case: Case) -> Signature:
    """Along the dim that is picked from, and where the source is larger than the index, the source is whole."""
    words = Words()
    source, index = case.reads
    rank = len(index)
    if case.argument("dim") is None:
        raise RuleError("the source is flattened")
    dim = _dim(case.argument("dim"), rank)
    broadcasts = case.op.kind == "take_along_dim"
    free = [i != dim and (broadcasts or source[i] == index[i]) for i in range(rank)]
    of_source = [f"d{i}" if free[i] else "." for i in range(rank)]
    of_index = [f"d{i}" if free[i] or i == dim else "." for i in range(rank)]
    return words.signature([words.all(of_source, source), words.all(of_index, index)], [words.all(of_index, case.made)])


@_rule("scatter", "scatter_add")
def _scatter(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    dim = _dim(case.argument("dim"), rank)
    alike = [i != dim and len({shape[i] for shape in case.reads}) == 1 for i in range(rank)]
    names = [f"d{i}" if same else "." for i, same in enumerate(alike)]
    return words.signature([words.all(names, shape) for shape in case.reads], [words.all(names, case.made)])


@_rule("one_hot")
def _one_hot(case: Case) -> Signature:
    """The number of classes is part of the graph."""
    words = Words()
    names = _names(len(case.reads[0]))
    return words.signature([words.all(names, case.reads[0])], [words.all([*names, "."], case.made)])


@_rule("index_select")
def _index_select(case: Case) -> Signature:
    words = Words()
    rank = len(case.made)
    dim = _dim(case.argument("dim"), rank)
    names = _names(rank)
    of_source = [name if i != dim else "." for i, name in enumerate(names)]
    picked = words.all(names[dim : dim + len(case.reads[1])], case.reads[1])
    return words.signature([words.all(of_source, case.reads[0]), picked], [words.all(names, case.made)])


@_rule("index")
def _index(case: Case) -> Signature:
    words = Words()
    source, *index_shapes = case.reads
    if "bool" in case.dtypes[1:]:
        raise RuleError("how much a mask picks depends on its values")
    positions = [i for i, one in enumerate(case.argument("indices")) if one is not None]
    side_by_side = positions == list(range(positions[0], positions[0] + len(positions)))
    first = positions[0] if side_by_side else 0
    rank = max(len(shape) for shape in index_shapes)
    picked = [f"i{j}" for j in range(rank)]
    of_source = ["." if i in positions else f"d{i}" for i in range(len(source))]
    kept = [name for name in of_source if name != "."]
    reads = [words.all(of_source, source), *(words.all(picked[rank - len(shape) :], shape) for shape in index_shapes)]
    return words.signature(reads, [words.all([*kept[:first], *picked, *kept[first:]], case.made)])


# ---- tensors out of nothing ----


def _creator(case: Case) -> Signature:
    words = Words()
    return words.signature(
        [_privates(words, one) for one in case.reads], [words.all(_names(len(case.made)), case.made)]
    )


def _filled_local(case: Case, cut: LocalCut) -> Compute:
    return _call(case, size=list(cut.made))


for _kind in ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"):
    _RULES[_kind] = Rule(signature=_creator, local=_filled_local)
_RULES["scalar_tensor"] = Rule(signature=_creator)


for _kind in ("arange", "rand", "randn"):
    _RULES[_kind] = Rule(signature=_creator, positional=True)
for _kind in ("dropout", "bernoulli"):
    _RULES[_kind] = Rule(signature=_pointwise, positional=True)
