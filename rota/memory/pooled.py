"""Runs batches of one shape as a model in a pool: unit by unit, when and where it is its turn.

A unit is a shard's forward pass, or its backward pass with its update. What it needs is in memory while it runs, and
leaves afterwards; what shards hand to each other stays in the memory that all devices share.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from rota.errors import FitError
from rota.graph.graph import Graph
from rota.memory.acting import Acting
from rota.memory.arrange import Cut, predicted_seconds
from rota.memory.holdings import Holdings
from rota.memory.steps import Group, Step, Training, groups_of, step_of
from rota.memory.turns import Turns
from rota.memory.units import Unit, units_of
from rota.plan.costs import Costs
from rota.plan.program import Program
from rota.runtime.footprint import Footprints

_FEWEST, _MOST = 2, 256


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """A model cut so that each of its units fits."""

    cut: Cut
    program: Program
    groups: dict[str, Group]
    step: Step
    units: tuple[Unit, ...]


def cut_to_fit(graph: Graph, training: Training, *, room_bytes: int, costs: Costs | None = None) -> Fitting:
    """With few shards, or more, so that each unit fits; what they keep is made again only where it must be."""
    shards, again = _FEWEST, False
    costs = costs or Costs()
    while True:
        cut = Cut(shards=shards, recomputed=frozenset(range(len(graph.ops)) if again else ()))
        program = cut.program(graph)
        groups = groups_of(program)
        try:
            step, units = pool_units(program, groups, training, room_bytes=room_bytes, costs=costs)
            return Fitting(cut=cut, program=program, groups=groups, step=step, units=units)
        except FitError:
            if shards < _MOST:
                shards *= 2
            elif again:
                raise
            else:
                shards, again = _FEWEST, True


def pool_units(
    program: Program,
    groups: Mapping[str, Group],
    training: Training,
    *,
    room_bytes: int,
    costs: Costs | None = None,
) -> tuple[Step, tuple[Unit, ...]]:
    """A step as units. FitError if one needs more room than there is."""
    seconds = predicted_seconds(program, costs or Costs())
    step = step_of(program, groups, Footprints(program.refined, plain_random=True, whole_tapes=True), training, seconds)
    movable = {
        item
        for group in groups.values()
        for item in (group.weights, group.moments, group.gradients)
        if item in step.items and step.items[item].movable
    }
    units = units_of(step, frozenset(movable))
    largest = max(units, key=lambda unit: unit.size_bytes)
    if largest.size_bytes > room_bytes:
        name = step.stages[largest.stages[0]].name
        raise FitError(
            f"{name} needs {largest.size_bytes:,} bytes, and half of a device has {room_bytes:,}, and it is cut as far "
            "as it can be",
            needed_bytes=2 * largest.size_bytes,
        )
    return step, units


class Pooled:
    """A program whose units take turns with those of other models."""

    at_once = 1

    def __init__(
        self,
        program: Program,
        holdings: Holdings,
        buffers: Mapping[str, torch.Tensor],
        *,
        step: Step,
        units: Sequence[Unit],
        turns: Turns,
        total_batches: int,
        cores: Sequence[Sequence[int]] = (),
        batches: int = 1,
        seed: int = 0,
    ) -> None:
        """`batches` are those of a step, `total_batches` those of the whole task; `cores` are those of each device."""
        self.program = program
        self.step = step
        self._holdings = holdings
        self._tiers = holdings.tiers
        self.units = units
        self._turns = turns
        self._total_batches = total_batches
        self._cores = cores
        self._acting = Acting(program, step, holdings, buffers, batches=batches, seed=seed, plain_random=True)
        self.units_s = [unit.seconds for unit in units]
        """What each unit takes: as predicted, and then as measured."""

    def enter(self, batch: int = 0) -> None:
        """All is on disk."""

    def leave(self) -> None:
        """All is on disk."""
        self._tiers.empty()

    def take(self, batches: Sequence[Any], *, place: int, number: int) -> list[dict[str, torch.Tensor]]:
        """One batch of a step, and with the last one the update; its metrics. `number` counts batches."""
        (batch,) = batches
        self._acting.begin(batch, place=place, number=number)
        row = [i for i, unit in enumerate(self.units) if self.step.acts[unit.stages[0]].batch == place]
        batch_s = sum(self.units_s[i] for i in row)
        after_s = max(0, self._total_batches - number - 1) * batch_s
        self._turns.ready([self.units_s[i] for i in row], after_s=after_s)
        device: int | None = None
        for i, following in zip(row, [*row[1:], None], strict=True):
            if device is None:
                device = self._turns.wait_for_room()
            self._bring(self.units[i])
            follows = self._turns.wait_for_turn()
            keep = frozenset[str]()
            if follows and following is None:
                self._turns.promised = device
            elif follows:
                assert following is not None
                # What both need stays; what the present one makes or changes cannot come before.
                self._bring(self.units[following], without=self.units[i].needs | self.units[i].changes)
                keep = self.units[following].needs
            self._run(i, device)
            self._release(self.units[i], device, keep=keep)
            device = device if follows else None
        return [self._acting.end(place)]

    def _bring(self, unit: Unit, *, without: frozenset[str] = frozenset()) -> None:
        for item in sorted(unit.needs - without):
            if not self._tiers.is_near(item):
                self._tiers.begin_load(item)

    def _run(self, number: int, device: int) -> None:
        unit, budget = self.units[number], self._tiers.budget
        for item in sorted(unit.needs):
            self._tiers.finish_load(item)
        if self._cores and len(self._cores[device]) == 1 and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._cores[device])  # of this thread
        begun_s = time.perf_counter()
        budget.take(unit.work_bytes + unit.made_bytes, "the work of a unit")
        try:
            for position in unit.stages:
                self._acting.act(self.step.acts[position])
        finally:
            budget.give(unit.work_bytes + unit.made_bytes)
        self.units_s[number] = time.perf_counter() - begun_s
        self._turns.ran(self.units_s[number])

    def _release(self, unit: Unit, device: int, *, keep: frozenset[str]) -> None:
        """Let go of what is not kept for the next unit: what has changed is written, and the rest dropped."""
        tiers = self._tiers
        leaving: list[Future[None]] = []
        for item in unit.ends:
            tiers.forget(item)
        for item in sorted((unit.needs | unit.changes) - unit.ends):
            if item in unit.changes:
                tiers.admit(item)  # a gradient that was made here has memory of its own
                tiers.change(item)
            if item in keep or not tiers.is_near(item):
                continue
            if tiers.is_changed(item):
                leaving.append(tiers.begin_write(item))
            else:
                tiers.drop(item)
        if not keep:
            tiers.budget.trim()  # another model may have this room now
        _when_all(leaving, lambda: self._gone(device))

    def _gone(self, device: int) -> None:
        self._tiers.budget.trim()
        self._turns.gone(device)


def _when_all(futures: Sequence[Future[None]], then: Callable[[], None]) -> None:
    """Do something when all of them are done; errors are told to those who wait for them."""
    left = len(futures)
    lock = threading.Lock()

    def done(future: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            then()

    if not futures:
        then()
    for future in futures:
        future.add_done_callback(done)
