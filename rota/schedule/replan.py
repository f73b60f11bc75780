"""What is left to schedule in the midst of a run, and whether another schedule is worth the switches that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rota.profile.estimate import Estimate
from rota.schedule.options import option_of
from rota.schedule.problem import Node, Objective, Option, Placement, Problem, Schedule, value_of

_NEAR = 3.0
"""A task that ends within so many times the cost of a switch is left alone."""
_GAIN = 0.01
"""Of the objective: less is not worth a change of plans."""
_DOUBT = 0.25
"""Of what estimates were wrong by: so much of the objective must a switch gain, beyond its cost."""
_LEAST_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class Left:
    """A task that has not ended, and the ways in which it can go on."""

    task: str
    steps: float
    """How many it has still to take."""
    estimates: tuple[Estimate, ...]
    label: str = ""
    """How it runs now."""
    devices: tuple[str, ...] = ()
    """Where it runs now; empty if it waits."""
    switch_s: float = 0.0
    """What it takes to leave its devices and to be ready elsewhere, beside the start there."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What is planned for a task."""

    task: str
    label: str
    devices: tuple[str, ...]
    start_s: float


def problem_of(
    tasks: Sequence[Left],
    nodes: Sequence[Node],
    *,
    objective: Objective = "makespan",
    deadlines: Mapping[str, float] | None = None,
) -> Problem:
    """The problem of going on from here: what runs may go on as it does, at no cost, or change, at its cost."""
    options: list[Option] = []
    for one in tasks:
        present = _present(one)
        if present is not None:
            options.append(present)
            if present.seconds <= _NEAR * one.switch_s:
                continue
        for estimate in one.estimates:
            options.append(
                option_of(one.task, estimate, steps=one.steps, more_s=max(one.switch_s, _LEAST_S))
                if one.devices
                else option_of(one.task, estimate, steps=max(one.steps, 1.0), more_s=_LEAST_S)
            )
    known = {option.tasks[0] for option in options}
    largest = max((len(node.devices) for node in nodes), default=0)
    return Problem(
        # What no node has room for spans several, or does not run at all.
        options=tuple(replace(one, spans=one.spans or one.devices > largest) for one in options),
        nodes=tuple(nodes),
        objective=objective,
        deadlines={task: by_s for task, by_s in (deadlines or {}).items() if task in known},
    )


def _present(one: Left) -> Option | None:
    """Going on where it is."""
    if not one.devices:
        return None
    for estimate in one.estimates:
        if estimate.label == one.label and estimate.devices == len(one.devices):
            option = option_of(one.task, replace(estimate, start_s=0.0), steps=one.steps)
            return replace(option, seconds=max(option.seconds, _LEAST_S), held=one.devices)
    return None


def continued(problem: Problem, intents: Sequence[Intent]) -> Schedule | None:
    """The schedule that the present intentions amount to; None if they do not cover the problem's tasks."""
    free_s: dict[str, float] = {}
    placements = []
    planned = {one.task: one for one in intents}
    for task in problem.tasks:
        held = next((i for i in problem.options_of[task] if problem.options[i].held), None)
        if held is not None:
            option = problem.options[held]
            placements.append(Placement(option=held, start_s=0.0, devices=option.held))
            free_s |= dict.fromkeys(option.held, option.seconds)
            planned.pop(task, None)
    for intent in sorted(planned.values(), key=lambda one: (one.start_s, one.task)):
        index = _option_of(problem, intent)
        if index is None:
            continue
        start_s = max((free_s.get(device, 0.0) for device in intent.devices), default=0.0)
        placements.append(Placement(option=index, start_s=start_s, devices=intent.devices))
        free_s |= dict.fromkeys(intent.devices, start_s + problem.options[index].seconds)
    if len(placements) != len(problem.tasks):
        return None
    return Schedule.of(placements)


def _option_of(problem: Problem, intent: Intent) -> int | None:
    for index in problem.options_of.get(intent.task, ()):
        option = problem.options[index]
        if option.label == intent.label and option.devices == len(intent.devices) and not option.held:
            return index
    return None


def intents_of(problem: Problem, schedule: Schedule, *, now_s: float) -> tuple[Intent, ...]:
    """What a schedule means for each task."""
    return tuple(
        Intent(
            task=task,
            label=problem.options[one.option].label,
            devices=one.devices,
            start_s=now_s + one.start_s,
        )
        for one in schedule.placements
        for task in problem.options[one.option].tasks
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether to change plans."""

    adopt: bool
    gain: float
    """Of the objective: seconds, or money."""
    switched: tuple[str, ...]
    """Tasks that run and would have to change."""


def judge(
    problem: Problem, present: Schedule | None, found: Schedule, *, switch_s: Mapping[str, float], doubt: float = 0.0
) -> Verdict:
    """Change plans if the forecast gain exceeds the cost of the switches, or if there is no plan.

    `doubt` is by how much estimates have turned out wrong: the less they can be believed, the more a switch must gain.
    """
    switched = tuple(
        task
        for one in found.placements
        for task in problem.options[one.option].tasks
        if not problem.options[one.option].held and any(problem.options[i].held for i in problem.options_of[task])
    )
    if present is None:
        return Verdict(adopt=True, gain=0.0, switched=switched)
    old, new = value_of(problem, present), value_of(problem, found)
    gain = old.objective - new.objective
    if new.late_s < old.late_s:
        return Verdict(adopt=old.late_s - new.late_s > _GAIN * old.late_s, gain=gain, switched=switched)
    cost = sum(switch_s.get(task, 0.0) for task in switched)
    if problem.objective == "completion":
        cost /= max(1, len(problem.tasks))
    elif problem.objective == "cost":
        cost = 0.0  # it is in the price of the options
    least = max(cost, (_GAIN + _DOUBT * doubt) * old.objective) if switched else 1e-9
    return Verdict(adopt=new < old and gain > least, gain=gain, switched=switched)


def corrected(estimates: Sequence[Estimate], *, label: str, devices: int, live_s: float) -> tuple[Estimate, ...]:
    """Estimates after a step of one way was seen to take so long.

    What is seen is taken as it is. What it says of the other ways depends on what was known: where a measured step was
    wrong, the device or the data differ, which concerns all ways alike. A wrong prediction is half that way's own, and
    says nothing of ways that were measured.
    """
    seen = next((one for one in estimates if one.label == label and one.devices == devices), None)
    if seen is None or live_s <= 0 or seen.step_s <= 0:
        return tuple(estimates)
    ratio = live_s / seen.step_s
    others = ratio if seen.measured else ratio**0.5
    return tuple(
        replace(one, step_s=live_s, measured=True, spread=min(one.spread, 0.05))
        if one is seen
        else (one if one.measured and not seen.measured else replace(one, step_s=one.step_s * others))
        for one in estimates
    )
