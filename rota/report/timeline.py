"""A timeline of a predicted step for the terminal: a row for each device, time from left to right."""

from __future__ import annotations

from rota.plan.explain import format_seconds
from rota.plan.program import NodeKind, Program
from rota.plan.simulate import Simulation

_SIGNS = {NodeKind.FORWARD: "F", NodeKind.BACKWARD: "B", NodeKind.EXCHANGE: "-"}
_IDLE = "."
_LEGEND = "F forward, B backward, - communication, . idle"
_NARROWEST = 10


def timeline(program: Program, simulation: Simulation, *, width: int = 100) -> list[str]:
    """Lines of at most `width` characters. Each character shows what takes most of its slice of the step."""
    label = len(f"device {program.devices - 1} ")
    columns = max(_NARROWEST, width - label)
    scale = columns / simulation.makespan_s if simulation.makespan_s > 0 else 0.0
    rows = [[dict.fromkeys(_SIGNS.values(), 0.0) for _ in range(columns)] for _ in range(program.devices)]
    for node, start_s, end_s in zip(program.nodes, simulation.start_s, simulation.end_s, strict=True):
        start, end = start_s * scale, end_s * scale
        for column in range(int(start), min(columns, int(end) + 1)):
            covered = min(end, column + 1) - max(start, column)
            for device in node.devices:
                rows[device][column][_SIGNS[node.kind]] += covered
    lines = [f"{'':{label}}{_axis(columns, simulation.makespan_s)}"]
    for device, row in enumerate(rows):
        lines.append(f"{f'device {device}':{label}}" + "".join(_sign(cell) for cell in row))
    return [*lines, f"{'':{label}}{_LEGEND}"]


def _sign(cell: dict[str, float]) -> str:
    idle = 1.0 - sum(cell.values())
    sign = max(cell, key=lambda one: cell[one])
    return sign if cell[sign] > 0 and cell[sign] >= idle else _IDLE


def _axis(columns: int, makespan_s: float) -> str:
    end = format_seconds(makespan_s)
    return f"0{end:>{columns - 1}}"
