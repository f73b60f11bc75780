"""What no schedule can be better than."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rota.schedule.arrays import Arrays, Floats, Place
from rota.schedule.problem import Problem

_PLACES = 12
"""So many places are looked at, besides the kinds; the ones with the most options first."""

_PRICE_STEPS = 60
_BISECTIONS = 40
_SAFE = 1 - 1e-9
"""Sums of floats in another order differ; a bound must not be above an optimum for that."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Resources:
    """What the options use of several things that are scarce: devices of a kind, of some nodes, weighed by width."""

    used: Floats
    """resource x pair of task and option -> device seconds; an option of several tasks shares them out."""
    capacity: Floats
    """resource -> devices."""

    @classmethod
    def of(cls, arrays: Arrays) -> Resources:
        """Every kind, and where it says more: the places, and dual feasible functions of the width inside nodes."""
        share = (arrays.area / arrays.members)[arrays.pair_option]
        rows: dict[bytes, tuple[Floats, float]] = {}

        def add(weights: Floats, capacity: float) -> None:
            # The same use of fewer devices says more.
            row = weights[arrays.pair_option] * share
            key = row.tobytes()
            if row.any() and (key not in rows or rows[key][1] > capacity):
                rows[key] = (row, capacity)

        for place in _scarce(arrays):
            nodes = set(place.nodes)
            inside = np.array([nodes.issuperset(one.nodes) for one in arrays.places] + [False])[arrays.place]
            add(inside.astype(np.float64), float(place.devices))
            sizes = {len(arrays.problem.nodes[node].devices) for node in place.nodes}
            if len(sizes) == 1:
                for weights in _by_width(arrays, sizes.pop()):
                    add(np.where(inside, weights, 0.0), float(place.devices))
        kept: list[tuple[Floats, float]] = []
        for row, capacity in sorted(rows.values(), key=lambda one: -float(one[0].sum()) / one[1]):
            if not any((row / capacity <= other / size).all() for other, size in kept):
                kept.append((row, capacity))
        return cls(
            used=np.array([row for row, _ in kept]).reshape(len(kept), len(share)),
            capacity=np.array([capacity for _, capacity in kept]),
        )


def _scarce(arrays: Arrays) -> list[Place]:
    """All nodes of each kind, and the places that options cannot leave."""
    nodes = arrays.problem.nodes
    kinds = {node.kind for node in nodes}
    whole = [tuple(index for index, node in enumerate(nodes) if node.kind == kind) for kind in sorted(kinds)]
    counts = np.bincount(arrays.place[arrays.usable], minlength=len(arrays.places))
    often = [arrays.places[index].nodes for index in np.argsort(-counts, kind="stable")[:_PLACES]]
    return [
        Place(nodes=one, spans=False, devices=sum(len(nodes[node].devices) for node in one))
        for one in dict.fromkeys(whole + often)
    ]


def _by_width(arrays: Arrays, size: int) -> list[Floats]:
    """option -> how much more than its width counts in nodes of this size, by dual feasible functions."""
    width = arrays.width.astype(np.float64)
    spans = np.array([option.spans for option in arrays.problem.options])
    counted: list[Floats] = []
    for least in range(2, size // 2 + 1):
        # Beside one that leaves less than `least` nothing fits that is as wide as `least`: it counts as the whole node.
        counted.append(np.where(width > size - least, float(size), np.where(width < least, 0.0, width)))
    for parts in range(1, min(size, 5)):
        # No more than `parts` of more than a (parts + 1)-th of the node are side by side: each counts as a parts-th.
        portions = (parts + 1) * width / size
        counted.append(np.where(portions == np.floor(portions), width, np.floor(portions) * size / parts))
    fits = ~spans & (arrays.width <= size)
    return [np.where(fits, one / width, 0.0) for one in counted]


def _above(needed_s: float, within_s: float) -> bool:
    """Whether it is more by more than rounding: what fits exactly is no proof."""
    return needed_s * _SAFE > within_s


def lower_bound(problem: Problem) -> float:
    """No schedule has a smaller measure of the problem's objective."""
    return bound_of(Arrays.of(problem))


def bound_of(arrays: Arrays) -> float:
    """As `lower_bound`."""
    if not arrays.problem.tasks:
        return 0.0
    objective = arrays.problem.objective
    if objective == "cost":
        shares = (arrays.price / arrays.members)[arrays.pair_option]
        return float(np.minimum.reduceat(shares, arrays.first_pair).sum()) * _SAFE
    if objective == "completion":
        return _completion_bound(arrays) * _SAFE
    return makespan_bound(arrays)[0]


def makespan_bound(arrays: Arrays) -> tuple[float, Floats]:
    """The bound on the makespan, and what a device second of each option is worth at it, by its kind and its width."""
    search = _Prices(arrays)
    bound_s = search.run()
    bound_s = max(bound_s, _long_bound(arrays, search, bound_s))
    return bound_s * _SAFE, search.worth()


class _Prices:
    """Prices of the resources: with any prices, the cheapest choice of options that takes more than there is by a
    time proves that the time is too short.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._resources = Resources.of(arrays)
        self._seconds = arrays.seconds[arrays.pair_option]
        self._lengths_s = np.unique(self._seconds)
        self.prices = 1.0 / self._resources.capacity / len(self._resources.capacity)

    def run(self) -> float:
        """The best bound of a few steps that make dearer what is used too much."""
        least_s = float(np.minimum.reduceat(self._seconds, self._arrays.first_pair).max())
        resources, best_s, best, most = self._resources, least_s, self.prices, 0.0
        for step in range(_PRICE_STEPS if len(resources.capacity) > 1 else 1):
            needed_s, chosen = self._cheapest(best_s)
            if _above(needed_s, best_s):
                best_s = self._raise(best_s, needed_s)
            if needed_s > most:
                best, most = self.prices, needed_s
            load = resources.used[:, chosen].sum(axis=1) / resources.capacity / best_s
            prices = self.prices * np.exp(2.0 / (1 + step / 4) * np.clip(load - load.max(), -1.0, 0.0))
            self.prices = prices / (prices * resources.capacity).sum()
        self.prices = best
        return best_s

    def _cheapest(self, within_s: float) -> tuple[float, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """What all tasks need at the prices, and the pairs that are cheapest, if only options within a time count."""
        costs = np.where(self._seconds <= within_s, self.prices @ self._resources.used, np.inf)
        first = self._arrays.first_pair
        least = np.minimum.reduceat(costs, first)
        cheapest = np.flatnonzero(costs == least[self._arrays.pair_task])
        return float(least.sum()), cheapest[np.searchsorted(cheapest, first)]

    def _raise(self, low_s: float, high_s: float) -> float:
        """The largest time that these prices prove too short."""
        for _ in range(_BISECTIONS):
            # Between two lengths of options the need is the same.
            first, last = np.searchsorted(self._lengths_s, (low_s, high_s), side="right")
            if first == last:
                return min(high_s, self._cheapest(low_s)[0])
            middle_s = (low_s + high_s) / 2
            if _above(self._cheapest(middle_s)[0], middle_s):
                low_s = middle_s
            else:
                high_s = middle_s
        return low_s

    def worth(self) -> Floats:
        """option -> the price of a device second, of all resources that it uses; zero if it cannot run."""
        arrays = self._arrays
        worth = np.zeros(len(arrays.seconds))
        share = (arrays.area / arrays.members)[arrays.pair_option]
        worth[arrays.pair_option] = self.prices @ self._resources.used / share
        return worth

    def long_needs(self, within_s: float, part: float) -> float:
        """What all tasks need by a time if those that leave less than a part of it take all of it, and short ones none.

        On each device a sequence of tasks fits into a time only if it does so with these lengths.
        """
        seconds, short_s = self._seconds, part * within_s
        counted = np.where(seconds > within_s - short_s, within_s, np.where(seconds < short_s, 0.0, seconds))
        costs = self.prices @ self._resources.used * counted / seconds
        costs = np.where(seconds <= within_s, costs, np.inf)
        return float(np.minimum.reduceat(costs, self._arrays.first_pair).sum())


def _long_bound(arrays: Arrays, prices: _Prices, bound_s: float) -> float:
    """A bound by the tasks that are so long that no two fit one after another."""
    best_s = bound_s
    for part in (0.5, 0.45, 0.4, 1 / 3, 0.3, 0.25, 0.2, 0.1, 0.05):
        low_s, high_s = best_s, 2 * best_s
        for _ in range(_BISECTIONS if _above(prices.long_needs(best_s, part), best_s) else 0):
            middle_s = (low_s + high_s) / 2
            if _above(prices.long_needs(middle_s, part), middle_s):
                low_s = middle_s
            else:
                high_s = middle_s
        best_s = low_s
    return best_s


def _completion_bound(arrays: Arrays) -> float:
    """The mean end: each task by itself; and all areas squashed onto one machine, the smallest first."""
    first, seconds = arrays.first_pair, arrays.seconds[arrays.pair_option]
    alone_s = float(np.minimum.reduceat(seconds, first).mean())
    resources = Resources.of(arrays)
    search = _Prices(arrays)
    search.run()
    best_s = alone_s
    for prices in (search.prices, *np.eye(len(resources.capacity)), np.ones(len(resources.capacity))):
        areas = prices @ resources.used / (prices @ resources.capacity)
        least = np.sort(np.minimum.reduceat(areas, first))
        # The middle of each task's time is no earlier than on the squashed machine; half its own length follows.
        middles_s = float((np.cumsum(least) - least / 2).mean())
        halves_s = float(np.minimum.reduceat(seconds, first).mean()) / 2
        best_s = max(best_s, middles_s + halves_s)
    return best_s
