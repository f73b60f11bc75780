"""Shard alternation: which model's next unit runs on which device, when many models share some devices.

Pure. A model is a row of units, one shard's forward or backward pass each, that must run one after another; any device
may run the next one. While a unit runs, the one that will follow it on the same device is chosen, so that its shard can
be brought meanwhile. The same rules are driven by processes that compute (arbiter.py), and by a virtual clock.
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
class _Row:
    """Units of a model that run one after another."""

    units_s: tuple[float, ...]
    after_s: float
    """What the model has to do after them."""
    since: int
    place: int = 0
    """Of the next one."""

    @property
    def is_last(self) -> bool:
        """Whether the next one is the last of them."""
        return self.place == len(self.units_s) - 1

    @property
    def remaining_s(self) -> float:
        """Of the model."""
        return sum(self.units_s[self.place :]) + self.after_s


@dataclass(kw_only=True)
class Pool:
    """Who runs what, and what comes next."""

    pick: Pick = longest_remaining
    _rows: dict[str, _Row] = field(default_factory=dict, init=False)
    _running: dict[int, str] = field(default_factory=dict, init=False)
    _next: dict[int, str] = field(default_factory=dict, init=False)
    """device -> the model whose unit it runs, or will run next"""
    _decisions: int = field(default=0, init=False)

    def add(self, name: str, units_s: Sequence[float], *, after_s: float = 0.0) -> None:
        """A model has units that can run now, one after another; it has so much to do after them."""
        assert name not in self._rows
        self._rows[name] = _Row(units_s=tuple(units_s), after_s=after_s, since=self._decisions)

    def choose(
        self,
        device: int,
        *,
        has_room: Callable[[str, int], bool] = lambda name, unit: True,
        known: bool = False,
    ) -> str | None:
        """The model whose unit runs on this device next; None if none can, or if there is no room for the one to run.

        The one that the device runs now may be the next, too, unless it runs the last of all its units. `has_room` is
        asked for a unit of those that are known; behind the last one of them it is the first, which the next are like.
        With `known` it is a known one in any case.
        """
        assert device not in self._next
        here = self._running.get(device)
        others = {*self._running.values(), *self._next.values()} - {here}
        free = [
            Candidate(name=name, remaining_s=row.remaining_s, since=row.since)
            for name, row in self._rows.items()
            if name not in others and not (name == here and row.is_last and (known or row.after_s <= 0))
        ]
        if not free:
            return None
        chosen = self.pick(free).name
        row = self._rows[chosen]
        unit = row.place + (1 if chosen == here else 0)
        if not has_room(chosen, unit % len(row.units_s)):
            return None
        self._next[device] = chosen
        self._decisions += 1
        return chosen

    def coming(self, device: int) -> str | None:
        """The model that was chosen for a device, and has not begun there."""
        return self._next.get(device)

    def is_ready(self, name: str) -> bool:
        """Whether a model has units: one that is chosen behind its own last one may be between two rows."""
        return name in self._rows

    def give_up(self, device: int) -> None:
        """What was chosen for a device does not come."""
        del self._next[device]

    def running(self, device: int) -> str | None:
        """The model whose unit a device runs."""
        return self._running.get(device)

    def began(self, device: int) -> None:
        """The unit that was chosen for a device runs now."""
        assert device not in self._running
        self._running[device] = self._next.pop(device)

    def ended(self, device: int) -> bool:
        """A device's unit has run; whether that was the last of those that the model had."""
        name = self._running.pop(device)
        row = self._rows[name]
        row.place += 1
        row.since = self._decisions
        if row.place == len(row.units_s):
            del self._rows[name]
            return True
        return False

    def leave(self, name: str) -> None:
        """A model ends early, or fails; the others go on."""
        self._rows.pop(name, None)
        for table in (self._running, self._next):
            for device in [device for device, one in table.items() if one == name]:
                del table[device]

    @property
    def done(self) -> bool:
        """Whether nothing can run."""
        return not self._rows


def lower_bound_s(works: Sequence[Work], devices: int) -> float:
    """No schedule is shorter: the work must be done, and a model's units one after another."""
    return max(sum(one.total_s for one in works) / devices, max((one.total_s for one in works), default=0.0))


def play(
    works: Sequence[Work], devices: int, *, pick: Pick = longest_remaining, loads_s: Mapping[str, float] | None = None
) -> float:
    """How long a pool takes on a virtual clock. `loads_s` is what it takes to bring a unit of each model."""
    loads = loads_s or {}
    steps = {work.name: work.steps for work in works}
    of = {work.name: work for work in works}
    pool = Pool(pick=pick)
    ends: list[tuple[float, int]] = []
    coming_s: dict[int, float] = {}  # device -> when what its next unit needs has come
    places = dict.fromkeys(of, 0)

    def begin_step(name: str) -> None:
        if steps[name] > 0:
            steps[name] -= 1
            places[name] = 0
            pool.add(name, of[name].units_s, after_s=steps[name] * sum(of[name].units_s))

    for name in of:
        begin_step(name)
    now_s = 0.0
    while not pool.done:
        for _ in range(2):  # one that runs, and one that comes
            for device in range(devices):
                if pool.coming(device) is None and (chosen := pool.choose(device)) is not None:
                    coming_s[device] = now_s + loads.get(chosen, 0.0)
                coming = pool.coming(device)
                if coming is not None and pool.is_ready(coming) and pool.running(device) is None:
                    pool.began(device)
                    took_s = of[coming].units_s[places[coming]]
                    places[coming] += 1
                    heapq.heappush(ends, (max(now_s, coming_s.pop(device)) + took_s, device))
        now_s, device = heapq.heappop(ends)
        ran = pool.running(device)
        assert ran is not None
        if pool.ended(device):
            begin_step(ran)
    return now_s
