"""The schedule of a problem: every heuristic, then a search from the best of them, until a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rota.errors import InputError, ScheduleError
from rota.schedule.anneal import anneal
from rota.schedule.arrays import Arrays
from rota.schedule.bounds import bound_of
from rota.schedule.heuristics import RULES
from rota.schedule.problem import Problem, Schedule, Value, check, check_problem, value_of

_EXACT_TASKS = 60
"""Up to here the exact search takes the whole problem."""

_EXACT_PAIRS = 4000
"""Options times nodes: with more, its model is too large as well."""

_STEP_WORK = 0.02
"""Of the exact search, for one step of a limit: CP-SAT's deterministic time, about seconds of one core."""

_CHANGES_PART = 0.15
"""Of the seconds, for random changes before the exact search."""

_CHANGE_TASK_S = 0.8e-6
"""About what a change takes, for each task; so that the changes end when their time does."""

_NARROW_PART = 0.3
"""Of the seconds, for asking whether there is a schedule that ends by some time."""

_NARROW = 0.002
"""Of the bound: what is asked for is no finer."""

_STEP_CHANGES = 300
_MOST_CHANGES = 200_000

_WINDOW_S = 1.5
_WINDOW_WORK = 0.04
_CLOSE = 1e-6
"""Of the bound: what is as close to it is optimal."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """When the search ends, whichever comes first. With steps alone the result is repeatable."""

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is None and self.steps is None:
            raise InputError("a limit needs a number of seconds or of steps")
        if not (self.seconds is None or self.seconds >= 0) or not (self.steps is None or self.steps >= 0):
            raise InputError(f"a limit of {self.seconds} seconds and {self.steps} steps cannot be: it is below zero")


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A schedule, and how good it is."""

    schedule: Schedule
    value: Value
    bound: float
    """On the objective's measure: no schedule that is as much in time has a smaller one."""
    by: str
    """What found the schedule: a heuristic, "hint", "anneal", "cp_sat" or "windows"."""
    heuristics: Mapping[str, Value]

    @property
    def gap(self) -> float:
        """How far it may be from the optimum, as a part of the bound."""
        return (self.value.objective - self.bound) / self.bound if self.bound else 0.0


def solve(
    problem: Problem,
    *,
    limit: Limit,
    seed: int = 0,
    clock: Callable[[], float],
    better: Callable[[Solved], None] = lambda solved: None,
    hints: Sequence[Schedule] = (),
) -> Solved:
    """The best schedule found within the limit, never worse than a heuristic's or a hint; InputError if there is none.

    `better` is told of the first and of each better one. Hints that are no schedules of this problem are left out.
    `clock` gives seconds.
    """
    search = begin(problem, limit=limit, seed=seed, clock=clock, better=better, hints=hints)
    if not search.done:
        search.improve()
    return search.solved


def begin(
    problem: Problem,
    *,
    limit: Limit,
    seed: int,
    clock: Callable[[], float],
    better: Callable[[Solved], None] = lambda solved: None,
    hints: Sequence[Schedule] = (),
) -> Search:
    """The heuristics alone: a search that was not gone on with."""
    started_s = clock()
    check_problem(problem)
    arrays = Arrays.of(problem)
    found = dict(_simple(arrays, seed))
    values = {name: value_of(problem, schedule) for name, schedule in found.items()}
    best = min(values, key=lambda name: values[name])
    solved = Solved(schedule=found[best], value=values[best], bound=bound_of(arrays), by=best, heuristics=values)
    for hint in hints:
        if is_schedule(problem, hint) and (value := value_of(problem, hint)) < solved.value:
            solved = replace(solved, schedule=hint, value=value, by="hint")
    better(solved)
    return Search(arrays, solved, limit=limit, seed=seed, clock=clock, started_s=started_s, better=better)


def _simple(arrays: Arrays, seed: int) -> Iterable[tuple[str, Schedule]]:
    for name, rule in RULES.items():
        schedule = rule(arrays, seed) if arrays.problem.tasks else Schedule(placements=())
        check(arrays.problem, schedule)
        yield name, schedule


def is_schedule(problem: Problem, schedule: Schedule) -> bool:
    """Whether it is one of this problem."""
    if any(not 0 <= one.option < len(problem.options) for one in schedule.placements):
        return False
    try:
        check(problem, schedule)
    except ScheduleError:
        return False
    return True


class Search:
    """A problem that is being solved: the best so far, and the time that is left."""

    def __init__(
        self,
        arrays: Arrays,
        solved: Solved,
        *,
        limit: Limit,
        seed: int,
        clock: Callable[[], float],
        started_s: float,
        better: Callable[[Solved], None],
    ) -> None:
        self._arrays = arrays
        self._limit = limit
        self._seed = seed
        self._clock = clock
        self._started_s = started_s
        self._better = better
        self.solved = solved

    @property
    def done(self) -> bool:
        """Whether the limit is reached, or nothing can be better."""
        value, bound = self.solved.value, self.solved.bound
        # A cost may be the least and the makespan still not: that counts among equals.
        best = (
            value.late_s == 0 and value.objective <= bound * (1 + _CLOSE) and self._arrays.problem.objective != "cost"
        )
        return best or self._left_s() <= 0 or not self._arrays.problem.tasks or self._limit.steps == 0

    def _left_s(self) -> float:
        if self._limit.seconds is None:
            return float("inf")
        return self._limit.seconds - (self._clock() - self._started_s)

    def improve(self) -> None:
        """Search until the limit."""
        arrays = self._arrays
        pairs = sum(len(arrays.places[place].nodes) for place in arrays.place[arrays.usable].tolist())
        if len(arrays.problem.tasks) <= _EXACT_TASKS and pairs <= _EXACT_PAIRS:
            self._exact()
        else:
            self._windows()

    def _found(self, schedule: Schedule, by: str) -> None:
        """Keep what is better and valid."""
        problem = self._arrays.problem
        value = value_of(problem, schedule)
        if value < self.solved.value:
            check(problem, schedule)
            self.solved = replace(self.solved, schedule=schedule, value=value, by=by)
            self._better(self.solved)

    def _exact(self) -> None:
        self._anneal()
        self._narrow()
        if self.done:
            return
        # Loading OR-tools takes half a second, which those who only look at schedules need not wait for.
        from rota.schedule.cp_sat import Effort, improve

        steps, left_s = self._limit.steps, self._left_s()
        outcome = improve(
            self._arrays,
            known=self.solved.schedule,
            bound=self.solved.bound,
            effort=Effort(
                seconds=None if left_s == float("inf") else left_s, work=None if steps is None else steps * _STEP_WORK
            ),
            seed=self._seed,
            better=lambda schedule: self._found(schedule, "cp_sat"),
        )
        if outcome.bound > self.solved.bound:
            self.solved = replace(self.solved, bound=min(outcome.bound, self.solved.value.objective))
            self._better(self.solved)

    def _anneal(self) -> None:
        seconds, steps, until_s = self._limit.seconds, self._limit.steps, float("-inf")
        changes = _MOST_CHANGES if steps is None else min(_MOST_CHANGES, steps * _STEP_CHANGES)
        if seconds is not None:
            until_s = self._left_s() - 2 * _CHANGES_PART * seconds
            tasks = len(self._arrays.problem.tasks)
            changes = min(changes, int(_CHANGES_PART * seconds / (tasks * _CHANGE_TASK_S)))
        found = anneal(
            self._arrays,
            self.solved.schedule,
            changes=changes,
            seed=self._seed,
            stop=lambda: self._left_s() < until_s,
        )
        self._found(found, "anneal")

    def _narrow(self) -> None:
        """Ask for schedules that end by some time between the bound and the best: there is one, or the bound rises."""
        from rota.schedule.cp_sat import Effort, within

        problem, seconds = self._arrays.problem, self._limit.seconds
        if problem.objective != "makespan" or problem.deadlines or seconds is None or self._limit.steps is not None:
            return
        until_s = self._left_s() - _NARROW_PART * seconds
        low_s = high_s = 0.0
        while self._left_s() > until_s and not self.done:
            low_s = max(low_s, self.solved.bound)
            high_s = min(high_s or self.solved.value.objective, self.solved.value.objective)
            if high_s - low_s < _NARROW * low_s:
                return
            target_s = (low_s + high_s) / 2
            found = within(
                self._arrays,
                known=self.solved.schedule,
                bound=self.solved.bound,
                target_s=target_s,
                effort=Effort(seconds=min(self._left_s() - until_s, _NARROW_PART * seconds / 4)),
                seed=self._seed,
            )
            if isinstance(found, Schedule):
                self._found(found, "cp_sat")
            elif found is False:
                self.solved = replace(self.solved, bound=target_s)
                self._better(self.solved)
            else:
                high_s = target_s

    def _windows(self) -> None:
        from rota.schedule.cp_sat import Effort
        from rota.schedule.windows import Pace, improve_windows

        steps = self._limit.steps
        effort = Effort(seconds=_WINDOW_S) if steps is None else Effort(work=_WINDOW_WORK)
        improve_windows(
            self._arrays,
            self.solved.schedule,
            bound=self.solved.bound,
            pace=Pace(window=effort, windows=steps, left_s=self._left_s),
            seed=self._seed,
            better=lambda schedule: self._found(schedule, "windows"),
        )
