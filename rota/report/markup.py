"""Pieces of HTML: text made safe, numbers and dates for people, lists of terms."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rota.report.format import duration, printable

# A virtual clock starts at zero, and its times are no dates.
_FIRST_DATE_S = 1e8


def text(value: str) -> str:
    """Text as HTML, inside an element or a quoted attribute."""
    return html.escape(printable(value))


def class_attribute(kind: str) -> str:
    """The attribute, or nothing for no class."""
    return f' class="{kind}"' if kind else ""


def chip(state: str) -> str:
    """A state with its coloured dot."""
    return f'<span class="chip {text(state)}">{text(state)}</span>'


def definitions(pairs: Sequence[tuple[str, str]], *, kind: str = "") -> str:
    """A list of terms; the values are HTML already."""
    items = "".join(f"<div><dt>{text(term)}</dt><dd>{value}</dd></div>\n" for term, value in pairs)
    return f"<dl{class_attribute(kind)}>\n{items}</dl>"


def moment(time_s: float) -> str:
    """A point in time."""
    if time_s < _FIRST_DATE_S:
        return f"{duration(time_s)} (simulated)"
    moment = datetime.fromtimestamp(time_s, UTC)
    return f'<time datetime="{moment:%Y-%m-%dT%H:%M:%SZ}">{moment:%Y-%m-%d %H:%M}</time>'


def step_time(step_s: float) -> str:
    """How long a step takes."""
    return f"{1000 * step_s:.3g} ms" if step_s < 1 else duration(step_s)


def count(amount: int) -> str:
    """A large count in few characters: 15.2 M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return str(amount)


def setting(value: Any) -> str:
    """A setting as its user would write it."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, ensure_ascii=False, default=str)
