"""Packing with backfilling: an option may also start in a hole that earlier ones have left; for small problems."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from rota.schedule.arrays import Arrays
from rota.schedule.problem import Placement, Schedule


def insert(arrays: Arrays, chosen: Sequence[int]) -> Schedule:
    """As `packing.pack`, but each option takes the earliest time at which its devices are free for long enough."""
    holes = _Holes(arrays)
    options = arrays.problem.options
    placements = [holes.hold(option) for option in chosen if options[option].held]
    placements += [holes.add(option) for option in chosen if not options[option].held]
    return Schedule.of(placements)


class _Holes:
    """What each device does when."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._busy: dict[str, list[tuple[float, float]]] = {device: [] for device in arrays.node_of}
        self._times: list[list[float]] = [[0.0] for _ in arrays.problem.nodes]

    def hold(self, option: int) -> Placement:
        """It runs on from the first moment."""
        return self._put(option, 0.0, self._arrays.problem.options[option].held)

    def add(self, option: int) -> Placement:
        """In the first hole that is large enough."""
        arrays = self._arrays
        place = arrays.places[int(arrays.place[option])]
        groups = [place.nodes] if place.spans else [(node,) for node in place.nodes]
        found = [one for group in groups if (one := self._earliest(option, group)) is not None]
        start_s, _, devices = min(found, key=lambda one: one[:2])
        return self._put(option, start_s, devices)

    def _earliest(self, option: int, nodes: Sequence[int]) -> tuple[float, float, tuple[str, ...]]:
        """Start, how long the devices will have been idle before it, devices."""
        arrays = self._arrays
        seconds, width = float(arrays.seconds[option]), int(arrays.width[option])
        names = [device for node in nodes for device in arrays.problem.nodes[node].devices]
        for start_s in sorted({time_s for node in nodes for time_s in self._times[node]}):
            free = [
                (idle_s, device) for device in names if (idle_s := self._idle(device, start_s, seconds)) is not None
            ]
            if len(free) >= width:
                # The sort is stable: devices of one node stay together.
                chosen = sorted(free, key=lambda one: one[0])[:width]
                return start_s, sum(idle_s for idle_s, _ in chosen), tuple(device for _, device in chosen)
        raise AssertionError("every device is free after the last end")

    def _idle(self, device: str, start_s: float, seconds: float) -> float | None:
        """For how long a device has been idle at a time; None if it is not free for these seconds from then on."""
        spans = self._busy[device]
        at = bisect_right(spans, (start_s, float("inf")))
        before_s = spans[at - 1][1] if at else 0.0
        if before_s > start_s or (at < len(spans) and spans[at][0] < start_s + seconds):
            return None
        return start_s - before_s

    def _put(self, option: int, start_s: float, devices: tuple[str, ...]) -> Placement:
        end_s = start_s + float(self._arrays.seconds[option])
        for device in devices:
            insort(self._busy[device], (start_s, end_s))
        for node in {self._arrays.node_of[device] for device in devices}:
            self._times[node].append(end_s)
        return Placement(option=option, start_s=start_s, devices=devices)
