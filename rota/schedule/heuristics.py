"""Schedules by simple rules: what others do, and where the search begins."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from rota.schedule.arrays import Arrays
from rota.schedule.bounds import makespan_bound
from rota.schedule.cover import choose, must_choose, ranks
from rota.schedule.insertion import insert
from rota.schedule.packing import pack
from rota.schedule.problem import Problem, Schedule, Value, value_of

Heuristic: TypeAlias = Callable[[Arrays, int], Schedule]

_SMALL = 100
"""Tasks: up to here holes are filled, and more orders and targets are tried."""

_LARGE = 3000
"""Tasks: from here on fewer targets are tried."""


def _max(arrays: Arrays, seed: int) -> Schedule:
    """Each task on the most devices that it can use, one after another: current practice."""
    return pack(arrays, _in_order(arrays, must_choose(arrays, ranks(-arrays.width, arrays.seconds))))


def _min(arrays: Arrays, seed: int) -> Schedule:
    """Each task on the fewest devices."""
    return pack(arrays, _in_order(arrays, must_choose(arrays, ranks(arrays.width, arrays.seconds))))


def _random(arrays: Arrays, seed: int) -> Schedule:
    """A random option for each task, in a random order."""
    draw = random.Random(seed)
    chosen = must_choose(arrays, np.array([draw.random() for _ in arrays.seconds]))
    draw.shuffle(chosen)
    return pack(arrays, chosen)


def _longest_first(arrays: Arrays, seed: int) -> Schedule:
    """The option of the least device seconds for each task, the longest first."""
    chosen = must_choose(arrays, arrays.area)
    return pack(arrays, sorted(chosen, key=lambda one: (-arrays.seconds[one], one)))


def _optimus(arrays: Arrays, seed: int) -> Schedule:
    """As many tasks as fit start with the fewest devices; the next devices go where they gain most; then the next wave.

    Optimus-greedy, for tasks that are all there at the start.
    """
    smallest = must_choose(arrays, ranks(arrays.width, arrays.seconds))
    waiting = sorted(smallest, key=lambda one: (-arrays.seconds[one], one))
    order: list[int] = []
    while waiting:
        wave, waiting = _wave(arrays, waiting)
        order += sorted(_widened(arrays, wave), key=lambda one: (-arrays.seconds[one], one))
    return pack(arrays, order)


def _wave(arrays: Arrays, waiting: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those that fit beside each other, by the number of devices of their kinds; and the others."""
    free = _devices(arrays)
    least = min(int(arrays.width[option]) for option in waiting)
    wave: list[int] = []
    rest: list[int] = []
    for place, option in enumerate(waiting):
        if max(free.values()) < least:
            return wave, rest + list(waiting[place:])
        kind = arrays.problem.options[option].kind
        if free[kind] >= arrays.width[option]:
            free[kind] -= int(arrays.width[option])
            wave.append(option)
        else:
            rest.append(option)
    return wave, rest


def _widened(arrays: Arrays, wave: Sequence[int]) -> list[int]:
    """The options after the devices that are left were given, one step after another, to the greatest gain of each."""
    options = arrays.problem.options
    free = _devices(arrays)
    for option in wave:
        free[options[option].kind] -= int(arrays.width[option])
    now = list(wave)
    steps = [(gain, place) for place, option in enumerate(now) if (gain := _step(arrays, option))]
    heap = [(-gain, place, wider) for (gain, wider), place in steps]
    heapq.heapify(heap)
    while heap:
        _, place, wider = heapq.heappop(heap)
        kind = options[wider].kind
        more = int(arrays.width[wider] - arrays.width[now[place]])
        if more > free[kind]:
            continue
        free[kind] -= more
        now[place] = wider
        if (following := _step(arrays, wider)) is not None:
            heapq.heappush(heap, (-following[0], place, following[1]))
    return now


def _step(arrays: Arrays, option: int) -> tuple[float, int] | None:
    """The seconds gained for each further device, and the wider option of the same task and kind that gains most."""
    mine = arrays.problem.options[option]
    if mine.held or arrays.members[option] > 1:
        return None
    task = arrays.members_of[option][0]
    best: tuple[float, int] | None = None
    for other in _pairs(arrays, task):
        wider = arrays.problem.options[other]
        if wider.kind != mine.kind or wider.held or arrays.members[other] > 1 or wider.devices <= mine.devices:
            continue
        gain = (mine.seconds - wider.seconds) / (wider.devices - mine.devices)
        if gain > 0 and (best is None or gain > best[0]):
            best = (gain, other)
    return best


def _moldable(arrays: Arrays, seed: int) -> Schedule:
    """For each of several times, the least device seconds with which every task ends within it; the best schedule."""
    return best_of(arrays, _covers(arrays))


def best_of(arrays: Arrays, covers: Iterable[Sequence[int]]) -> Schedule:
    """The best of the chosen options in every order that suits the objective."""
    best: tuple[Value, Schedule] | None = None
    seen: set[frozenset[int]] = set()
    for cover in covers:
        if (key := frozenset(cover)) in seen:
            continue
        seen.add(key)
        for order in _orders(arrays, cover):
            for schedule in _packings(arrays, order):
                value = value_of(arrays.problem, schedule)
                if best is None or value < best[0]:
                    best = (value, schedule)
    assert best is not None, "there is always a cover"
    return best[1]


def _packings(arrays: Arrays, order: Sequence[int]) -> Iterable[Schedule]:
    small = len(arrays.problem.tasks) <= _SMALL
    if arrays.problem.objective == "cost":
        yield pack(arrays, order, cheap=True)
        if not arrays.problem.deadlines:
            return
    yield insert(arrays, order) if small else pack(arrays, order)


def _orders(arrays: Arrays, cover: Sequence[int]) -> Iterable[list[int]]:
    """Orders of the chosen options: what should start first, first."""
    seconds, width, area, due = arrays.seconds, arrays.width, arrays.area, arrays.dues
    if arrays.problem.deadlines:
        yield sorted(cover, key=lambda one: (due[one], seconds[one], one))
        yield sorted(cover, key=lambda one: (due[one] - seconds[one], -seconds[one], one))
    if arrays.problem.objective == "completion":
        yield sorted(cover, key=lambda one: (area[one] / arrays.members[one], one))
        yield sorted(cover, key=lambda one: (seconds[one] / arrays.members[one], one))
        return
    yield sorted(cover, key=lambda one: (-seconds[one], -width[one], one))
    if len(arrays.problem.tasks) <= _LARGE:
        yield sorted(cover, key=lambda one: (-width[one], -seconds[one], one))
        yield sorted(cover, key=lambda one: (-area[one], one))


def _covers(arrays: Arrays) -> Iterable[list[int]]:
    """Choices of options that suit the objective."""
    objective = arrays.problem.objective
    if objective == "cost":
        yield must_choose(arrays, ranks(arrays.price / arrays.members, arrays.seconds) * arrays.members)
        yield must_choose(arrays, arrays.price)
        if not arrays.problem.deadlines:
            return
    if objective == "completion" or arrays.problem.deadlines:
        # A task delays those behind it by its area, and itself by its length: how many are behind it is tried.
        devices = max(1, int(arrays.sizes.sum()))
        for behind in (0.0, 0.5, 1.0, 2.0, len(arrays.problem.tasks) / 4, len(arrays.problem.tasks) / 2):
            score = arrays.seconds * arrays.members + behind * arrays.area / devices
            yield must_choose(arrays, score)
    yield from _within_targets(arrays)


def _within_targets(arrays: Arrays) -> Iterable[list[int]]:
    bound_s, worth = makespan_bound(arrays)
    tasks = len(arrays.problem.tasks)
    tries = 8 if tasks > _LARGE else 16 if tasks > _SMALL else 24
    costs = arrays.area * worth
    for growth in np.linspace(0.0, 1.0, tries) ** 2:
        score = np.where(arrays.seconds <= bound_s * (1 + 1e-6) * (1 + growth), costs, np.inf)
        if (found := choose(arrays, score)) is not None:
            yield balanced(arrays, found, within_s=bound_s * (1 + growth))
    yield must_choose(arrays, arrays.area)


def balanced(arrays: Arrays, cover: Sequence[int], *, within_s: float) -> list[int]:
    """The same choice with tasks moved from kinds that have too much to do to others, the cheapest moves first."""
    devices = _devices(arrays)
    kinds = [kind for kind in devices if devices[kind]]
    if len(kinds) < 2:
        return list(cover)
    now = list(cover)
    load = dict.fromkeys(kinds, 0.0)
    for option in now:
        kind = arrays.problem.options[option].kind
        load[kind] += float(arrays.area[option]) / devices[kind]
    moves = []
    for place, option in enumerate(now):
        for other in _others(arrays, option, within_s):
            moves.append((float(arrays.area[other] / arrays.area[option]), place, other))
    for _, place, other in sorted(moves):
        here, there = arrays.problem.options[now[place]].kind, arrays.problem.options[other].kind
        less = float(arrays.area[now[place]]) / devices[here]
        more = float(arrays.area[other]) / devices[there]
        if now[place] == cover[place] and max(load[here] - less, load[there] + more) < load[here]:
            load[here] -= less
            load[there] += more
            now[place] = other
    return now


def _others(arrays: Arrays, option: int, within_s: float) -> Iterable[int]:
    """The least device seconds of the same task on each other kind, within a time."""
    mine = arrays.problem.options[option]
    if mine.held or arrays.members[option] > 1:
        return ()
    best: dict[str, int] = {}
    for other in _pairs(arrays, arrays.members_of[option][0]):
        one = arrays.problem.options[other]
        if one.kind == mine.kind or one.held or arrays.members[other] > 1 or one.seconds > within_s:
            continue
        if one.kind not in best or arrays.area[other] < arrays.area[best[one.kind]]:
            best[one.kind] = other
    return best.values()


def _pairs(arrays: Arrays, task: int) -> list[int]:
    """The options of a task that can run."""
    first = int(arrays.first_pair[task])
    last = int(arrays.first_pair[task + 1]) if task + 1 < len(arrays.first_pair) else len(arrays.pair_option)
    return [int(option) for option in arrays.pair_option[first:last]]


def _devices(arrays: Arrays) -> dict[str, int]:
    """kind -> devices."""
    count: dict[str, int] = {}
    for node in arrays.problem.nodes:
        count[node.kind] = count.get(node.kind, 0) + len(node.devices)
    return count


def _in_order(arrays: Arrays, chosen: Sequence[int]) -> list[int]:
    """As the tasks come."""
    return sorted(chosen, key=lambda one: (arrays.members_of[one], one))


RULES: Mapping[str, Heuristic] = {
    "max": _max,
    "min": _min,
    "random": _random,
    "optimus": _optimus,
    "longest_first": _longest_first,
    "moldable": _moldable,
}
"""The heuristics, for those who have the arrays already."""


def _of_problem(rule: Heuristic) -> Callable[[Problem, int], Schedule]:
    def run(problem: Problem, seed: int) -> Schedule:
        return rule(Arrays.of(problem), seed) if problem.tasks else Schedule(placements=())

    return run


HEURISTICS: Mapping[str, Callable[[Problem, int], Schedule]] = {name: _of_problem(rule) for name, rule in RULES.items()}
"""name -> a function of the problem and a seed."""
