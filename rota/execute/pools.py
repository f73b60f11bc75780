"""Tasks that share devices shard by shard: when that is worth it, and the policy that lets them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rota.execute.policy import Decision, OpenPool, Policy, View
from rota.execute.record import TaskRecord
from rota.execute.states import TaskState
from rota.profile.estimate import Estimate
from rota.schedule.problem import Node, Problem, Schedule
from rota.techniques import POOL

_SPILLS = "spill"
_REACHED = 0.85
"""Of what the processors or the disk could do, so much is thought to get done: three tasks given 44 s took 46."""
_START_S = 3.0
"""The processes of a pool are started for it."""
_WORTH = 0.97
"""Of what the schedule takes without it."""


@dataclass(frozen=True, kw_only=True)
class PoolChoice:
    """Tasks that share all devices, before the others run."""

    tasks: tuple[str, ...]
    pool_s: float
    makespan_s: float
    """With all others,"""
    instead_s: float
    """and what it would be otherwise."""


def pool_of(
    problem: Problem,
    schedule: Schedule,
    *,
    estimates: Mapping[str, Sequence[Estimate]],
    steps: Mapping[str, float],
    nodes: Sequence[Node],
    makespan_s: float,
    others_s: Callable[[Collection[str]], float],
) -> PoolChoice | None:
    """The tasks that spill as a pool, if that is worth it; `others_s` tells what the tasks beside some take."""
    if len(nodes) != 1 or nodes[0].kind != "cpu" or len(nodes[0].devices) < 2 or problem.objective != "makespan":
        return None
    found: dict[str, Estimate] = {}
    for place in schedule.placements:
        option = problem.options[place.option]
        if _SPILLS not in option.label:
            continue
        for task in option.tasks:
            known = [one for one in estimates[task] if one.label == _SPILLS and one.compute_s]
            if known:
                found[task] = known[0]
    if len(found) < 2:
        return None
    devices = len(nodes[0].devices)
    computed_s = {task: steps[task] * one.compute_s for task, one in found.items()}
    moved_s = {task: steps[task] * one.moves_s for task, one in found.items()}
    # The devices compute side by side and have one disk; a task is in one place at a time.
    work_s = max(sum(computed_s.values()) / devices, sum(moved_s.values()), *computed_s.values())
    pool_s = sum(one.start_s + _START_S for one in found.values()) / devices + work_s / _REACHED
    whole_s = pool_s + others_s(found)
    if whole_s > _WORTH * makespan_s:
        return None
    return PoolChoice(tasks=tuple(found), pool_s=pool_s, makespan_s=whole_s, instead_s=makespan_s)


class Sharing:
    """Opens a pool of some tasks when all devices are free, before the others; then another policy decides."""

    def __init__(self, within: Policy, *, tasks: set[str], devices: Sequence[str], chosen: bool) -> None:
        """`tasks` may be looked at by the other policy, too; `chosen` if they could run in other ways."""
        self._within = within
        self._tasks = tasks
        self._devices = tuple(devices)
        self._chosen = chosen

    def decide(self, view: View) -> Sequence[Decision]:
        """The pool first; while it runs, nothing else does."""
        pooled = tuple(one.name for one in view.waiting if one.name in self._tasks)
        if any(
            task.state is TaskState.RUNNING and task.strategy == POOL and task.name in self._tasks
            for task in view.record.tasks.values()
        ):
            return ()
        if pooled:
            if set(view.free) >= set(self._devices):
                return (OpenPool(tasks=pooled, devices=self._devices),)
            return ()
        others = [one for one in view.waiting if one.name not in self._tasks]
        return self._within.decide(replace(view, waiting=others))

    def another_way(self, task: TaskRecord) -> str:
        """One that the pool cannot run goes on without it, if it may."""
        if task.name in self._tasks and self._chosen:
            self._tasks.discard(task.name)
            return _SPILLS
        return self._within.another_way(task) if task.name not in self._tasks else ""
