"""The interlaced pipeline: large embeddings and the loss are cut over all devices, and the layers between are stages.

A vocabulary that is larger than all layers together makes one stage of a pipeline slow and the others wait for it. Here
every device has a part of the vocabulary, and works on it in extra steps between those of its own stage.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

from rota.errors import InputError
from rota.graph.graph import Graph, Op
from rota.graph.refine import Dim
from rota.graph.vocabulary import BLOCK_SCORES, block_classes
from rota.plan.microbatches import Mode, microbatches_of
from rota.plan.plan import At, Plan
from rota.strategies.base import register
from rota.strategies.mesh import Choice, Copy, Cut, Mesh, Pin, Recipe
from rota.strategies.pipeline import copied, op_cost, stages_by_cost
from rota.strategies.tensor import Vocabulary
from rota.strategies.turns import turning_ops


@dataclass(frozen=True, kw_only=True)
class Interlaced(Recipe):
    """SuperScaler's plan for models with huge vocabularies."""

    orders_microbatches: ClassVar[bool] = True

    def default_microbatches(self, samples: int, degree: int) -> int:
        """Fewer than a pipeline: each of them makes a gradient of the whole vocabulary."""
        return max(1, min(samples, 2 * degree)) if degree > 1 else 1

    def prepare(self, graph: Graph, degree: int, *, whole: bool) -> Graph:
        """With losses that can be cut along the vocabulary."""
        return block_classes(graph, degree)

    def begin(self, plan: Plan, degree: int) -> _Interlaced:
        """Refused if the model has no vocabulary to cut, or fewer other ops than stages."""
        return _Interlaced(plan, degree)


_Moment = tuple[Op, int, bool]
"""An op, a micro-batch, and whether its backward pass is meant."""


class _Interlaced:
    def __init__(self, plan: Plan, degree: int) -> None:
        self._plan = plan
        self._stages = degree
        self._cut = _cut_dims(plan, degree)
        if not self._cut and degree > 1:
            raise InputError(
                f"the model has no embedding or loss whose vocabulary can be cut into {degree}; use pipeline"
            )
        self._spread = self._cut.keys() | _behind_blocks(plan.graph)
        costs = tuple(0.0 if op.name in self._spread else op_cost(plan, op) for op in plan.graph.ops)
        self.stage_of = stages_by_cost(plan, degree, costs)
        self._copied = copied(plan, self.stage_of)
        self._everywhere = _read_everywhere(plan.graph, self._spread, self._copied.keys())

    def choose(self, op: Op) -> Choice:
        """Along the vocabulary; else to its stage; what is small and needed by all is computed by all."""
        if op.name in self._cut:
            return Cut(dim=self._cut[op.name].name)
        if op.name in self._everywhere or op.name in self._spread:
            return Copy()
        if op.name in self._copied:
            return Copy(places=tuple(sorted(self._copied[op.name])))
        return Pin(place=self.stage_of[op.name])

    def finish(self, mesh: Mesh) -> None:
        """One forward and one backward of its stage at a time, and between them the steps that all devices share.

        In turn t a stage takes the backward pass of one micro-batch and the forward pass of micro-batch t - stage.
        Then all devices compute the scores of the micro-batch that has just left the last stage, forward and backward.
        """
        plan, count, last = self._plan, self._plan.microbatches, self._stages - 1
        plan.group(name for name, dim in self._cut.items() if dim.reduced)
        plan.group(name for name, dim in self._cut.items() if not dim.reduced)
        turning = turning_ops(plan)
        if not turning:
            return
        scores = next((op for op in reversed(plan.graph.ops) if op.kind == BLOCK_SCORES), None)
        ends = self._ends(turning)
        if scores is not None:
            self._look_up_in_time(mesh, scores, ends)
        for stage, (first, final) in ends.items():
            ahead = last - stage + 1 if scores is None else 2 * (last - stage) + 1
            for m in range(count - ahead):
                self._order(mesh, (first, m, True), (first, m + ahead, False))
            if scores is None or stage == last:
                continue
            behind = last - stage  # the last stage is at a micro-batch that this one had so many turns ago
            for m in range(count):
                if m + behind < count:
                    self._order(mesh, (final, m + behind, False), (scores, m, False), along=True)
                if m + behind + 1 < count:
                    self._order(mesh, (scores, m, True), (first, m + behind + 1, False))
                if m >= behind:
                    self._order(mesh, (scores, m, True), (final, m - behind, True))

    def _look_up_in_time(self, mesh: Mesh, scores: Op, ends: Mapping[int, tuple[Op, Op]]) -> None:
        """Look rows up at the end of the turn before the first stage needs them, so that nobody waits for them."""
        running = microbatches_of(self._plan).running
        for op in self._plan.graph.ops:
            if op.name not in self._cut or op.kind != "embedding" or running[op.name].mode is not Mode.ROWS:
                continue
            for m in range(self._stages, self._plan.microbatches):
                self._order(mesh, (op, m, False), (scores, m - self._stages, False), along=True)
                for stage, (_, final) in ends.items():
                    self._order(mesh, (final, m - 1 - stage, False), (op, m, False))

    def _ends(self, turning: Collection[str]) -> dict[int, tuple[Op, Op]]:
        """The first and the last op of each stage that has a backward pass for the samples of each micro-batch."""
        plan = self._plan
        running = microbatches_of(plan).running
        found: dict[int, tuple[Op, Op]] = {}
        for op in reversed(plan.graph.ops):
            alone = op.name not in self._copied and op.name not in self._spread
            if alone and op.name in turning and running[op.name].mode is Mode.ROWS:
                stage = self.stage_of[op.name]
                found[stage] = (op, found.get(stage, (op, op))[1])
        return found

    def _order(self, mesh: Mesh, first: _Moment, second: _Moment, *, along: bool = False) -> None:
        """One before the other, on the same device or, `along` the axis, on any device that differs only in it."""
        plan = self._plan
        inner = math.prod(mesh.degrees[mesh.axis + 1 :])
        for one in plan.parts(first[0]):
            for other in plan.parts(second[0]):
                here, there = plan.device_of(one), plan.device_of(other)
                assert here is not None
                assert there is not None
                if here == there or (along and here - mesh.place(here) * inner == there - mesh.place(there) * inner):
                    plan.prefer(
                        At(part=one, microbatch=first[1], backward=first[2]),
                        before=At(part=other, microbatch=second[1], backward=second[2]),
                    )


def _cut_dims(plan: Plan, degree: int) -> dict[str, Dim]:
    """The ops that are cut along the vocabulary, and the dim of each.

    A product whose loss cannot be cut is not: its scores would be gathered.
    """
    vocabulary = Vocabulary(plan.refined, degree)
    found = {op.name: (op, vocabulary.dim_of(op)) for op in plan.graph.ops}
    return {
        name: dim
        for name, (op, dim) in found.items()
        if dim is not None and (op.kind == "embedding" or dim.family in vocabulary.scored)
    }


def _behind_blocks(graph: Graph) -> set[str]:
    """The ops that read what the blocks of a loss come to: small, and computed everywhere."""
    made = {name for op in graph.find(kind=BLOCK_SCORES) for name in op.outputs}
    found = set()
    for op in graph.ops:
        if any(name in made for name in op.inputs):
            found.add(op.name)
            made.update(op.outputs)
    return found


def _read_everywhere(graph: Graph, spread: Set[str], light: Set[str]) -> set[str]:
    """Of the ops that depend on the batch alone, those whose results are read by what all devices do."""
    found: set[str] = set()
    wanted: set[str] = set()
    for op in reversed(graph.ops):
        if op.name in light and any(name in wanted for name in op.outputs):
            found.add(op.name)
        if op.name in spread or op.name in found:
            wanted.update(op.inputs)
    return found


def interlaced(stages: int | None = None, *, microbatches: int | None = None) -> Interlaced:
    """The vocabulary over all devices, and the layers in stages."""
    return Interlaced(degree=stages, microbatches=microbatches)


register("interlaced", interlaced)
