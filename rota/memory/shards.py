"""Cuts a model into shards: rows of ops that are in memory together, with few bytes alive between one and the next.

Pure. Any graph will do: what is alive at a cut is every tensor that was made before it and is read after it, whether it
is a layer's output, a skip connection or what an encoder hands to each layer of a decoder.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from rota.graph.graph import Graph, Role

_UNEVEN = 0.25
"""How much a shard that is half empty counts, compared with the bytes that are alive at a cut on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The ops from one place to another in the graph's order."""

    start: int
    stop: int
    parameters: tuple[str, ...]
    """That it is the first to read."""


def cut_into_shards(graph: Graph, *, most_bytes: int) -> tuple[Shard, ...]:
    """As few bytes alive at the cuts as there can be, with at most so many bytes of parameters in each shard.

    An op whose own parameters are larger is a shard by itself.
    """
    count = len(graph.ops)
    if count == 0:
        return ()
    own = _own_parameters(graph)
    sizes = [sum(graph.tensors[name].size_bytes for name in names) for names in own]
    alive = alive_bytes(graph)
    before = [0, *itertools.accumulate(sizes)]
    bringing = [0, *itertools.accumulate(size > 0 for size in sizes)]
    usual = sum(alive[1:count]) / max(1, count - 1)
    best = [math.inf] * (count + 1)
    best[0] = 0.0
    came: list[int] = [0] * (count + 1)
    for stop in range(1, count + 1):
        for start in range(stop - 1, -1, -1):
            held = before[stop] - before[start]
            if held > most_bytes and bringing[stop] - bringing[start] > 1:
                break
            # One that is nearly full is as good as a full one; nearly empty ones would be many.
            empty = max(0.0, 1 - held / most_bytes) if most_bytes else 0.0
            cost = best[start] + (alive[stop] if stop < count else 0) + _UNEVEN * usual * empty**2
            if cost < best[stop]:
                best[stop], came[stop] = cost, start
    bounds = [count]
    while bounds[-1] > 0:
        bounds.append(came[bounds[-1]])
    bounds.reverse()
    return tuple(
        Shard(start=start, stop=stop, parameters=tuple(name for names in own[start:stop] for name in names))
        for start, stop in itertools.pairwise(bounds)
    )


def alive_bytes(graph: Graph) -> list[int]:
    """Before each op, and after the last: what was made and is still to be read."""
    last: dict[str, int] = {}
    for place, op in enumerate(graph.ops):
        for name in op.inputs:
            last[name] = place
    for name in (*graph.outputs.values(), *graph.updates.values()):
        last[name] = len(graph.ops)
    change = [0] * (len(graph.ops) + 2)
    for place, op in enumerate(graph.ops):
        for made in op.outputs:
            if made is not None and made in last:
                size = graph.tensors[made].size_bytes
                change[place + 1] += size
                change[last[made] + 1] -= size
    found, now = [], 0
    for place in range(len(graph.ops) + 1):
        now += change[place]
        found.append(now)
    return found


def _own_parameters(graph: Graph) -> list[list[str]]:
    """For each op the parameters that it is the first to read."""
    seen: set[str] = set()
    found: list[list[str]] = []
    for op in graph.ops:
        mine = [name for name in op.inputs if graph.tensors[name].role is Role.PARAMETER and name not in seen]
        seen.update(mine)
        found.append(mine)
    return found
