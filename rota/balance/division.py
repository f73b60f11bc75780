"""How a program divides its work between devices: what all of them do, and the share that each has of the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rota.balance.pace import Shares
from rota.graph.cost import element_bytes
from rota.plan.costs import Costs, call_cost
from rota.plan.program import Program

_UPDATE_PASSES = 7
"""How often Adam reads or writes an element of a parameter, its gradient and its moments."""
_PRODUCTS = frozenset({"linear"})


@dataclass(frozen=True, kw_only=True)
class Division:
    """The work of a step, by rough rates."""

    fixed: float
    """What every device does, against the sum of what is divided."""
    shares: Shares
    products: float
    """Which part of what is divided are products with parameters."""


def division_of(program: Program) -> Division:
    """Of a compiled plan."""
    costs = Costs()
    devices = program.devices
    done: dict[str, dict[int, float]] = {}
    """op -> device -> seconds"""
    ranges: dict[str, set[tuple[tuple[str, tuple[int, int]], ...]]] = {}
    for segment in program.segments:
        runs = sum(1 for one in program.microbatches.contexts if one == segment.context) if segment.context >= 0 else 1
        for call in segment.calls:
            cost = call_cost(program.refined, segment, call, costs)
            seconds = (cost.forward_s + (cost.backward_s if segment.grad else 0.0)) * max(1, runs)
            of_op = done.setdefault(call.op, {})
            of_op[segment.device] = of_op.get(segment.device, 0.0) + seconds
            ranges.setdefault(call.op, set()).add(tuple(sorted(call.ranges.items())))
    fixed, products = 0.0, 0.0
    divided = [0.0] * devices
    for op, of_device in done.items():
        if len(of_device) == devices and len(ranges[op]) == 1:
            fixed += max(of_device.values())
            continue
        for device, seconds in of_device.items():
            divided[device] += seconds
        if program.refined.cases[op].op.kind in _PRODUCTS:
            products += sum(of_device.values())
    for name in program.gradients:
        layout = program.stored[name]
        rate_s = element_bytes(program.refined, name) * _UPDATE_PASSES / costs.bytes_per_s
        if len(layout) == devices and len({piece.box for piece in layout}) == 1:
            fixed += math.prod(program.refined.shape(name)) * rate_s
            continue
        for piece in layout:
            divided[piece.device] += piece.box.size * rate_s
    total = sum(divided)
    if total <= 0:
        return Division(fixed=1.0, shares=(1 / devices,) * devices, products=0.0)
    return Division(
        fixed=fixed / total, shares=tuple(one / total for one in divided), products=min(1.0, products / total)
    )
