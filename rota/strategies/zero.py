"""ZeRO: data parallelism whose parameters, gradients and moments are stored cut and brought together for use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rota.graph.graph import Graph, Op
from rota.graph.part import reads_of
from rota.graph.rules import occurrences
from rota.graph.scaled import scale_before_sum
from rota.plan.box import Box, even_widths, first_overlap, missing
from rota.plan.layout import Piece
from rota.plan.plan import Plan
from rota.strategies.base import register
from rota.strategies.data import Samples
from rota.strategies.dims import layer_name, layers_of
from rota.strategies.mesh import Choice, Mesh, Recipe

Stage = Literal[1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class Zero(Recipe):
    """Stage 1 and 2 keep gathered parameters for a step; stage 3 (FSDP) gathers them for each layer and pass."""

    balances: ClassVar[bool] = True
    stage: Stage = 3

    def prepare(self, graph: Graph, degree: int, *, whole: bool) -> Graph:
        """With a loss for which no device has to wait before its backward pass."""
        return scale_before_sum(graph) if whole and degree > 1 else graph

    def begin(self, plan: Plan, degree: int) -> _Stored:
        """Refused as data parallelism is."""
        return _Stored(plan, degree, self.stage, self.shares)


class _Stored:
    def __init__(self, plan: Plan, degree: int, stage: int, shares: tuple[float, ...] | None) -> None:
        self._plan = plan
        self._samples = Samples(plan, degree, shares)
        self._degree = degree
        self._stage = stage

    def choose(self, op: Op) -> Choice:
        """As data parallelism does."""
        return self._samples.choose(op)

    def finish(self, mesh: Mesh) -> None:
        """Store each parameter in as many pieces as there are copies of it along the axis, layer by layer."""
        plan = self._plan
        if self._stage == 3:
            for ops in layers_of(plan):
                plan.group(ops)
        tail = _tail(plan)
        for tensor in plan.graph.parameters:
            whole = Box.whole(plan.refined.shape(tensor.name))
            copies = _used(plan, tensor.name)
            pieces = [
                Piece(device=device, box=part)
                for box, devices in copies.items()
                for device, part in zip(devices, _pieces(box, len(devices)), strict=False)
            ]
            if copies and not _missing(whole, copies):
                # What is used last is used again at once, by the backward pass.
                again = self._stage == 3 and tensor.name not in tail
                plan.store(tensor.name, tuple(pieces), gather="use" if again else "step")


def _tail(plan: Plan) -> set[str]:
    """The parameters that are used behind the last layer only."""
    ops = plan.graph.ops
    end = max((i for i, op in enumerate(ops) if layer_name(op.module)), default=len(ops))
    before = {name for op in ops[: end + 1] for name in op.inputs}
    return {name for op in ops[end + 1 :] for name in op.inputs} - before


def _used(plan: Plan, name: str) -> dict[Box, list[int]]:
    """The boxes of a parameter that devices use, and which devices use each."""
    found: dict[Box, list[int]] = {}
    for op in plan.graph.ops:
        if name not in op.inputs:
            continue
        frame = plan.refined.frames[op.name]
        for part in plan.parts(op):
            device = plan.device_of(part)
            for tensor, box in zip(occurrences(op), reads_of(frame, dict(part.ranges)), strict=True):
                if tensor == name and box is not None and device is not None:
                    devices = found.setdefault(box, [])
                    if device not in devices:
                        devices.append(device)
    return found


def _missing(whole: Box, copies: dict[Box, list[int]]) -> bool:
    return bool(missing(whole, copies)) or first_overlap(list(copies)) is not None


def _pieces(box: Box, parts: int) -> list[Box]:
    """A box cut into as many parts, along its longest dim; fewer if it is too small."""
    shape = box.shape
    if not shape or max(shape) < parts:
        return [box]
    dim = max(range(len(shape)), key=lambda i: (shape[i] % parts == 0, shape[i]))
    if shape[dim] < parts:
        dim = shape.index(max(shape))
    return list(box.split(dim, even_widths(shape[dim], parts)))


def zero(degree: int | None = None, *, stage: Stage = 3, microbatches: int | None = None) -> Zero:
    """Data parallelism with stored parameters cut; stage 3 is FSDP."""
    return Zero(degree=degree, stage=stage, microbatches=microbatches)


register("zero", zero)
