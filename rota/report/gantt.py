"""A schedule as text: a row for each device, or for each node where devices are many, time from left to right."""

from __future__ import annotations

import string
from collections.abc import Sequence

from rota.report.format import duration
from rota.schedule.problem import Placement, Problem, Schedule, makespan_s

_SIGNS = string.ascii_lowercase + string.ascii_uppercase + string.digits
_IDLE = "."
_SHADES = " ░▒▓█"
_NARROWEST = 10
_MOST_ROWS = 32
_WIDEST_LABEL = 16
_MOST_NAMED = 48

_Span = tuple[float, float, str]
"""Start, end, sign."""


def gantt_lines(problem: Problem, schedule: Schedule, width: int = 100) -> list[str]:
    """Lines of at most `width` characters; each character shows what takes most of its slice of the time."""
    end_s = makespan_s(problem, schedule)
    if not schedule.placements or end_s <= 0:
        return ["nothing is scheduled"]
    devices = [device for node in problem.nodes for device in node.devices]
    by_device = len(devices) <= _MOST_ROWS
    names = devices if by_device else [node.name for node in problem.nodes]
    label = min(_WIDEST_LABEL, max(map(len, names))) + 1
    columns = max(_NARROWEST, width - label)
    lines = [f"{'':{label}}{_axis(columns, end_s)}"]
    if by_device:
        spans = _spans(problem, schedule)
        rows = {name: _row(spans.get(name, []), columns, end_s) for name in names}
    else:
        rows = _shares(problem, schedule, columns, end_s)
    lines += [f"{_short(name, label - 1):{label}}{row}" for name, row in rows.items()]
    if not by_device:
        return [*lines, f"{'':{label}}the share of a node at work: {' '.join(_SHADES[1:])}"[:width]]
    return [*lines, "", *_legend(problem, schedule, width)]


def sign_of(place: int) -> str:
    """What stands for the placement of this place in a schedule; signs come again after 62."""
    return _SIGNS[place % len(_SIGNS)]


def _spans(problem: Problem, schedule: Schedule) -> dict[str, list[_Span]]:
    """device -> what it does."""
    found: dict[str, list[_Span]] = {}
    for place, one in enumerate(schedule.placements):
        stop_s = one.start_s + problem.options[one.option].seconds
        for device in one.devices:
            found.setdefault(device, []).append((one.start_s, stop_s, sign_of(place)))
    return found


def _row(spans: Sequence[_Span], columns: int, end_s: float) -> str:
    covered: list[dict[str, float]] = [{} for _ in range(columns)]
    for start_s, stop_s, sign in spans:
        start, stop = start_s / end_s * columns, stop_s / end_s * columns
        for column in range(int(start), min(columns, int(stop) + 1)):
            part = min(stop, column + 1) - max(start, column)
            covered[column][sign] = covered[column].get(sign, 0.0) + part
    return "".join(_sign(cell) for cell in covered)


def _sign(cell: dict[str, float]) -> str:
    if not cell:
        return _IDLE
    sign = max(cell, key=lambda one: cell[one])
    return sign if cell[sign] >= 1 - sum(cell.values()) else _IDLE


def _shares(problem: Problem, schedule: Schedule, columns: int, end_s: float) -> dict[str, str]:
    """node -> how much of it is at work."""
    busy = {node.name: [0.0] * columns for node in problem.nodes}
    for one in schedule.placements:
        start = one.start_s / end_s * columns
        stop = (one.start_s + problem.options[one.option].seconds) / end_s * columns
        for device in one.devices:
            row = busy[problem.node_of[device].name]
            for column in range(int(start), min(columns, int(stop) + 1)):
                row[column] += max(0.0, min(stop, column + 1) - max(start, column))
    rows = {}
    for node in problem.nodes:
        shades = [share / len(node.devices) for share in busy[node.name]]
        rows[node.name] = "".join(_SHADES[min(len(_SHADES) - 1, round(share * (len(_SHADES) - 1)))] for share in shades)
    return rows


def _legend(problem: Problem, schedule: Schedule, width: int) -> list[str]:
    shown = schedule.placements[:_MOST_NAMED]
    named = [_words(problem, one) for one in shown]
    widest = max(len(name) for name, _ in named)
    lines = [
        f"{sign_of(place)}  {name:{widest}}  {words}"[:width].rstrip() for place, (name, words) in enumerate(named)
    ]
    if len(schedule.placements) > len(shown):
        lines.append(f"   and {len(schedule.placements) - len(shown)} more")
    return lines


def _words(problem: Problem, one: Placement) -> tuple[str, str]:
    option = problem.options[one.option]
    how = f"{option.label} on " if option.label else "on "
    stop_s = one.start_s + option.seconds
    return " + ".join(
        option.tasks
    ), f"{how}{option.devices} {option.kind}, {duration(one.start_s)} to {duration(stop_s)}"


def _axis(columns: int, end_s: float) -> str:
    return f"0{duration(end_s):>{columns - 1}}"


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
