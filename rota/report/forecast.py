"""What is told of a schedule that was only thought of: the options of each task, a timeline, and what else could be."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rota.cluster.device import format_bytes
from rota.cluster.file import WhatIf
from rota.report.format import duration
from rota.report.gantt import gantt_lines
from rota.report.table import Table
from rota.schedule.problem import Problem, ends_of

if TYPE_CHECKING:
    from rota.profile.estimate import Estimate
    from rota.schedule.solve import Solved

_SIMPLE = ("max", "min", "random", "optimus")
_MOST_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A task of the table."""

    name: str
    steps: int
    alike: Hashable
    """Equal for tasks that cost the same."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cluster, what tasks cost on it, and what was found."""

    words: str
    """What the cluster is."""
    problem: Problem
    estimates: Mapping[str, Sequence[Estimate]]
    """task -> the best few ways of each count; the options are the best of each."""
    solved: Solved
    notes: tuple[tuple[str, str], ...] = ()
    """(term, words) of what else should be told."""


def forecast_lines(
    tasks: Sequence[Listed], base: Case, cases: Sequence[tuple[WhatIf, Case]] = (), *, width: int
) -> list[str]:
    """For people."""
    solved = base.solved
    facts = outcome_facts(base)
    lines = [f"{facts[0][0]:10} {facts[0][1]}", "", str(options_table(tasks, base)), ""]
    lines += [*gantt_lines(base.problem, solved.schedule, width), ""]
    lines += [f"{term:10} {words}" for term, words in facts[1:]]
    for asked, case in cases:
        saved = solved.value.objective - case.solved.value.objective
        share = saved / solved.value.objective if solved.value.objective else 0.0
        words = (
            f"{_amount(case.problem, case.solved.value.objective)}, saves {_amount(case.problem, saved)} ({share:.0%})"
        )
        lines.append(f"what if    {asked.text}: {words}{f'; {asked.note}' if asked.note else ''}")
    return lines


def outcome_facts(case: Case) -> list[tuple[str, str]]:
    """(term, words) of what came out."""
    problem, solved = case.problem, case.solved
    facts = [("cluster", case.words), ("makespan", duration(solved.value.makespan_s))]
    if problem.objective != "makespan":
        facts.append((problem.objective, _amount(problem, solved.value.objective)))
    if solved.value.late_s > 0:
        late = ", ".join(f"{task} by {duration(late_s)}" for task, late_s in _late(case).items())
        facts.append(("late", f"{duration(solved.value.late_s)} in all behind the deadlines: {late}"))
    bound = _amount(problem, solved.bound)
    facts.append(("bound", f"{bound}; the schedule is within {max(0.0, solved.gap):.1%} of the best there can be"))
    simple = ", ".join(f"{name} {_amount(problem, value)}" for name, value in _simple(case).items())
    facts.append(("otherwise", simple))
    return facts + list(case.notes)


def _late(case: Case) -> dict[str, float]:
    """task -> by how much it misses its deadline, the worst first"""
    ends = ends_of(case.problem, case.solved.schedule)
    found = {task: ends[task] - by_s for task, by_s in case.problem.deadlines.items() if ends.get(task, 0.0) > by_s}
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def best_of_each(found: Iterable[Estimate]) -> list[Estimate]:
    """The fastest of each kind and number of devices: no other can be in a better schedule."""
    best: dict[tuple[str, int, bool], Estimate] = {}
    for one in found:
        key = (one.kind, one.devices, one.spans)
        if key not in best or one.step_s < best[key].step_s:
            best[key] = one
    return list(best.values())


def options_table(tasks: Sequence[Listed], case: Case) -> Table:
    """The best way of each number of devices, for each group of tasks that cost the same; the chosen are marked."""
    chosen = _chosen(case)
    groups: dict[Any, list[Listed]] = {}
    for one in tasks:
        groups.setdefault((one.alike, one.steps), []).append(one)
    rows = []
    for members in groups.values():
        names = [one.name for one in members]
        first = _names(names)
        ways = best_of_each(case.estimates[names[0]])
        taken = {chosen[name] for name in names}
        ways += [
            way
            for way in case.estimates[names[0]]
            if way not in ways and (way.label, way.kind, way.devices, way.spans) in taken
        ]
        for way in ways:
            by = [name for name in names if chosen[name] == (way.label, way.kind, way.devices, way.spans)]
            rows.append(
                (
                    "*" if by else "",
                    first,
                    way.label + (" over nodes" if way.spans else ""),
                    str(way.devices),
                    way.kind,
                    f"{way.step_s:.3g} s" + ("" if way.measured else " predicted"),
                    format_bytes(way.memory_bytes) if way.memory_bytes else "",
                    duration(way.start_s + members[0].steps * way.step_s),
                    "" if not by else "all" if by == names and len(names) > 1 else _names(by),
                )
            )
            first = ""
    columns = ("", "tasks", "strategy", "devices", "kind", "step", "memory", "in all", "chosen by")
    return Table(columns=columns, rows=tuple(rows))


def _names(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _chosen(case: Case) -> dict[str, tuple[str, str, int, bool]]:
    """task -> the way that the schedule has for it."""
    found = {}
    for placement in case.solved.schedule.placements:
        option = case.problem.options[placement.option]
        for task in option.tasks:
            found[task] = (option.label, option.kind, option.devices, option.spans)
    return found


def _amount(problem: Problem, value: float) -> str:
    return f"{value:.2f}" if problem.objective == "cost" else duration(value)


def _simple(case: Case) -> dict[str, float]:
    """What the simple ways come to, where they have a schedule."""
    return {name: case.solved.heuristics[name].objective for name in _SIMPLE if name in case.solved.heuristics}


def forecast_json(tasks: Sequence[Listed], base: Case, cases: Sequence[tuple[WhatIf, Case]] = ()) -> dict[str, Any]:
    """For programs."""
    chosen = _chosen(base)
    ends = ends_of(base.problem, base.solved.schedule)
    return {
        "cluster": [
            {"name": one.name, "kind": one.kind, "devices": len(one.devices), "price_per_hour": one.price_per_hour}
            for one in base.problem.nodes
        ],
        "objective": base.problem.objective,
        "late_s": base.solved.value.late_s,
        "late": _late(base),
        "tasks": [
            {
                "name": one.name,
                "steps": one.steps,
                "options": [
                    {
                        "strategy": way.label,
                        "kind": way.kind,
                        "devices": way.devices,
                        "spans": way.spans,
                        "step_s": way.step_s,
                        "start_s": way.start_s,
                        "measured": way.measured,
                        "memory_bytes": way.memory_bytes,
                        "seconds": way.start_s + one.steps * way.step_s,
                        "chosen": chosen[one.name] == (way.label, way.kind, way.devices, way.spans),
                    }
                    for way in base.estimates[one.name]
                ],
            }
            for one in tasks
        ],
        "schedule": [
            {
                "tasks": list(base.problem.options[one.option].tasks),
                "strategy": base.problem.options[one.option].label,
                "start_s": one.start_s,
                "end_s": ends[base.problem.options[one.option].tasks[0]],
                "devices": list(one.devices),
            }
            for one in base.solved.schedule.placements
        ],
        **_outcome(base),
        "simple": _simple(base),
        "what_if": [
            {
                "text": asked.text,
                "note": asked.note,
                **_outcome(case),
                "saved": base.solved.value.objective - case.solved.value.objective,
                "saved_makespan_s": base.solved.value.makespan_s - case.solved.value.makespan_s,
            }
            for asked, case in cases
        ],
    }


def _outcome(case: Case) -> dict[str, Any]:
    solved = case.solved
    return {
        "makespan_s": solved.value.makespan_s,
        "value": solved.value.objective,
        "bound": solved.bound,
        "gap": solved.gap,
        "found_by": solved.by,
    }
