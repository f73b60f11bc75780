"""What ops, the engine and communications cost: rough rates, or what was measured on a machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rota.graph.cost import element_bytes, work_of
from rota.graph.part import reads_of
from rota.graph.refine import Refined, local_shape
from rota.graph.rules import occurrences
from rota.plan.collectives import Link
from rota.plan.layout import Kind
from rota.plan.program import Call, Node, Program, Segment
from rota.runtime.footprint import likeness, plain


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCost:
    """Seconds of a part of an op."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What an op of some kind costs that was not measured; no less for more work."""

    op_s: float
    flop_s: float
    byte_s: float
    backward: float
    """Of the time of the forward run."""

    def forward_s(self, flops: float, touched_bytes: float) -> float:
        """Of a part of an op that does so much."""
        return self.op_s + flops * self.flop_s + touched_bytes * self.byte_s


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCost:
    """What the engine itself takes, beside the ops."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    entry_forward_s: float = 0.0
    """For each entry that returns a gradient."""
    entry_backward_s: float = 0.0
    exchange_s: float = 0.0
    """For each tensor that is exchanged."""
    step_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCost:
    """A collective of one kind in a group of some size."""

    group: int
    launch_s: float
    """Until the device can go on."""
    launch_byte_s: float
    """For each byte that a device gives: they are put side by side first."""
    latency_s: float
    """From the moment when the last of the group has launched it."""
    byte_s: float
    """For each byte that a device receives."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured on a machine."""

    calls: Mapping[str, CallCost] = field(repr=False)
    """signature -> seconds"""
    rates: Mapping[str, Rate] = field(default_factory=dict, repr=False)
    """kind of op -> what is estimated for parts that are not in `calls`"""
    rest: Rate = field(default_factory=lambda: Rate(op_s=1e-5, flop_s=5e-11, byte_s=2e-10, backward=2.0))
    """For kinds of which nothing was measured."""
    node: NodeCost = field(default_factory=NodeCost)
    copy_byte_s: float = 0.0
    """To copy a byte, or to add it to another."""
    assemble_s: float = 0.0
    assemble_byte_s: float = 0.0
    """To put a tensor together from its parts."""
    links: Mapping[Kind, tuple[LinkCost, ...]] = field(default_factory=dict)
    """kind -> one for each size of group that was measured, smallest first"""
    overlap_share: float = 0.0
    """How much of a device's time a communication takes that runs beside its computation."""
    crowding: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """(so many devices at work at once, how much longer each takes)"""
    optimizer: tuple[tuple[int, float], ...] = ((0, 0.0), (1, 0.0))
    """(bytes of a parameter, seconds to update it), smallest first"""
    bucket_bytes: int = 3 * 2**20
    measured: int = 0
    """The parts of ops, as different as they come, of the programs that it was made for."""
    estimated: int = 0
    """Those of them for which there was no time."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What things cost: rough rates, or what was measured."""

    flops_per_s: float = 2e10
    bytes_per_s: float = 5e9
    op_s: float = 1e-5
    """What every op costs, however small."""
    link: Link = field(default_factory=Link)
    calibration: Calibration | None = None
    """If there is one, it is used instead of the rates."""
    _known: dict[Any, CallCost] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The seconds of segments that were seen: a search simulates thousands of programs that are much alike."""


def signature(refined: Refined, segment: Segment, call: Call) -> str:
    """What parts of ops have in common that cost the same: the op, its arguments, its local shapes, what is derived."""
    op, frame = refined.cases[call.op].op, refined.frames[call.op]
    tensors = refined.graph.tensors
    reads = [
        None
        if box is None
        else (
            local_shape(refined.factors[name], box.shape),
            tensors[name].dtype,
            segment.grad and op.with_grad and tensors[name].requires_grad,
        )
        for name, box in zip(occurrences(op), reads_of(frame, call.ranges), strict=True)
    ]
    # The arguments of a creator or a view are the shapes of the whole; what counts of them is in the ranges.
    cut = sorted((name, end - start) for name, (start, end) in call.ranges.items())
    facts = (op.target, plain(op.args), plain(tuple(sorted(op.kwargs.items()))), op.autocast, reads, cut)
    return f"{op.kind} {hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"


def call_seconds(refined: Refined, segment: Segment, index: int, costs: Costs) -> float:
    """Of the forward run of one op's part."""
    return call_cost(refined, segment, segment.calls[index], costs).forward_s


def call_cost(refined: Refined, segment: Segment, call: Call, costs: Costs) -> CallCost:
    """Of one op's part: measured, or estimated from its work."""
    known = costs.calibration
    if known is not None:
        measured = known.calls.get(signature(refined, segment, call))
        if measured is not None:
            return measured
    work = work_of(refined, call.op, call.ranges)
    if known is None:  # its products, or the bytes that it touches
        forward_s = max(work.flops / costs.flops_per_s, work.touched_bytes / costs.bytes_per_s) + costs.op_s
        return CallCost(forward_s=forward_s, backward_s=2 * forward_s)
    rate = known.rates.get(refined.cases[call.op].op.kind, known.rest)
    forward_s = rate.forward_s(work.flops, work.touched_bytes)
    return CallCost(forward_s=forward_s, backward_s=forward_s * rate.backward)


def segment_costs(program: Program, costs: Costs) -> list[CallCost]:
    """Of one run of each segment, forward and backward."""
    found: list[CallCost] = []
    node = costs.calibration.node if costs.calibration is not None else NodeCost()
    for segment in program.segments:
        key = likeness(program.refined, segment)
        cost = costs._known.get(key)
        if cost is None:
            calls = [call_cost(program.refined, segment, call, costs) for call in segment.calls]
            derived = sum(entry.grad for entry in segment.entries) if segment.grad else 0
            forward_s = sum(one.forward_s for one in calls) + node.forward_s + derived * node.entry_forward_s
            backward_s = sum(one.backward_s for one in calls) + node.backward_s + derived * node.entry_backward_s
            cost = costs._known[key] = CallCost(
                forward_s=forward_s, backward_s=backward_s + (forward_s if segment.recompute else 0.0)
            )
        found.append(cost)
    return found


def step_seconds(program: Program, node: Node, costs: Costs) -> float:
    """How long a step takes once its group is there: its latency, and the bytes that the busiest device receives."""
    assert node.step is not None
    if node.step.kind is Kind.LOCAL:
        return sum(piece.box.size for piece in node.step.outputs) * 4 / costs.bytes_per_s
    per_device = received_bytes(program, node) / max(1, len(node.step.outputs))
    return costs.link.latency_s + per_device / costs.link.bandwidth_bytes_per_s


def received_bytes(program: Program, node: Node) -> int:
    """What arrives at devices because of a node, over all of them."""
    if node.step is None:
        return 0
    return node.step.received_elements * element_bytes(program.refined, program.flows[node.flow].tensor)
