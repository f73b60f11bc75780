"""Predicts a step of a program: when each node runs, how busy each device is, and how much memory it needs at most.

Without measured costs every exchange is blocking and every op has a rough rate. With a calibration the engine is
replayed as it is: collectives are joined and run beside the computation until somebody reads what they make.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rota.graph.cost import element_bytes, work_of
from rota.graph.graph import Ref
from rota.graph.part import reads_of
from rota.graph.refine import Refined, local_shape
from rota.graph.rules import occurrences
from rota.plan.box import Box
from rota.plan.collectives import Link
from rota.plan.layout import Kind
from rota.plan.program import ONCE, Call, Node, NodeKind, Program, Segment, Value
from rota.runtime.buckets import buckets_of
from rota.runtime.footprint import Footprint, Footprints, likeness, slice_bytes


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
    bucket_bytes: int = 25 * 2**20
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


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A predicted step."""

    makespan_s: float
    start_s: tuple[float, ...]
    """Of each node."""
    end_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    """Of each device: computing."""
    moving_s: tuple[float, ...]
    """Of each device: communicating, with the others already there."""
    peak_bytes: tuple[int, ...]
    """Of each device: parameters, gradients, activations and what is needed in between."""
    stored_bytes: tuple[int, ...]
    """Of each device: parameters and buffers."""
    received_bytes: int
    """Over all devices."""


def simulate(program: Program, costs: Costs | None = None) -> Simulation:
    """Replay a program with a clock and a ledger for each device."""
    costs = costs or Costs()
    times = _blocking_times(program, costs) if costs.calibration is None else _Replay(program, costs).run()
    memory = _Memory(program)
    peaks = memory.replay()
    return Simulation(
        makespan_s=times.makespan_s,
        start_s=tuple(times.start_s),
        end_s=tuple(times.end_s),
        busy_s=tuple(times.busy_s),
        moving_s=tuple(times.moving_s),
        peak_bytes=tuple(peaks),
        stored_bytes=tuple(memory.stored_bytes),
        received_bytes=sum(received_bytes(program, node) for node in program.nodes),
    )


# ---- what an op costs ----


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
    facts = (op.target, _plain(op.args), _plain(tuple(sorted(op.kwargs.items()))), op.autocast, reads, cut)
    return f"{op.kind} {hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"


def _plain(value: Any) -> Any:
    if isinstance(value, Ref):
        return "tensor"
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    return str(value)


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


_call_cost = call_cost  # rota.search knows it by this name


def _segment_costs(program: Program, costs: Costs) -> list[CallCost]:
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


# ---- time ----


@dataclass(kw_only=True)
class _Times:
    makespan_s: float = 0.0
    start_s: list[float]
    end_s: list[float]
    busy_s: list[float]
    moving_s: list[float]


def _blocking_times(program: Program, costs: Costs) -> _Times:
    """As if a device did one thing at a time."""
    free = [0.0] * program.devices
    times = _Times(start_s=[], end_s=[], busy_s=[0.0] * program.devices, moving_s=[0.0] * program.devices)
    segments = _segment_costs(program, costs)
    steps: dict[int, float] = {}
    for node in program.nodes:
        begin = max(free[device] for device in node.devices)
        if node.step is not None:
            duration = steps.get(id(node.step))
            if duration is None:
                duration = steps[id(node.step)] = step_seconds(program, node, costs)
            for device in node.devices:
                times.moving_s[device] += duration
        else:
            cost = segments[node.segment]
            duration = cost.backward_s if node.kind is NodeKind.BACKWARD else cost.forward_s
            times.busy_s[node.devices[0]] += duration
        for device in node.devices:
            free[device] = begin + duration
        times.start_s.append(begin)
        times.end_s.append(begin + duration)
    times.makespan_s = max(times.end_s, default=0.0)
    return times


class _Replay:
    """Replays the engine: what it launches, what it waits for, and what runs beside its computation meanwhile."""

    def __init__(self, program: Program, costs: Costs) -> None:
        assert costs.calibration is not None
        self._program = program
        self._known = costs.calibration
        self._costs = costs
        self._segments = _segment_costs(program, costs)
        at_work = len({device for node in program.nodes for device in node.devices})
        self._crowding = _interpolated(self._known.crowding, max(1, at_work))
        self._rate = 1.0 - min(0.95, self._known.overlap_share)
        """How fast a device computes while something is under way."""
        self._clock = [self._known.node.step_s] * program.devices
        self._flights: list[list[tuple[float, float]]] = [[] for _ in range(program.devices)]
        """Of each device, when communications are under way from now on; they follow each other."""
        self._moved_s = [0.0] * program.devices
        """Of each device, when the last of them ends."""
        self._pending: dict[tuple[int, Value], tuple[float, float, float]] = {}
        """What is under way -> when it began, when it is there, and how long it takes to unpack"""
        self._summed: set[tuple[int, Value]] = set()
        self._moves: dict[int, tuple[float, float, float]] = {}
        count = len(program.nodes)
        self._times = _Times(
            start_s=[0.0] * count,
            end_s=[0.0] * count,
            busy_s=[self._known.node.step_s] * program.devices,
            moving_s=[0.0] * program.devices,
        )

    def run(self) -> _Times:
        """All nodes, and the optimizer."""
        program = self._program
        buckets = buckets_of(program, most_bytes=self._known.bucket_bytes)
        joined = {index for bucket in buckets.values() for index in bucket.nodes}
        for index, node in enumerate(program.nodes):
            if node.step is None:
                self._compute(index, node)
            elif node.step.kind is Kind.LOCAL:
                self._local(index, node)
            elif node.step.kind is Kind.SEND:
                self._send(index, node)
            elif index in buckets:
                self._launch(buckets[index].nodes)
            elif index not in joined:
                self._launch((index,))
        for device, value in list(self._pending):
            self._wait(device, value)
        for device, seconds in enumerate(_optimizer_seconds(program, self._known)):
            self._busy(device, seconds)
        self._times.makespan_s = max(self._clock, default=0.0)
        return self._times

    # ---- devices ----

    def _busy(self, device: int, seconds: float) -> None:
        """A device computes, slower while a communication needs it, too."""
        now, left = self._clock[device], seconds * self._crowding
        self._times.busy_s[device] += left
        begun = now
        flights = self._flights[device]
        while flights and left > 0:
            begin, end = flights[0]
            if end <= now:
                flights.pop(0)
                continue
            if begin > now:
                alone = min(left, begin - now)
                now, left = now + alone, left - alone
                continue
            beside = min(left, (end - now) * self._rate)
            now, left = min(end, now + beside / self._rate), left - beside
            if left > 0:
                now = end
        now += left
        self._times.moving_s[device] += max(0.0, now - begun - seconds * self._crowding)
        self._clock[device] = now

    def _wait(self, device: int, value: Value) -> None:
        under_way = self._pending.pop((device, value), None)
        if under_way is not None:
            begin, end, unpack_s = under_way
            now = self._clock[device]
            if end > now:
                self._times.moving_s[device] += end - max(now, begin)
                self._clock[device] = end
            if unpack_s:
                self._busy(device, unpack_s)

    def _settle(self, device: int, values: Iterable[Value | None]) -> None:
        if self._pending:
            for value in values:
                if value is not None:
                    self._wait(device, value)

    # ---- nodes ----

    def _compute(self, index: int, node: Node) -> None:
        device = node.devices[0]
        self._settle(device, node.reads)
        cost = self._segments[node.segment]
        seconds = cost.forward_s
        if node.kind is NodeKind.BACKWARD:
            for values in node.gradients:
                self._settle(device, values)
            seconds = cost.backward_s + self._sums_s(device, node)
        self._times.start_s[index] = self._clock[device]
        self._busy(device, seconds)
        self._times.end_s[index] = self._clock[device]

    def _sums_s(self, device: int, node: Node) -> float:
        """To add gradients to others: of several readers, or of several micro-batches."""
        segment = self._program.segments[node.segment]
        count = size_bytes = 0
        for exit, values in zip(segment.exits, node.gradients, strict=True):
            if len(values) > 1:
                count += len(values) - 1
                size_bytes += (len(values) - 1) * exit.box.size * element_bytes(self._program.refined, exit.tensor)
        for entry, value in zip(segment.entries, node.adds, strict=True):
            if value is not None:
                if (device, value) in self._summed:
                    count += 1
                    size_bytes += entry.box.size * element_bytes(self._program.refined, entry.tensor)
                else:
                    self._summed.add((device, value))
        return count * self._known.node.exchange_s + size_bytes * self._known.copy_byte_s

    def _local(self, index: int, node: Node) -> None:
        device = node.devices[0]
        self._settle(device, node.reads)
        assert node.step is not None
        self._times.start_s[index] = self._clock[device]
        size = node.step.outputs[0].box.size * self._width(node)
        if len(node.step.inputs) == 1:
            self._busy(device, self._known.node.exchange_s + size * self._known.copy_byte_s)
        else:
            self._busy(device, self._assemble_s(size))
        self._times.end_s[index] = self._clock[device]

    def _send(self, index: int, node: Node) -> None:
        assert node.step is not None
        source, target = node.step.group
        (read,), (made,) = node.reads, node.makes
        self._settle(source, (read,))
        size = node.step.outputs[0].box.size * self._width(node)
        link = _link(self._known, Kind.SEND, 2)
        self._busy(source, link.launch_s + size * link.launch_byte_s)
        self._busy(target, self._known.node.exchange_s)
        begin, end = self._fly((source, target), link.latency_s + size * link.byte_s, self._clock[source])
        self._pending[(target, made)] = (begin, end, 0.0)
        self._times.start_s[index], self._times.end_s[index] = begin, end

    def _launch(self, indices: Sequence[int]) -> None:
        """Collectives that are launched as one."""
        nodes = [self._program.nodes[index] for index in indices]
        first = nodes[0].step
        assert first is not None
        link = _link(self._known, first.kind, len(first.group))
        moves = [self._move(node) for node in nodes]
        given = sum(given for given, _, _ in moves)
        received = sum(received for _, received, _ in moves)
        launch_s = link.launch_s + given * link.launch_byte_s + (len(nodes) - 1) * self._known.node.exchange_s
        for node in nodes:
            assert node.step is not None
            for piece, value in zip(node.step.inputs, node.reads, strict=True):
                self._settle(piece.device, (value,))
        for device in first.group:
            self._busy(device, launch_s)
        last = max(self._clock[device] for device in first.group)
        begin, end = self._fly(first.group, link.latency_s + received * link.byte_s, last)
        start = begin
        for index, node, (_, part, unpack_s) in zip(indices, nodes, moves, strict=True):
            assert node.step is not None
            for piece, value in zip(node.step.outputs, node.makes, strict=True):
                self._pending[(piece.device, value)] = (begin, end, unpack_s)
            # They move together; each is shown with its share of the time.
            stop = start + (end - begin) * (part / received if received else 1 / len(nodes))
            self._times.start_s[index], self._times.end_s[index] = start, min(end, stop)
            start = stop

    def _fly(self, devices: Sequence[int], seconds: float, ready_s: float) -> tuple[float, float]:
        """When a communication begins and ends: a device moves one after another."""
        begin = max(ready_s, *(self._moved_s[device] for device in devices))
        end = begin + seconds
        for device in devices:
            self._flights[device].append((begin, end))
            self._moved_s[device] = end
        return begin, end

    def _move(self, node: Node) -> tuple[float, float, float]:
        """The bytes that a device gives and receives, and the seconds to unpack them."""
        step = node.step
        assert step is not None
        found = self._moves.get(id(step))
        if found is None:
            width = self._width(node)
            given = max(piece.box.size for piece in step.inputs) * width
            received = step.received_elements * width / max(1, len(step.outputs))
            unpack_s = self._known.node.exchange_s
            if step.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL):
                unpack_s = self._assemble_s(max(piece.box.size for piece in step.outputs) * width)
            found = self._moves[id(step)] = (given, received, unpack_s)
        return found

    def _assemble_s(self, size_bytes: float) -> float:
        return self._known.assemble_s + size_bytes * self._known.assemble_byte_s

    def _width(self, node: Node) -> int:
        return element_bytes(self._program.refined, self._program.flows[node.flow].tensor)


def _link(known: Calibration, kind: Kind, group: int) -> LinkCost:
    """What was measured for a group of this size, or carried on from the next smaller one as in a ring."""
    measured = known.links.get(kind, ())
    if not measured:
        rough = Link()
        return LinkCost(
            group=group,
            launch_s=rough.latency_s,
            launch_byte_s=0.0,
            latency_s=rough.latency_s * (group - 1),
            byte_s=1 / rough.bandwidth_bytes_per_s,
        )
    one = measured[max(0, bisect.bisect_right([link.group for link in measured], group) - 1)]
    if one.group == group:
        return one
    return LinkCost(
        group=group,
        launch_s=one.launch_s,
        launch_byte_s=one.launch_byte_s,
        latency_s=one.latency_s * (group - 1) / (one.group - 1),
        byte_s=one.byte_s,
    )


def _optimizer_seconds(program: Program, known: Calibration) -> list[float]:
    """Of each device: to update its parameters."""
    found = [0.0] * program.devices
    update_s = functools.cache(functools.partial(_interpolated, known.optimizer))
    for name in program.gradients:
        width = element_bytes(program.refined, name)
        for piece in program.stored[name]:
            found[piece.device] += update_s(piece.box.size * width)
    return found


def _interpolated(points: Sequence[tuple[int, float]], at: float) -> float:
    """Between the points on straight lines, and beyond them in the direction of the last two."""
    if len(points) == 1:
        return points[0][1]
    place = min(max(1, bisect.bisect_left([one for one, _ in points], at)), len(points) - 1)
    (a, low), (b, high) = points[place - 1], points[place]
    return max(min(low, high) if at < a else 0.0, low + (high - low) * (at - a) / (b - a))


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


# ---- memory ----


@dataclass(kw_only=True, slots=True)
class _Storage:
    """Memory that several values may share."""

    size: int
    holders: int = 0


_MOST_FOOTPRINTS = 2048
_FOOTPRINTS: dict[object, Footprint] = {}
"""Those measured last, of all graphs: a search predicts hundreds of programs that have most segments in common."""


class _Alike:
    """Footprints that are measured once for all segments that differ only in where their ranges begin.

    A replica's samples are others than its neighbour's and take as much memory. Where something is added once, by the
    first part along a summed dim, it does matter whether a range begins at zero.
    """

    def __init__(self, refined: Refined) -> None:
        self._footprints = Footprints(refined)
        self._refined = refined

    def of(self, segment: Segment) -> Footprint:
        """Of one segment."""
        calls, *rest = likeness(self._refined, segment)
        widths = []
        for call in segment.calls:
            frame = self._refined.frames[call.op]
            widths.append(
                tuple(
                    (name, high - low, bool(frame.once) and frame.dims[name].reduced and low == 0)
                    for name, (low, high) in sorted(call.ranges.items())
                )
            )
        # All that likeness tells of a call but its ranges.
        key = (tuple((*call[:6], *call[7:]) for call in calls), tuple(widths), *rest)
        found = _FOOTPRINTS.get(key)
        if found is None:
            if len(_FOOTPRINTS) >= _MOST_FOOTPRINTS:
                _FOOTPRINTS.clear()
            found = _FOOTPRINTS[key] = self._footprints.of(segment)
        return found


class _Memory:
    """Replays what every device holds."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.footprints = _Alike(program.refined)
        self.live = [0] * program.devices
        self.peak = [0] * program.devices
        self.stored_bytes = [0] * program.devices
        self._held: list[dict[Value, _Storage]] = [{} for _ in range(program.devices)]
        self._tapes: dict[tuple[int, int], tuple[int, list[_Storage]]] = {}
        self._summed: set[tuple[int, Value]] = set()
        self._numbers = {box: number for number, box in enumerate(program.boxes)}
        self._slices: dict[tuple[str, tuple[int, ...]], int] = {}

    def replay(self) -> list[int]:
        """The peak of each device."""
        program = self.program
        for name, layout in program.stored.items():
            for piece in layout:
                size = piece.box.size * element_bytes(program.refined, name)
                self._hold(piece.device, Value(name, ONCE, self._numbers[piece.box]), _Storage(size=size))
                self.stored_bytes[piece.device] += size
        prints = [self.footprints.of(segment) for segment in program.segments]
        for node, frees in zip(program.nodes, program.frees, strict=True):
            if node.kind is NodeKind.EXCHANGE:
                self._exchange(node)
            elif node.kind is NodeKind.FORWARD:
                self._forward(node, prints[node.segment])
            else:
                self._backward(node, prints[node.segment])
            for device, value in frees:
                self._drop(device, value)
        return self.peak

    def _hold(self, device: int, value: Value, storage: _Storage) -> None:
        self._keep(device, storage)
        self._held[device][value] = storage

    def _keep(self, device: int, storage: _Storage) -> None:
        storage.holders += 1
        if storage.holders == 1:
            self.live[device] += storage.size
            self.peak[device] = max(self.peak[device], self.live[device])

    def _release(self, device: int, storage: _Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            self.live[device] -= storage.size

    def _drop(self, device: int, value: Value) -> None:
        storage = self._held[device].pop(value, None)
        if storage is not None:
            self._release(device, storage)

    def _need(self, device: int, size: int) -> None:
        self.peak[device] = max(self.peak[device], self.live[device] + size)

    def _forward(self, node: Node, footprint: Footprint) -> None:
        device = node.devices[0]
        segment = self.program.segments[node.segment]
        self._need(device, footprint.forward_peak)
        entries = [
            self._sliced(segment, i) if value is None else self._held[device][value]
            for i, value in enumerate(node.reads)
        ]
        exits: list[_Storage] = []
        for value, size, shared in zip(node.makes, footprint.exits, footprint.exit_of_entry, strict=True):
            source = entries[shared] if shared is not None else None
            storage = source if source is not None else _Storage(size=size)
            exits.append(storage)
            self._hold(device, value, storage)
        if segment.grad:
            kept = [one for one, keep in zip(entries, footprint.keeps_entry, strict=True) if keep and one is not None]
            kept += [one for one, keep in zip(exits, footprint.keeps_exit, strict=True) if keep]
            for storage in kept:
                self._keep(device, storage)
            self.live[device] += footprint.kept
            self.peak[device] = max(self.peak[device], self.live[device])
            self._tapes[(node.segment, node.microbatch)] = (footprint.kept, kept)

    def _sliced(self, segment: Segment, index: int) -> _Storage:
        """A part of the batch or of a constant: a copy where it cannot be a view."""
        entry = segment.entries[index]
        key = (entry.tensor, entry.box.shape)
        if key not in self._slices:
            whole = Box.whole(self.program.refined.shape(entry.tensor))
            self._slices[key] = slice_bytes(self.program.refined, entry.tensor, whole, entry.box)
        return _Storage(size=self._slices[key])

    def _backward(self, node: Node, footprint: Footprint) -> None:
        device = node.devices[0]
        sums = sum(self._held[device][values[0]].size for values in node.gradients if len(values) > 1)
        self._need(device, sums + footprint.backward_peak)
        incoming = [
            self._held[device][values[0]] if len(values) == 1 else None if not values else _Storage(size=0)
            for values in node.gradients
        ]
        kept, storages = self._tapes.pop((node.segment, node.microbatch))
        self.live[device] -= kept
        for storage in storages:
            self._release(device, storage)
        entries = self.program.segments[node.segment].entries
        for i, (value, size) in enumerate(zip(node.adds, footprint.gradients, strict=True)):
            if value is None:
                continue
            handed = footprint.gradient_of_exit[i]
            given = incoming[handed] if handed is not None else None
            box = self.program.boxes[value.box]
            if box.shape != entries[i].box.shape:  # it is spread over a larger piece
                size = box.size * element_bytes(self.program.refined, entries[i].tensor)
                given = None
                self._need(device, 2 * size)
            if value not in self._held[device]:
                self._hold(device, value, given if given is not None else _Storage(size=size))
            elif (device, value) not in self._summed:
                self._need(device, size)
                self._summed.add((device, value))

    def _exchange(self, node: Node) -> None:
        assert node.step is not None
        width = element_bytes(self.program.refined, self.program.flows[node.flow].tensor)
        for piece, value in zip(node.step.outputs, node.makes, strict=True):
            self._hold(piece.device, value, _Storage(size=piece.box.size * width))
