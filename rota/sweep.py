"""The tasks of one run, and `grid`, which makes them from lists of values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rota.errors import InputError
from rota.given import quoted, text
from rota.task import NAME_RULE, Task, is_safe_name


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Tasks that are run and compared together."""

    tasks: tuple[Task, ...]
    name: str = ""
    """Names the run folder where the user names none; by default the script or file does."""

    def __post_init__(self) -> None:
        if isinstance(self.tasks, Task) or not isinstance(self.tasks, Iterable):
            raise InputError(f"a sweep's tasks must be a list of rota.Task, not {type(self.tasks).__name__}")
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if text(self.name, "a sweep's name") and not is_safe_name(self.name):
            raise InputError(f"sweep name {quoted(self.name)} cannot be used; {NAME_RULE}")
        if not self.tasks:
            raise InputError("the sweep has no tasks; give at least one")
        seen: dict[str, Task] = {}
        for task in self.tasks:
            if not isinstance(task, Task):
                raise InputError(f"a sweep holds rota.Task values, not {type(task).__name__}")
            # Two folders that differ only in case are one folder on some file systems.
            if task.name.casefold() in seen:
                raise InputError(
                    f"two tasks are named {quoted(task.name)}; put what distinguishes them into the name, "
                    'for example name=f"gpt-lr{lr:g}"'
                )
            seen[task.name.casefold()] = task

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __getitem__(self, name: str) -> Task:
        for task in self.tasks:
            if task.name == name:
                return task
        known = ", ".join(task.name for task in self.tasks[:6])
        raise InputError(f"the sweep has no task {quoted(name)}; it has {known}{', ...' if len(self) > 6 else ''}")


def grid(task: Callable[..., Task], **axes: Iterable[Any]) -> Sweep:
    """Call `task` with every combination of the values and collect what it returns into a `Sweep`.

    >>> grid(task, lr=[1e-3, 3e-4], depth=[2, 4, 6])    # six tasks
    """
    if not callable(task):
        raise InputError(f"rota.grid needs a function that returns a rota.Task, not {type(task).__name__}")
    values: dict[str, list[Any]] = {}
    for name, axis in axes.items():
        if isinstance(axis, str) or not isinstance(axis, Iterable):
            raise InputError(f"rota.grid: {name} must be a list of values; write {name}=[{quoted(axis)}]")
        values[name] = list(axis)
        if not values[name]:
            raise InputError(f"rota.grid: {name} has no values; give at least one")
    tasks = [_call(task, dict(zip(values, point, strict=True))) for point in itertools.product(*values.values())]
    return Sweep(tasks=tuple(tasks))


def _call(function: Callable[..., Task], point: dict[str, Any]) -> Task:
    name = getattr(function, "__name__", "task")
    call = f"{name}({', '.join(f'{key}={quoted(value)}' for key, value in point.items())})"
    try:
        made = function(**point)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"rota.grid: {call} raised {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(made, Task):
        raise InputError(f"rota.grid: {call} returned {type(made).__name__}; it must return a rota.Task")
    return made if made.settings else dataclasses.replace(made, settings=point)
