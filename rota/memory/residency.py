"""Decides what is in memory when, for a step whose order is known and that is taken again and again.

Pure. A step is a row of stages: a shard's forward pass, its backward pass, its update. Between two uses an item stays
or leaves. What would be used again last leaves first, and it leaves right after its last use. What changed is written,
what did not is dropped. What left comes back as early as there is room for it. Every byte is counted at every stage, so
that the budget holds whatever the speed of the disk turns out to be.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rota.errors import FitError

_RESERVES = 5
"""How many sizes of room for what comes and goes are tried, each larger by the largest item."""
_SETTLED = 3
"""After so many steps, each is like the one before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Something that is in memory or not: a shard's weights, its moments, its gradients, its activations."""

    size_bytes: int
    lasting: bool = False
    """It is there before and after each step. Otherwise it is made and ended in each step."""
    movable: bool = True
    """It may leave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Something that is computed in one go."""

    name: str
    reads: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()
    """Of what it reads."""
    makes: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()
    """Of what it reads or makes: nobody needs them after it."""
    work_bytes: int = 0
    """What it needs beside all items, while it runs."""
    seconds: float = 0.0

    @property
    def holds(self) -> frozenset[str]:
        """What is there while it runs."""
        return self.reads | self.makes


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What it takes to move items."""

    read_byte_s: float
    write_byte_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """An item comes back."""

    item: str
    stage: int
    """It is there before this one runs."""
    begin: int
    """It may begin when the stage before this one has run; below 0 in the step before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """An item that has changed leaves."""

    item: str
    stage: int
    """It begins when this one has run."""
    by: int
    """Its bytes are free before this one begins; beyond the last stage in the next step."""


@dataclass(frozen=True, kw_only=True)
class Residency:
    """What comes and goes in each step."""

    items: Mapping[str, Item]
    stages: tuple[Stage, ...]
    budget_bytes: int
    loads: tuple[Load, ...]
    writes: tuple[Write, ...]
    drops: tuple[frozenset[str], ...]
    """After each stage, what leaves as it is: it has not changed since it was last written."""
    used_bytes: tuple[int, ...]
    """At each stage, with all that may be on its way."""

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Read and written in a step."""
        return (
            sum(self.items[load.item].size_bytes for load in self.loads),
            sum(self.items[write.item].size_bytes for write in self.writes),
        )

    @functools.cached_property
    def beginning(self) -> tuple[tuple[Load, ...], ...]:
        """The loads that may begin before each stage, those that are needed first first."""
        found: list[list[Load]] = [[] for _ in self.stages]
        for load in self.loads:
            found[load.begin % len(self.stages)].append(load)
        return tuple(tuple(sorted(loads, key=lambda load: (load.stage - load.begin, load.item))) for loads in found)

    def present_before(self, position: int) -> tuple[frozenset[str], frozenset[str]]:
        """What is there before a stage, and what is on its way, of what was there or made before it."""
        count = len(self.stages)
        gone = {(write.item, write.stage) for write in self.writes}
        gone |= {(item, place) for place, dropped in enumerate(self.drops) for item in dropped}
        ahead = {(load.item, load.stage): load.stage - load.begin for load in self.loads}
        there, coming = set(), set()
        for item, places in self._uses.items():
            before = [place for place in places if place < position]
            after = [place for place in places if place >= position]
            if not self.items[item].lasting and not (before and after):
                continue  # not made yet, or ended
            last = before[-1] if before else places[-1]
            first = after[0] if after else places[0] + count
            if (item, last) not in gone:
                there.add(item)
            elif first - ahead[(item, first % count)] < position:
                coming.add(item)
        return frozenset(there), frozenset(coming)

    @functools.cached_property
    def _uses(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for position, stage in enumerate(self.stages):
            for item in stage.holds:
                found.setdefault(item, []).append(position)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a step takes."""

    step_s: float
    compute_s: float
    read_s: float
    write_s: float

    @property
    def limit(self) -> str:
        """What it mostly waits for: compute, read or write."""
        if self.step_s <= 1.05 * self.compute_s:
            return "compute"
        return "read" if self.read_s >= self.write_s else "write"


def plan_residency(
    stages: Sequence[Stage], items: Mapping[str, Item], *, budget_bytes: int, rates: Rates
) -> tuple[Residency, Forecast]:
    """The best of some plans, which leave more or less room for what is on its way. FitError if a stage has no room."""
    gaps = _gaps_of(stages, items)
    least = _least_bytes(stages, items, gaps)
    worst = max(range(len(stages)), key=lambda position: least[position], default=None)
    if worst is not None and least[worst] > budget_bytes:
        raise FitError(
            f"{stages[worst].name} needs {least[worst]:,} bytes at once, and the budget is {budget_bytes:,}; "
            f"give it at least {least[worst]:,}",
            needed_bytes=least[worst],
        )
    largest = max((items[gap.item].size_bytes for gap in gaps if not gap.forced), default=0)
    best: tuple[Residency, Forecast] | None = None
    for count in range(_RESERVES):
        kept = _kept(gaps, items, least, budget_bytes - count * largest)
        found = _with_moves(stages, items, gaps, kept, least, budget_bytes, rates)
        told = predict(found, rates)
        if best is None or (told.step_s, found.moved_bytes) < (best[1].step_s, best[0].moved_bytes):
            best = found, told
        if not found.loads:  # everything stays: more room for what moves is of no use
            break
    assert best is not None
    return best


# ---- what stays ----


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gap:
    """Between two uses of an item that follow each other."""

    item: str
    start: int
    end: int
    """Beyond the last stage if that is in the next step."""
    forced: bool

    def covers(self, count: int) -> Iterator[int]:
        """The stages during which the item is not used."""
        return (position % count for position in range(self.start + 1, self.end))


def _gaps_of(stages: Sequence[Stage], items: Mapping[str, Item]) -> list[_Gap]:
    uses: dict[str, list[int]] = {}
    for position, stage in enumerate(stages):
        for name in sorted(stage.holds):
            uses.setdefault(name, []).append(position)
    gaps = []
    for name, places in uses.items():
        item = items[name]
        _check_life(name, item, places, stages)
        ends = [*places[1:], places[0] + len(stages)] if item.lasting else places[1:]
        for start, end in zip(places, ends, strict=False):
            # One that is used by the next stage again stays: there is nothing to gain.
            gaps.append(_Gap(item=name, start=start, end=end, forced=not item.movable or end == start + 1))
    return gaps


def _check_life(name: str, item: Item, places: Sequence[int], stages: Sequence[Stage]) -> None:
    made = [place for place in places if name in stages[place].makes]
    ended = [place for place in places if name in stages[place].ends]
    assert (made, ended) == (([], []) if item.lasting else ([places[0]], [places[-1]])), name


def _least_bytes(stages: Sequence[Stage], items: Mapping[str, Item], gaps: Iterable[_Gap]) -> list[int]:
    """What must be there at each stage."""
    least = [stage.work_bytes + sum(items[item].size_bytes for item in stage.holds) for stage in stages]
    for gap in gaps:
        if gap.forced:
            for position in gap.covers(len(stages)):
                least[position] += items[gap.item].size_bytes
    return least


def _kept(gaps: Sequence[_Gap], items: Mapping[str, Item], least: Sequence[int], capacity: int) -> set[_Gap]:
    """The gaps during which items stay: where there is no room, what is used again last leaves."""
    count = len(least)
    starting: dict[int, list[_Gap]] = {}
    for gap in gaps:
        if not gap.forced:
            starting.setdefault(gap.start, []).append(gap)
    dropped: set[tuple[_Gap, int]] = set()
    active: list[tuple[int, int, str, _Gap, int]] = []  # the furthest end first, then the largest
    ending: dict[int, int] = {}
    held = 0
    for time in range(_SETTLED * count):
        held -= ending.pop(time, 0)
        while active and held > max(0, capacity - least[time % count]):
            end, _, _, gap, began = heapq.heappop(active)
            if -end > time:  # otherwise it is over
                size = items[gap.item].size_bytes
                held -= size
                ending[-end] -= size
                dropped.add((gap, began))
        for gap in starting.get(time % count, ()):
            size = items[gap.item].size_bytes
            end = time + gap.end - gap.start
            heapq.heappush(active, (-end, -size, gap.item, gap, time))
            held += size
            ending[end] = ending.get(end, 0) + size
    # By the last step but one it is the same in each step, unless sizes make it alternate; then some more must leave.
    last = (_SETTLED - 2) * count
    kept = {gap for gap in gaps if not gap.forced and (gap, last + gap.start) not in dropped}
    used = list(least)
    for gap in kept:
        _add(used, gap.covers(count), items[gap.item].size_bytes)
    for gap in sorted(kept, key=lambda gap: (gap.start - gap.end, gap.item)):
        if any(used[position] > capacity for position in gap.covers(count)):
            kept.discard(gap)
            _add(used, gap.covers(count), -items[gap.item].size_bytes)
    for gap in sorted(gaps, key=lambda gap: (gap.end - gap.start, gap.item, gap.start)):
        size = items[gap.item].size_bytes
        if not gap.forced and gap not in kept and all(used[p] + size <= capacity for p in gap.covers(count)):
            kept.add(gap)
            _add(used, gap.covers(count), size)
    return kept


def _add(used: list[int], positions: Iterable[int], size: int) -> None:
    for position in positions:
        used[position] += size


# ---- what moves ----


def _with_moves(
    stages: Sequence[Stage],
    items: Mapping[str, Item],
    gaps: Sequence[_Gap],
    kept: set[_Gap],
    least: Sequence[int],
    budget_bytes: int,
    rates: Rates,
) -> Residency:
    count = len(stages)
    used = list(least)
    for gap in kept:
        _add(used, gap.covers(count), items[gap.item].size_bytes)
    left = [gap for gap in gaps if not gap.forced and gap not in kept]
    changed = {gap for gap in left if _is_changed(gap, left, stages)}
    drops: list[set[str]] = [set() for _ in stages]
    writes: dict[_Gap, Write] = {}
    for gap in sorted(left, key=lambda gap: (gap.start, gap.end, gap.item)):
        size = items[gap.item].size_bytes
        if gap not in changed:
            drops[gap.start].add(gap.item)
            continue
        by = gap.start + 1
        left_s = size * rates.write_byte_s
        while left_s > 0 and by < gap.end and used[by % count] + size <= budget_bytes:
            left_s -= stages[by % count].seconds
            used[by % count] += size
            by += 1
        writes[gap] = Write(item=gap.item, stage=gap.start, by=by)
    gone = {gap: write.by for gap, write in writes.items()}
    loads = []
    for gap, begin in _begins(left, gone, items, used, budget_bytes).items():
        wrapped = gap.end - gap.end % count
        loads.append(Load(item=gap.item, stage=gap.end - wrapped, begin=begin - wrapped))
    return Residency(
        items=items,
        stages=tuple(stages),
        budget_bytes=budget_bytes,
        loads=tuple(loads),
        writes=tuple(writes.values()),
        drops=tuple(frozenset(one) for one in drops),
        used_bytes=tuple(used),
    )


def _begins(
    left: Sequence[_Gap], gone: Mapping[_Gap, int], items: Mapping[str, Item], used: list[int], budget_bytes: int
) -> dict[_Gap, int]:
    """When each item may begin to come back: all of them a stage earlier in turn, as long as there is room."""
    count = len(used)
    begins = {gap: gap.end for gap in sorted(left, key=lambda gap: (gap.end % count, gap.item, gap.start))}
    waiting = list(begins)
    while waiting:
        further = []
        for gap in waiting:
            size, before = items[gap.item].size_bytes, begins[gap] - 1
            if before >= gone.get(gap, gap.start + 1) and used[before % count] + size <= budget_bytes:
                begins[gap] = before
                used[before % count] += size
                further.append(gap)
        waiting = further
    return begins


def _is_changed(gap: _Gap, left: Sequence[_Gap], stages: Sequence[Stage]) -> bool:
    """Whether the item has changed since it last came back, or was made."""
    count = len(stages)
    # It came back at the end of the last gap in which it was away; if there is no other, of this very one.
    ago = min((gap.start - other.end) % count for other in left if other.item == gap.item)
    for place in range(gap.start - ago, gap.start + 1):
        stage = stages[place % count]
        if gap.item in stage.changes or gap.item in stage.makes:
            return True
    return False


# ---- what it takes ----


def predict(residency: Residency, rates: Rates) -> Forecast:
    """The time of a step when it has settled: loads one after another beside the stages, and so are writes."""
    count = len(residency.stages)
    size = {name: item.size_bytes for name, item in residency.items.items()}
    needed: dict[int, list[Load]] = {}
    for load in residency.loads:
        needed.setdefault(load.stage, []).append(load)
    written: dict[int, list[Write]] = {}
    awaited: dict[int, list[Write]] = {}
    for write in residency.writes:
        written.setdefault(write.stage, []).append(write)
        awaited.setdefault(write.by % count, []).append(write)
    done: dict[Load | Write, float] = {}
    now_s = reads_s = writes_s = 0.0
    marks = [0.0]
    for _ in range(_SETTLED + 1):
        for position, stage in enumerate(residency.stages):
            now_s = max([now_s, *(done.get(one, 0.0) for one in awaited.get(position, ()))])
            for load in residency.beginning[position]:
                reads_s = max(reads_s, now_s) + size[load.item] * rates.read_byte_s
                done[load] = reads_s
            now_s = max([now_s, *(done.get(one, 0.0) for one in needed.get(position, ()))]) + stage.seconds
            for write in written.get(position, ()):
                writes_s = max(writes_s, now_s) + size[write.item] * rates.write_byte_s
                done[write] = writes_s
        marks.append(now_s)
    read_bytes, written_bytes = residency.moved_bytes
    return Forecast(
        step_s=marks[-1] - marks[-2],
        compute_s=sum(stage.seconds for stage in residency.stages),
        read_s=read_bytes * rates.read_byte_s,
        write_s=written_bytes * rates.write_byte_s,
    )
