"""Auto: the strategy with the shortest predicted step that fits, found by a search over all others."""

from __future__ import annotations

from dataclasses import dataclass

from rota.cluster.device import parse_bytes
from rota.graph.graph import Graph
from rota.plan.plan import Plan
from rota.strategies.base import register


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Searches when it is called; the same graph and devices give the same plan."""

    memory: str | int | None = None
    """Of each device, such as "4GiB"; as much as it takes if not given."""

    def __post_init__(self) -> None:
        if self.memory is not None:
            parse_bytes(self.memory, what="auto: memory")

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """The plan of the best candidate; FitError if none fits."""
        from rota.search.search import search  # it searches over the strategies of this folder

        memory_bytes = None if self.memory is None else parse_bytes(self.memory)
        return search(graph, devices, memory_bytes=memory_bytes).chosen.strategy(graph, devices)

    def __str__(self) -> str:
        """As the user writes it."""
        return "auto" if self.memory is None else f"auto(memory={self.memory!r})"


def auto(*, memory: str | int | None = None) -> Auto:
    """Whatever is fastest, in so much memory on each device."""
    return Auto(memory=memory)


register("auto", auto)
