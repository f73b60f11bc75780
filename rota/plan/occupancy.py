"""What every device of a program holds in the course of a step, and how much that is at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rota.graph.cost import element_bytes
from rota.graph.refine import Refined
from rota.plan.box import Box
from rota.plan.program import ONCE, Entry, Exit, Node, NodeKind, Program, Segment, Value
from rota.runtime.footprint import Footprint, Footprints, Strides, likeness, slice_bytes


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

    def of(self, segment: Segment, strides: Sequence[Strides]) -> Footprint:
        """Of one segment, whose entries lie so in memory."""
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
        key = (tuple((*call[:6], *call[7:]) for call in calls), tuple(widths), self._plain, tuple(strides), *rest)
        found = _FOOTPRINTS.get(key)
        if found is None:
            if len(_FOOTPRINTS) >= _MOST_FOOTPRINTS:
                _FOOTPRINTS.clear()
            found = _FOOTPRINTS[key] = self._footprints.of(segment, strides)
        return found


class Occupancy:
    """Replays what every device holds."""

    def __init__(self, program: Program, *, plain_random: bool = False) -> None:
        """`plain_random` if random numbers will be drawn as PyTorch draws them."""
        self.program = program
        self.footprints = _Alike(program.refined, plain_random=plain_random)
        self.live = [0] * program.devices
        self.peak = [0] * program.devices
        self.stored_bytes = [0] * program.devices
        self._held: list[dict[Value, _Storage]] = [{} for _ in range(program.devices)]
        self._strides: dict[tuple[int, Value], Strides] = {}
        """Of values whose elements do not follow each other."""
        self._prints: dict[tuple[int, tuple[Strides, ...]], Footprint] = {}
        self._tapes: dict[tuple[int, int], tuple[Footprint, dict[int, _Storage]]] = {}
        """What a tape keeps of a segment's entries and, behind them, of its exits."""
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
        for node, frees in zip(program.nodes, program.frees, strict=True):
            if node.kind is NodeKind.EXCHANGE:
                self._exchange(node)
            elif node.kind is NodeKind.FORWARD:
                self._forward(node)
            else:
                self._backward(node)
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

    def _forward(self, node: Node) -> None:
        device = node.devices[0]
        segment = self.program.segments[node.segment]
        footprint = self._footprint(device, segment, node.reads)
        sliced = [i for i, value in enumerate(node.reads) if value is None]
        entries = [
            self._sliced(segment, i) if value is None else self._held[device][value]
            for i, value in enumerate(node.reads)
        ]
        for i in sliced:
            self._keep(device, entries[i])
        self._need(device, footprint.forward_peak)
        exits: list[_Storage] = []
        for value, strides in zip(node.makes, footprint.exit_strides, strict=True):
            if strides is not None:
                self._strides[(device, value)] = strides
        for value, size, entry, exit in zip(
            node.makes, footprint.exits, footprint.exit_of_entry, footprint.exit_of_exit, strict=True
        ):
            source = entries[entry] if entry is not None else exits[exit] if exit is not None else _Storage(size=size)
            exits.append(source)
            self._hold(device, value, source)
        if segment.grad:
            keeps = (*footprint.keeps_entry, *footprint.keeps_exit)
            storages = (*entries, *exits)
            # Of those in one memory the tape is one holder, and the first stands for them all.
            first: dict[int, _Storage] = {}
            for i, (storage, keep) in enumerate(zip(storages, keeps, strict=True)):
                if keep and not any(storage is one for one in first.values()):
                    first[i] = storage
                    self._keep(device, storage)
            self._tapes[(node.segment, node.microbatch)] = (footprint, first)
            self.live[device] += footprint.kept
            self.peak[device] = max(self.peak[device], self.live[device])
        for i in sliced:
            self._release(device, entries[i])

    def _footprint(self, device: int, segment: Segment, reads: Sequence[Value | None]) -> Footprint:
        strides = tuple(None if value is None else self._strides.get((device, value)) for value in reads)
        key = (segment.index, strides)
        if key not in self._prints:
            self._prints[key] = self.footprints.of(segment, strides)
        return self._prints[key]

    def _sliced(self, segment: Segment, index: int) -> _Storage:
        """A part of the batch or of a constant: a copy where it cannot be a view."""
        entry = segment.entries[index]
        key = (entry.tensor, entry.box.shape)
        if key not in self._slices:
            whole = Box.whole(self.program.refined.shape(entry.tensor))
            self._slices[key] = slice_bytes(self.program.refined, entry.tensor, whole, entry.box)
        return _Storage(size=self._slices[key])

    def _backward(self, node: Node) -> None:
        device = node.devices[0]
        segment = self.program.segments[node.segment]
        incoming = [
            self._incoming(device, exit, values) for exit, values in zip(segment.exits, node.gradients, strict=True)
        ]
        again = [self._sliced(segment, i) for i, value in enumerate(node.reads) if value is None and segment.recompute]
        passing = [
            one for one, values in zip(incoming, node.gradients, strict=True) if one is not None and len(values) > 1
        ]
        for storage in (*passing, *again):
            self._keep(device, storage)
        footprint, tape = self._tapes.pop((node.segment, node.microbatch))
        for stretch in footprint.backward:
            self._need(device, stretch.peak)
            if stretch.released in tape:
                self._release(device, tape.pop(stretch.released))
        self.live[device] -= footprint.kept
        made: list[_Storage] = []
        for size, exit, entry in zip(
            footprint.gradients, footprint.gradient_of_exit, footprint.gradient_of_entry, strict=True
        ):
            given = incoming[exit] if exit is not None else made[entry] if entry is not None else None
            made.append(given if given is not None else _Storage(size=size))
            self._keep(device, made[-1])
        for storage in (*passing, *again, *tape.values()):
            self._release(device, storage)
        for one, value, storage in zip(segment.entries, node.adds, made, strict=True):
            if value is not None:
                self._add(device, one, value, storage)
            self._release(device, storage)

    def _incoming(self, device: int, exit: Exit, values: Sequence[Value]) -> _Storage | None:
        """The gradient of an exit: a value, or a sum of several."""
        if len(values) > 1:
            return _Storage(size=exit.box.size * element_bytes(self.program.refined, exit.tensor))
        return self._held[device][values[0]] if values else None

    def _add(self, device: int, entry: Entry, value: Value, gradient: _Storage) -> None:
        box = self.program.boxes[value.box]
        size = box.size * element_bytes(self.program.refined, entry.tensor)
        if box.shape != entry.box.shape:  # it is spread over a larger piece
            gradient = _Storage(size=size)
            self._need(device, size)
        held = self._held[device].get(value)
        if held is None:
            self._hold(device, value, gradient)
        elif held.holders > 1 or held.size != size:  # it cannot be added to in place
            self._hold(device, value, _Storage(size=size))
            self._release(device, held)

    def _exchange(self, node: Node) -> None:
        assert node.step is not None
        width = element_bytes(self.program.refined, self.program.flows[node.flow].tensor)
        for piece, value in zip(node.step.outputs, node.makes, strict=True):
            self._hold(piece.device, value, _Storage(size=piece.box.size * width))
