"""Which options to take: a set of them in which every task is exactly once and no device is held twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rota.errors import InputError
from rota.schedule.arrays import Arrays, Floats, Ints

_TRIES = 50_000
"""Of the search for an exact cover, which is only needed where tasks have no option of their own."""


def ranks(*keys: Floats | Ints) -> Floats:
    """A score for each option that sorts as the keys do, the first of which counts most."""
    order = np.lexsort(keys[::-1])
    score = np.empty(len(order))
    score[order] = np.arange(len(order), dtype=np.float64)
    return score


def choose(arrays: Arrays, score: Floats) -> list[int] | None:
    """Options of a low total score that cover every task once; an infinite score forbids one. None if there are none.

    A score is of an option as a whole: one of several tasks is weighed against what its tasks would score alone.
    """
    alone = _alone(arrays, score)
    if not arrays.entangled:
        return None if (alone < 0).any() else [int(one) for one in alone]
    return _greedy(arrays, score, alone) or _search(arrays, score)


def must_choose(arrays: Arrays, score: Floats) -> list[int]:
    """As `choose`; InputError if there are none."""
    found = choose(arrays, score)
    if found is None:
        raise InputError("the options of the tasks exclude each other: no choice of them has every task exactly once")
    return found


def _alone(arrays: Arrays, score: Floats) -> Ints:
    """task -> the best of the options that are only its own and hold nothing; -1 if there is none."""
    of_pair = np.where(_simple(arrays), score, np.inf)[arrays.pair_option]
    order = np.lexsort((of_pair, arrays.pair_task))
    # The order keeps the pairs of a task together, so that its best is where its pairs began.
    best = order[arrays.first_pair]
    return np.where(np.isfinite(of_pair[best]), arrays.pair_option[best], -1)


def _simple(arrays: Arrays) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    simple = arrays.usable.copy()
    simple[list(arrays.entangled)] = False
    return simple


def _greedy(arrays: Arrays, score: Floats, alone: Ints) -> list[int] | None:
    """Take pools and held options where they are better than what the tasks have alone."""

    def gain(option: int) -> float:
        singles = [int(alone[task]) for task in arrays.members_of[option]]
        return float("inf") if min(singles) < 0 else sum(score[one] for one in singles) - float(score[option])

    gains = {option: gain(option) for option in arrays.entangled if np.isfinite(score[option])}
    taken: list[int] = []
    covered: set[int] = set()
    held: set[str] = set()
    # A held option that is as good as another is kept: what runs goes on.
    for option in sorted(gains, key=lambda one: (-gains[one], float(score[one]), one)):
        if gains[option] < 0:
            break
        devices = arrays.problem.options[option].held
        tasks = arrays.members_of[option]
        if covered.isdisjoint(tasks) and held.isdisjoint(devices):
            taken.append(option)
            covered.update(tasks)
            held.update(devices)
    rest = [int(alone[task]) for task in range(len(alone)) if task not in covered]
    return None if any(one < 0 for one in rest) else taken + rest


def _search(arrays: Arrays, score: Floats) -> list[int] | None:
    """Depth first, the tasks with the fewest options first, the best option of each first."""
    options: list[list[int]] = [[] for _ in arrays.first_pair]
    for task, option in zip(arrays.pair_task.tolist(), arrays.pair_option.tolist(), strict=True):
        if np.isfinite(score[option]):
            options[task].append(option)
    for of_task in options:
        of_task.sort(key=lambda one: (float(score[one]), one))
    order = sorted(range(len(options)), key=lambda task: (len(options[task]), task))
    return _depth_first(arrays, order, options)


def _depth_first(arrays: Arrays, order: Sequence[int], options: Sequence[Sequence[int]]) -> list[int] | None:
    covered: set[int] = set()
    held: set[str] = set()
    # (place in the order, which of its options is next, the option that it took)
    stack: list[tuple[int, int, int]] = []
    position, following = 0, 0
    for _ in range(_TRIES + len(order)):
        while position < len(order) and order[position] in covered:
            position += 1
        if position == len(order):
            return [option for _, _, option in stack]
        found = _next(arrays, options[order[position]], following, covered, held)
        if found is None:
            if not stack:
                return None
            position, following, option = stack.pop()
            covered.difference_update(arrays.members_of[option])
            held.difference_update(arrays.problem.options[option].held)
            continue
        option = options[order[position]][found]
        stack.append((position, found + 1, option))
        covered.update(arrays.members_of[option])
        held.update(arrays.problem.options[option].held)
        position, following = position + 1, 0
    return None


def _next(arrays: Arrays, options: Sequence[int], first: int, covered: set[int], held: set[str]) -> int | None:
    for index in range(first, len(options)):
        option = options[index]
        if covered.isdisjoint(arrays.members_of[option]) and held.isdisjoint(arrays.problem.options[option].held):
            return index
    return None
