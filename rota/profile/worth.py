"""Which way of running a task is worth measuring: only what can move the schedule by more than a few percent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rota.profile.estimate import Estimate
from rota.schedule.heuristics import HEURISTICS
from rota.schedule.options import option_of
from rota.schedule.problem import Node, Objective, Problem, Schedule, value_of

MATTERS = 0.03
"""Of the objective."""
_ROUGHLY = ("moldable", "longest_first")
_IDEAL = "ideal"


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Tasks that cost the same, and the ways in which they can run."""

    name: str
    steps: Mapping[str, int]
    """task -> how many it takes"""
    estimates: tuple[Estimate, ...]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A way that should be measured."""

    alike: str
    estimate: Estimate


def next_trial(
    classes: Sequence[Alike],
    nodes: Sequence[Node],
    *,
    objective: Objective = "makespan",
    besides: Collection[Trial] = (),
    among: Collection[str] | None = None,
) -> Trial | None:
    """What to measure next, `among` these; None if nothing uncertain matters. `besides` is being measured."""
    busy = {(one.alike, one.estimate.label, one.estimate.devices) for one in besides}
    options = _Options(classes)
    problem, schedule = _solved(options, nodes, objective)
    if schedule is None:
        return None
    now = value_of(problem, schedule).objective
    open_ = [
        (one, estimate)
        for one in classes
        for estimate in one.estimates
        if not estimate.measured
        and (among is None or one.name in among)
        and (one.name, estimate.label, estimate.devices) not in busy
    ]
    chosen = {(options.owners[place.option][0].name, options.owners[place.option][1]) for place in schedule.placements}
    first = [(one, estimate) for one, estimate in open_ if (one.name, estimate) in chosen]
    if first:
        one, estimate = max(first, key=lambda pair: sum(pair[0].steps.values()) * pair[1].step_s * pair[1].devices)
        return Trial(alike=one.name, estimate=estimate)
    best: tuple[float, Trial] | None = None
    for one, estimate in open_:
        hopeful = replace(estimate, step_s=estimate.step_s * (1 - estimate.spread))
        other, found = _solved(_Options(classes, instead={(one.name, estimate): hopeful}), nodes, objective)
        if found is None:
            continue
        gain = 1 - value_of(other, found).objective / now if now else 0.0
        if gain > MATTERS and (best is None or gain > best[0]):
            best = (gain, Trial(alike=one.name, estimate=estimate))
    return None if best is None else best[1]


def worth_searching(
    classes: Sequence[Alike],
    nodes: Sequence[Node],
    counts: Mapping[str, Sequence[int]],
    *,
    objective: Objective = "makespan",
) -> list[str]:
    """The classes for which it may matter how they run on several devices, the most promising first.

    A way on k devices is thought to be k times as fast, which is seldom more than true. If even that moves the schedule
    by less than a few percent, nobody need search for it.
    """
    problem, schedule = _solved(_Options(classes), nodes, objective)
    if schedule is None:
        return [one.name for one in classes]
    now = value_of(problem, schedule).objective
    hopeful = [_with_ideals(one, counts[one.name]) for one in classes]
    options = _Options(hopeful)
    other, found = _solved(options, nodes, objective)
    if found is None or value_of(other, found).objective > (1 - MATTERS) * now:
        return []
    used: dict[str, float] = {}
    for place in found.placements:
        one, estimate = options.owners[place.option]
        if estimate.label == _IDEAL:
            used[one.name] = used.get(one.name, 0.0) + other.options[place.option].area_s
    return sorted(used, key=lambda name: -used[name])


def _with_ideals(one: Alike, counts: Sequence[int]) -> Alike:
    """With a way on each number of devices that has none, as good as can be."""
    known = {estimate.devices for estimate in one.estimates}
    best = min(one.estimates, key=lambda estimate: estimate.step_s * estimate.devices)
    ideals = [
        replace(best, label=_IDEAL, devices=count, step_s=best.step_s * best.devices / count, measured=False)
        for count in counts
        if count not in known
    ]
    return replace(one, estimates=(*one.estimates, *ideals))


class _Options:
    """The options of all tasks, and whose they are."""

    def __init__(
        self, classes: Sequence[Alike], *, instead: Mapping[tuple[str, Estimate], Estimate] | None = None
    ) -> None:
        self.options = []
        self.owners: list[tuple[Alike, Estimate]] = []
        for one in classes:
            for task, steps in one.steps.items():
                for estimate in one.estimates:
                    taken = (instead or {}).get((one.name, estimate), estimate)
                    self.options.append(option_of(task, taken, steps=steps))
                    self.owners.append((one, estimate))


def _solved(options: _Options, nodes: Sequence[Node], objective: Objective) -> tuple[Problem, Schedule | None]:
    problem = Problem(options=tuple(options.options), nodes=tuple(nodes), objective=objective)
    if not all(any(problem.can_run(problem.options[i]) for i in problem.options_of[task]) for task in problem.tasks):
        return problem, None
    found = [HEURISTICS[name](problem, 0) for name in _ROUGHLY]
    return problem, min(found, key=lambda one: value_of(problem, one), default=None)
