"""The exact search: optional intervals and cumulative capacity in OR-tools' CP-SAT, from a schedule that is known."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

from rota.schedule.arrays import Arrays
from rota.schedule.packing import pack
from rota.schedule.problem import Schedule, Value, makespan_s, value_of

with warnings.catch_warnings():
    # Of the types that SWIG makes (Python 3.12); nothing that a user of OR-tools could change.
    warnings.filterwarnings("ignore", message="builtin type .* has no __module__", category=DeprecationWarning)
    from ortools.sat.python import cp_model

_TICKS = 50_000
"""Of the makespan of the schedule that is known, where the lengths are not multiples of a common unit."""

_UNITS_S = (1.0, 0.5, 0.1, 0.01, 0.001)
_COST_UNITS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to search: by the clock with several threads, or by counted work with one, which is repeatable."""

    seconds: float | None = None
    work: float | None = None
    """CP-SAT's deterministic time: about seconds of one core."""
    workers: int = 8
    """More than cores: each searches in another way."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the search found."""

    schedule: Schedule | None
    """The best, if it is better than the one that was known."""
    bound: float
    """On the objective's measure, of schedules that are no later."""
    optimal: bool


def improve(
    arrays: Arrays,
    *,
    known: Schedule,
    bound: float,
    effort: Effort,
    seed: int = 0,
    better: Callable[[Schedule], None] = lambda schedule: None,
) -> Outcome:
    """Search for a better schedule; `bound` is one on the objective's measure, and reaching it ends the search."""
    model = _Model(arrays, known, bound)
    solver = _solver(effort, seed)
    watch = _Watch(model, value_of(arrays.problem, known), better)
    status = solver.solve(model.model, watch)
    optimal = status == cp_model.OPTIMAL
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(f"the model is not valid: {model.model.validate()}")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Outcome(schedule=None, bound=bound, optimal=False)
    proved = model.measure_bound(solver.best_objective_bound, watch.best)
    return Outcome(schedule=watch.schedule, bound=min(max(bound, proved), watch.best.objective), optimal=optimal)


def within(
    arrays: Arrays, *, known: Schedule, bound: float, target_s: float, effort: Effort, seed: int = 0
) -> Schedule | bool | None:
    """A schedule that ends by a time; False if it is proved that there is none, None if it is not known.

    That a time is too short is often proved much sooner than a bound is raised while searching for the best.
    """
    model = _Model(arrays, known, bound)
    model.end_by(target_s)
    solver = _solver(effort, seed)
    watch = _Watch(model, value_of(arrays.problem, known), lambda schedule: None)
    status = solver.solve(model.model, watch)
    return False if status == cp_model.INFEASIBLE else watch.schedule


def _solver(effort: Effort, seed: int) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = effort.workers if effort.work is None else 1
    # Gangs that are wider than half a node exclude each other, which these look at more closely.
    solver.parameters.use_strong_propagation_in_disjunctive = True
    solver.parameters.use_dynamic_precedence_in_disjunctive = True
    if effort.work is not None:
        solver.parameters.max_deterministic_time = effort.work
    if effort.seconds is not None:
        solver.parameters.max_time_in_seconds = max(0.01, effort.seconds)
    return solver


class _Watch(cp_model.CpSolverSolutionCallback):
    """Hears of each solution."""

    def __init__(self, model: _Model, known: Value, better: Callable[[Schedule], None]) -> None:
        super().__init__()
        self._model = model
        self._better = better
        self.best = known
        self.schedule: Schedule | None = None

    def on_solution_callback(self) -> None:
        """Called by the solver."""
        schedule = self._model.schedule(self._number)
        value = value_of(self._model.arrays.problem, schedule)
        if value < self.best:
            self.best, self.schedule = value, schedule
            self._better(schedule)

    def _number(self, variable: Any) -> int:
        return int(super().value(variable))


@dataclass(frozen=True, kw_only=True)
class _Use:
    """What an option takes of a node, or of a kind as a whole."""

    literal: Any
    """Whether it does."""
    count: Any
    """How many devices: a number, or a variable."""


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The variables of an option."""

    taken: Any
    start: Any
    uses: Mapping[int, _Use]
    """By node; empty if any devices of the kind will do."""


class _Model:
    """The variables and constraints of a problem."""

    def __init__(self, arrays: Arrays, known: Schedule, bound: float) -> None:
        self.arrays = arrays
        # Not all of its methods are typed.
        self.model: Any = cp_model.CpModel()
        self._time = _Time.of(arrays, known)
        needless = arrays.dominated - {one.option for one in known.placements}
        kept = [option for option in sorted(set(arrays.pair_option.tolist())) if option not in needless]
        alike = _symmetric(arrays, kept)
        self._loose = _loose_kinds(arrays, kept)
        self._hint = _in_symmetric_order(arrays, known, self._time.starts, alike)
        self._devices = {one.option: _counts(arrays, one.devices) for one in self._hint.values()}
        self._makespan = self._number(0, self._time.horizon, self._time.last)
        self._starts = [
            self._number(0, self._time.horizon, self._hint[task].start) for task in range(len(arrays.problem.tasks))
        ]
        self._chosen = {option: self._choice(option) for option in kept}
        self._add_tasks()
        self._add_capacity()
        for group in alike:
            for one, other in pairwise([task for task, _ in group]):
                self.model.add(self._starts[one] <= self._starts[other])
        self._add_objective(bound)

    def _number(self, low: int, high: int, hint: int) -> Any:
        variable = self.model.new_int_var(low, high, "")
        self.model.add_hint(variable, hint)
        return variable

    def _literal(self, hint: bool) -> Any:
        literal = self.model.new_bool_var("")
        self.model.add_hint(literal, hint)
        return literal

    def _choice(self, option: int) -> _Chosen:
        tasks = self.arrays.members_of[option]
        taken = self._literal(option in self._devices)
        start = self._starts[tasks[0]]
        if self._time.lengths[option] > self._time.horizon:
            self.model.add(taken == 0)
        for task in tasks[1:]:
            self.model.add(self._starts[task] == start).only_enforce_if(taken)
        if self.arrays.problem.options[option].held:
            self.model.add(start == 0).only_enforce_if(taken)
        return _Chosen(taken=taken, start=start, uses=self._uses(option, taken))

    def _uses(self, option: int, taken: Any) -> dict[int, _Use]:
        arrays = self.arrays
        wanted, nodes = arrays.problem.options[option], arrays.places[int(arrays.place[option])].nodes
        if wanted.kind in self._loose:
            return {}
        if wanted.held:
            return {node: _Use(literal=taken, count=n) for node, n in _counts(arrays, wanted.held).items()}
        if len(nodes) == 1:
            return {nodes[0]: _Use(literal=taken, count=wanted.devices)}
        hinted = self._devices.get(option, {})
        if wanted.spans:
            most = [min(wanted.devices, int(arrays.sizes[node])) for node in nodes]
            counts = [self._number(0, most[i], hinted.get(node, 0)) for i, node in enumerate(nodes)]
            self.model.add(sum(counts) == wanted.devices * taken)
            return {node: _Use(literal=taken, count=count) for node, count in zip(nodes, counts, strict=True)}
        there = {node: self._literal(node in hinted) for node in nodes}
        self.model.add(sum(there.values()) == taken)
        return {node: _Use(literal=literal, count=wanted.devices) for node, literal in there.items()}

    def _add_tasks(self) -> None:
        """Each is in one option, and ends before the makespan."""
        arrays, lengths = self.arrays, self._time.lengths
        self._ends = []
        of_task: list[list[int]] = [[] for _ in self._starts]
        for option in self._chosen:
            for task in arrays.members_of[option]:
                of_task[task].append(option)
        for task, options in enumerate(of_task):
            self.model.add_exactly_one(self._chosen[option].taken for option in options)
            end = self._starts[task] + sum(lengths[option] * self._chosen[option].taken for option in options)
            self.model.add(end <= self._makespan)
            self._ends.append(end)
        holders: dict[str, list[Any]] = {}
        for option, chosen in self._chosen.items():
            for device in arrays.problem.options[option].held:
                holders.setdefault(device, []).append(chosen.taken)
        for literals in holders.values():
            self.model.add_at_most_one(literals)

    def _add_capacity(self) -> None:
        """On each node, on each kind as a whole, and as device seconds, without which the solver's bound is poor."""
        arrays, lengths = self.arrays, self._time.lengths
        nodes = arrays.problem.nodes
        of_kind: dict[str, list[int]] = {}
        of_node: dict[int, list[tuple[int, _Use]]] = {}
        for option, chosen in self._chosen.items():
            of_kind.setdefault(arrays.problem.options[option].kind, []).append(option)
            for node, use in chosen.uses.items():
                of_node.setdefault(node, []).append((option, use))
        for kind, options in of_kind.items():
            size = sum(len(node.devices) for node in nodes if node.kind == kind)
            uses = [(one, _Use(literal=self._chosen[one].taken, count=int(arrays.width[one]))) for one in options]
            area = sum(int(arrays.width[one]) * lengths[one] * self._chosen[one].taken for one in options)
            self.model.add(area <= size * self._makespan)
            if kind in self._loose or sum(node.kind == kind for node in nodes) > 1:
                self._cumulative(uses, size)
        for node, node_uses in of_node.items():
            size = len(nodes[node].devices)
            self._cumulative(node_uses, size)
            if not any(arrays.problem.options[option].spans for option, _ in node_uses):
                area = sum(use.count * lengths[option] * use.literal for option, use in node_uses)
                self.model.add(area <= size * self._makespan)

    def _cumulative(self, uses: Sequence[tuple[int, _Use]], size: int) -> None:
        intervals = [
            self.model.new_optional_fixed_size_interval_var(
                self._chosen[option].start, self._time.lengths[option], use.literal, ""
            )
            for option, use in uses
        ]
        self.model.add_cumulative(intervals, [use.count for _, use in uses], size)

    # ---- the objective ----

    def _add_objective(self, bound: float) -> None:
        """Being late counts more than all the rest."""
        problem, time = self.arrays.problem, self._time
        floor = math.ceil(bound / time.tick_s - 1e-6) if time.exact else math.floor(bound / time.tick_s)
        if problem.objective == "makespan":
            measure, self._most = self._makespan, time.horizon
            self.model.add(self._makespan >= min(floor, time.last))
        elif problem.objective == "completion":
            measure, self._most = sum(self._ends), time.horizon * len(self._ends)
        else:
            cost, most = self._cost()
            # With deadlines the three together would not fit into 63 bits; then equal costs may end at any time.
            self._cost_weight = 1 if problem.deadlines else time.horizon + 1
            measure = cost if problem.deadlines else cost * self._cost_weight + self._makespan
            self._most = (most + 1) * self._cost_weight
        self._late_weight = self._most + 1
        late = []
        numbers = {task: index for index, task in enumerate(problem.tasks)}
        for task, due_s in problem.deadlines.items():
            if task in numbers:
                due = time.due(due_s)
                hinted = self._hint[numbers[task]]
                by = hinted.start + time.lengths[hinted.option] - due
                late.append(self._number(0, max(0, time.horizon - due), max(0, by)))
                self.model.add(late[-1] >= self._ends[numbers[task]] - due)
        self.model.minimize(measure + self._late_weight * sum(late) if late else measure)

    def _cost(self) -> tuple[Any, int]:
        """In whole units, and how much it can be at most."""
        arrays = self.arrays
        nodes = arrays.problem.nodes
        dearest: dict[str, float] = {}
        for one in nodes:
            dearest[one.kind] = max(dearest.get(one.kind, 0.0), one.price_per_hour)
        options = arrays.problem.options
        prices = [dearest.get(one.kind, 0.0) * one.devices * one.seconds / 3600 for one in options]
        total = sum(max(prices[option] for option in own) for own in arrays.problem.options_of.values())
        self._cost_unit = total / _COST_UNITS or 1.0
        terms = []
        for option, chosen in self._chosen.items():
            hours = float(arrays.seconds[option]) / 3600
            if not chosen.uses:
                terms.append(round(prices[option] / self._cost_unit) * chosen.taken)
            for node, use in chosen.uses.items():
                each = nodes[node].price_per_hour * hours / self._cost_unit
                if isinstance(use.count, int):
                    terms.append(round(each * use.count) * use.literal)
                else:
                    terms.append(round(each) * use.count)
        return sum(terms), _COST_UNITS + sum(one.devices for one in options)

    def end_by(self, target_s: float) -> None:
        """Any schedule that ends by a time is as good as another."""
        ticks = target_s / self._time.tick_s
        # Lengths were rounded up: each task before the end of one may have added a tick.
        latest = math.floor(ticks + 1e-9) if self._time.exact else math.ceil(ticks) + len(self._starts)
        self.model.clear_hints()
        self.model.clear_objective()
        self.model.add(self._makespan <= latest)

    def measure_bound(self, proved: float, value: Value) -> float:
        """The solver's bound as one on the objective's measure, of schedules that are as late as this value."""
        time, tasks = self._time, len(self._starts)
        if value.late_s > 0:
            late = round(value.late_s / time.tick_s)
            if not time.exact or proved < late * self._late_weight:
                return 0.0
            proved -= late * self._late_weight
        if proved > self._most:
            return 0.0
        # Lengths were rounded up: each task before the end of one may have added a tick.
        lost = 0 if time.exact else tasks
        if self.arrays.problem.objective == "makespan":
            return max(0.0, math.ceil(proved - 1e-6) - lost) * time.tick_s
        if self.arrays.problem.objective == "completion":
            return max(0.0, math.ceil(proved - 1e-6) / tasks - lost) * time.tick_s
        devices = int(self.arrays.sizes.sum())
        return max(0.0, proved // self._cost_weight - tasks * devices) * self._cost_unit

    def schedule(self, value: Callable[[Any], int]) -> Schedule:
        """From the values of the variables: the same order and nodes, each as early as it can be.

        On each node (or kind) the times at which devices become free are, in order, never later than in the solution;
        so nothing starts later than there.
        """
        taken = [option for option, chosen in self._chosen.items() if value(chosen.taken)]
        at = {}
        for option in taken:
            uses = self._chosen[option].uses
            counts = {
                node: use.count if isinstance(use.count, int) else value(use.count)
                for node, use in uses.items()
                if value(use.literal)
            }
            if counts := {node: count for node, count in counts.items() if count}:
                at[option] = counts
        order = sorted(taken, key=lambda option: (value(self._chosen[option].start), option))
        return pack(self.arrays, order, at=at)


@dataclass(frozen=True, kw_only=True)
class _Started:
    """A task in the schedule that is known."""

    option: int
    start: int
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Time:
    """Seconds as whole ticks."""

    tick_s: float
    exact: bool
    """Whether every length is a whole number of ticks."""
    lengths: Sequence[int]
    """option -> ticks, rounded up."""
    starts: Mapping[int, int]
    """option -> when it starts in the known schedule, in ticks."""
    last: int
    """When the known schedule ends."""
    horizon: int
    """No better schedule ends later."""

    @classmethod
    def of(cls, arrays: Arrays, known: Schedule) -> _Time:
        """Such that the known schedule stays valid."""
        tick_s, exact = _tick(arrays, known)
        whole = [seconds / tick_s for seconds in arrays.seconds.tolist()]
        lengths = [max(1, round(ticks) if exact else math.ceil(ticks - 1e-9)) for ticks in whole]
        free: dict[str, int] = {}
        starts: dict[int, int] = {}
        for one in known.placements:
            starts[one.option] = max(free.get(device, 0) for device in one.devices)
            free.update(dict.fromkeys(one.devices, starts[one.option] + lengths[one.option]))
        last = max(free.values(), default=0)
        horizon = _horizon(arrays, known, lengths, starts, last)
        return cls(tick_s=tick_s, exact=exact, lengths=lengths, starts=starts, last=last, horizon=horizon)

    def due(self, seconds: float) -> int:
        """A deadline; if it is between two ticks, the earlier."""
        return min(self.horizon, math.floor(seconds / self.tick_s + 1e-9))


def _tick(arrays: Arrays, known: Schedule) -> tuple[float, bool]:
    """A common unit of all lengths and deadlines, or a small part of the known makespan."""
    longest_s = makespan_s(arrays.problem, known)
    times_s = [*arrays.seconds.tolist(), *arrays.problem.deadlines.values()]
    for unit_s in _UNITS_S:
        if longest_s / unit_s < 2 * _TICKS and all(abs(one / unit_s - round(one / unit_s)) < 1e-9 for one in times_s):
            return unit_s, True
    return longest_s / _TICKS, False


def _horizon(arrays: Arrays, known: Schedule, lengths: Sequence[int], starts: Mapping[int, int], last: int) -> int:
    problem = arrays.problem
    of_task: dict[int, list[int]] = {}
    for option in set(arrays.pair_option.tolist()):
        for task in arrays.members_of[option]:
            of_task.setdefault(task, []).append(lengths[option])
    # Without needless waiting nothing ends later than all tasks one after another.
    serial = max(last, sum(max(some) for some in of_task.values()))
    if problem.objective == "cost" or value_of(problem, known).late_s > 0:
        return serial
    if problem.objective == "completion":
        total = sum((start + lengths[option]) * len(arrays.members_of[option]) for option, start in starts.items())
        least = [min(some) for some in of_task.values()]
        return max(last, min(serial, total - sum(least) + max(least, default=0)))
    return last


def _in_symmetric_order(
    arrays: Arrays, known: Schedule, starts: Mapping[int, int], alike: Sequence[_Alike]
) -> dict[int, _Started]:
    """task -> where it is in the known schedule; tasks that are alike are exchanged until they start in order."""
    found = {
        task: _Started(option=one.option, start=starts[one.option], devices=one.devices)
        for one in known.placements
        for task in arrays.members_of[one.option]
    }
    for group in alike:
        placed = sorted((found[task] for task, _ in group), key=lambda one: (one.start, one.option))
        keys = {option: key for _, options in group for key, option in options.items()}
        for (task, options), one in zip(group, placed, strict=True):
            found[task] = replace(one, option=options[keys[one.option]])
    return found


_Alike: TypeAlias = "list[tuple[int, dict[object, int]]]"
"""Tasks that are alike, each with its options by what is alike in them."""


def _symmetric(arrays: Arrays, kept: Sequence[int]) -> list[_Alike]:
    """Groups of tasks that are alike: the same options and deadline, and nothing held or shared."""
    problem = arrays.problem
    options_of: dict[int, list[int]] = {}
    for option in kept:
        for task in arrays.members_of[option]:
            options_of.setdefault(task, []).append(option)
    groups: dict[object, _Alike] = {}
    for task, options in options_of.items():
        if any(problem.options[one].held or arrays.members[one] > 1 for one in options):
            continue
        keys = {_key(arrays, one): one for one in options}
        # Where two options of a task are the same, it is not clear which is which.
        if len(keys) == len(options):
            due = problem.deadlines.get(problem.tasks[task])
            groups.setdefault((frozenset(keys), due), []).append((task, dict(keys)))
    return [group for group in groups.values() if len(group) > 1]


def _key(arrays: Arrays, option: int) -> object:
    one = arrays.problem.options[option]
    return one.kind, one.devices, one.seconds, int(arrays.place[option])


def _counts(arrays: Arrays, devices: Sequence[str]) -> dict[int, int]:
    """node -> how many of the devices are its own."""
    counts: dict[int, int] = {}
    for device in devices:
        counts[arrays.node_of[device]] = counts.get(arrays.node_of[device], 0) + 1
    return counts


def _loose_kinds(arrays: Arrays, kept: Sequence[int]) -> set[str]:
    """Kinds of several nodes of which any devices will do: no option minds which nodes its devices are of."""
    problem = arrays.problem
    loose = set()
    for kind in {node.kind for node in problem.nodes}:
        nodes = tuple(index for index, node in enumerate(problem.nodes) if node.kind == kind and node.devices)
        options = [one for one in kept if problem.options[one].kind == kind]
        alike = problem.objective != "cost" or len({problem.nodes[node].price_per_hour for node in nodes}) == 1
        free = all(
            (problem.options[one].spans or problem.options[one].devices == 1)
            and (problem.options[one].held or arrays.places[int(arrays.place[one])].nodes == nodes)
            for one in options
        )
        if len(nodes) > 1 and alike and free:
            loose.add(kind)
    return loose
