"""Fake sweeps on fake clusters: tasks that take the time they are said to take, run by the real controller."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rota.execute.backends.simulated import SimulatedBackend, SimulatedTask
from rota.execute.policy import Policy
from rota.execute.record import RunRecord
from rota.execute.scheduled import Scheduled
from rota.execute.solvers import InlineSolver
from rota.profile.estimate import Estimate
from rota.schedule.problem import Node, Objective, Problem, Schedule
from rota.schedule.replan import Left, intents_of, problem_of
from rota.schedule.solve import Limit, solve
from rota.sweep import Sweep
from rota.task import Task
from rota.testing.runs import controlling

_STEPS = 1000
"""Of a task that is replayed: a checkpoint is taken after each fortieth of it."""


@dataclass(frozen=True, kw_only=True)
class FakeTask:
    """A task by what it takes."""

    name: str
    steps: int
    ways: tuple[Estimate, ...]
    """How it can run, and what a step then really takes."""
    alike: str = ""
    """Tasks with the same word cost the same."""


def random_tasks(seed: int, *, tasks: int, widths: Sequence[int], kind: str = "fake") -> list[FakeTask]:
    """Tasks of unlike length that gain unlike much from more devices."""
    chance = random.Random(seed)
    found = []
    for number in range(tasks):
        serial = chance.uniform(0.02, 0.6)
        step_s = chance.uniform(0.2, 2.0)
        ways = tuple(
            Estimate(
                label=f"way{width}",
                kind=kind,
                devices=width,
                step_s=step_s * (serial + (1 - serial) / width) * chance.uniform(0.95, 1.1),
                spread=0.05,
                memory_bytes=0,
                measured=True,
                start_s=1.0,
            )
            for width in widths
        )
        found.append(FakeTask(name=f"t{number}", steps=chance.randint(200, 2000), ways=ways, alike=f"t{number}"))
    return found


def misjudged(tasks: Sequence[FakeTask], seed: int, *, most: float, each_way: bool) -> dict[str, tuple[Estimate, ...]]:
    """Estimates that are wrong by up to `most`: for all ways of a task alike, or for each way by its own."""
    chance = random.Random(seed)
    found = {}
    for task in tasks:
        common = chance.uniform(1 - most, 1 + most)
        found[task.name] = tuple(
            replace(
                way,
                step_s=way.step_s * (chance.uniform(1 - most, 1 + most) if each_way else common),
                measured=not each_way,  # what was measured is wrong for all ways alike, as on a device that turns slow
            )
            for way in task.ways
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Played:
    """How a run went."""

    makespan_s: float
    switches: int
    record: RunRecord


def play(
    tasks: Sequence[FakeTask],
    nodes: Sequence[Node],
    *,
    estimates: Mapping[str, tuple[Estimate, ...]] | None = None,
    replan: bool = True,
    steps: int = 2,
    objective: Objective = "makespan",
    policy: Policy | None = None,
    start_s: float = 1.0,
) -> Played:
    """Run tasks on the virtual clock, by a schedule that is made from the estimates, or by a policy."""
    known = dict(estimates or {task.name: task.ways for task in tasks})
    truth = {task.name: task for task in tasks}
    sweep = Sweep(tasks=tuple(_task(one) for one in tasks))
    scheduled = policy or _scheduled(tasks, nodes, known, replan=replan, steps=steps, objective=objective)

    def plan_of(task: Task, devices: int) -> SimulatedTask:
        one = truth[task.name]
        way = next(way for way in one.ways if way.label == task.strategy and way.devices == devices)
        every = max(1, one.steps // 40)
        return SimulatedTask(steps=one.steps, step_s=way.step_s, report_every=every, save_every=every)

    devices = [device for node in nodes for device in node.devices]
    backend = SimulatedBackend(plan_of, start_s=start_s)
    with tempfile.TemporaryDirectory() as root:
        with controlling(sweep, Path(root) / "run", backend, devices, durable=False, policy=scheduled) as controller:
            controller.run()
        record = controller.record
    ends = [span.end_s or 0.0 for task in record.tasks.values() for span in task.spans]
    return Played(makespan_s=max(ends), switches=getattr(scheduled, "switches", 0), record=record)


def replay(problem: Problem, schedule: Schedule, *, replan: bool = False, steps: int = 2) -> Played:
    """Run a schedule on the virtual clock, each task as long as its option says; `replan` lets it be improved."""
    tasks = []
    for task in problem.tasks:
        options = [problem.options[index] for index in problem.options_of[task]]
        ways = tuple(
            Estimate(
                label=option.label,
                kind=option.kind,
                devices=option.devices,
                step_s=option.seconds / _STEPS,
                spread=0.05,
                memory_bytes=option.memory_bytes,
                measured=True,
                spans=option.spans,
            )
            for option in options
        )
        tasks.append(FakeTask(name=task, steps=_STEPS, ways=ways))
    policy = Scheduled(
        estimates={task.name: task.ways for task in tasks},
        classes={task.name: task.name for task in tasks},
        nodes=problem.nodes,
        solver=InlineSolver(steps=steps),
        objective=problem.objective,
        intents=intents_of(problem, schedule, now_s=0.0),
        replan=replan,
    )
    return play(tasks, problem.nodes, policy=policy, start_s=0.0)


def _scheduled(
    tasks: Sequence[FakeTask],
    nodes: Sequence[Node],
    known: Mapping[str, tuple[Estimate, ...]],
    *,
    replan: bool,
    steps: int,
    objective: Objective,
) -> Scheduled:
    left = [Left(task=task.name, steps=float(task.steps), estimates=known[task.name]) for task in tasks]
    problem = problem_of(left, nodes, objective=objective)
    first = solve(problem, limit=Limit(steps=steps), clock=lambda: 0.0)
    return Scheduled(
        estimates=known,
        classes={task.name: task.alike or task.name for task in tasks},
        nodes=nodes,
        solver=InlineSolver(steps=steps),
        objective=objective,
        intents=intents_of(problem, first.schedule, now_s=0.0),
        replan=replan,
    )


def _task(one: FakeTask) -> Task:
    def nothing(*_: Any) -> Any:
        raise AssertionError("a fake task has no code")

    return Task(name=one.name, model=nothing, data=nothing, optimizer=nothing, loss=nothing, steps=one.steps)
