"""A model in a pool: whichever device runs its next unit, what that needs is brought there, and leaves afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from rota.errors import FitError
from rota.graph.graph import Graph
from rota.memory.acting import Acting
from rota.memory.arrange import Cut, predicted_seconds
from rota.memory.holdings import Holdings
from rota.memory.slab import Budget
from rota.memory.steps import Training, groups_of, step_of
from rota.memory.tiers import Tiers
from rota.memory.units import Unit, units_of
from rota.plan.costs import Costs
from rota.runtime.footprint import Footprints

_FEWEST, _MOST = 2, 256


class Pooled:
    """One model. Its weights, gradients and moments are on a device while a unit that needs them runs, else on disk.

    What its shards hand to each other stays in the memory that all devices share.
    """

    def __init__(
        self,
        graph: Graph,
        parameters: dict[str, torch.nn.Parameter],
        buffers: dict[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        training: Training,
        tiers: Tiers,
        budget_bytes: int,
        clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        """`budget_bytes` are those of each device: one unit runs in half of them, while the next one comes."""
        self.tiers = tiers
        self._batches = training.batches
        self._cut_to_fit(graph, training, budget_bytes // 2)
        self.holdings = Holdings(
            self._groups, parameters, optimizer, items=self._step.items, tiers=tiers, clip_norm=clip_norm
        )
        # Random numbers are keyed by where they are used: units of other models run in between.
        self._acting = Acting(
            self._program,
            self._step,
            self.holdings,
            buffers,
            batches=training.batches,
            seed=seed,
            plain_random=False,
        )
        self.units_s = [unit.seconds for unit in self.units]
        """What each unit takes: as predicted, and then as measured."""

    def _cut_to_fit(self, graph: Graph, training: Training, room_bytes: int) -> None:
        """With few shards, or more; what they keep for their backward passes is made again only where it must be."""
        shards, again = _FEWEST, False
        while True:
            cut = Cut(shards=shards, recomputed=frozenset(range(len(graph.ops)) if again else ()))
            self._program = cut.program(graph)
            self._groups = groups_of(self._program)
            seconds = predicted_seconds(self._program, Costs())
            self._step = step_of(self._program, self._groups, Footprints(self._program.refined), training, seconds)
            movable = {
                item
                for group in self._groups.values()
                for item in (group.weights, group.moments, group.gradients)
                if item in self._step.items and self._step.items[item].movable
            }
            self.units = units_of(self._step, frozenset(movable))
            largest = max(self.units, key=lambda unit: unit.size_bytes)
            if largest.size_bytes <= room_bytes:
                return
            if shards >= _MOST and not again:
                shards, again = _FEWEST, True
                continue
            if shards >= _MOST:
                name = self._step.stages[largest.stages[0]].name
                raise FitError(
                    f"{name} needs {largest.size_bytes:,} bytes, and half of a device has {room_bytes:,}; give each "
                    f"at least {2 * largest.size_bytes:,}",
                    needed_bytes=2 * largest.size_bytes,
                )
            shards *= 2

    # ---- units ----

    def bring(self, unit: Unit, budget: Budget, *, without: Iterable[str] = ()) -> None:
        """Begin to load what a unit needs, but what another one has or changes just now."""
        for item in sorted(unit.needs - set(without)):
            if not self.tiers.is_near(item):
                self.tiers.begin_load(item, budget=budget)

    def run(self, unit: Unit, budget: Budget) -> float:
        """Wait for what it needs, and run it; the seconds that it ran."""
        self.bring(unit, budget)
        for item in sorted(unit.needs):
            self.tiers.finish_load(item)
        begun_s = time.perf_counter()
        budget.take(unit.work_bytes + unit.made_bytes, "the work of a unit")
        try:
            for position in unit.stages:
                self._acting.act(self._step.acts[position])
        finally:
            budget.give(unit.work_bytes + unit.made_bytes)
        return time.perf_counter() - begun_s

    def release(self, unit: Unit, budget: Budget, *, keep: frozenset[str] = frozenset()) -> None:
        """Let go of what is not kept for the next unit: what has changed is written, and the rest dropped."""
        for item in unit.ends:
            self.tiers.forget(item)
        for item in sorted((unit.needs | unit.changes) - unit.ends):
            if item in unit.changes:
                self.tiers.admit(item, budget=budget)  # a gradient that was made here has memory of its own
                self.tiers.change(item)
            if item in keep or not self.tiers.is_near(item):
                continue
            if self.tiers.is_changed(item):
                self.tiers.begin_write(item)
            else:
                self.tiers.drop(item)

    def abandon(self) -> None:
        """Let go of everything; nothing of it is of use any more."""
        self.tiers.abandon()

    def begin(self, batch: Any, *, place: int, number: int) -> None:
        """Take a batch of a step."""
        if place == 0:
            self.holdings.begin_step()
        self._acting.begin(batch, number=number)

    def end(self) -> dict[str, torch.Tensor]:
        """The metrics of the batch."""
        return self._acting.end()

    def batch_of(self, number: int) -> int:
        """Which batch of its step a unit is for."""
        return self._step.acts[self.units[number].stages[0]].batch
