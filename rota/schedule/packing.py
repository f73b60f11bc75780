"""From chosen options in an order to a schedule: each starts as early as it can after those before it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rota.schedule.arrays import Arrays, Floats, Ints
from rota.schedule.problem import Placement, Problem, Schedule


def pack(
    arrays: Arrays,
    chosen: Sequence[int],
    *,
    cheap: bool = False,
    target_s: float | None = None,
    at: Mapping[int, Mapping[int, int]] | None = None,
) -> Schedule:
    """List scheduling: options in the order in which they are given, the held ones before all others.

    `cheap`: only on the devices that cost least. `target_s`: rather where it just ends before this time than where it
    starts first. `at` (option -> node -> devices): exactly there.
    """
    packing = _Packing(arrays, cheap=cheap, at=at or {})
    options = arrays.problem.options
    placements = [packing.hold(option) for option in chosen if options[option].held]
    placements += [packing.add(option, target_s) for option in chosen if not options[option].held]
    return Schedule.of(placements)


def left_shift(problem: Problem, schedule: Schedule) -> Schedule:
    """The same devices in the same order, each option as early as it can be."""
    free_s: dict[str, float] = {}
    placements = []
    for one in schedule.placements:
        start_s = max(free_s.get(device, 0.0) for device in one.devices)
        free_s.update(dict.fromkeys(one.devices, start_s + problem.options[one.option].seconds))
        placements.append(replace(one, start_s=start_s))
    return Schedule.of(placements)


class _Packing:
    """When the devices of each node become free."""

    def __init__(self, arrays: Arrays, *, cheap: bool, at: Mapping[int, Mapping[int, int]]) -> None:
        self._arrays = arrays
        self._cheap = cheap
        self._at = at
        self._names = [node.devices for node in arrays.problem.nodes]
        self._seconds = arrays.seconds.tolist()
        # node -> (free from, device) in order; _free has the times again, as an array: k-th device x node.
        self._rows = [[(0.0, device) for device in range(len(names))] for names in self._names]
        most = max((len(names) for names in self._names), default=0)
        self._free = np.full((most, len(self._names)), np.inf)
        for node, names in enumerate(self._names):
            self._free[: len(names), node] = 0.0
        self._candidates: dict[tuple[int, int], tuple[Ints, bool]] = {}

    def hold(self, option: int) -> Placement:
        """It runs on from the first moment."""
        held = self._arrays.problem.options[option].held
        end_s = self._seconds[option]
        for node in {self._arrays.node_of[device] for device in held}:
            names = self._names[node]
            self._put(node, [(end_s if names[device] in held else at_s, device) for at_s, device in self._rows[node]])
        return Placement(option=option, start_s=0.0, devices=held)

    def add(self, option: int, target_s: float | None) -> Placement:
        """After all that were added before."""
        wanted = self._arrays.problem.options[option]
        if option in self._at:
            return self._exactly(option, self._at[option])
        nodes, everywhere = self._nodes(option)
        if wanted.spans and len(nodes) > 1:
            return self._spread(option, nodes.tolist())
        width = wanted.devices
        starts = self._free[width - 1] if everywhere else self._free[width - 1][nodes]
        at = self._choose(starts, nodes, width, self._seconds[option], target_s)
        return self._take(option, int(nodes[at]), float(starts[at]))

    def _choose(self, starts: Floats, nodes: Ints, width: int, seconds: float, target_s: float | None) -> int:
        """The earliest start; of equals, where devices have waited least, then where the fewest stay idle."""
        at = int(starts.argmin())
        if target_s is not None and float(starts[at]) + seconds <= target_s:
            fits = starts + seconds <= target_s
            at = int(np.where(fits, starts, -1.0).argmax())
        tied = np.flatnonzero(starts == starts[at])
        if len(tied) == 1:
            return at
        free = self._free[:, nodes[tied]]
        idle = (free <= starts[at]).sum(axis=0)
        waited = -free[:width].sum(axis=0)
        return int(tied[np.lexsort((idle, waited))[0]])

    def _take(self, option: int, node: int, start_s: float) -> Placement:
        devices = self._occupy(node, int(self._arrays.width[option]), start_s, start_s + self._seconds[option])
        return Placement(option=option, start_s=start_s, devices=devices)

    def _exactly(self, option: int, at: Mapping[int, int]) -> Placement:
        start_s = max(self._rows[node][count - 1][0] for node, count in at.items())
        end_s = start_s + self._seconds[option]
        devices = [device for node, count in at.items() for device in self._occupy(node, count, start_s, end_s)]
        return Placement(option=option, start_s=start_s, devices=tuple(devices))

    def _occupy(self, node: int, width: int, start_s: float, end_s: float) -> tuple[str, ...]:
        """Those of the node's free devices that have waited least."""
        row = self._rows[node]
        last = bisect_right(row, (start_s, len(row)))
        taken = sorted(device for _, device in row[last - width : last])
        del row[last - width : last]
        at = bisect_left(row, (end_s, -1))
        row[at:at] = [(end_s, device) for device in taken]
        # Not sorted by device among equal times, which nothing depends on.
        self._free[: len(row), node] = [at_s for at_s, _ in row]
        names = self._names[node]
        return tuple(names[device] for device in taken)

    def _put(self, node: int, row: Iterable[tuple[float, int]]) -> None:
        self._rows[node] = sorted(row)
        self._free[: len(self._rows[node]), node] = [at_s for at_s, _ in self._rows[node]]

    def _spread(self, option: int, nodes: list[int]) -> Placement:
        """The devices that are free first, of as few nodes as can be."""
        width = int(self._arrays.width[option])
        start_s = float(np.partition(self._free[:, nodes].ravel(), width - 1)[width - 1])
        end_s = start_s + self._seconds[option]
        # node -> how many of its devices are free by then; a single node that has enough is best if it just has.
        counts = {node: bisect_right(self._rows[node], (start_s, len(self._rows[node]))) for node in nodes}
        missing = width
        devices: list[str] = []
        while missing:
            enough = [node for node in counts if counts[node] >= missing]
            node = min(enough, key=lambda one: counts[one]) if enough else max(counts, key=lambda one: counts[one])
            count = min(counts.pop(node), missing)
            devices += self._occupy(node, count, start_s, end_s)
            missing -= count
        return Placement(option=option, start_s=start_s, devices=tuple(devices))

    def _nodes(self, option: int) -> tuple[Ints, bool]:
        """The nodes to look at, and whether they are all there are."""
        arrays = self._arrays
        key = (int(arrays.place[option]), int(arrays.width[option]) if self._cheap else 0)
        if key not in self._candidates:
            nodes = list(arrays.places[key[0]].nodes)
            if self._cheap:
                nodes = self._cheapest(nodes, key[1], spans=arrays.places[key[0]].spans)
            self._candidates[key] = (np.array(nodes, dtype=np.int64), len(nodes) == len(self._names))
        return self._candidates[key]

    def _cheapest(self, nodes: list[int], width: int, *, spans: bool) -> list[int]:
        """The nodes of the lowest price; of those in order of price as many as it needs, if it spans."""
        every = self._arrays.problem.nodes
        by_price = sorted(nodes, key=lambda one: every[one].price_per_hour)
        if not spans:
            return [one for one in nodes if every[one].price_per_hour == every[by_price[0]].price_per_hour]
        chosen: list[int] = []
        while sum(len(self._names[one]) for one in chosen) < width:
            chosen.append(by_price[len(chosen)])
        return chosen
