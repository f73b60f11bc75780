"""When each node of a program runs: as if a device did one thing at a time, or as the engine really does it.

Without measured costs every exchange is blocking and every op has a rough rate. With a calibration the engine is
replayed as it is: collectives are joined and run beside the computation until somebody reads what they make.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rota.graph.cost import element_bytes
from rota.plan.collectives import Link
from rota.plan.costs import Calibration, Costs, LinkCost, segment_costs, step_seconds
from rota.plan.layout import Kind
from rota.plan.program import Node, NodeKind, Program, Value
from rota.runtime.buckets import buckets_of


@dataclass(kw_only=True)
class Times:
    makespan_s: float = 0.0
    start_s: list[float]
    end_s: list[float]
    busy_s: list[float]
    moving_s: list[float]


def blocking_times(program: Program, costs: Costs) -> Times:
    """As if a device did one thing at a time."""
    free = [0.0] * program.devices
    times = Times(start_s=[], end_s=[], busy_s=[0.0] * program.devices, moving_s=[0.0] * program.devices)
    segments = segment_costs(program, costs)
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


class Replay:
    """Replays the engine: what it launches, what it waits for, and what runs beside its computation meanwhile."""

    def __init__(self, program: Program, costs: Costs) -> None:
        assert costs.calibration is not None
        self._program = program
        self._known = costs.calibration
        self._costs = costs
        self._segments = segment_costs(program, costs)
        at_work = len({device for node in program.nodes for device in node.devices})
        self._crowding = interpolated(self._known.crowding, max(1, at_work))
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
        self._times = Times(
            start_s=[0.0] * count,
            end_s=[0.0] * count,
            busy_s=[self._known.node.step_s] * program.devices,
            moving_s=[0.0] * program.devices,
        )

    def run(self) -> Times:
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
    update_s = functools.cache(functools.partial(interpolated, known.optimizer))
    for name in program.gradients:
        width = element_bytes(program.refined, name)
        for piece in program.stored[name]:
            found[piece.device] += update_s(piece.box.size * width)
    return found


def interpolated(points: Sequence[tuple[int, float]], at: float) -> float:
    """Between the points on straight lines, and beyond them in the direction of the last two."""
    if len(points) == 1:
        return points[0][1]
    place = min(max(1, bisect.bisect_left([one for one, _ in points], at)), len(points) - 1)
    (a, low), (b, high) = points[place - 1], points[place]
    return max(min(low, high) if at < a else 0.0, low + (high - low) * (at - a) / (b - a))
