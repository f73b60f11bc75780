"""The registry of strategies: a strategy makes a plan of a graph for so many devices and micro-batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

from rota.errors import InputError
from rota.graph.graph import Graph
from rota.plan.plan import Plan


class Strategy(Protocol):
    """Cuts and places every op of a graph."""

    def __call__(self, graph: Graph, devices: int, microbatches: int) -> Plan:
        """A plan that can be compiled; InputError if the graph and the numbers do not go together."""
        ...


_STRATEGIES: dict[str, Strategy] = {}


def register(name: str) -> Callable[[Strategy], Strategy]:
    """Function decorator: `find(name)` gives this strategy."""

    def keep(strategy: Strategy) -> Strategy:
        if name in _STRATEGIES:
            raise InputError(f"there is already a strategy named {name!r}; choose another name")
        _STRATEGIES[name] = strategy
        return strategy

    return keep


def find(name: str) -> Strategy:
    """The strategy of a name."""
    known = names()
    if name not in known:
        raise InputError(f"there is no strategy {name!r}; choose one of {', '.join(known)}")
    return _STRATEGIES[name]


def names() -> list[str]:
    """All known strategies: those of this folder, and what users registered."""
    importlib.import_module("rota.strategies")  # its files register themselves
    return sorted(_STRATEGIES)
