"""Decides before a run: what the tasks cost, and which runs how, where and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rota.cluster.device import Cluster, format_bytes
from rota.errors import InputError
from rota.execute.pools import PoolChoice, pool_of
from rota.execute.profiler import Prober, Profile, Profiler, Progress
from rota.execute.solvers import ChildSolver
from rota.profile.estimate import WORTH_S, Estimate
from rota.profile.store import EstimateStore
from rota.report.format import duration
from rota.schedule.problem import Node, Objective, Problem
from rota.schedule.replan import Intent, Left, intents_of, problem_of
from rota.schedule.solve import Solved
from rota.store.cache import cache_folder
from rota.sweep import Sweep
from rota.task import Task

_SHARE, _MOST_S = 0.01, 10.0
"""Of what the tasks take: so long may the first schedule be searched for."""
_POLL_S = 0.05
_TRIALS = 3
"""How often a schedule is made anew because a way that it rests on was timed and is slower than predicted."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is known and planned before a run."""

    profile: Profile
    nodes: tuple[Node, ...]
    problem: Problem
    solved: Solved | None
    """None if nothing is known of any task."""
    solving_s: float
    pool: PoolChoice | None = None
    """The tasks that share all devices before the others run, where that takes less time."""

    @property
    def intents(self) -> tuple[Intent, ...]:
        """What is planned for each task; starts count from the beginning."""
        return () if self.solved is None else intents_of(self.problem, self.solved.schedule, now_s=0.0)

    def sentence(self) -> str:
        """What came out, in one line."""
        profile = self.profile
        spent = f"profiled in {duration(profile.spent_s)}" if profile.looked or profile.tried else "known from before"
        if self.solved is None:
            return f"nothing is known of the tasks ({spent}); the longest go first"
        value, count = self.solved.value, len(self.problem.tasks)
        if self.pool is not None:
            return (
                f"{count} tasks in about {duration(self.pool.makespan_s)} ({spent}): {', '.join(self.pool.tasks)} "
                f"share all devices, shard by shard; without that it would be {duration(self.pool.instead_s)}"
            )
        return (
            f"{count} task{'s' * (count != 1)} in about {duration(value.makespan_s)} ({spent}); "
            f"the schedule is within {100 * max(0.0, self.solved.gap):.1f}% of the best possible"
        )


def nodes_of(cluster: Cluster) -> tuple[Node, ...]:
    """A cluster as the scheduler sees it: the devices of a kind in one machine are a node."""
    groups: dict[tuple[str, str], list[str]] = {}
    memory: dict[tuple[str, str], int] = {}
    for device in cluster.devices:
        key = (device.kind, f"{device.node} {device.label}")
        groups.setdefault(key, []).append(device.name)
        memory[key] = min(memory.get(key, device.memory_bytes), device.memory_bytes)
    return tuple(
        Node(
            name=f"{kind} {place}" if place else kind,
            kind=kind,
            devices=tuple(names),
            memory_bytes=memory[(kind, label)],
            price_per_hour=1.0,
        )
        for place, ((kind, label), names) in enumerate(groups.items())
    )


def counts_of(task: Task, width: int, total: int) -> tuple[int, ...]:
    """The numbers of devices that a task may get: powers of two and all of them, unless it says how many."""
    if task.devices is not None or task.strategy != "auto":
        return (width,)
    powers = [1 << power for power in range(total.bit_length()) if 1 << power <= total]
    return tuple(sorted({*powers, total}))


def forecast(
    sweep: Sweep,
    *,
    cluster: Cluster,
    backend: Prober,
    folder: Path,
    widths: Mapping[str, int],
    done: Mapping[str, int] | None = None,
    objective: Objective = "makespan",
    deadlines: Mapping[str, float] | None = None,
    progress: Progress = lambda what, done, total: None,
    interrupted: Callable[[], bool] = lambda: False,
    seconds: float | None = None,
    thorough: bool = False,
    worth_s: float = WORTH_S,
) -> Forecast:
    """Profile the tasks and schedule them; `done` is how many steps tasks have taken already.

    `thorough` also looks for ways that would not change the schedule; tasks that one device trains in `worth_s` are not
    cut.
    """
    nodes = nodes_of(cluster)
    profiler = Profiler(
        backend=backend,
        devices=cluster.devices,
        nodes=nodes,
        folder=folder,
        store=EstimateStore.of(cache_folder(), cluster.devices),
        objective=objective,
        thorough=thorough,
        worth_s=worth_s,
        progress=progress,
        interrupted=interrupted,
    )
    total = len(cluster.devices)
    profile = profiler.run(list(sweep), lambda task: counts_of(task, widths[task.name], total))
    solving_s = 0.0
    for attempt in range(_TRIALS + 1):
        left = _left_of(sweep, profile, done or {})
        if not left and profile.unfit:  # otherwise the others go on, and it fails by itself
            name, why = next(iter(profile.unfit.items()))
            raise InputError(f"task {name!r} fits nowhere: {why}; give it more memory (--memory) or more devices")
        problem = problem_of(left, nodes, objective=objective, deadlines=deadlines)
        _check_fits(problem, nodes, profile.estimates)
        begun_s = time.monotonic()
        solved = None if not left or interrupted() else _solved(problem, seconds, progress, interrupted)
        solving_s += time.monotonic() - begun_s
        again = None
        if solved is not None and attempt < _TRIALS:  # what it rests on is to be measured, not predicted
            again = profiler.try_chosen(_chosen_beside_measured(problem, solved, profile))
        if again is None:
            break
        profile = again
    pool = None
    if solved is not None:
        pool = pool_of(
            problem,
            solved.schedule,
            estimates=profile.estimates,
            steps={one.task: one.steps for one in left},
            nodes=nodes,
            makespan_s=solved.value.makespan_s,
            others_s=lambda tasks: _others_s([one for one in left if one.task not in tasks], nodes, interrupted),
        )
    return Forecast(profile=profile, nodes=nodes, problem=problem, solved=solved, solving_s=solving_s, pool=pool)


def _others_s(left: Sequence[Left], nodes: Sequence[Node], interrupted: Callable[[], bool]) -> float:
    """What some tasks take by themselves."""
    if not left:
        return 0.0
    found = _solved(problem_of(left, nodes), 0.0, lambda what, done, total: None, interrupted)
    return 0.0 if found is None else found.value.makespan_s


def _left_of(sweep: Sweep, profile: Profile, done: Mapping[str, int]) -> list[Left]:
    """What is to be done of the tasks of which something is known."""
    return [
        Left(
            task=task.name,
            steps=float(max(1, profile.steps[task.name] - done.get(task.name, 0))),
            estimates=profile.estimates[task.name],
        )
        for task in sweep
        if task.name in profile.estimates
    ]


def _chosen_beside_measured(problem: Problem, solved: Solved, profile: Profile) -> set[tuple[str, str, int]]:
    """The ways that a schedule chose, of tasks that have a way that was measured: its gain is to be real."""
    found = set()
    for place in solved.schedule.placements:
        option = problem.options[place.option]
        for task in option.tasks:
            if any(one.measured for one in profile.estimates[task]):
                found.add((task, option.label, option.devices))
    return found


def _check_fits(problem: Problem, nodes: Sequence[Node], estimates: Mapping[str, tuple[Estimate, ...]]) -> None:
    for task in problem.tasks:
        if not any(problem.can_run(problem.options[index]) for index in problem.options_of[task]):
            least = min(estimates[task], key=lambda one: (one.memory_bytes, one.devices))
            most = max((node.memory_bytes or 0 for node in nodes), default=0)
            raise InputError(
                f"task {task!r} fits nowhere: its smallest way to run, {least.label}, needs {least.devices} devices "
                f"with {format_bytes(least.memory_bytes)} each, and there are "
                f"{sum(len(node.devices) for node in nodes)} with {format_bytes(most)}"
            )


def _solved(
    problem: Problem, seconds: float | None, progress: Progress, interrupted: Callable[[], bool]
) -> Solved | None:
    """A schedule that took little time to find, compared with what it is for."""
    solver = ChildSolver()
    try:
        solver.ask(problem, hints=(), seconds=0.0)
        first = solver.answer()
        assert first is not None
        limit_s = min(_MOST_S, _SHARE * first.value.makespan_s) if seconds is None else seconds
        progress("scheduling", 0, 1)
        solver.ask(problem, hints=(first.schedule,), seconds=limit_s)
        while (found := solver.answer()) is None:
            if interrupted():
                return first
            time.sleep(_POLL_S)
        progress("scheduling", 1, 1)
        return found
    finally:
        solver.close()
