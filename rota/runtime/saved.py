"""What a checkpoint says of its task, and whether what was read from one is what the loop writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rota.errors import CorruptCheckpointError
from rota.task import Task

_TRAINING: dict[str, type | tuple[type, ...]] = {
    "model": Mapping,
    "buffers": Mapping,
    "gradients": Mapping,
    "optimizer": Mapping,
    "lr_schedule": object,
    "cursor": Mapping,
    "rng": Mapping,
    "step": int,
    "batches": int,
    "sums": Mapping,
    "unvalidated": bool,
    "best": (Mapping, type(None)),
    "last": Mapping,
}
_METRICS: dict[str, type | tuple[type, ...]] = {"number": int, "latest": Mapping, "unconfirmed": (list, tuple)}


def mark_of(task: Task) -> dict[str, Any]:
    """Names a task, with the settings by which one of the same name in another run may differ."""
    told = {"seed": task.seed, "precision": task.precision, **{str(key): one for key, one in task.settings.items()}}
    return {"name": task.name, "settings": {key: _plain(value) for key, value in told.items()}}


def check(tree: Any, task: Task, *, notice: Callable[[str], None]) -> None:
    """CorruptCheckpointError if a tree is not one that the loop wrote for this task; `notice` hears of other settings.

    Checkpoints of before rota marked them do not say whose they are.
    """
    _check_parts("it", tree, {"training": Mapping, "metrics": Mapping})
    _check_parts("its training", tree["training"], _TRAINING)
    _check_parts("its metrics", tree["metrics"], _METRICS)
    for key in ("step", "batches"):
        if tree["training"][key] < 0:
            raise CorruptCheckpointError(f"is damaged (its {key} is {tree['training'][key]})")
    for one in tree["metrics"]["unconfirmed"]:
        if not isinstance(one, list | tuple) or len(one) != 4:
            raise CorruptCheckpointError("is damaged (its metrics are none)")
    if "task" in tree:
        _check_mark(tree["task"], mark_of(task), notice)


def _check_parts(what: str, node: Any, parts: Mapping[str, type | tuple[type, ...]]) -> None:
    if not isinstance(node, Mapping):
        raise CorruptCheckpointError(f"is damaged ({what} is not what rota writes)")
    for key, kind in parts.items():
        if key not in node or not isinstance(node[key], kind):
            raise CorruptCheckpointError(f"is damaged ({what} has no {key!r} that rota writes)")


def _check_mark(found: Any, own: dict[str, Any], notice: Callable[[str], None]) -> None:
    if not isinstance(found, Mapping) or found.get("name") != own["name"]:
        whose = f"task {found['name']!r}" if isinstance(found, Mapping) and "name" in found else "no task"
        raise CorruptCheckpointError(f"belongs to {whose} and not to {own['name']!r}")
    before = found.get("settings")
    if not isinstance(before, Mapping):
        return
    both = [key for key in own["settings"] if key in before]
    changed = [
        f"{key} was {before[key]} and is {own['settings'][key]}" for key in both if before[key] != own["settings"][key]
    ]
    if changed:
        notice(f"its checkpoint was written with other settings ({', '.join(changed)}); training goes on from it")


def _plain(value: Any) -> Any:
    """As it is after it was read back; what JSON cannot hold is not compared by its address in memory."""
    if isinstance(value, bool | int | float | str) or value is None:
        return json.loads(json.dumps(value))
    return getattr(value, "__name__", None) or type(value).__name__
