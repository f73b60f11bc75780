"""Everything on the first device; further devices stay idle."""

from __future__ import annotations

from rota.graph.graph import Graph
from rota.plan.plan import Plan
from rota.strategies.base import register


@register("single")
def single(graph: Graph, devices: int, microbatches: int) -> Plan:
    """No op is cut, and device 0 runs them all."""
    plan = Plan(graph, devices=devices, microbatches=microbatches)
    plan.assign(graph.ops, 0)
    return plan
