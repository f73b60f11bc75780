"""Pool: tasks that do not fit share devices shard by shard; whichever has the most left to do runs its next shard."""

from __future__ import annotations

from dataclasses import dataclass

from rota.graph.graph import Graph
from rota.plan.plan import Plan
from rota.strategies.base import register
from rota.strategies.spill import spill
from rota.techniques import POOL


@dataclass(frozen=True, kw_only=True)
class PoolStrategy:
    """A place among all tasks that have it, on all devices."""

    spills = True
    pooled = True
    """The tasks that have it run together."""
    fixed_devices = 1
    """At a time."""

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """The plan of one that spills: which device runs which shard is decided as they run."""
        return spill()(graph, 1)

    def __str__(self) -> str:
        """As the user writes it."""
        return POOL


def pool() -> PoolStrategy:
    """Take turns with the other tasks of the sweep that say so, shard by shard, on all devices."""
    return PoolStrategy()


register(POOL, pool)
