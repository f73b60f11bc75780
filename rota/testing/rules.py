"""Checks that an op's rule is right: the parts of every cut must make up the whole op, and so must their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rota.errors import RuleError
from rota.graph.graph import Graph, Op, Ref, Role, Tensor
from rota.graph.part import PartCompute, Place, compute_part, makes_of, reads_of
from rota.graph.refine import Dim, Refined, local_shape, refine
from rota.graph.rules import occurrences, rule_of
from rota.plan.box import Box, Range, even_widths

_PLACE = Place(key=20_220_707)

# Their values are whatever was in memory.
_UNDEFINED = ("empty", "new_empty", "empty_like")

# What PyTorch says of an input for which an op has no derivative, such as the weights of the classes of a loss.
_NO_DERIVATIVE = ("derivative", "differentiable", "autograd formula")

Cut = Mapping[str, Sequence[int]]
"""dim -> the widths of its parts"""


def check_rule(
    op: Any, *args: Any, parts: Sequence[int] = (2, 3), tolerance: float = 1e-10, **kwargs: Any
) -> list[str]:
    """Try every cut that an op's rule allows for these arguments; the names of the dims that can be cut.

    `op` is an overload, such as ``torch.ops.mylib.swish.default``, and the arguments are tensors, lists of tensors and
    plain values. Each dim is cut evenly into each number of `parts` and unevenly, and each two dims together. What the
    parts make and the gradients of all inputs must be those of the whole op; everything is computed in float64.
    Raises RuleError if they are not, or if the op has no rule.
    """
    graph, values = _graph_of(_overload(op), args, kwargs)
    if rule_of(graph.ops[0]) is None:
        raise RuleError(f"{graph.ops[0].target} has no rule, so nothing was tried; see rota.register_rule")
    return check_op(refine(graph), graph.ops[0].name, values, parts=parts, tolerance=tolerance)


def check_op(
    refined: Refined,
    op_name: str,
    values: Sequence[torch.Tensor],
    *,
    parts: Sequence[int] = (2, 3),
    tolerance: float = 1e-10,
) -> list[str]:
    """The same for an op within a graph, cut along the factors that the graph gives its dims."""
    values = [value.detach().double() if value.is_floating_point() else value.detach() for value in values]
    check = _Check(refined=refined, op_name=op_name, values=values, tolerance=tolerance)
    dims = [dim for dim in refined.frames[op_name].dims.values() if not dim.fixed]
    if dims:
        whole = check.whole()
        for cut in _cuts(dims, parts):
            check.compare(cut, whole)
    return [dim.name for dim in dims]


def _cuts(dims: Sequence[Dim], parts: Sequence[int]) -> Iterator[Cut]:
    for dim in dims:
        widths = [even_widths(dim.size, count) for count in parts if count <= dim.size]
        if dim.size > 2:
            widths.append((1, dim.size - 1))
        for one in widths:
            yield {dim.name: one}
    for one_dim, other in itertools.combinations([dim for dim in dims if dim.size > 1], 2):
        yield {one_dim.name: even_widths(one_dim.size, 2), other.name: even_widths(other.size, 2)}


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What an op makes of its inputs, each tensor in the shape of its factors."""

    outputs: list[torch.Tensor]
    output_gradients: list[torch.Tensor | None]
    """What is put in at the outputs; None for one that is not differentiable."""
    gradients: list[torch.Tensor | None]
    """Of the inputs; None for one that has none."""
    reads: list[torch.Tensor]
    """The inputs afterwards: batch_norm writes into its running averages."""


@dataclass(frozen=True, kw_only=True)
class _Check:
    """An op, its inputs and how close the parts must be to the whole."""

    refined: Refined
    op_name: str
    values: Sequence[torch.Tensor]
    tolerance: float

    @property
    def op(self) -> Op:
        return self.refined.cases[self.op_name].op

    def whole(self) -> _Result:
        """The op, uncut, with random gradients at its outputs."""
        compute = compute_part(self.refined, self.op_name, {})
        leaves = [value.clone() for value in self.values]
        differentiable = [i for i in range(len(leaves)) if self._is_differentiable(compute, i)]
        for i in differentiable:
            leaves[i].requires_grad_()
        outputs = list(compute([_unleaf(one) for one in leaves], _PLACE))
        generator = torch.Generator().manual_seed(1)
        into = [
            torch.randn(one.shape, generator=generator, dtype=one.dtype) if one.requires_grad else None
            for one in outputs
        ]
        found = _gradients(outputs, into, [leaves[i] for i in differentiable])
        gradients = dict(zip(differentiable, found, strict=True))
        return _Result(
            outputs=[self._refine(name, one.detach()) for name, one in zip(self.op.outputs, outputs, strict=True)],
            output_gradients=[
                None if one is None else self._refine(name, one)
                for name, one in zip(self.op.outputs, into, strict=True)
            ],
            gradients=[
                self._refine(name, gradients[i]) if i in gradients else None
                for i, name in enumerate(occurrences(self.op))
            ],
            reads=[self._refine(name, one.detach()) for name, one in zip(occurrences(self.op), leaves, strict=True)],
        )

    def compare(self, cut: Cut, whole: _Result) -> None:
        """Compute all parts of a cut and compare what they make up with the whole."""
        frame = self.refined.frames[self.op_name]
        partial = any(frame.dims[name].reduced for name in cut)
        outputs = [torch.zeros_like(one) for one in whole.outputs]
        made = [torch.zeros(one.shape, dtype=torch.int64) for one in whole.outputs]
        gradients = [None if one is None else torch.zeros_like(one) for one in whole.gradients]
        for ranges in _parts(cut):
            reads = reads_of(frame, ranges)
            makes = makes_of(frame, ranges)
            found, of_reads = self._part(ranges, reads, makes, whole, where=_words(cut))
            for i, box in enumerate(makes):
                if box is not None:
                    at = box.inside(Box.whole(outputs[i].shape))
                    outputs[i][at] = outputs[i][at] + found[i] if partial else found[i]
                    made[i][at] += 1
            for total, box, gradient in zip(gradients, reads, of_reads, strict=True):
                if total is not None and box is not None and gradient is not None:
                    total[box.inside(Box.whole(total.shape))] += gradient
        for i, one in enumerate(whole.outputs):
            if not partial and bool((made[i] != 1).any()):
                self._fail(f"does not make each element of output {i} once", _words(cut))
            if self.op.kind not in _UNDEFINED:
                self._same(outputs[i], one, f"output {i}", _words(cut))
        for name, total, expected in zip(occurrences(self.op), gradients, whole.gradients, strict=True):
            if total is not None and expected is not None:
                self._same(total, expected, f"the gradient of {name}", _words(cut))

    def _part(
        self,
        ranges: Mapping[str, Range],
        reads: Sequence[Box | None],
        makes: Sequence[Box | None],
        whole: _Result,
        *,
        where: str,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """What a part makes, and the gradients of what it reads, both in the shape of their factors."""
        names = occurrences(self.op)
        leaves = [
            None if box is None else self._slice(name, value, box).requires_grad_(gradient is not None)
            for name, value, box, gradient in zip(names, self.values, reads, whole.gradients, strict=True)
        ]
        compute = compute_part(self.refined, self.op_name, ranges)
        try:
            outputs = compute([_unleaf(one) for one in leaves if one is not None], _PLACE)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            self._fail(f"cannot be computed: {str(error).strip().splitlines()[0]}", where, cause=error)
        into: list[torch.Tensor | None] = []
        for i, (name, one, box) in enumerate(zip(self.op.outputs, outputs, makes, strict=True)):
            if name is None or box is None:
                into.append(None)
                continue
            shape = local_shape(self.refined.factors[name], box.shape)
            if tuple(one.shape) != shape:
                self._fail(f"makes output {i} of shape {list(one.shape)} where {list(shape)} is expected", where)
            gradient = whole.output_gradients[i]
            into.append(None if gradient is None else gradient[box.inside(Box.whole(gradient.shape))].reshape(shape))
        wanted = [i for i, one in enumerate(leaves) if one is not None and one.requires_grad]
        gradients = dict(zip(wanted, _gradients(outputs, into, [leaves[i] for i in wanted]), strict=True))
        for name, leaf, box, after in zip(names, leaves, reads, whole.reads, strict=True):
            if leaf is not None and box is not None:
                written = leaf.detach().reshape(box.shape)
                self._same(written, after[box.inside(Box.whole(after.shape))], f"{name} afterwards", where)
        return (
            [one if box is None else one.detach().reshape(box.shape) for one, box in zip(outputs, makes, strict=True)],
            [
                gradients[i].reshape(box.shape) if i in gradients and box is not None else None
                for i, box in enumerate(reads)
            ],
        )

    def _is_differentiable(self, compute: PartCompute, index: int) -> bool:
        """Whether PyTorch has a derivative for this input."""
        if not self.values[index].is_floating_point():
            return False
        leaves = [value.clone().requires_grad_(i == index) for i, value in enumerate(self.values)]
        try:
            outputs = [one for one in compute([_unleaf(one) for one in leaves], _PLACE) if one.requires_grad]
            torch.autograd.grad(outputs, leaves[index], [torch.ones_like(one) for one in outputs], allow_unused=True)
        except (RuntimeError, NotImplementedError) as error:
            if not any(words in str(error) for words in _NO_DERIVATIVE):
                raise
            return False
        return bool(outputs)

    def _refine(self, name: str | None, value: torch.Tensor) -> torch.Tensor:
        return value if name is None else value.reshape(self.refined.shape(name))

    def _slice(self, name: str, value: torch.Tensor, box: Box) -> torch.Tensor:
        part = self._refine(name, value)[box.inside(Box.whole(self.refined.shape(name)))]
        return part.reshape(local_shape(self.refined.factors[name], box.shape)).clone()

    def _same(self, found: torch.Tensor, expected: torch.Tensor, what: str, where: str) -> None:
        tolerance = self.tolerance
        if expected.is_floating_point():  # an op that was told to compute in float32 is only as exact as that
            tolerance = max(tolerance, 100 * torch.finfo(expected.dtype).eps)
        found, expected = (one.to(torch.promote_types(one.dtype, torch.float64)) for one in (found, expected))
        equal = (found == expected) | (found.isnan() & expected.isnan())
        distance = (found - expected).abs().masked_fill(equal, 0)
        scale = max(1.0, expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0)
        largest = distance.nan_to_num(nan=torch.inf).max().item() if distance.numel() else 0.0
        if largest > tolerance * scale:
            self._fail(f"{what} differs by {largest:.3g}", where)

    def _fail(self, what: str, where: str, *, cause: Exception | None = None) -> Any:
        raise RuleError(f"the rule of {self.op.target} is wrong: cut along {where}, {what}") from cause


def _unleaf(value: torch.Tensor) -> torch.Tensor:
    """What may be written in place even if a gradient is wanted."""
    return value.view_as(value) if value.requires_grad else value


def _parts(cut: Cut) -> Iterator[dict[str, Range]]:
    ranges = []
    for widths in cut.values():
        ends = list(itertools.accumulate(widths))
        ranges.append([(end - width, end) for end, width in zip(ends, widths, strict=True)])
    for chosen in itertools.product(*ranges):
        yield dict(zip(cut, chosen, strict=True))


def _words(cut: Cut) -> str:
    return " and ".join(f"{name} into {' + '.join(map(str, widths))}" for name, widths in cut.items())


def _gradients(
    outputs: Sequence[torch.Tensor], into: Sequence[torch.Tensor | None], leaves: Sequence[Any]
) -> list[torch.Tensor]:
    """The gradients of the leaves, zeros for one that has none."""
    pairs = [(one, g) for one, g in zip(outputs, into, strict=True) if g is not None and one.requires_grad]
    if not pairs or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(
        [one for one, _ in pairs], list(leaves), [gradient for _, gradient in pairs], allow_unused=True
    )
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


# ---- a graph of one op ----


def _overload(op: Any) -> torch._ops.OpOverload:
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op gives
    if isinstance(op, torch._ops.OpOverloadPacket):
        op = op.default
    if not isinstance(op, torch._ops.OpOverload):
        raise RuleError(f"{op!r} is not an op; give an overload, for example torch.ops.aten.linear.default")
    return op


def _graph_of(
    function: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Graph, list[torch.Tensor]]:
    """A graph of one op, and the values of what it reads, in order."""
    tensors: dict[str, Tensor] = {}
    values: list[torch.Tensor] = []

    def refer(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            values.append(value)
            tensors[name] = _tensor(name, value, Role.INPUT)
            return Ref(name=name)
        if isinstance(value, tuple | list):
            return [refer(item, f"{name}.{i}") for i, item in enumerate(value)]
        return value

    schema = function._schema
    given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
    placed = {
        one.name: refer(given.get(one.name, one.default_value), one.name)
        for one in schema.arguments
        if one.name in given or not one.kwarg_only
    }
    by_position = tuple(placed[one.name] for one in schema.arguments if not one.kwarg_only)
    by_name = {one.name: placed[one.name] for one in schema.arguments if one.kwarg_only and one.name in given}
    made = function(*_copied(args), **_copied(kwargs))
    several = isinstance(made, tuple | list)
    results = list(made) if several else [made]
    outputs = [f"result.{i}" if several else "result" for i in range(len(results))]
    tensors.update({name: _tensor(name, one, Role.ACTIVATION) for name, one in zip(outputs, results, strict=True)})
    kind = schema.name.removeprefix("aten::")
    op = Op(
        name="op",
        kind=kind.strip("_") if kind.startswith("__") else kind,
        target=str(function),
        args=by_position,
        kwargs=by_name,
        inputs=tuple(name for name in tensors if name not in outputs),
        outputs=tuple(outputs),
    )
    graph = Graph(
        tensors=tensors,
        ops=(op,),
        inputs=op.inputs,
        outputs={},
        aliases={},
        updates={},
        constants={},
    )
    return graph, values


def _copied(value: Any) -> Any:
    """The same arguments for an op that may write into them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    return type(value)(_copied(item) for item in value) if isinstance(value, tuple | list) else value


def _tensor(name: str, value: torch.Tensor, role: Role) -> Tensor:
    return Tensor(name=name, shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."), role=role)
