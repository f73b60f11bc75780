"""Problems, schedules and solutions as JSON, for another process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rota.errors import MessageError
from rota.schedule.problem import Node, Option, Placement, Problem, Schedule, Value
from rota.schedule.solve import Limit, Solved


def dump_problem(problem: Problem) -> dict[str, Any]:
    """What `load_problem` reads."""
    return {
        "options": [_plain(option, Option) for option in problem.options],
        "nodes": [_plain(node, Node) for node in problem.nodes],
        "objective": problem.objective,
        "deadlines": dict(problem.deadlines),
    }


def load_problem(data: Mapping[str, Any]) -> Problem:
    """The problem that `dump_problem` was given."""
    return Problem(
        options=tuple(
            Option(**{**one, "tasks": tuple(one["tasks"]), "held": tuple(one["held"])}) for one in data["options"]
        ),
        nodes=tuple(Node(**{**one, "devices": tuple(one["devices"])}) for one in data["nodes"]),
        objective=data["objective"],
        deadlines=data["deadlines"],
    )


def dump_schedule(schedule: Schedule) -> list[Any]:
    """What `load_schedule` reads."""
    return [[one.option, one.start_s, list(one.devices)] for one in schedule.placements]


def load_schedule(data: Sequence[Any]) -> Schedule:
    """The schedule that `dump_schedule` was given."""
    return Schedule(
        placements=tuple(
            Placement(option=option, start_s=start_s, devices=tuple(devices)) for option, start_s, devices in data
        )
    )


def dump_solved(solved: Solved) -> dict[str, Any]:
    """What `load_solved` reads."""
    return {
        "schedule": dump_schedule(solved.schedule),
        "value": _plain(solved.value, Value),
        "bound": solved.bound,
        "by": solved.by,
        "heuristics": {name: _plain(value, Value) for name, value in solved.heuristics.items()},
    }


def load_solved(data: Mapping[str, Any]) -> Solved:
    """The solution that `dump_solved` was given."""
    return Solved(
        schedule=load_schedule(data["schedule"]),
        value=Value(**data["value"]),
        bound=data["bound"],
        by=data["by"],
        heuristics={name: Value(**value) for name, value in data["heuristics"].items()},
    )


def dump_request(problem: Problem, limit: Limit, seed: int, hints: Sequence[Schedule]) -> bytes:
    """One line: what is to be solved."""
    request = {
        "problem": dump_problem(problem),
        "limit": _plain(limit, Limit),
        "seed": seed,
        "hints": [dump_schedule(hint) for hint in hints],
    }
    return json.dumps(request).encode() + b"\n"


def load_request(line: bytes) -> tuple[Problem, Limit, int, list[Schedule]]:
    """What `dump_request` was given; MessageError if it is something else."""
    try:
        data = json.loads(line)
        hints = [load_schedule(one) for one in data["hints"]]
        return load_problem(data["problem"]), Limit(**data["limit"]), int(data["seed"]), hints
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError(f"a request to solve a schedule cannot be read: {error}") from error


def _plain(value: Any, of: Any) -> dict[str, Any]:
    """The fields alone: asdict copies every string of every tuple, which is slow for 10,000 tasks."""
    return {name: getattr(value, name) for name in of.__dataclass_fields__}
