"""Pipelines: runs of ops on one device after another, with micro-batches that follow each other through them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from rota.errors import InputError
from rota.given import check_amounts
from rota.graph.cost import element_bytes, work_of
from rota.graph.graph import Op
from rota.plan.plan import At, Plan
from rota.strategies.base import register
from rota.strategies.mesh import Choice, Copy, Mesh, Pin, Recipe
from rota.strategies.turns import turning_ops

Order = Literal["1f1b", "gpipe", "interleaved"]

Rates = tuple[float, float]
"""What it takes to send a tensor: in any case, and for each byte."""
_SEND_S: Rates = (5e-4, 1e-9)
_SEND_WORK: Rates = (0.0, 40.0)
"""In multiplications, as `op_cost` counts."""


@dataclass(frozen=True, kw_only=True)
class Pipeline(Recipe):
    """Stages of about equal cost; any graph, since a value may skip stages."""

    orders_microbatches: ClassVar[bool] = True
    balances: ClassVar[bool] = True
    order: Order = "1f1b"
    chunks: int = 2
    """How many stages each device has, if they are interleaved."""
    seconds: tuple[float, ...] | None = field(default=None, repr=False)
    """The measured cost of each op; estimated if not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None:
            check_amounts(self.seconds, "pipeline: seconds", least=0.0)

    def default_microbatches(self, samples: int, degree: int) -> int:
        """Enough that filling and draining the stages is a small part of the step."""
        return max(1, min(samples, 4 * degree)) if degree > 1 else 1

    def begin(self, plan: Plan, degree: int) -> _Stages:
        """Refused if there are fewer ops than stages."""
        if self.seconds is not None and len(self.seconds) != len(plan.graph.ops):
            raise InputError(f"seconds has {len(self.seconds)} numbers, and the graph {len(plan.graph.ops)} ops")
        return _Stages(plan, degree, self)


class _Stages:
    def __init__(self, plan: Plan, degree: int, recipe: Pipeline) -> None:
        self._plan = plan
        self._degree = degree
        self._recipe = recipe
        self.stages = degree * (recipe.chunks if recipe.order == "interleaved" else 1)
        measured = recipe.seconds is not None
        send = _SEND_S if measured else _SEND_WORK
        speeds = None
        if recipe.shares is not None:
            speeds = [recipe.shares[stage % degree] * degree for stage in range(self.stages)]
        self.stage_of = stages_by_cost(plan, self.stages, recipe.seconds, send=send, speeds=speeds)
        self._copied = copied(plan, self.stage_of)

    def choose(self, op: Op) -> Choice:
        """To its stage; what depends on the batch alone is computed wherever it is needed."""
        stages = self._copied.get(op.name)
        if stages is not None:
            return Copy(places=tuple(sorted({stage % self._degree for stage in stages})))
        return Pin(place=self.stage_of[op.name] % self._degree)

    def finish(self, mesh: Mesh) -> None:
        """Let no device run further ahead than the order says."""
        plan, count = self._plan, self._plan.microbatches
        if count == 1 or self._recipe.order == "interleaved":
            return
        firsts = {self.stage_of[name]: name for name in reversed(turning_ops(plan)) if name not in self._copied}
        for stage, op in firsts.items():
            ahead = count if self._recipe.order == "gpipe" else min(count, self.stages - stage)
            for part in plan.parts(op):
                if self._recipe.order == "gpipe":
                    plan.prefer(At(part=part, microbatch=count - 1), before=At(part=part, microbatch=0, backward=True))
                else:
                    for m in range(count - ahead):
                        plan.prefer(
                            At(part=part, microbatch=m, backward=True), before=At(part=part, microbatch=m + ahead)
                        )


def stages_by_cost(
    plan: Plan,
    stages: int,
    costs: Sequence[float] | None = None,
    *,
    send: Rates = _SEND_WORK,
    speeds: Sequence[float] | None = None,
) -> dict[str, int]:
    """The stage of each op: contiguous runs in the order of the graph, that take about as long with what they exchange.

    `speeds` are those of the stages' devices, 1 on average; all are 1 if not given.
    """
    ops = plan.graph.ops
    if len(ops) < stages:
        raise InputError(f"a model of {len(ops)} ops cannot be cut into {stages} stages; use fewer")
    costs = [op_cost(plan, op) for op in ops] if costs is None else costs
    bounds = even_bounds(costs, _crossing_costs(plan, send), stages, speeds=speeds)
    return {op.name: bisect.bisect_right(bounds, i) for i, op in enumerate(ops)}


def op_cost(plan: Plan, op: Op) -> float:
    """A rough cost of an op, in multiplications."""
    work = work_of(plan.refined, op.name, {})
    return max(work.flops, 4 * work.touched_bytes)


def _crossing_costs(plan: Plan, rates: Rates) -> list[float]:
    """What a device spends on sending, or receiving, what crosses a cut before each op, and its gradient back."""
    launch, per_byte = rates
    graph = plan.graph
    made = {name: i for i, op in enumerate(graph.ops) for name in op.outputs if name is not None}
    free = copied(plan, {op.name: 0 for op in graph.ops})
    last = dict(made)
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            if name in last:
                last[name] = i
    changes = [0.0] * (len(graph.ops) + 2)
    for name, first in made.items():
        if graph.ops[first].name in free:
            continue  # it is computed where it is needed
        tensor = graph.tensors[name]
        size_bytes = math.prod(tensor.shape) * element_bytes(plan.refined, name) / plan.microbatches
        cost = (launch + per_byte * size_bytes) * (2 if tensor.requires_grad else 1)
        changes[first + 1] += cost
        changes[last[name] + 1] -= cost
    return [max(0.0, one) for one in itertools.accumulate(changes[: len(graph.ops) + 1])]


def even_bounds(
    costs: Sequence[float], crossing: Sequence[float], stages: int, *, speeds: Sequence[float] | None = None
) -> list[int]:
    """Where stages 1, 2, ... begin, so that the slowest stage with its two cuts is as fast as can be."""
    speeds = [1.0] * stages if speeds is None else speeds
    before = np.concatenate([[0.0], np.cumsum(costs)])
    cuts = np.asarray(crossing, dtype=float).copy()
    cuts[0] = cuts[-1] = 0.0
    low, high = 0.0, float(before[-1] + 2 * cuts.max()) * (1 + 1e-9) / min(speeds)
    found = _within(before, cuts, speeds, high)
    assert found is not None
    for _ in range(40):
        middle = (low + high) / 2
        bounds = _within(before, cuts, speeds, middle)
        if bounds is None:
            low = middle
        else:
            found, high = bounds, middle
    return found


def _within(before: Any, cuts: Any, speeds: Sequence[float], limit: float) -> list[int] | None:
    """Bounds of stages that take no more than this, each of at least one op; None if there are none."""
    stages = len(speeds)
    # A stage from i to j costs (before[j] + cuts[j]) - (before[i] - cuts[i]).
    gains, ends = before - cuts, before + cuts
    count = len(before)
    best = np.full(count, -np.inf)  # of the places where a stage may begin, the best so far
    best[0:] = gains[0]
    starts = np.zeros(count, dtype=np.int64)
    trail = []
    for stage in range(stages):
        # best[j - 1]: the stage has at least one op.
        reached = np.zeros(count, dtype=bool)
        reached[1:] = ends[1:] - best[:-1] <= limit * speeds[stage]
        begun = np.concatenate([[0], starts[:-1]])
        trail.append(begun)
        if stage == stages - 1:
            return _traced(trail, count - 1) if reached[-1] else None
        usable = np.where(reached, gains, -np.inf)
        best = np.maximum.accumulate(usable)
        starts = np.maximum.accumulate(np.where(usable == best, np.arange(count), 0))
        starts = np.where(np.isneginf(best), 0, starts)
    return None


def _traced(trail: list[Any], place: int) -> list[int]:
    bounds = []
    for begun in reversed(trail[1:]):
        place = int(begun[place])
        bounds.append(place)
    return bounds[::-1]


def copied(plan: Plan, stage_of: dict[str, int]) -> dict[str, set[int]]:
    """The ops that depend on nothing but the batch and constants, and the stages that need what they make."""
    graph = plan.graph
    made: dict[str, Op] = {name: op for op in graph.ops for name in op.outputs if name is not None}
    light: set[str] = set()
    for op in graph.ops:
        makers = [made[name].name for name in op.inputs if name in made]
        weights = any(graph.tensors[name].role.value in ("parameter", "buffer") for name in op.inputs)
        if not weights and all(maker in light for maker in makers):
            light.add(op.name)
    needed: dict[str, set[int]] = {name: set() for name in light}
    for op in reversed(graph.ops):
        stages = needed[op.name] if op.name in light else {stage_of[op.name]}
        for name in op.inputs:
            if name in made and made[name].name in light:
                needed[made[name].name] |= stages
    return {name: stages or {stage_of[name]} for name, stages in needed.items()}


def pipeline(
    stages: int | None = None,
    *,
    microbatches: int | None = None,
    order: Order = "1f1b",
    chunks: int = 2,
    seconds: tuple[float, ...] | None = None,
) -> Pipeline:
    """Stages on one device after another; a batch in four parts for each stage unless you say otherwise."""
    return Pipeline(degree=stages, microbatches=microbatches, order=order, chunks=chunks, seconds=seconds)


register("pipeline", pipeline)
