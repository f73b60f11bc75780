"""The mixed integer program of the Saturn paper, by HiGHS: kept as a comparison, nothing uses it to schedule."""

from __future__ import annotations

import datetime
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

from rota.errors import InputError
from rota.schedule.arrays import Arrays
from rota.schedule.heuristics import RULES
from rota.schedule.packing import left_shift
from rota.schedule.problem import Placement, Problem, Schedule, makespan_s

with warnings.catch_warnings():
    # Of the types that SWIG makes (Python 3.12); nothing that a user of OR-tools could change.
    warnings.filterwarnings("ignore", message="builtin type .* has no __module__", category=DeprecationWarning)
    from ortools.math_opt.python import mathopt


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the solver found in its time."""

    schedule: Schedule | None
    bound_s: float
    """On the makespan."""


def milp(problem: Problem, seconds: float) -> Outcome:
    """Minimise the makespan; InputError for what the paper's program does not know: other objectives, pools, spans."""
    known = all(len(one.tasks) == 1 and not one.held and not one.spans for one in problem.options)
    if problem.objective != "makespan" or problem.deadlines or not known:
        raise InputError("the program of the paper knows makespans of single tasks inside nodes, and nothing else")
    return _Program(Arrays.of(problem)).solve(seconds)


class _Program:
    """The variables, with the names that the paper gives them in the comments."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        problem = arrays.problem
        self._model = mathopt.Model()
        # U: large enough for any start and any length of a schedule that is worth having, and no larger.
        self._large = makespan_s(problem, RULES["moldable"](arrays, 0)) + float(arrays.seconds.max())
        self._last = self._model.add_variable(lb=0.0)  # C
        self._options = [
            [option for option in problem.options_of[task] if arrays.place[option] >= 0] for task in problem.tasks
        ]
        self._taken = {  # B
            option: self._model.add_binary_variable() for options in self._options for option in options
        }
        tasks, nodes = range(len(problem.tasks)), range(len(problem.nodes))
        self._at = {(task, node): self._model.add_binary_variable() for task in tasks for node in nodes}  # O
        places = [(task, node, device) for task in tasks for node in nodes for device in range(int(arrays.sizes[node]))]
        self._used = {place: self._model.add_binary_variable() for place in places}  # P
        self._start = {place: self._model.add_variable(lb=0.0, ub=self._large) for place in places}  # I
        self._after = {pair: self._model.add_binary_variable() for pair in itertools.combinations(tasks, 2)}  # A
        for task in tasks:
            self._add_task(task)
        for one, other in self._after:
            self._add_isolation(one, other)
        self._model.minimize(self._last)

    def _add_task(self, task: int) -> None:
        model, arrays, large = self._model, self._arrays, self._large
        nodes = range(len(arrays.sizes))
        model.add_linear_constraint(sum(self._taken[option] for option in self._options[task]) == 1)
        model.add_linear_constraint(sum(self._at[task, node] for node in nodes) == 1)
        for node, option in itertools.product(nodes, self._options[task]):
            taken, at = self._taken[option], self._at[task, node]
            if node not in arrays.places[int(arrays.place[option])].nodes:
                model.add_linear_constraint(taken + at <= 1)
                continue
            devices = range(int(arrays.sizes[node]))
            width, length_s = int(arrays.width[option]), float(arrays.seconds[option])
            count = sum(self._used[task, node, device] for device in devices)
            slack = len(devices) * (2 - at - taken)
            model.add_linear_constraint(count >= width - slack)
            model.add_linear_constraint(count <= width + slack)
            mean = sum(self._start[task, node, device] for device in devices) / width
            for device in devices:
                start, used = self._start[task, node, device], self._used[task, node, device]
                model.add_linear_constraint(self._last >= start + length_s - large * (2 - taken - used))
                apart = large * len(devices) * (3 - used - taken - at)
                model.add_linear_constraint(mean - start <= apart)
                model.add_linear_constraint(start - mean <= apart)
        for node in nodes:
            count = sum(self._used[task, node, device] for device in range(int(arrays.sizes[node])))
            model.add_linear_constraint(count <= int(arrays.sizes[node]) * self._at[task, node])

    def _add_isolation(self, one: int, other: int) -> None:
        """On a device that both use, one of two tasks ends before the other starts."""
        model, large, after = self._model, 2 * self._large, self._after[one, other]
        for node, size in enumerate(self._arrays.sizes.tolist()):
            for device in range(size):
                first, second = self._start[one, node, device], self._start[other, node, device]
                both = self._used[one, node, device] + self._used[other, node, device]
                for option in self._options[one]:
                    length_s = float(self._arrays.seconds[option])
                    slack = large * (3 - both - self._taken[option] + after)
                    model.add_linear_constraint(first <= second - length_s + slack)
                for option in self._options[other]:
                    length_s = float(self._arrays.seconds[option])
                    slack = large * (4 - both - after - self._taken[option])
                    model.add_linear_constraint(first >= second + length_s - slack)

    def solve(self, seconds: float) -> Outcome:
        """Within a time."""
        parameters = mathopt.SolveParameters(time_limit=datetime.timedelta(seconds=seconds))
        result = mathopt.solve(self._model, mathopt.SolverType.HIGHS, params=parameters)
        bound_s = max(0.0, result.termination.objective_bounds.dual_bound)
        if not result.has_primal_feasible_solution():
            return Outcome(schedule=None, bound_s=bound_s)
        return Outcome(schedule=self._schedule(result.variable_values()), bound_s=bound_s)

    def _schedule(self, values: dict[Any, float]) -> Schedule:
        nodes = self._arrays.problem.nodes
        placements = []
        for task, options in enumerate(self._options):
            option = max(options, key=lambda one: values[self._taken[one]])
            node = max(range(len(nodes)), key=lambda one: values[self._at[task, one]])
            used = [d for d in range(len(nodes[node].devices)) if values[self._used[task, node, d]] > 0.5]
            placements.append(
                Placement(
                    option=option,
                    start_s=max(values[self._start[task, node, device]] for device in used),
                    devices=tuple(nodes[node].devices[device] for device in used),
                )
            )
        # The solver's starts are right up to its tolerance.
        return left_shift(self._arrays.problem, Schedule.of(placements))
