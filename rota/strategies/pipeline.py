"""Pipelines: runs of ops on one device after another, with micro-batches that follow each other through them."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rota.errors import InputError
from rota.graph.cost import work_of
from rota.graph.graph import Op
from rota.plan.plan import At, Plan
from rota.strategies.base import register
from rota.strategies.mesh import Choice, Copy, Mesh, Pin, Recipe
from rota.strategies.turns import has_turns, meets

Order = Literal["1f1b", "gpipe", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class Pipeline(Recipe):
    """Stages of about equal cost; any graph, since a value may skip stages."""

    orders_microbatches: ClassVar[bool] = True
    order: Order = "1f1b"
    chunks: int = 2
    """How many stages each device has, if they are interleaved."""
    seconds: tuple[float, ...] | None = field(default=None, repr=False)
    """The measured cost of each op; estimated if not given."""

    def default_microbatches(self, samples: int, degree: int) -> int:
        """Enough that filling and draining the stages is a small part of the step."""
        return max(1, min(samples, 4 * degree)) if degree > 1 else 1

    def begin(self, plan: Plan, degree: int) -> _Stages:
        """Refused if there are fewer ops than stages."""
        if not isinstance(self.chunks, int) or self.chunks < 1:
            raise InputError(f"a device needs at least one stage, not {self.chunks!r}")
        if self.seconds is not None and len(self.seconds) != len(plan.graph.ops):
            raise InputError(f"seconds has {len(self.seconds)} numbers, and the graph {len(plan.graph.ops)} ops")
        if self.order not in ("1f1b", "gpipe", "interleaved"):
            raise InputError(f"a pipeline has the orders 1f1b, gpipe and interleaved, not {self.order!r}")
        return _Stages(plan, degree, self)


class _Stages:
    def __init__(self, plan: Plan, degree: int, recipe: Pipeline) -> None:
        self._plan = plan
        self._degree = degree
        self._recipe = recipe
        self.stages = degree * (recipe.chunks if recipe.order == "interleaved" else 1)
        self.stage_of = stages_by_cost(plan, self.stages, recipe.seconds)
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
        if count == 1 or self._recipe.order == "interleaved" or meets(plan):
            return
        for stage in range(self.stages):
            ahead = count if self._recipe.order == "gpipe" else min(count, self.stages - stage)
            op = self._first_with_gradient(stage)
            if op is None:
                continue
            for part in plan.parts(op):
                if self._recipe.order == "gpipe":
                    plan.order(At(part=part, microbatch=count - 1), before=At(part=part, microbatch=0, backward=True))
                else:
                    for m in range(count - ahead):
                        plan.order(
                            At(part=part, microbatch=m, backward=True), before=At(part=part, microbatch=m + ahead)
                        )

    def _first_with_gradient(self, stage: int) -> Op | None:
        for op in self._plan.graph.ops:
            if self.stage_of[op.name] == stage and op.name not in self._copied and has_turns(self._plan, op):
                return op
        return None


def stages_by_cost(plan: Plan, stages: int, seconds: tuple[float, ...] | None = None) -> dict[str, int]:
    """The stage of each op: contiguous runs in the order of the graph, of about equal cost."""
    ops = plan.graph.ops
    if len(ops) < stages:
        raise InputError(f"a model of {len(ops)} ops cannot be cut into {stages} stages; use fewer")
    costs = list(seconds) if seconds is not None else [op_cost(plan, op) for op in ops]
    bounds = _even_bounds(costs, stages)
    return {op.name: bisect.bisect_right(bounds, i) for i, op in enumerate(ops)}


def op_cost(plan: Plan, op: Op) -> float:
    """A rough cost of an op, in multiplications."""
    work = work_of(plan.refined, op.name, {})
    return max(work.flops, 4 * work.touched_bytes)


def _even_bounds(costs: list[float], stages: int) -> list[int]:
    """Where stages 1, 2, ... begin, so that the dearest stage is as cheap as can be (by bisection)."""
    total, most = sum(costs), max(costs)
    low, high = max(most, total / stages), total
    for _ in range(50):
        middle = (low + high) / 2
        if len(_greedy(costs, middle)) < stages:
            high = middle
        else:
            low = middle
    bounds = _greedy(costs, high)
    while len(bounds) < stages - 1:  # fewer were needed: cut the longest run
        edges = [0, *bounds, len(costs)]
        start, stop = max(itertools.pairwise(edges), key=lambda one: one[1] - one[0])
        bounds = sorted([*bounds, (start + stop) // 2])
    return bounds


def _greedy(costs: list[float], limit: float) -> list[int]:
    bounds: list[int] = []
    running = 0.0
    for i, cost in enumerate(costs):
        if running + cost > limit and running > 0:
            bounds.append(i)
            running = 0.0
        running += cost
    return bounds


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
