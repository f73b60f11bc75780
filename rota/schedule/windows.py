"""Large problems: better a few nodes at a time, with quick moves and with the exact search, while the rest stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from rota.schedule.arrays import Arrays
from rota.schedule.cp_sat import Effort, improve
from rota.schedule.moves import Moves
from rota.schedule.problem import Placement, Problem, Schedule, value_of

_TASKS = 70
"""A window has no more of them."""

_NODES = (2, 3, 4)
"""How many nodes are looked at together; each number in turn."""

_MOVES = 40
"""Quick moves in a row, before a schedule is made of them and shown."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long each part of the search takes."""

    window: Effort
    windows: int | None = None
    """How many; without a number until the time is over."""
    left_s: Callable[[], float] = lambda: float("inf")


def improve_windows(
    arrays: Arrays,
    known: Schedule,
    *,
    bound: float,
    pace: Pace,
    seed: int,
    better: Callable[[Schedule], None],
) -> Schedule:
    """The best schedule that was found at this pace; repeatable if it counts windows and work."""
    search = _Windows(arrays, known, bound, random.Random(seed), better)
    count = 0

    def stop() -> bool:
        return pace.left_s() <= 0

    while not stop() and not search.done and (pace.windows is None or count < pace.windows):
        search.quick(stop)
        if not stop() and not search.done:
            effort = pace.window
            if effort.seconds is not None:
                effort = replace(effort, seconds=min(effort.seconds, pace.left_s()))
            search.window(effort, seed + count, _NODES[count % len(_NODES)])
        count += 1
    return search.schedule


class _Windows:
    """The schedule as it is, and what was tried."""

    def __init__(
        self,
        arrays: Arrays,
        known: Schedule,
        bound: float,
        draw: random.Random,
        better: Callable[[Schedule], None],
    ) -> None:
        self._arrays = arrays
        self._bound = bound
        self._draw = draw
        self._better = better
        self.schedule = known
        self._value = value_of(arrays.problem, known)
        self._quick = True

    @property
    def done(self) -> bool:
        """Whether nothing can be better."""
        return self._value.late_s == 0 and self._value.objective <= self._bound * (1 + 1e-6)

    def _keep(self, schedule: Schedule) -> bool:
        value = value_of(self._arrays.problem, schedule)
        if value < self._value:
            self.schedule, self._value = schedule, value
            self._better(schedule)
            return True
        return False

    def quick(self, stop: Callable[[], bool]) -> None:
        """Quick moves until none helps."""
        if not self._quick or not Moves.suit(self._arrays, self.schedule):
            return
        moves = Moves(self._arrays, self.schedule)
        helped = True
        while helped and not stop() and moves.makespan_s > self._bound * (1 + 1e-6):
            count = 0
            while helped and count < _MOVES and not stop():
                helped = moves.step(self._draw)
                count += helped
            if count:
                self._keep(moves.schedule())
        self._quick = False

    def window(self, effort: Effort, seed: int, nodes: int) -> None:
        """The exact search on a few nodes."""
        inside = self._inside(self._choose(nodes))
        sub = _part(self._arrays, self.schedule, inside)
        if sub is None:
            return
        problem, known, names = sub
        part = Arrays.of(problem)
        # Nothing is gained by a part that ends before the whole can.
        bound = self._bound if problem.objective == "makespan" else 0.0
        bound = min(bound, value_of(problem, known).objective)
        found = improve(part, known=known, bound=bound, effort=effort, seed=seed).schedule
        if found is None:
            return
        placements = [replace(one, option=names[one.option]) for one in found.placements]
        chosen = {one.option for one in known.placements}
        before = {names[one] for one in chosen}
        rest = [one for one in self.schedule.placements if one.option not in before]
        self._put(Schedule.of([*rest, *placements]), value_of(problem, found) < value_of(problem, known))

    def _put(self, schedule: Schedule, gained: bool) -> None:
        """A part may be better where the whole is not, as long as several nodes end last."""
        if not self._keep(schedule) and gained:
            value = value_of(self._arrays.problem, schedule)
            if value <= self._value:
                self.schedule, self._value = schedule, value
        self._quick = self._quick or gained

    def _choose(self, count: int) -> list[int]:
        """The node that ends last, and others, rather those that end early."""
        arrays = self._arrays
        ends = [0.0] * len(arrays.problem.nodes)
        for one in self.schedule.placements:
            end_s = one.start_s + float(arrays.seconds[one.option])
            for device in one.devices:
                node = arrays.node_of[device]
                ends[node] = max(ends[node], end_s)
        nodes = [node for node in range(len(ends)) if arrays.sizes[node]]
        if arrays.problem.objective == "makespan":
            first = max(nodes, key=lambda node: (ends[node], -node))
        else:
            first = self._draw.choice(nodes)
        others = sorted((node for node in nodes if node != first), key=lambda node: (ends[node], node))
        # Half of the time among those that end earliest.
        pool = others[: max(count, len(others) // 4)] if self._draw.random() < 0.5 else others
        return [first, *self._draw.sample(pool, min(count - 1, len(pool)))]

    def _inside(self, nodes: list[int]) -> set[int]:
        """As many of the nodes as have few enough tasks."""
        counts: dict[int, int] = {}
        for one in self.schedule.placements:
            for node in {self._arrays.node_of[device] for device in one.devices}:
                counts[node] = counts.get(node, 0) + 1
        inside: set[int] = set()
        total = 0
        for node in nodes:
            total += counts.get(node, 0)
            if inside and total > _TASKS:
                break
            inside.add(node)
        return inside


def _part(arrays: Arrays, schedule: Schedule, nodes: set[int]) -> tuple[Problem, Schedule, list[int]] | None:
    """The problem of some nodes, its schedule, and the options' indices in the whole; None if there is nothing in it.

    A task that is on other nodes too stays as it is. Its devices are left out, with what else runs on them.
    """
    problem = arrays.problem
    blocked: set[str] = set()
    inside: list[Placement] = []
    for one in schedule.placements:
        within = {arrays.node_of[device] in nodes for device in one.devices}
        if within == {True}:
            inside.append(one)
        elif True in within:
            blocked.update(one.devices)
    while more := [one for one in inside if not blocked.isdisjoint(one.devices)]:
        blocked.update(device for one in more for device in one.devices)
        inside = [one for one in inside if one not in more]
    if not inside:
        return None
    tasks = {task for one in inside for task in problem.options[one.option].tasks}
    names: list[int] = []
    for task in sorted(tasks):
        names += [one for one in problem.options_of[task] if tasks.issuperset(problem.options[one].tasks)]
    names = [one for one in dict.fromkeys(names) if arrays.place[one] >= 0]
    part = Problem(
        options=tuple(problem.options[one] for one in names),
        nodes=tuple(
            replace(
                problem.nodes[node], devices=tuple(one for one in problem.nodes[node].devices if one not in blocked)
            )
            for node in sorted(nodes)
        ),
        objective=problem.objective,
        deadlines={task: due_s for task, due_s in problem.deadlines.items() if task in tasks},
    )
    number = {name: index for index, name in enumerate(names)}
    known = Schedule.of(replace(one, option=number[one.option]) for one in inside)
    return part, known, names
