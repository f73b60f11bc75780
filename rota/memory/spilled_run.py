"""One device of a program, in which nothing is kept that somebody else may want to move."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rota.memory.steps import forward_reads
from rota.plan.program import Node, NodeKind, Program, Segment, Source, Value
from rota.runtime.device_run import DeviceRun, laid_out, total
from rota.runtime.segment import Dropped, SegmentRunner, Tape


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """A note of a view of what a segment made and keeps."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """A note of a view of a parameter, whose memory is another one each time that it comes back."""

    parameter: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """From where the parameter begins."""

    def again(self) -> torch.Tensor:
        """The view, of the memory that the parameter has now."""
        whole = self.parameter.detach()
        return whole.as_strided(self.size, self.stride, int(whole.storage_offset()) + self.offset)


def owning(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without what it is a view of, which would keep its memory when that is taken from it."""
    if not tensor._is_view():
        return tensor
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), *place)


class SpilledSegment(SegmentRunner):
    """Keeps nothing of what other items hold, and what it does keep where it can be moved."""

    def _dropping(self, tape: Tape, values: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        entries = {value.untyped_storage()._cdata: i for i, value in enumerate(values)}
        kept: dict[tuple[int, torch.dtype], int] = {}

        def pack(tensor: torch.Tensor) -> Dropped | _Kept:
            storage = tensor.untyped_storage()
            size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            entry = entries.get(storage._cdata)
            if entry is not None:
                return Dropped(entry=entry, size=size, stride=stride, offset=offset)
            key = (storage._cdata, tensor.dtype)
            if key not in kept:
                # All of the memory, flat; while it is listed no other can be given its place.
                kept[key] = len(tape.kept)
                tape.kept.append(torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage))
            return _Kept(number=kept[key], size=size, stride=stride, offset=offset)

        def unpack(note: Dropped | _Kept) -> torch.Tensor:
            if isinstance(note, Dropped):
                value = tape.returned[note.entry]
                assert value is not None
                return value.detach().as_strided(note.size, note.stride, note.offset)
            return tape.kept[note.number].as_strided(note.size, note.stride, note.offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class SpilledRun(DeviceRun):
    """One device, on the model's own parameters."""

    def __init__(
        self,
        program: Program,
        device: int,
        *,
        seed: int,
        plain_random: bool,
        shares: int,
        stored: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(program, device, seed=seed, plain_random=plain_random)
        self._shares = shares
        self._forward_reads = forward_reads(program)
        self._passed = _read_by_segments_only(program)
        self._seen: dict[Value, _Seen] = {}
        for (name, _), value in self._stored.items():
            self.values[value] = stored[name]

    def share_code(self, other: SpilledRun) -> None:
        """Run the same segments as another one, which has other values."""
        self._runners = other._runners

    def kept(self, segment: int, microbatch: int) -> list[torch.Tensor]:
        """What a segment keeps for its backward pass."""
        return self._tapes[(segment, microbatch)].kept

    def made(self, value: Value) -> list[torch.Tensor]:
        """What a segment made for others."""
        return [self.values[value]]

    def hand_over(self, names: Iterable[str]) -> None:
        """Add complete gradients to those of the parameters, and forget them here."""
        for name in names:
            for (device, box), values in self.program.gradients[name].items():
                if device != self.device:
                    continue
                parameter = self.stored(name, box)
                gradient = total([self.values.pop(value) for value in values])
                assert gradient is not None
                gradient = owning(laid_out(gradient, parameter))
                if parameter.grad is None:
                    parameter.grad = gradient
                else:  # in place: it may lie in a slab
                    parameter.grad += gradient

    def forward(self, node: Node) -> None:
        """Run a segment; what it makes may be moved."""
        super().forward(node)
        parameters = self._parameters_of(node)
        for value in node.makes:
            made = self.values[value]
            parameter = parameters.get(made.untyped_storage()._cdata)
            if parameter is None:
                self.values[value] = owning(made)
            elif value in self._passed:  # it must not keep what the parameter leaves behind
                offset = int(made.storage_offset()) - int(parameter.storage_offset())
                self._seen[value] = _Seen(parameter=parameter, size=made.size(), stride=made.stride(), offset=offset)
                self.values[value] = torch.empty((), dtype=made.dtype, device=made.device).expand(made.size())
            else:
                self.values[value] = made.clone()

    def _parameters_of(self, node: Node) -> dict[int, torch.Tensor]:
        """the memory of each parameter that a segment sees, itself or a view of it -> the parameter"""
        found: dict[int, torch.Tensor] = {}
        for entry, value in zip(self.program.segments[node.segment].entries, node.reads, strict=True):
            if value in self._seen:
                parameter = self._seen[value].parameter
            elif value is not None and entry.source is Source.STORED:
                parameter = self.values[value]
            else:
                continue
            if isinstance(parameter, torch.nn.Parameter):
                found[parameter.untyped_storage()._cdata] = parameter
        return found

    def clear(self) -> None:
        """Forget what the last step left, but for parameters and buffers."""
        super().clear()
        self._seen.clear()

    def drop(self, values: Iterable[Value]) -> None:
        """Forget values that nobody needs any more."""
        values = list(values)
        super().drop(values)
        for value in values:
            self._seen.pop(value, None)

    def _inputs(self, segment: Segment, node: Node, *, everything: bool = True) -> list[Any]:
        found = super()._inputs(segment, node, everything=everything)
        return [
            self._seen[value].again() if value in self._seen else one
            for one, value in zip(found, node.reads, strict=True)
        ]

    def _made_runner(self, segment: Segment) -> SegmentRunner:
        return SpilledSegment(segment, self.program.refined)

    def _before(self, segment: Segment, node: Node) -> list[torch.Tensor | None]:
        """What later segments have found: sums come out as the plain ones only if their terms are added one by one."""
        return [
            None
            if value is None or self.program.boxes[value.box].ranges != entry.box.ranges
            else self.values.get(value)
            for entry, value in zip(segment.entries, node.adds, strict=True)
        ]

    def _again(self, segment: Segment, node: Node) -> list[Any]:
        reads = self._forward_reads[(node.segment, node.microbatch)]
        found = self._inputs(segment, node, everything=True)
        for i, value in enumerate(reads):
            if found[i] is None and value is not None:
                found[i] = self._seen[value].again() if value in self._seen else self.values.get(value)
        return found


def _read_by_segments_only(program: Program) -> set[Value]:
    """What is no result, no buffer's next value, and goes to no other device."""
    made = {value for node in program.nodes if node.kind is NodeKind.FORWARD for value in node.makes}
    made -= {one.value for one in program.results.values()}
    made -= {value for pieces in program.updates.values() for value in pieces.values()}
    for node in program.nodes:
        if node.kind is NodeKind.EXCHANGE:
            made -= set(node.reads)
    return made
