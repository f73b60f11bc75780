"""Whole numbers, of Python, numpy or torch."""

from __future__ import annotations

import operator
from typing import Any

from rota.errors import InputError


def whole(value: Any) -> int | None:
    """As Python's own; None for what is not a whole number. A truth value is none."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def positive(value: Any, what: str) -> int:
    """A whole number of at least 1; InputError that says what is none."""
    found = whole(value)
    if found is None or found < 1:
        raise InputError(f"{what} must be a whole number of at least 1, not {value!r}")
    return found
