"""Tells whether two sweeps are the same, so that a run is never resumed with another sweep's tasks."""

from __future__ import annotations

import hashlib
import json
import numbers
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rota.fingerprint import code_parts
from rota.sweep import Sweep
from rota.task import Task

# How long to wait, how often to save and on how many devices does not change what is trained.
_FREE_FIELDS = {"setup_timeout_s", "step_timeout_s", "checkpoint_every", "strategy", "devices", "compile"}
_FREE_FIELDS |= {"deadline_s", "balance"}


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


def fixed_facts(described: Mapping[str, Any]) -> dict[str, Any]:
    """Of the numbers that describe a task, as a journal has them, those that change what is trained."""
    kept = {key: value for key, value in described.items() if key not in _FREE_FIELDS | {"settings"}}
    found: dict[str, Any] = json.loads(json.dumps(kept, default=repr))
    return found


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


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # numpy's
        return value.item()
    return getattr(value, "__name__", None) or str(value)
