"""Carries out what was planned (residency.py), stage by stage.

Before each stage what it needs has come, and what may come for later ones begins to; after it, what leaves begins to
leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rota.memory.residency import Load, Residency, Write
from rota.memory.steps import Act, Step
from rota.memory.tiers import Tiers


class StepRun:
    """Carries out the stages of a step, over and over."""

    def __init__(
        self,
        step: Step,
        residency: Residency,
        tiers: Tiers,
        run: Callable[[Act], None],
    ) -> None:
        self._step = step
        self._residency = residency
        self._tiers = tiers
        self._run = run
        self._position = 0
        count = len(step.stages)
        self._needed: list[list[Load]] = [[] for _ in range(count)]
        for load in residency.loads:
            self._needed[load.stage].append(load)
        self._written: list[list[Write]] = [[] for _ in range(count)]
        self._awaited: list[list[Write]] = [[] for _ in range(count)]
        for write in residency.writes:
            self._written[write.stage].append(write)
            self._awaited[write.by % count].append(write)
        self._taken: dict[str, int] = {}
        self.stage_s = [0.0] * count
        """What each stage took the last time, without what it waited for."""
        self.wait_s = 0.0
        """How long stages waited for what moves, in all."""

    def begin(self, batch: int = 0) -> None:
        """Have in memory, or on its way, what is there when this batch of a step begins. All else is on disk."""
        # A device that has no sample of a batch may have nothing to do at all.
        self._position = next((i for i, act in enumerate(self._step.acts) if act.batch == batch), 0)
        there, coming = self._residency.present_before(self._position)
        for item in sorted(there):
            if item not in self._tiers.held:
                if not self._step.items[item].lasting:  # a gradient that never leaves
                    self._take(item)
            elif not self._tiers.is_near(item):
                self._tiers.begin_load(item)
                self._tiers.finish_load(item)
        for item in sorted(coming):
            if not self._tiers.is_near(item):
                self._tiers.begin_load(item)

    def leave(self) -> None:
        """Have everything on disk, but what never leaves; between two batches."""
        for item in list(self._taken):
            self._tiers.budget.give(self._taken.pop(item))
            if item in self._tiers.held and self._step.items[item].movable:
                self._tiers.admit(item)
        self._tiers.empty()

    def advance(self, until: int) -> None:
        """All stages of the batches before this one."""
        while self._position < len(self._step.stages) and self._step.acts[self._position].batch < until:
            self._stage(self._position)
            self._position += 1
        if self._position == len(self._step.stages):
            self._position = 0

    def _stage(self, position: int) -> None:
        tiers, stage = self._tiers, self._step.stages[position]
        begun_s = time.perf_counter()
        for write in self._awaited[position]:
            tiers.finish_write(write.item)
        for load in self._residency.beginning[position]:
            tiers.begin_load(load.item)
        for load in self._needed[position]:
            tiers.finish_load(load.item)
        for item in stage.makes:
            self._take(item)
        ready_s = time.perf_counter()
        self.wait_s += ready_s - begun_s
        tiers.budget.take(stage.work_bytes, stage.name)
        try:
            self._run(self._step.acts[position])
            tiers.await_device()
        finally:
            tiers.budget.give(stage.work_bytes)
        self.stage_s[position] = time.perf_counter() - ready_s
        for item in stage.ends:
            tiers.budget.give(self._taken.pop(item, 0))
            if item in tiers.held:
                tiers.forget(item)
        for item in stage.changes:
            if item in tiers.held and item not in self._taken:
                tiers.change(item)
        for item in self._residency.drops[position]:
            tiers.drop(item)
        for write in self._written[position]:
            if write.item in self._taken:  # it was made here, and has memory of its own
                tiers.begin_write_loose(write.item, self._taken.pop(write.item))
            else:
                tiers.begin_write(write.item)

    def _take(self, item: str) -> None:
        size = self._step.items[item].size_bytes
        self._tiers.budget.take(size, item)
        self._taken[item] = size
