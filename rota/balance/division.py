"""How a program divides its work between devices: what all of them do, and the share that each has of the rest."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from rota.balance.pace import Shares
from rota.graph.cost import element_bytes, work_of
from rota.graph.refine import local_shape
from rota.plan.box import Box
from rota.plan.costs import Costs
from rota.plan.program import Program

_UPDATE_PASSES = 7
"""How often Adam reads or writes an element of a parameter, its gradient and its moments."""
_PASSES = 3
"""A backward pass takes about as long as two forward passes."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """The work of a step, by rough rates."""

    fixed: float
    """What every device does, against the sum of what is divided."""
    shares: Shares
    products: float
    """Which part of what is divided are products that may leave columns out."""


def division_of(program: Program) -> Division:
    """Of a compiled plan."""
    costs = Costs()
    devices = program.devices
    done: dict[str, dict[int, float]] = {}
    """op -> device -> seconds, without what every op takes however small it is"""
    calls = [0] * devices
    ranges: dict[str, set[tuple[tuple[str, tuple[int, int]], ...]]] = {}
    for segment in program.segments:
        runs = sum(1 for one in program.microbatches.contexts if one == segment.context) if segment.context >= 0 else 1
        for call in segment.calls:
            work = work_of(program.refined, call.op, call.ranges)
            once_s = work.flops / costs.flops_per_s or work.touched_bytes / costs.bytes_per_s
            of_op = done.setdefault(call.op, {})
            passes = _PASSES if segment.grad else 1
            of_op[segment.device] = of_op.get(segment.device, 0.0) + once_s * passes * max(1, runs)
            calls[segment.device] += passes * max(1, runs)
            ranges.setdefault(call.op, set()).add(tuple(sorted(call.ranges.items())))
    fixed, products = costs.op_s * max(calls), 0.0
    resizable = {op for device in range(devices) for op in products_of(program, device)}
    divided = [0.0] * devices
    for op, of_device in done.items():
        if len(of_device) == devices and len(ranges[op]) == 1:
            fixed += max(of_device.values())
            continue
        for device, seconds in of_device.items():
            divided[device] += seconds
        if op in resizable:
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


def products_of(program: Program, device: int) -> dict[str, tuple[tuple[str, Box], int]]:
    """The products of which a device may leave columns out: op -> the piece of its weight, and how many columns it has.

    Nobody else may have that piece (copies would not stay equal), it must be used as it is stored, and by one op only.
    """
    refined = program.refined
    readers = Counter(name for op in refined.graph.ops for name in set(op.inputs))
    uses: dict[tuple[int, str], set[Box]] = {}
    for segment in program.segments:
        for entry in segment.entries:
            uses.setdefault((segment.device, entry.tensor), set()).add(entry.box)
    found: dict[str, tuple[tuple[str, Box], int]] = {}
    for segment in program.segments:
        for call in segment.calls if segment.device == device else ():
            op = refined.cases[call.op].op
            if op.kind != "linear" or len(op.inputs) < 2 or not call.ranges or readers[op.inputs[1]] != 1:
                continue
            name = op.inputs[1]
            layout = program.stored.get(name, ())
            mine = [piece.box for piece in layout if piece.device == device]
            others = [piece.box for piece in layout if piece.device != device]
            if name not in program.gradients or len(mine) != 1 or not others:
                continue
            if uses.get((device, name)) == {mine[0]} and all(mine[0].intersect(box) is None for box in others):
                found[call.op] = ((name, mine[0]), local_shape(refined.factors[name], mine[0].shape)[1])
    return found
