"""Everything on the first device; further devices stay idle."""

from __future__ import annotations

from dataclasses import dataclass

from rota.given import check_fields
from rota.graph.graph import Graph
from rota.plan.plan import Plan
from rota.strategies.base import register


@dataclass(frozen=True, kw_only=True)
class Single:
    """No op is cut, and device 0 runs them all."""

    microbatches: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "single")

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """A plan on one device."""
        plan = Plan(graph, devices=devices, microbatches=self.microbatches)
        plan.assign(graph.ops, 0)
        return plan

    def __str__(self) -> str:
        """As the user writes it."""
        return "single" if self.microbatches == 1 else f"single(microbatches={self.microbatches})"


def single(*, microbatches: int = 1) -> Single:
    """All on one device, the batch in so many parts."""
    return Single(microbatches=microbatches)


register("single", single)
