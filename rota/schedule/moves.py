"""Quick moves for a large problem's makespan: a task of the node that ends last goes elsewhere, or runs wider."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rota.schedule.arrays import Arrays
from rota.schedule.packing import pack
from rota.schedule.problem import Schedule

_PARTNERS = 12
"""Nodes that are tried with the one that ends last: those with the least to do, and as many random ones."""

_LESS = 1e-9
"""Of an end: what is less must be less by more than rounding."""


@dataclass(kw_only=True)
class _Bin:
    """A node with the options that run in it, in the order in which they start."""

    size: int
    fixed: tuple[int, ...]
    """Options that stay as they are, and first: held, or on several nodes."""
    free_s: list[float]
    """When the devices become free of them."""
    order: list[int]
    load: float
    """Device seconds."""
    end_s: float


class Moves:
    """The state of the moves: nodes as bins, which are changed two at a time."""

    def __init__(self, arrays: Arrays, schedule: Schedule) -> None:
        self._arrays = arrays
        self._seconds: list[float] = arrays.seconds.tolist()
        self._width: list[int] = arrays.width.tolist()
        self._area: list[float] = arrays.area.tolist()
        self._sets: dict[int, frozenset[int]] = {}
        self._options: dict[int, list[int]] = {}
        self._bins = self._read(schedule)

    @staticmethod
    def suit(arrays: Arrays, schedule: Schedule) -> bool:
        """Only for a makespan without deadlines, where nothing spans nodes."""
        problem = arrays.problem
        spread = any(len({arrays.node_of[device] for device in one.devices}) > 1 for one in schedule.placements)
        return problem.objective == "makespan" and not problem.deadlines and len(problem.nodes) > 1 and not spread

    def _read(self, schedule: Schedule) -> list[_Bin]:
        arrays = self._arrays
        options = arrays.problem.options
        inside: list[list[int]] = [[] for _ in arrays.problem.nodes]
        for one in schedule.placements:
            inside[arrays.node_of[one.devices[0]]].append(one.option)
        bins = []
        for node, chosen in enumerate(inside):
            fixed = tuple(one for one in chosen if options[one].held)
            size = int(arrays.sizes[node])
            held_s = [self._seconds[one] for one in fixed for _ in range(self._width[one])]
            made = _Bin(
                size=size,
                fixed=fixed,
                free_s=sorted([0.0] * (size - len(held_s)) + held_s),
                order=[one for one in chosen if not options[one].held],
                load=sum(self._area[one] for one in chosen),
                end_s=0.0,
            )
            made.end_s = self._end(made.free_s, made.order)
            bins.append(made)
        return bins

    def _alternatives(self, option: int) -> list[int]:
        """What may take an option's place, itself included; the least device seconds first."""
        arrays, options = self._arrays, self._arrays.problem.options
        if arrays.members[option] > 1:
            return [option]
        same = arrays.problem.options_of[options[option].tasks[0]]
        usable = [one for one in same if arrays.place[one] >= 0 and arrays.members[one] == 1 and not options[one].held]
        return sorted(usable, key=lambda one: (self._area[one], one))

    # ---- one node ----

    def _end(self, free_s: Sequence[float], order: Sequence[int]) -> float:
        """When a node ends that runs these in this order."""
        row = list(free_s)
        for option in order:
            width = self._width[option]
            start_s = row[width - 1]
            last = bisect_right(row, start_s)
            del row[last - width : last]
            end_s = start_s + self._seconds[option]
            at = bisect_left(row, end_s)
            row[at:at] = [end_s] * width
        return row[-1] if row else 0.0

    def _arranged(self, made: _Bin, options: Iterable[int], within_s: float) -> tuple[float, list[int]] | None:
        """An order with which the node ends before a time, if one of a few does."""
        chosen = list(options)
        area = sum(self._area[one] for one in chosen) + sum(made.free_s)
        if area > made.size * within_s:
            return None
        seconds, width = self._seconds, self._width
        keys: tuple[Callable[[int], tuple[float, float]], ...] = (
            lambda one: (-seconds[one], -width[one]),
            lambda one: (-width[one], -seconds[one]),
        )
        for key in keys:
            order = sorted(chosen, key=key)
            if (end_s := self._end(made.free_s, order)) < within_s:
                return end_s, order
        return None

    # ---- two nodes ----

    def latest(self) -> int:
        """The node that ends last."""
        return max(range(len(self._bins)), key=lambda node: (self._bins[node].end_s, -node))

    @property
    def makespan_s(self) -> float:
        """Of the state."""
        return max(made.end_s for made in self._bins)

    def ends_s(self) -> list[float]:
        """When each node ends."""
        return [made.end_s for made in self._bins]

    def step(self, draw: random.Random) -> bool:
        """Make the node that ends last end earlier, without another one ending as late; False if no move does."""
        node = self.latest()
        made = self._bins[node]
        within_s = made.end_s * (1 - _LESS)
        if self._rearrange(node, made.order, within_s):
            return True
        by_load = sorted(
            (one for one in range(len(self._bins)) if one != node),
            key=lambda one: (self._bins[one].load / max(1, self._bins[one].size), one),
        )
        partners = by_load[:_PARTNERS] + draw.sample(by_load, min(_PARTNERS, len(by_load)))
        return any(self._exchange(node, partner, within_s) for partner in dict.fromkeys(partners))

    def _rearrange(self, node: int, options: Sequence[int], within_s: float) -> bool:
        """Another order, or another width for one of the tasks."""
        made = self._bins[node]
        if self._keep(node, self._arranged(made, options, within_s)):
            return True
        for place, option in enumerate(made.order):
            for other in self._fitting(option, node):
                if other != option:
                    changed = [*made.order[:place], other, *made.order[place + 1 :]]
                    if self._keep(node, self._arranged(made, changed, within_s)):
                        return True
        return False

    def _exchange(self, node: int, partner: int, within_s: float) -> bool:
        """Move a task to the partner, or exchange two."""
        mine, theirs = self._bins[node], self._bins[partner]
        spare = theirs.size * within_s - theirs.load
        for option in mine.order:
            rest = [one for one in mine.order if one != option]
            left = self._arranged(mine, rest, within_s)
            for moved in self._fitting(option, partner):
                if left is not None and self._area[moved] <= spare:
                    right = self._arranged(theirs, [*theirs.order, moved], within_s)
                    if right is not None:
                        return self._keep(node, left) and self._keep(partner, right)
            if self._swap(node, partner, option, rest, within_s):
                return True
        return False

    def _swap(self, node: int, partner: int, option: int, rest: Sequence[int], within_s: float) -> bool:
        mine, theirs = self._bins[node], self._bins[partner]
        room = mine.size * within_s - mine.load + self._area[option]
        spare = theirs.size * within_s - theirs.load
        for back in theirs.order:
            for moved in self._fitting(option, partner)[:2]:
                if self._area[moved] - self._area[back] > spare:
                    break
                for returned in self._fitting(back, node)[:2]:
                    if self._area[returned] >= self._area[option] or self._area[returned] > room:
                        break
                    right = self._arranged(theirs, [*(one for one in theirs.order if one != back), moved], within_s)
                    if right is None:
                        break
                    left = self._arranged(mine, [*rest, returned], within_s)
                    if left is not None:
                        return self._keep(node, left) and self._keep(partner, right)
        return False

    def _fitting(self, option: int, node: int) -> list[int]:
        """What may take an option's place on a node."""
        arrays = self._arrays
        found = self._options.get(option)
        if found is None:
            found = self._options[option] = self._alternatives(option)
        size = self._bins[node].size  # one that may span nodes may be wider than any
        return [one for one in found if self._width[one] <= size and node in self._nodes(int(arrays.place[one]))]

    def _nodes(self, place: int) -> frozenset[int]:
        cached = self._sets.get(place)
        if cached is None:
            cached = self._sets[place] = frozenset(self._arrays.places[place].nodes)
        return cached

    def _keep(self, node: int, arranged: tuple[float, list[int]] | None) -> bool:
        if arranged is None:
            return False
        made = self._bins[node]
        made.end_s, made.order = arranged
        made.load = sum(self._area[one] for one in made.order) + sum(made.free_s)
        return True

    def schedule(self) -> Schedule:
        """The state with its devices."""
        order = [(place, one, node) for node, made in enumerate(self._bins) for place, one in enumerate(made.order)]
        at = {one: {node: self._width[one]} for _, one, node in order}
        fixed = [one for made in self._bins for one in made.fixed]
        return pack(self._arrays, fixed + [one for _, one, _ in sorted(order)], at=at)
