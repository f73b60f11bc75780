"""Ways to train a task that rota does not know itself: whatever can search for knobs and execute joins the choice."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rota.errors import InputError, RotaError, WayError
from rota.task import Task, is_safe_name

if TYPE_CHECKING:
    from rota.runtime.executor import Executor, Parts
    from rota.runtime.gang import Gang

ENTRY_POINTS = "rota.techniques"
POOL = "pool"
"""The strategy of tasks that share devices shard by shard; a journal calls it so, too."""
PLAIN = ("auto", "single")
"""Strategies of which a worker needs nothing but the name."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a technique's search says: how it would run a task, and what that costs."""

    knobs: Mapping[str, Any]
    """Plain values by name; they come back when it executes."""
    step_s: float
    """Seconds of a step."""
    memory_bytes: int
    """On the device that needs the most."""


class Technique(Protocol):
    """Something that can train a task on devices."""

    name: str

    def search(self, task: Task, devices: int) -> Found | None:
        """How it would run a task on so many devices; None if it does not fit. Called in a worker, on one device."""
        ...

    def execute(self, task: Parts, devices: Gang, knobs: dict[str, Any]) -> Executor:
        """What runs the batches of a task, in each of the processes that train it together."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A technique with its knobs. A task may have it as its strategy."""

    technique: Technique
    knobs: Mapping[str, Any]

    def __call__(self, graph: Any, devices: int) -> Any:
        """It has no plan."""
        raise InputError(f"{self} is a technique and has no plan to explain")

    def execute(self, parts: Parts, batch: Any, *, gang: Gang, notice: Callable[[str], None]) -> Executor:
        """What runs the batches."""
        try:
            made = self.technique.execute(parts, gang, dict(self.knobs))
        except RotaError:
            raise
        except Exception as error:  # it is not ours
            raise WayError(f"the technique {self} raised {type(error).__name__}: {error}") from error
        if made is None or not callable(getattr(made, "backward", None)):
            raise WayError(f"the technique {self} returned {type(made).__name__}, which cannot run batches")
        return made

    def __str__(self) -> str:
        """As labels have it."""
        return label_of(self.technique.name, self.knobs)


_KNOWN: dict[str, Technique] = {}


def register_technique(technique: Technique) -> Technique:
    """Let a technique be chosen by `auto`."""
    name = getattr(technique, "name", None)
    if not isinstance(name, str) or not is_safe_name(name) or not name.isidentifier():
        raise InputError(f"a technique needs a name of letters, digits and _, not {name!r}")
    for method in ("search", "execute"):
        if not callable(getattr(technique, method, None)):
            raise InputError(f"the technique {name!r} has no method {method}")
    _KNOWN[name] = technique
    return technique


def forget_technique(name: str) -> None:
    """The opposite."""
    _KNOWN.pop(name, None)


def techniques() -> tuple[Technique, ...]:
    """All that are registered, and those that packages bring."""
    _load_entry_points()
    return tuple(_KNOWN.values())


def registered() -> tuple[dict[str, Any], tuple[Technique, ...]]:
    """The strategies and techniques that were registered in this process, for workers, which do not know them."""
    base = sys.modules.get("rota.strategies.base")  # without it nobody has registered a strategy
    return {} if base is None else base.of_users(), techniques()


@functools.cache
def _load_entry_points() -> None:
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            made = point.load()
            register_technique(made() if isinstance(made, type) else made)
        except Exception as error:  # whatever the package raises when it is imported
            raise InputError(f"the technique {point.name!r} of {point.value} cannot be loaded: {error}") from error


def ready(label: str) -> Ready | None:
    """The technique that a label names, with its knobs; None if it names none."""
    name = label.partition("(")[0]
    technique = _KNOWN.get(name)
    if technique is None:
        return None
    return Ready(technique=technique, knobs=_knobs_of(label))


def _knobs_of(label: str) -> dict[str, Any]:
    """The knobs of a call that `label_of` wrote."""
    call = ast.parse(label, mode="eval").body
    if not isinstance(call, ast.Call):
        return {}
    return {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg}


def travelling(label: str) -> Any:
    """A strategy by its label, as it goes to workers: by its name, unless only this process knows the name."""
    made: Any = ready(label)
    if made is not None:
        return made
    base = sys.modules.get("rota.strategies.base")  # without it nobody has registered anything
    return base.find(label) if base is not None and base.is_users(label) else label


def arrived(strategy: Any) -> Any:
    """What travelled by its name, as the strategy that it is."""
    if not isinstance(strategy, str) or strategy in PLAIN:
        return strategy
    from rota.strategies.base import find

    found: Any = find(strategy)
    return str(found) if str(found) in PLAIN else found


def label_of(name: str, knobs: Mapping[str, Any]) -> str:
    """A call that names a technique and its knobs."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in knobs.items())})"


def checked(found: Any, name: str) -> Found | None:
    """What a search returned, if it is what it should be; InputError says what is wrong with it."""
    if found is None:
        return None
    if not isinstance(found, Found):
        raise InputError(f"the search of {name} returned {type(found).__name__}; it must return a Found or None")
    try:
        plain = json.loads(json.dumps(dict(found.knobs)))
    except (TypeError, ValueError) as error:
        raise InputError(f"the knobs of {name} are no plain values: {error}") from error
    if plain != dict(found.knobs) or not all(isinstance(key, str) and key.isidentifier() for key in plain):
        raise InputError(f"the knobs of {name} are no plain values by name")
    try:
        again = _knobs_of(label_of(name, plain))
    except (SyntaxError, ValueError):
        again = None
    if again != plain:  # such as infinity, or the name of a keyword
        raise InputError(f"the knobs of {name} cannot be written as a call: {plain!r}")
    is_number = isinstance(found.step_s, int | float) and not isinstance(found.step_s, bool)
    if not is_number or not math.isfinite(found.step_s) or found.step_s <= 0:
        raise InputError(f"{name} says that a step takes {found.step_s!r} s, which cannot be")
    if not isinstance(found.memory_bytes, int) or isinstance(found.memory_bytes, bool) or found.memory_bytes < 0:
        raise InputError(f"{name} says that it needs {found.memory_bytes!r} bytes, which cannot be")
    return found
