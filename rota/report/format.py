"""Numbers for people: durations, metrics, and how far a task is."""

from __future__ import annotations

import math
import re

from rota.execute.record import TaskRecord

_MAX_CELL = 40
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys instead of showing it, and what it cannot show; lines may end and have tabs."""


def printable(text: str) -> str:
    """Text for a terminal: what would move its cursor, colour it or type for its user stands there as \\x1b."""
    return _OBEYED.sub(lambda one: ascii(one[0])[1:-1], text)


def one_line(text: str) -> str:
    """Text for one line of a terminal: a name or a path with a line break in it does not begin another one."""
    return printable(text).replace("\n", "\\n")


def duration(seconds: float) -> str:
    """A length of time for people: 4.2 s, 3 min 20 s, 1 h 05 min, 2 d 3 h."""
    if seconds < 59.95:
        return f"{max(0.0, seconds):.1f} s"
    total = round(seconds)
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def setting(value: object) -> str:
    """A setting in few characters."""
    return shorten(f"{value:g}" if isinstance(value, float) else str(value))


def shorten(text: str) -> str:
    """What fits a cell of a table."""
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"


def metric(value: float | None) -> str:
    """A metric to four digits; nothing where there is none."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def steps(task: TaskRecord) -> str:
    """How far a task is: 120/400."""
    return str(task.step) if task.total_steps is None else f"{task.step}/{task.total_steps}"
