"""Small problems: random changes of options and order, kept if they are better or, at first, not much worse."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from rota.schedule.arrays import Arrays
from rota.schedule.packing import pack
from rota.schedule.problem import Schedule

_WARM = 0.6
"""How much worse a change may be at the start, as a part of the measure, times the number of tasks."""

_COOLED = 50.0
"""How much smaller that is at the end."""

_LOOK_EVERY = 256
"""Changes between two looks at the clock."""


def anneal(
    arrays: Arrays, known: Schedule, *, changes: int, seed: int, stop: Callable[[], bool] = lambda: False
) -> Schedule:
    """The best schedule that was met; repeatable if `stop` never says so. The known one, where it does not suit."""
    problem = arrays.problem
    spans = any(place.spans and len(place.nodes) > 1 for place in arrays.places)
    if problem.objective == "cost" or spans or not problem.tasks:
        return known
    state = _State(arrays, known)
    if not state.order:
        return known
    draw = random.Random(seed)
    warm = _WARM / len(state.order)
    now = best = state.measure()
    kept = list(state.order)
    for change in range(changes):
        if change % _LOOK_EVERY == 0 and stop():
            break
        before = state.order
        state.order = state.changed(draw)
        value = state.measure()
        warmth = best * warm * _COOLED ** (-change / changes)
        if value <= now or draw.random() < math.exp((now - value) / warmth):
            now = value
            if value < best:
                best, kept = value, list(state.order)
        else:
            state.order = before
    return pack(arrays, [*state.held, *kept])


class _State:
    """An order of options that is packed as a list: the same way as `packing.pack`, but only for its measure."""

    def __init__(self, arrays: Arrays, known: Schedule) -> None:
        options = arrays.problem.options
        self._seconds: list[float] = arrays.seconds.tolist()
        self._width: list[int] = arrays.width.tolist()
        self._members: list[int] = arrays.members.tolist()
        nowhere: tuple[int, ...] = ()
        self._nodes = [arrays.places[place].nodes if place >= 0 else nowhere for place in arrays.place.tolist()]
        self._completion = arrays.problem.objective == "completion"
        self._dues = [
            [due for task in option.tasks if (due := arrays.problem.deadlines.get(task)) is not None]
            for option in options
        ]
        # Being late counts more than anything else, but a search needs a slope.
        self._late_weight = 1000.0
        chosen = [one.option for one in known.placements]
        self.held = [one for one in chosen if options[one].held]
        self.order = [one for one in chosen if not options[one].held]
        self._rows = [[0.0] * int(size) for size in arrays.sizes]
        for one in self.held:
            for device in options[one].held:
                row = self._rows[arrays.node_of[device]]
                row.remove(0.0)
                row.append(self._seconds[one])
        for row in self._rows:
            row.sort()
        self._others = {one: self._alternatives(arrays, one) for one in self.order}

    @staticmethod
    def _alternatives(arrays: Arrays, option: int) -> list[int]:
        """What may take an option's place; for each of these the same."""
        options = arrays.problem.options
        if arrays.members[option] > 1:
            return []
        return [
            one
            for one in arrays.problem.options_of[options[option].tasks[0]]
            if arrays.place[one] >= 0
            and arrays.members[one] == 1
            and not options[one].held
            and one not in arrays.dominated
        ]

    def measure(self) -> float:
        """Of the order as it is."""
        rows = [list(row) for row in self._rows]
        total, last = 0.0, max((row[-1] for row in rows if row), default=0.0)
        for option in self.order:
            width = self._width[option]
            nodes = self._nodes[option]
            row = rows[nodes[0]] if len(nodes) == 1 else rows[min(nodes, key=lambda one: rows[one][width - 1])]
            start_s = row[width - 1]
            end_s = start_s + self._seconds[option]
            stop = bisect_right(row, start_s)
            del row[stop - width : stop]
            at = bisect_left(row, end_s)
            row[at:at] = [end_s] * width
            if end_s > last:
                last = end_s
            if self._completion:
                total += end_s * self._members[option]
            for due_s in self._dues[option]:
                if end_s > due_s:
                    total += (end_s - due_s) * self._late_weight
        return total if self._completion else total + last

    def changed(self, draw: random.Random) -> list[int]:
        """The order with one change."""
        order = list(self.order)
        place = draw.randrange(len(order))
        kind = draw.random()
        if kind < 0.4 and (others := self._others_of(order[place])):
            order[place] = draw.choice(others)
        elif kind < 0.7:
            other = draw.randrange(len(order))
            order[place], order[other] = order[other], order[place]
        else:
            order.insert(draw.randrange(len(order)), order.pop(place))
        return order

    def _others_of(self, option: int) -> list[int]:
        found = self._others.get(option)
        if found is None:
            # An option that took another's place: the alternatives are those of its task.
            found = next(others for others in self._others.values() if option in others)
            self._others[option] = found
        return found
