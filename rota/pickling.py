"""Turns a task into bytes that a worker can read, lambdas and closures included."""

from __future__ import annotations

import importlib
import io
import types
from typing import Any

import cloudpickle


def pickle_task(task: Any) -> bytes:
    """The bytes of a task; whatever its objects raise if they cannot travel."""
    out = io.BytesIO()
    _Pickler(out).dump(task)
    return out.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, which knows plain modules only: torch.backends.cudnn and its like are of a class of their own."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)
