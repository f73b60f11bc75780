"""Checks of what a user gives: flags, texts, choices and whole numbers, each refused with one sentence."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from rota.errors import InputError
from rota.whole import at_least, quoted, whole

__all__ = ["check_amounts", "check_fields", "flag", "one_of", "quoted", "text"]


def flag(value: Any, what: str) -> bool:
    """A truth value as it is; InputError for all else, also for what Python takes for one."""
    if not isinstance(value, bool):
        raise InputError(f"{what} must be True or False, not {quoted(value)}")
    return value


def text(value: Any, what: str) -> str:
    """A text as it is; InputError for all else."""
    if not isinstance(value, str):
        raise InputError(f"{what} must be a text, not {quoted(value)}")
    return value


def one_of(value: Any, choices: Collection[Any], what: str) -> Any:
    """One of some plain values, of the same type as that value; True is not 1."""
    for choice in choices:
        found = whole(value) if isinstance(choice, int) else value
        if type(found) is type(choice) and found == choice:
            return choice
    raise InputError(f"{what} must be one of {', '.join(map(repr, choices))}, not {quoted(value)}")


def is_amount(value: Any, *, least: float = math.ulp(0.0)) -> bool:
    """Whether it is a finite number of at least `least`, of Python, numpy or torch."""
    try:
        number = value if isinstance(value, int | float) else value.item()
        known = isinstance(number, int | float) and not isinstance(number, bool)
        return known and number >= least and math.isfinite(number)
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError):
        return False


def check_amounts(values: Any, what: str, *, least: float = math.ulp(0.0)) -> None:
    """InputError for what is no sequence of such numbers."""
    if (
        not isinstance(values, Sequence)
        or isinstance(values, str)
        or not all(is_amount(v, least=least) for v in values)
    ):
        kind = "positive numbers" if least > 0 else f"numbers of at least {least:g}"
        raise InputError(f"{what} must be a tuple of {kind}, not {quoted(values)}")


def check_fields(holder: Any, where: str, *, least: int = 1) -> None:
    """Check the fields of a frozen dataclass against their types; whole numbers are at least `least` and plain.

    A field of another type than a flag, a text, a choice or a whole number is for the class itself to check.
    """
    try:
        hints = typing.get_type_hints(type(holder))
    except NameError:  # a class of a user, whose types are there for type checkers only
        return
    for one in fields(holder):
        value, kind = getattr(holder, one.name), hints[one.name]
        options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        if value is None and type(None) in options:
            continue
        options = tuple(option for option in options if option is not type(None))
        if len(options) == 1:
            object.__setattr__(holder, one.name, _checked(value, options[0], f"{where}: {one.name}", least))


def _checked(value: Any, kind: Any, what: str, least: int) -> Any:
    if kind is bool:
        return flag(value, what)
    if kind is str:
        return text(value, what)
    if typing.get_origin(kind) is typing.Literal:
        return one_of(value, typing.get_args(kind), what)
    if kind is int:
        return at_least(value, least, what)
    return value
