"""A graph with fewer of its repeated layers: what is linear in their number can be told from two small graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rota.graph.graph import Graph, Op, Ref, Role, replace_refs
from rota.strategies.dims import layer_name

_FEWEST = 3
"""Layers that must look alike before it is worth to leave some out."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Layers that follow each other and look alike."""

    graph: Graph
    first: int
    """The first op of the first layer."""
    period: int
    """How many ops a layer has."""
    layers: int

    def with_layers(self, layers: int) -> Graph:
        """The graph with only the first so many of the layers; what followed the last of them follows these."""
        assert 1 <= layers <= self.layers
        if layers == self.layers:
            return self.graph
        graph = self.graph
        cut, end = self.first + layers * self.period, self.first + self.layers * self.period
        stands: dict[str, str] = {}
        for old, new in zip(graph.ops[end - self.period : end], graph.ops[cut - self.period : cut], strict=True):
            stands |= {a: b for a, b in zip(old.outputs, new.outputs, strict=True) if a is not None and b is not None}
        ops = (*graph.ops[:cut], *(_rewired(op, stands) for op in graph.ops[end:]))
        dropped = {name for op in graph.ops[cut:end] for name in op.outputs if name is not None}
        needed = {name for op in ops for name in op.inputs}
        dropped |= {name for op in graph.ops[cut:end] for name in op.inputs if name not in needed}
        dropped -= set(graph.inputs)
        return replace(
            graph,
            tensors={name: tensor for name, tensor in graph.tensors.items() if name not in dropped},
            ops=ops,
            outputs={metric: stands.get(name, name) for metric, name in graph.outputs.items()},
            aliases={alias: name for alias, name in graph.aliases.items() if name not in dropped},
            updates={name: made for name, made in graph.updates.items() if name not in dropped},
            constants={name: value for name, value in graph.constants.items() if name not in dropped},
        )


def stack_of(graph: Graph) -> Stack | None:
    """The largest stack of layers that look alike, or None if there is none.

    A layer is what its module's path says up to the first number, with what comes before the next layer begins.
    """
    found: list[Stack] = []
    starts: dict[str, list[int]] = {}
    seen: set[str] = set()
    for i, op in enumerate(graph.ops):
        layer = layer_name(op.module)
        if layer and layer not in seen:
            seen.add(layer)
            starts.setdefault(layer.rpartition(".")[0], []).append(i)
    for firsts in starts.values():
        found += _runs(graph, firsts)
    found = [one for one in found if one.layers >= _FEWEST and _is_closed(one)]
    return max(found, key=lambda one: one.layers * one.period, default=None)


def _runs(graph: Graph, firsts: Sequence[int]) -> list[Stack]:
    """Runs of layers of equal structure, of layers that begin at these ops."""
    found: list[Stack] = []
    made = {name: (i, j) for i, op in enumerate(graph.ops) for j, name in enumerate(op.outputs) if name is not None}
    layer = 0
    while layer + 1 < len(firsts):
        period = firsts[layer + 1] - firsts[layer]
        count = 1
        loose = _structure(graph, made, firsts[layer], period, strict=False)
        strict: Any = None
        while layer + count < len(firsts):
            start = firsts[layer + count]
            if start != firsts[layer] + count * period or start + period > len(graph.ops):
                break
            if _structure(graph, made, start, period, strict=False) != loose:
                break
            this = _structure(graph, made, start, period, strict=True)
            if strict is not None and this != strict:
                break
            strict = this
            count += 1
        found.append(Stack(graph=graph, first=firsts[layer], period=period, layers=count))
        layer += count
    return found


def _structure(
    graph: Graph, made: Mapping[str, tuple[int, int]], start: int, period: int, *, strict: bool
) -> tuple[Any, ...]:
    """What two layers have in common if they compute the same; `strict` also tells what of the layer before is read."""
    own: dict[str, int] = {}

    def seen(name: str) -> Any:
        tensor = graph.tensors[name]
        like = (tensor.shape, tensor.dtype, tensor.role, tensor.requires_grad)
        if tensor.role is not Role.ACTIVATION:
            # A parameter: which of the layer's own, not its name.
            return name if tensor.role is Role.INPUT else (*like, own.setdefault(name, len(own)))
        at, output = made[name]
        if at >= start:
            return (*like, at - start, output)
        if not strict:
            return like
        return (*like, at - start, output) if at >= start - period else name

    found = []
    for op in graph.ops[start : start + period]:
        args = replace_refs(op.args, lambda name: Ref(name=repr(seen(name))))
        kwargs = tuple((key, replace_refs(value, seen)) for key, value in sorted(op.kwargs.items()))
        outputs = tuple(None if name is None else seen(name) for name in op.outputs)
        found.append((op.target, repr(args), repr(kwargs), outputs, op.with_grad, op.autocast))
    return tuple(found)


def _is_closed(stack: Stack) -> bool:
    """Whether what a layer makes is read by itself and the next one only, and its parameters by itself only."""
    graph, end = stack.graph, stack.first + stack.layers * stack.period
    owner: dict[str, int] = {}
    for i in range(stack.first, end):
        layer = (i - stack.first) // stack.period
        for name in graph.ops[i].outputs:
            if name is not None:
                owner[name] = layer
    for i, op in enumerate(graph.ops):
        inside = stack.first <= i < end
        layer = (i - stack.first) // stack.period if inside else stack.layers
        if any(name in owner and owner[name] < layer - 1 for name in op.inputs):
            return False
    return all(owner.get(name, stack.layers) == stack.layers - 1 for name in graph.outputs.values() if name in owner)


def _rewired(op: Op, stands: Mapping[str, str]) -> Op:
    if not any(name in stands for name in op.inputs):
        return op
    return replace(
        op,
        args=replace_refs(op.args, lambda name: Ref(name=stands.get(name, name))),
        kwargs={
            key: replace_refs(value, lambda name: Ref(name=stands.get(name, name))) for key, value in op.kwargs.items()
        },
        inputs=tuple(stands.get(name, name) for name in op.inputs),
    )
