"""Turns frozen dataclasses into JSON and back, refusing everything that is not one: messages and events use it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from rota.errors import MessageError

T = TypeVar("T")

_DEEPEST = 20
"""Of values whose type is not said: what goes through them calls itself."""
_SHOWN = 40
"""Characters of what was found."""


@dataclasses.dataclass(frozen=True)
class Within:
    """Bounds of a number. What a field may have beyond its type stands beside that in an `Annotated`."""

    least: float
    most: float

    def check(self, value: Any, where: str) -> None:
        """MessageError if it is out of bounds, or no number."""
        if not self.least <= value <= self.most:
            raise MessageError(f"{where} is {_shown(value)}, and should be from {self.least:g} to {self.most:g}")


@dataclasses.dataclass(frozen=True)
class Keys:
    """The types of what an object has by these names; it may have other names, too."""

    needed: Mapping[str, Any]
    optional: Mapping[str, Any]

    def check(self, value: Any, where: str) -> None:
        """MessageError if something is missing or of another type."""
        for key in self.needed:
            if key not in value:
                raise MessageError(f"{where} has no {key}")
        for key, hint in {**self.needed, **self.optional}.items():
            if key in value:
                _convert(value[key], hint, f"{where}.{key}")


@dataclasses.dataclass(frozen=True)
class Fits:
    """What a text has to be."""

    fits: Callable[[str], bool]
    rule: str

    def check(self, value: Any, where: str) -> None:
        """MessageError if it is not."""
        if not self.fits(value):
            raise MessageError(f"{where} is {_shown(value)}, but {self.rule}")


Count = Annotated[int, Within(0, 2**62)]
Seconds = Annotated[float, Within(-1e12, 1e12)]
"""A length of time; clocks may be set back while it is measured."""
Share = Annotated[float, Within(0, 1e9)]
TIME = Within(-1e12, 253_402_214_400)
"""Of a point in time: until the last year of calendars."""

_KINDS: dict[str, type[Any]] = {}


def register(cls: type[T]) -> type[T]:
    """Class decorator: values of this dataclass can be encoded; its name is its kind on the wire and on disk."""
    if cls.__name__ in _KINDS:
        raise AssertionError(f"two registered kinds are named {cls.__name__}")
    _KINDS[cls.__name__] = cls
    return cls


def encode(value: Any) -> tuple[str, str]:
    """The kind and the JSON text of a registered value."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return type(value).__name__, json.dumps(fields, separators=(",", ":"))


def decode(kind: str, text: str | bytes) -> Any:
    """The value that `encode` was given; MessageError for anything else."""
    cls = _KINDS.get(kind)
    if cls is None:
        raise MessageError(f"unknown kind of message {_shown(kind)}; it may come from a newer rota")
    try:
        fields = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise MessageError(f"a {kind} message is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MessageError(f"a {kind} message is not a JSON object")
    hints = _hints(kind)
    unknown = fields.keys() - hints.keys()
    if unknown:
        raise MessageError(f"a {kind} message has an unknown field {_shown(min(unknown))}")
    for name, value in fields.items():
        fields[name] = _convert(value, hints[name], f"{kind}.{name}")
    try:
        return cls(**fields)
    except TypeError as error:
        raise MessageError(f"a {kind} message is incomplete: {error}") from error


@functools.cache
def _hints(kind: str) -> dict[str, Any]:
    return typing.get_type_hints(_KINDS[kind], include_extras=True)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Check a JSON value against a type hint; lists become the tuples that frozen dataclasses hold."""
    if hint is Any:
        _check_depth(value, where)
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        found = _convert(value, arguments[0], where)
        for one in arguments[1:]:
            one.check(found, where)
        return found
    if origin is typing.Union or origin is types.UnionType:
        if value is None and type(None) in arguments:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _convert(value, hint, where)
    if origin is tuple and isinstance(value, list):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_convert(item, arguments[0], where) for item in value)
        if len(arguments) == len(value):
            return tuple(_convert(item, one, where) for item, one in zip(value, arguments, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {key: _convert(item, arguments[1], where) for key, item in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise MessageError(f"{where} is {type(value).__name__}, and should be {hint}")


def _check_depth(value: Any, where: str, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise MessageError(f"{where} has lists in lists, more than {_DEEPEST} deep")
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(one, where, depth + 1)


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN]
