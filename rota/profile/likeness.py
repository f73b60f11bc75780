"""Tells whether two tasks cost the same before anything is made of them: from their code."""

from __future__ import annotations

import hashlib

from rota.fingerprint import code_parts
from rota.pickling import pickle_task
from rota.task import Task


def code_key(task: Task, *, width: int | None) -> str:
    """Tasks with the same key cost the same: the same code makes their model, data and loss from the same values.

    Learning rates and other real numbers of the optimizer do not matter, nor do seeds and lengths.
    """
    parts = [str(width), str(task.strategy), task.precision, str(task.accumulate), str(task.compile)]
    parts += [str(task.clip_norm is None), making_key(task)]
    for function in (task.optimizer, task.lr_schedule):
        parts += [one for one in code_parts(function, seen=set()) if not _is_real(one)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def making_key(task: Task) -> str:
    """Equal for tasks whose model, data and loss are made by the same code from the same values."""
    try:
        made = pickle_task((task.model, task.data, task.loss))
    except Exception:  # whatever the user's objects raise; it is told when the task is to travel
        return f"alone {task.name}"
    return f"{task.precision} {hashlib.sha256(made).hexdigest()}"


def _is_real(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not text.lstrip("-").isdigit()
