"""Rewrites of a graph: the same computation in other ops. A graph remembers those that it went through."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rota.graph.graph import Graph

_KNOWN: dict[str, Callable[..., Graph]] = {}


def rewrite(function: Callable[..., Graph]) -> Callable[..., Graph]:
    """Decorate a function of a graph and of plain values, so that what it did can be told and done again."""
    name = function.__name__

    @functools.wraps(function)
    def remembered(graph: Graph, *values: Any) -> Graph:
        made = function(graph, *values)
        return graph if made is graph else replace(made, rewrites=(*graph.rewrites, (name, *values)))

    _KNOWN[name] = remembered
    return remembered


def repeated(graph: Graph, rewrites: Iterable[tuple[Any, ...]]) -> Graph:
    """The graph after these rewrites; LookupError for one that nobody knows."""
    for name, *values in rewrites:
        graph = _KNOWN[name](graph, *values)
    return graph
