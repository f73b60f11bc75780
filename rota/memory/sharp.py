"""Shard alternation: which model's next unit runs on which device, when many models share some devices.

Pure. A model is a row of units, one shard's forward or backward pass each, that must run one after another; any device
may run the next one. While a unit runs, the one that will follow it on the same device is chosen, so that its shard can
be brought meanwhile. The same rules are driven by threads that compute, and by a virtual clock.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a model has to do."""

    name: str
    units_s: tuple[float, ...]
    """What each unit of a step takes."""
    steps: int

    @property
    def total_s(self) -> float:
        """All of it, on one device."""
        return self.steps * sum(self.units_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A model whose next unit could run."""

    name: str
    remaining_s: float
    since: int
    """The number of the decision after which it could."""


Pick = Callable[[Sequence[Candidate]], Candidate]


def longest_remaining(candidates: Sequence[Candidate]) -> Candidate:
    """Sharded-LRTF: the model with the most left to do, so that none is left alone at the end."""
    return max(candidates, key=lambda one: (one.remaining_s, -one.since, one.name))


def first_come(candidates: Sequence[Candidate]) -> Candidate:
    """The one that waits for the longest."""
    return min(candidates, key=lambda one: (one.since, one.name))


def at_random(seed: int) -> Pick:
    """Any."""
    dice = random.Random(seed)
    return lambda candidates: dice.choice(sorted(candidates, key=lambda one: one.name))


@dataclass(kw_only=True)
class _Progress:
    work: Work
    unit: int = 0
    step: int = 0
    remaining_s: float = 0.0
    since: int = 0

    @property
    def is_last(self) -> bool:
        """Whether its next unit is its last one."""
        return self.step == self.work.steps - 1 and self.unit == len(self.work.units_s) - 1


@dataclass(kw_only=True)
class Pool:
    """Who runs what, and what comes next."""

    works: Sequence[Work]
    pick: Pick = longest_remaining
    _models: dict[str, _Progress] = field(init=False)
    _running: dict[int, str] = field(default_factory=dict, init=False)
    _next: dict[int, str] = field(default_factory=dict, init=False)
    """device -> the model whose unit it runs, or will run next"""
    _decisions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._models = {one.name: _Progress(work=one, remaining_s=one.total_s) for one in self.works if one.steps > 0}

    def choose(self, device: int) -> tuple[str, int] | None:
        """The model whose unit runs on this device next, and which unit that is; None if all of them are busy.

        The one that the device runs now may be the next, too, unless it runs its last unit.
        """
        assert device not in self._next
        others = {*self._running.values(), *self._next.values()} - {self._running.get(device, "")}
        free = [
            Candidate(name=name, remaining_s=one.remaining_s, since=one.since)
            for name, one in self._models.items()
            if name not in others and not (name == self._running.get(device) and one.is_last)
        ]
        if not free:
            return None
        name = self._next[device] = self.pick(free).name
        self._decisions += 1
        model = self._models[name]
        unit = model.unit + 1 if name == self._running.get(device) else model.unit
        return name, unit % len(model.work.units_s)

    def follows(self, device: int) -> bool:
        """Whether a unit is chosen for a device, of a model that is still there."""
        return device in self._next

    def began(self, device: int) -> None:
        """The unit that was chosen for a device runs now."""
        assert device not in self._running
        self._running[device] = self._next.pop(device)

    def ended(self, device: int) -> bool:
        """A device's unit has run; whether that was the model's last one."""
        name = self._running.pop(device)
        one = self._models[name]
        one.remaining_s -= one.work.units_s[one.unit]
        one.unit += 1
        one.since = self._decisions
        if one.unit == len(one.work.units_s):
            one.unit, one.step = 0, one.step + 1
        if one.step == one.work.steps:
            del self._models[name]
            return True
        return False

    def leave(self, name: str) -> None:
        """A model ends early, or fails; the others go on."""
        self._models.pop(name, None)
        for table in (self._running, self._next):
            for device in [device for device, one in table.items() if one == name]:
                del table[device]

    def measured(self, name: str, units_s: Sequence[float]) -> None:
        """What its units really take, from now on."""
        one = self._models.get(name)
        if one is not None:
            work = Work(name=name, units_s=tuple(units_s), steps=one.work.steps)
            left = sum(units_s[one.unit :]) + (work.steps - one.step - 1) * sum(units_s)
            one.work, one.remaining_s = work, left

    @property
    def done(self) -> bool:
        """Whether nothing is left."""
        return not self._models


def lower_bound_s(works: Sequence[Work], devices: int) -> float:
    """No schedule is shorter: the work must be done, and a model's units one after another."""
    return max(sum(one.total_s for one in works) / devices, max((one.total_s for one in works), default=0.0))


def play(
    works: Sequence[Work], devices: int, *, pick: Pick = longest_remaining, loads_s: Mapping[str, float] | None = None
) -> float:
    """How long a pool takes on a virtual clock. `loads_s` is what it takes to bring a unit of each model."""
    loads = loads_s or {}
    seconds = {work.name: work.units_s for work in works}
    pool = Pool(works=works, pick=pick)
    ends: list[tuple[float, int]] = []
    coming: dict[int, tuple[float, float]] = {}  # device -> what the next unit takes, and when it has come
    running: set[int] = set()
    now_s = 0.0
    while not pool.done:
        for _ in range(2):  # one that runs, and one that comes
            for device in range(devices):
                if device not in coming and (chosen := pool.choose(device)) is not None:
                    name, unit = chosen
                    coming[device] = (seconds[name][unit], now_s + loads.get(name, 0.0))
                if device in coming and device not in running:
                    took_s, there_s = coming.pop(device)
                    pool.began(device)
                    running.add(device)
                    heapq.heappush(ends, (max(now_s, there_s) + took_s, device))
        now_s, device = heapq.heappop(ends)
        running.discard(device)
        pool.ended(device)
    return now_s
