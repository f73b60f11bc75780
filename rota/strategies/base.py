"""The registry of strategies: a strategy makes a plan of a graph for so many devices.

A strategy is found by name, with knobs as in Python and products as in the library: ``tensor``,
``pipeline(microbatches=8)``, ``data(2) * tensor(2)``. Users add theirs with `@rota.strategy`, or packages with an entry
point in the group ``rota.strategies``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from rota.errors import InputError
from rota.given import quoted
from rota.graph.graph import Graph
from rota.plan.plan import Plan
from rota.written import parsed

ENTRY_POINTS = "rota.strategies"


@runtime_checkable
class Strategy(Protocol):
    """Cuts and places every op of a graph."""

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """A plan that can be compiled; InputError if the graph and the devices do not go together."""
        ...


Factory = Callable[..., Strategy]
"""Makes a strategy from its knobs."""

_FACTORIES: dict[str, Factory] = {}
_USERS: set[str] = set()
"""The names that `@rota.strategy` registered."""

F = TypeVar("F", bound=Callable[..., Plan])


def register(name: str, factory: Factory) -> None:
    """`find(name)` gives what the factory makes."""
    if _FACTORIES.get(name, factory) is not factory:
        raise InputError(f"there is already a strategy named {name!r}; choose another name")
    _FACTORIES[name] = factory


def strategy(function: F) -> F:
    """Function decorator: a function of a graph and the number of devices, and knobs by name, that makes a plan."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier() or not callable(function):
        raise InputError("@rota.strategy is for a function with a name, such as def mine(graph, devices): ...")
    if name in _USERS:  # a cell of a notebook, run again
        del _FACTORIES[name]
    register(name, functools.partial(_with_knobs, function))
    _USERS.add(name)
    return function


def _with_knobs(function: Callable[..., Plan], **knobs: Any) -> Strategy:
    return functools.partial(function, **knobs) if knobs else function


def is_users(label: str) -> bool:
    """Whether a label names a strategy that was registered in this process."""
    return label.partition("(")[0] in _USERS


def of_users() -> dict[str, Strategy]:
    """The strategies that were registered in this process, by name."""
    return {name: _FACTORIES[name]() for name in sorted(_USERS)}


def find(text: str) -> Strategy:
    """The strategy that a name, a call or a product of them describes."""
    return _made(parsed(text))


def _made(tree: ast.expr) -> Strategy:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult):
        left, right = _made(tree.left), _made(tree.right)
        if not hasattr(left, "__mul__") or not hasattr(right, "__mul__"):
            alone = tree.left if not hasattr(left, "__mul__") else tree.right
            raise InputError(
                f"the strategy {quoted(ast.unparse(alone))} stands alone; it cannot be multiplied with another"
            )
        product: Strategy = left * right
        return product
    if isinstance(tree, ast.Name):
        return _call(tree.id, (), {})
    assert isinstance(tree, ast.Call)
    assert isinstance(tree.func, ast.Name)
    if any(one.arg is None for one in tree.keywords):
        raise InputError(f"the knobs of {quoted(ast.unparse(tree))} must be given by name")
    try:
        args = [ast.literal_eval(one) for one in tree.args]
        knobs = {one.arg: ast.literal_eval(one.value) for one in tree.keywords if one.arg is not None}
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise InputError(f"the knobs of {quoted(ast.unparse(tree))} must be plain values") from None
    return _call(tree.func.id, args, knobs)


def _call(name: str, args: Any, knobs: Any) -> Strategy:
    known = names()
    if name not in known:
        raise InputError(f"there is no strategy {quoted(name)}; choose one of {', '.join(known)}")
    try:
        return _FACTORIES[name](*args, **knobs)
    except TypeError as error:
        raise InputError(f"the strategy {name} does not take these knobs: {error}") from None


def names() -> list[str]:
    """All known strategies: those of this folder, what users registered, and what packages bring."""
    importlib.import_module("rota.strategies")  # its files register themselves
    _load_entry_points()
    return sorted(_FACTORIES)


@functools.cache
def _load_entry_points() -> None:
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.name in _FACTORIES:
            continue
        try:
            found = point.load()
        except Exception as error:  # whatever the package raises when it is imported
            raise InputError(
                f"the strategy {point.name!r} of the package {point.value} cannot be loaded: {error}"
            ) from error
        if point.name not in _FACTORIES:
            register(point.name, functools.partial(_with_knobs, found))


def with_microbatches(strategy: Strategy, microbatches: int) -> Strategy:
    """The same strategy, taking a batch in so many parts."""
    given: Any = strategy
    if is_dataclass(given) and hasattr(given, "microbatches"):
        made: Any = given
        return cast(Strategy, replace(made, microbatches=microbatches))
    target = given.func if isinstance(given, functools.partial) else given
    if "microbatches" in inspect.signature(target).parameters:
        return functools.partial(given, microbatches=microbatches)
    raise InputError(f"the strategy {describe(strategy)} has no micro-batches to choose")


def describe(strategy: Any) -> str:
    """What a strategy is called, for people."""
    if isinstance(strategy, str):
        return strategy
    if isinstance(strategy, functools.partial):
        knobs = ", ".join(f"{key}={value!r}" for key, value in strategy.keywords.items())
        return f"{describe(strategy.func)}({knobs})"
    return getattr(strategy, "__name__", None) or str(strategy)
