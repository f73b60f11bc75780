"""Predicts a step of a program: when each node runs, how busy each device is, and how much memory it needs at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rota.graph.cost import element_bytes, work_of
from rota.graph.refine import Refined
from rota.plan.box import Box
from rota.plan.collectives import Link
from rota.plan.layout import Kind
from rota.plan.program import ONCE, Node, NodeKind, Program, Segment, Value
from rota.runtime.footprint import Footprint, Footprints, likeness, slice_bytes


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What things cost: rough rates, and measured seconds where there are any."""

    flops_per_s: float = 2e10
    bytes_per_s: float = 5e9
    op_s: float = 1e-5
    """What every op costs, however small."""
    link: Link = field(default_factory=Link)
    segment_s: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """segment -> measured seconds of its forward and backward run"""


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
    start_s, end_s, busy_s, moving_s = _times(program, costs)
    memory = _Memory(program)
    peaks = memory.replay()
    return Simulation(
        makespan_s=max(end_s, default=0.0),
        start_s=tuple(start_s),
        end_s=tuple(end_s),
        busy_s=tuple(busy_s),
        moving_s=tuple(moving_s),
        peak_bytes=tuple(peaks),
        stored_bytes=tuple(memory.stored_bytes),
        received_bytes=sum(received_bytes(program, node) for node in program.nodes),
    )


# ---- time ----


def _times(program: Program, costs: Costs) -> tuple[list[float], list[float], list[float], list[float]]:
    free = [0.0] * program.devices
    busy = [0.0] * program.devices
    moving = [0.0] * program.devices
    starts: list[float] = []
    ends: list[float] = []
    segments = _segment_seconds(program, costs)
    steps: dict[int, float] = {}
    for node in program.nodes:
        begin = max(free[device] for device in node.devices)
        if node.step is not None:
            duration = steps.get(id(node.step))
            if duration is None:
                duration = steps[id(node.step)] = step_seconds(program, node, costs)
            for device in node.devices:
                moving[device] += duration
        else:
            duration = segments[node.segment][1 if node.kind is NodeKind.BACKWARD else 0]
            busy[node.devices[0]] += duration
        for device in node.devices:
            free[device] = begin + duration
        starts.append(begin)
        ends.append(begin + duration)
    return starts, ends, busy, moving


def _segment_seconds(program: Program, costs: Costs) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    known: dict[object, tuple[float, float]] = {}
    for segment in program.segments:
        if segment.index in costs.segment_s:
            found.append(costs.segment_s[segment.index])
            continue
        key = likeness(program.refined, segment)
        if key not in known:
            forward = sum(call_seconds(program.refined, segment, i, costs) for i in range(len(segment.calls)))
            known[key] = (forward, forward * (3 if segment.recompute else 2))
        found.append(known[key])
    return found


def call_seconds(refined: Refined, segment: Segment, index: int, costs: Costs) -> float:
    """A rough cost of one op's part: its products, or the bytes that it touches."""
    call = segment.calls[index]
    work = work_of(refined, call.op, call.ranges)
    return max(work.flops / costs.flops_per_s, work.touched_bytes / costs.bytes_per_s) + costs.op_s


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


class _Memory:
    """Replays what every device holds."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.footprints = Footprints(program.refined)
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
