"""The dims that strategies look for: those that count samples, and families that a device can keep to itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rota.graph.graph import Op, Role
from rota.graph.refine import Dim, Refined
from rota.graph.rules import occurrences
from rota.plan.plan import Plan

_PRODUCTS = frozenset({"linear", "addmm", "matmul", "mm", "bmm", "einsum", "conv1d", "conv2d"})


def dim_of(refined: Refined, op: str, families: Iterable[int]) -> Dim | None:
    """The dim of an op that belongs to one of these families and can be cut; one that is kept before one summed."""
    frame = refined.frames[op]
    wanted = frozenset(families)
    found = [dim for dim in frame.dims.values() if dim.family in wanted and frame.can_cut(dim)]
    return min(found, key=lambda dim: dim.reduced) if found else None


@dataclass
class _Family:
    """What is known of dims that are the same index."""

    size: int
    weights: dict[str, int] = field(default_factory=dict)
    """parameter -> its elements, of those that cutting the family cuts"""
    opens: bool = False
    """A product makes it."""
    closes: bool = False
    """A product sums over it."""
    stuck: bool = False
    """An op needs all of it at once."""
    ops: list[str] = field(default_factory=list)


def paired_families(refined: Refined, degree: int) -> list[int]:
    """The families along which a product's outputs can be cut up to where another product sums over them.

    Attention heads and the columns of a feed-forward layer are such families: between the two products each device
    works on its own. Of families that share a product, the one that cuts more weights wins.
    """
    graph = refined.graph
    trained = {tensor.name for tensor in graph.tensors.values() if tensor.role is Role.PARAMETER}
    samples = refined.batch_families()
    found: dict[int, _Family] = {}
    for op in graph.ops:
        frame = refined.frames[op.name]
        for dim in frame.dims.values():
            if dim.family in samples:
                continue
            family = found.setdefault(dim.family, _Family(size=dim.size))
            family.ops.append(op.name)
            summed = dim.reduced and op.kind not in _PRODUCTS  # as in a norm: every device would have to wait there
            family.stuck = family.stuck or summed or not frame.can_cut(dim)
            if op.kind in _PRODUCTS:
                reads = [name for name, names in zip(occurrences(op), frame.reads, strict=True) if dim.name in names]
                weights = [name for name in reads if name in trained]
                family.opens = family.opens or (not dim.reduced and bool(weights))
                family.closes = family.closes or (dim.reduced and bool(weights))
                family.weights |= {name: math.prod(graph.tensors[name].shape) for name in weights}
    good = [
        (number, family)
        for number, family in found.items()
        if family.opens and family.closes and not family.stuck and family.size >= degree
    ]
    good.sort(key=lambda one: (-sum(one[1].weights.values()), -one[1].size, one[0]))
    taken: set[str] = set()
    chosen: list[int] = []
    for number, family in good:
        if taken.isdisjoint(family.weights):
            chosen.append(number)
            taken |= family.weights.keys()
    return chosen


def layers_of(plan: Plan) -> Iterator[list[Op]]:
    """The ops of each layer: those whose module has the same number in its path, and the runs in between."""
    groups: dict[str, list[Op]] = {}
    for op in plan.graph.ops:
        groups.setdefault(layer_name(op.module), []).append(op)
    yield from groups.values()


def layer_name(module: str) -> str:
    """The path of a module up to its first number: blocks.3 of blocks.3.attention.query."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""
