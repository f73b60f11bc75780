"""Tells whether two sweeps are the same, so that a run is never resumed with another sweep's tasks."""

from __future__ import annotations

import hashlib
import json
import numbers
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from rota.sweep import Sweep
from rota.task import Task

# How long to wait, how often to save and on how many devices does not change what is trained.
_FREE_FIELDS = {"setup_timeout_s", "step_timeout_s", "checkpoint_every", "strategy", "devices", "compile"}


def describe(task: Task) -> dict[str, Any]:
    """The numbers that describe a task, its name and settings, as JSON values."""
    facts = {
        field.name: getattr(task, field.name)
        for field in fields(task)
        if field.name not in ("settings", "strategy") and not callable(getattr(task, field.name))
    }
    facts["strategy"] = getattr(task.strategy, "__name__", None) or str(task.strategy)
    settings = {str(key): _jsonable(value) for key, value in task.settings.items()}
    return {**facts, "settings": settings}


def digest(sweep: Sweep) -> str:
    """A digest of the tasks: their numbers, and the code of their functions with the plain values they refer to."""
    total = hashlib.sha256()
    for task in sweep:
        facts = {key: value for key, value in describe(task).items() if key not in _FREE_FIELDS}
        total.update(json.dumps(facts, sort_keys=True, default=repr).encode())
        for name in ("model", "data", "loss", "optimizer", "lr_schedule"):
            for part in code_parts(getattr(task, name), seen=set()):
                total.update(part.encode())
    return total.hexdigest()


def code_parts(function: Any, seen: set[int]) -> Iterator[str]:
    """What a function does, as far as it can be told without running it."""
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        yield type(function).__qualname__ if not isinstance(function, type) else function.__qualname__
        return
    seen.add(id(code))
    yield from _of_code(code)
    for value in (function.__defaults__ or ()) + tuple((function.__kwdefaults__ or {}).values()):
        yield _plain(value)
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
        yield from code_parts(value, seen) if isinstance(value, Callable) else iter([_plain(value)])  # type: ignore[arg-type]


def _of_code(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield " ".join(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _of_code(constant)
        else:
            yield _plain(constant)


def _plain(value: Any) -> str:
    """Numbers and strings as they are; of anything else only its type, for its text may hold an address."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(_plain(item) for item in value)}]"
    if isinstance(value, frozenset | set):
        return f"set[{', '.join(sorted(_plain(item) for item in value))}]"
    if isinstance(value, dict):
        return f"dict[{', '.join(f'{_plain(key)}: {_plain(item)}' for key, item in value.items())}]"
    return type(value).__qualname__


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # numpy's
        return value.item()
    return getattr(value, "__name__", None) or str(value)
