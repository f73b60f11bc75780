"""Turns frozen dataclasses into JSON and back, refusing everything that is not one: messages and events use it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import types
import typing
from typing import Any, TypeVar

from rota.errors import MessageError

T = TypeVar("T")

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
        raise MessageError(f"unknown kind of message {kind!r}; it may come from a newer rota")
    try:
        fields = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise MessageError(f"a {kind} message is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MessageError(f"a {kind} message is not a JSON object")
    hints = _hints(kind)
    unknown = fields.keys() - hints.keys()
    if unknown:
        raise MessageError(f"a {kind} message has an unknown field {min(unknown)!r}")
    for name, value in fields.items():
        fields[name] = _convert(value, hints[name], f"{kind}.{name}")
    try:
        return cls(**fields)
    except TypeError as error:
        raise MessageError(f"a {kind} message is incomplete: {error}") from error


@functools.cache
def _hints(kind: str) -> dict[str, Any]:
    return typing.get_type_hints(_KINDS[kind])


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Check a JSON value against a type hint; lists become the tuples that frozen dataclasses hold."""
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
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
