"""What every device of a program holds in the course of a step, and how much that is at most."""

from __future__ import annotations

from dataclasses import dataclass

from rota.graph.cost import element_bytes
from rota.graph.refine import Refined
from rota.plan.box import Box
from rota.plan.program import ONCE, Node, NodeKind, Program, Segment, Value
from rota.runtime.footprint import Footprint, Footprints, likeness, slice_bytes


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

    def __init__(self, refined: Refined, *, plain_random: bool) -> None:
        self._footprints = Footprints(refined, plain_random=plain_random)
        self._refined = refined
        self._plain = plain_random

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
        key = (tuple((*call[:6], *call[7:]) for call in calls), tuple(widths), self._plain, *rest)
        found = _FOOTPRINTS.get(key)
        if found is None:
            if len(_FOOTPRINTS) >= _MOST_FOOTPRINTS:
                _FOOTPRINTS.clear()
            found = _FOOTPRINTS[key] = self._footprints.of(segment)
        return found


class Occupancy:
    """Replays what every device holds."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.footprints = _Alike(
            program.refined, plain_random=program.devices == 1
        )  # alone, a task draws as PyTorch does
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
