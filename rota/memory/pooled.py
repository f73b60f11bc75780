"""Runs batches of one shape as a model in a pool: unit by unit, when and where it is its turn.

A unit is a shard's forward pass, or its backward pass with its update. What it needs is in a region of the device's
memory while it runs, and leaves afterwards; what shards hand to each other stays in the memory that all devices share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rota.errors import FitError
from rota.graph.graph import Graph
from rota.memory.acting import Acting
from rota.memory.arena import Arena, Region
from rota.memory.arrange import Cut, predicted_seconds
from rota.memory.holdings import Holdings
from rota.memory.steps import Group, Step, Training, groups_of, step_of
from rota.memory.turns import Turns
from rota.memory.units import Unit, units_of
from rota.plan.costs import Costs
from rota.plan.program import Program
from rota.runtime.footprint import Footprints

_FEWEST, _MOST = 2, 256
_FINER = 1.5
"""Times as many shards are tried next: the fewer there are, the less is spent between them."""
_AT_ONCE, _LEAST_AT_ONCE = 3, 2
"""Units of which a device should have, and must have, what moves."""


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """A model cut so that each of its units fits."""

    cut: Cut
    program: Program
    groups: dict[str, Group]
    step: Step
    units: tuple[Unit, ...]


def cut_to_fit(graph: Graph, training: Training, *, room_bytes: int, costs: Costs | None = None) -> Fitting:
    """With few shards, or more, so that a device has room for what runs, what comes and what leaves.

    If that cannot be, then for what runs and either of the two. What they keep is made again only where it must be.
    """
    costs = costs or Costs()
    refused: FitError | None = None
    for again in (False, True):
        fits: Fitting | None = None
        shards, most_units = _FEWEST, 0
        while shards <= _MOST:
            cut = Cut(shards=shards, recomputed=frozenset(range(len(graph.ops)) if again else ()))
            program = cut.program(graph)
            groups = groups_of(program)
            try:
                step, units = pool_units(program, groups, training, room_bytes=room_bytes, costs=costs)
            except FitError as error:
                refused = error
            else:
                found = Fitting(cut=cut, program=program, groups=groups, step=step, units=units)
                if max(unit.device_bytes(_AT_ONCE) for unit in units) <= room_bytes:
                    return found
                fits = fits or found
                if len(units) == most_units:
                    break  # it cannot be cut any further
                most_units = len(units)
            shards = max(shards + 1, int(_FINER * shards))
        if fits is not None:
            return fits
    assert refused is not None
    raise refused


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
    largest = max(units, key=lambda unit: unit.device_bytes(_LEAST_AT_ONCE))
    needed_bytes = largest.device_bytes(_LEAST_AT_ONCE)
    if needed_bytes > room_bytes:
        name = step.stages[largest.stages[0]].name
        raise FitError(
            f"{name} and another one like it need {needed_bytes:,} bytes, and a device has {room_bytes:,}, and it is "
            "cut as far as it can be",
            needed_bytes=needed_bytes,
        )
    return step, units


@dataclass(kw_only=True)
class Seat:
    """A task's place in a pool."""

    turns: Turns
    cores: Sequence[Sequence[int]]
    """Of each device,"""
    arenas: Sequence[Arena]
    """and its memory."""
    promised: tuple[int, int, int] | None = None
    """Where the first of the next units has room: the device, where the region begins, and how large it is."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a unit runs."""

    device: int
    region: Region


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
        seat: Seat,
        room_bytes: int,
        total_batches: int,
        batches: int = 1,
        seed: int = 0,
    ) -> None:
        """`batches` are those of a step, `total_batches` those of the whole task; a device has so much room."""
        self.program = program
        self.step = step
        self._holdings = holdings
        self._tiers = holdings.tiers
        self.units = units
        self._turns = seat.turns
        self._seat = seat
        self._room_bytes = room_bytes
        self._total_batches = total_batches
        self._acting = Acting(program, step, holdings, buffers, batches=batches, seed=seed, plain_random=True)
        self.units_s = [unit.seconds for unit in units]
        """What each unit takes: as predicted, and then as measured."""

    def enter(self, batch: int = 0) -> None:
        """All is on disk, and no memory is kept but that of devices."""
        self._tiers.budget.trim()

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
        units = [self.units[i] for i in row]
        here = self._promised_place(units[0])
        self._turns.ready(
            [self.units_s[i] for i in row],
            moved_bytes=[unit.moved_bytes for unit in units],
            work_bytes=[unit.work_bytes for unit in units],
            room_bytes=self._room_bytes,
            after_s=after_s,
        )
        for i, following in zip(row, [*row[1:], None], strict=True):
            unit = self.units[i]
            if here is None:
                here = self._place(unit, *self._turns.wait_for_room())
            self._bring(unit, here)
            begin = self._turns.wait_for_turn()
            there: _Place | None = None
            keep = frozenset[str]()
            if begin is not None and following is None:
                self._seat.promised = (here.device, begin, units[0].moved_bytes)
            elif begin is not None:
                assert following is not None
                there = self._place(self.units[following], here.device, begin)
                # What both need stays; what the present one makes or changes cannot come before.
                self._bring(self.units[following], there, without=unit.needs | unit.changes)
                keep = self.units[following].needs
            self._run(i, here)
            self._release(unit, here, keep=keep)
            here = there
        return [self._acting.end(place)]

    def _promised_place(self, unit: Unit) -> _Place | None:
        """Where the first unit of a row has room already, if it has."""
        if self._seat.promised is None:
            return None
        device, begin, size_bytes = self._seat.promised
        self._seat.promised = None
        if size_bytes < unit.moved_bytes:  # batches of another kind follow
            self._turns.gone(device, begin)
            return None
        return self._place(unit, device, begin)

    def _place(self, unit: Unit, device: int, begin: int) -> _Place:
        region = Region(
            self._seat.arenas[device], begin, unit.moved_bytes, gone=lambda: self._turns.gone(device, begin)
        )
        return _Place(device=device, region=region)

    def _bring(self, unit: Unit, place: _Place, *, without: frozenset[str] = frozenset()) -> None:
        for item in sorted(unit.needs - without):
            if not self._tiers.is_near(item):
                self._tiers.begin_load(item, budget=place.region)

    def _run(self, number: int, place: _Place) -> None:
        unit, budget = self.units[number], self._tiers.budget
        for item in sorted(unit.needs):
            self._tiers.finish_load(item)
        cores = self._seat.cores[place.device]
        if len(cores) == 1 and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)  # of this thread
        begun_s = time.perf_counter()
        budget.take(unit.work_bytes + unit.made_bytes, "the work of a unit")
        try:
            for position in unit.stages:
                self._acting.act(self.step.acts[position])
        finally:
            budget.give(unit.work_bytes + unit.made_bytes)
        self.units_s[number] = time.perf_counter() - begun_s
        self._turns.ran(self.units_s[number])

    def _release(self, unit: Unit, place: _Place, *, keep: frozenset[str]) -> None:
        """Let go of what is not kept for the next unit: what has changed is written, and the rest dropped."""
        tiers = self._tiers
        for item in unit.ends:
            tiers.forget(item)
        for item in sorted((unit.needs | unit.changes) - unit.ends):
            if item in unit.changes:
                tiers.admit(item, budget=place.region)  # a gradient that was made here has memory of its own
                tiers.change(item)
            if item in keep or not tiers.is_near(item):
                continue
            if tiers.is_changed(item):
                tiers.begin_write(item)
            else:
                tiers.drop(item)
        place.region.close()  # what stays or leaves is there until it is gone
