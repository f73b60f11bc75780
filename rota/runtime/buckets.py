"""Joins small collectives into large ones: the same for every device of a group, decided from the program alone.

A collective costs a latency however small it is, and a model has hundreds of small parameters. Collectives of one kind
and group that follow each other in the program, with computation in between or not, are launched as one, in the place
of the last of them: before anything reads what they make, or when enough has come together. What they send is put into
the bucket in their own places, while it is still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rota.graph.cost import element_bytes
from rota.plan.layout import Kind, Step
from rota.plan.ordering import read
from rota.plan.program import NodeKind, Program, Value

BUCKET_BYTES = 3 * 2**20
"""Enough that a latency does not count, and little enough that much is under way before the backward pass ends."""

_JOINED = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Collectives that are launched as one."""

    nodes: tuple[int, ...]
    """In the order of the program; it is launched at the last."""


@dataclass
class _Open:
    nodes: list[int]
    size_bytes: int = 0


def buckets_of(program: Program, *, most_bytes: int) -> Mapping[int, Bucket]:
    """node at which a bucket is launched -> the bucket. A collective that stands alone is a bucket of one."""
    opened: dict[tuple[Kind, tuple[int, ...], str], _Open] = {}
    of_value: dict[tuple[int, Value], tuple[Kind, tuple[int, ...], str]] = {}
    found: dict[int, Bucket] = {}

    def close(key: tuple[Kind, tuple[int, ...], str]) -> None:
        bucket = opened.pop(key, None)
        if bucket is not None:
            found[bucket.nodes[-1]] = Bucket(nodes=tuple(bucket.nodes))

    for index, node in enumerate(program.nodes):
        for one in read(node):
            waiting = of_value.get(one)
            if waiting is not None:
                close(waiting)
        if node.kind is not NodeKind.EXCHANGE:
            continue
        step = node.step
        assert step is not None
        if step.kind not in _JOINED or not is_even(step):
            continue
        tensor = program.flows[node.flow].tensor
        key = (step.kind, step.group, program.refined.graph.tensors[tensor].dtype)
        bucket = opened.setdefault(key, _Open(nodes=[]))
        bucket.nodes.append(index)
        bucket.size_bytes += max(piece.box.size for piece in step.outputs) * element_bytes(program.refined, tensor)
        for piece, value in zip(step.outputs, node.makes, strict=True):
            of_value[(piece.device, value)] = key
        if bucket.size_bytes >= most_bytes:
            close(key)
    for key in list(opened):
        close(key)
    return found


def is_even(step: Step) -> bool:
    """Whether every device gives, or gets, as much as the others: what collectives of PyTorch ask for."""
    pieces = step.inputs if step.kind is Kind.ALL_GATHER else step.outputs
    return len({piece.box.size for piece in pieces}) == 1
