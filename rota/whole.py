"""Whole numbers, of Python, numpy or torch, and how a message quotes what is none."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

from rota.errors import InputError

_LONGEST = 80
"""Characters that a message quotes of what a user gave."""


class _Short(reprlib.Repr):
    """Looks at the beginning of long containers only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 10 * _LONGEST
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 20


_SHORT = _Short()


def quoted(value: Any) -> str:
    """What a user gave as a message quotes it: on one line, and long ones cut.

    The end of a long text stays, because it often says which one it is.
    """
    try:
        words = " ".join(_SHORT.repr(value).split()) if not isinstance(value, str) else repr(value)
    except Exception:  # the value is the user's, and its repr may raise
        words = f"a {type(value).__name__}"
    if len(words) <= _LONGEST:
        return words
    return f"{words[: _LONGEST - 23]}...{words[-20:]}"


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
    return at_least(value, 1, what)


def at_least(value: Any, least: int, what: str) -> int:
    """A whole number that is not less than `least`; InputError for all else."""
    found = whole(value)
    if found is None or found < least:
        raise InputError(f"{what} must be a whole number of at least {least}, not {quoted(value)}")
    return found
