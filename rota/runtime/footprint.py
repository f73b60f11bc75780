"""How much memory a segment takes, found by running it on tensors without data.

The same code runs that will run on real tensors, so what autograd keeps, what is shared and what is temporary is not
modelled but seen. Segments that look alike, as those of repeated layers do, are run once.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from rota.graph.graph import Ref
from rota.graph.part import Place
from rota.graph.refine import Refined, local_shape
from rota.plan.box import Box
from rota.plan.program import Segment
from rota.runtime.ledger import Ledger
from rota.runtime.pieces import cut
from rota.runtime.segment import SegmentRunner, Tape

Strides = tuple[int, ...] | None
"""How a tensor lies in its memory; None for one whose elements follow each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The backward run until it lets go of something that others may hold, too; bytes count from its beginning."""

    peak: int
    """The most that there is, beyond what was there when the backward run began."""
    released: int | None
    """The entry, or behind all entries the exit, that it lets go of then; None at the end of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """The memory of a segment, in bytes."""

    entries: tuple[int, ...]
    """Of each entry."""
    exits: tuple[int, ...]
    """Of each exit; 0 for one that shares the memory of an entry or of an exit before it."""
    exit_of_entry: tuple[int | None, ...]
    """For each exit, the entry whose memory it shares."""
    exit_of_exit: tuple[int | None, ...]
    """For each exit, the exit before it whose memory it shares."""
    exit_strides: tuple[Strides, ...]
    forward_peak: int
    """The most that the forward run needs beyond its entries."""
    kept: int
    """What is kept for the backward run, beyond entries and exits."""
    keeps_entry: tuple[bool, ...]
    keeps_exit: tuple[bool, ...]
    moves_exit: tuple[bool, ...]
    """For each exit, whether it is all that is in its memory and nobody else's, so that it can be moved."""
    backward_peak: int
    """The most that the backward run needs beyond what was kept and the gradients that come in."""
    backward: tuple[Stretch, ...]
    """The same, told in the order in which entries and exits that were kept are needed no more."""
    gradients: tuple[int, ...]
    """Of each entry's gradient."""
    gradient_of_exit: tuple[int | None, ...]
    """For each entry, the exit whose gradient is handed on as its own."""
    gradient_of_entry: tuple[int | None, ...]
    """For each entry, the entry before it whose gradient is in the same memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Backward:
    stretches: tuple[Stretch, ...] = ()
    gradients: tuple[int, ...]
    handed: tuple[int | None, ...]
    twins: tuple[int | None, ...]


class _FakeLedger(Ledger):  # type: ignore[no-untyped-call]
    """Counts tensors without data; asks the kernel where the size of what it makes is its own matter."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.mkldnn_rnn_layer.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        *results, workspace = func(*args, **(kwargs or {}))
        workspace = workspace.new_empty(_workspace_bytes(args))
        for one in (*results, workspace):
            self.charge(one)
        return (*results, workspace)


_MOST_STEPS = 32
_WORKSPACES: dict[object, int] = {}


def _workspace_bytes(args: tuple[Any, ...]) -> int:
    """What a recurrent layer of oneDNN keeps for its backward run, which only the kernel knows.

    It grows evenly with the steps but for the rounding to pages, so that of long sequences some steps are enough.
    """
    steps = int(args[0].shape[0])
    key = tuple((tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else str(one) for one in args)
    if key not in _WORKSPACES:
        if steps <= _MOST_STEPS:
            _WORKSPACES[key] = _asked_bytes(args, steps)
        else:
            half, most = (_asked_bytes(args, count) for count in (_MOST_STEPS // 2, _MOST_STEPS))
            _WORKSPACES[key] = most + (most - half) * 2 * (steps - _MOST_STEPS) // _MOST_STEPS
    return _WORKSPACES[key]


def _asked_bytes(args: tuple[Any, ...], steps: int) -> int:
    with unset_fake_temporarily():
        real = [torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, torch.Tensor) else one for one in args]
        real[0] = real[0][:steps]
        return int(torch.ops.aten.mkldnn_rnn_layer.default(*real)[-1].nbytes)


class Footprints:
    """The footprints of a program's segments."""

    def __init__(self, refined: Refined, *, plain_random: bool, whole_tapes: bool = False) -> None:
        """`plain_random` if random numbers will be drawn as PyTorch draws them, which takes other memory.

        With `whole_tapes`, what a forward run keeps lies together and is freed when the backward run has ended; else
        autograd frees it bit by bit, and what it frees makes room for what the backward run makes.
        """
        self._refined = refined
        self._plain = plain_random
        self._whole_tapes = whole_tapes
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, Footprint] = {}

    def __len__(self) -> int:
        """How many different ones were found so far."""
        return len(self._known)

    def of(self, segment: Segment, strides: Sequence[Strides] = ()) -> Footprint:
        """Of one segment, whose entries lie so in memory; run once for all that look like it."""
        key = likeness(self._refined, segment), *strides
        if key not in self._known:
            self._known[key] = self._measure(segment, strides or (None,) * len(segment.entries))
        return self._known[key]

    def _measure(self, segment: Segment, strides: Sequence[Strides]) -> Footprint:
        runner = SegmentRunner(segment, self._refined)
        place = Place(key=1, plain=self._plain)
        ledger = _FakeLedger()
        with self._mode, ledger:
            ledger.watch(-1)
            values = [
                self._fake(entry.tensor, entry.box.shape, one)
                for entry, one in zip(segment.entries, strides, strict=True)
            ]
            sizes = tuple(_charged(ledger, value) for value in values)
            ledger.watch(0)
            outputs, tape = runner.forward(list(values), place)
            forward_peak = ledger.peak_bytes.get(0, 0)
            keys = [one.untyped_storage()._cdata for one in (*values, *outputs)]
            exits, shared, repeated = _exits(outputs, keys)
            refs = [weakref.ref(one.untyped_storage()) for one in (*values, *outputs)]
            shapes = [(tuple(output.shape), output.dtype) for output in outputs]
            laid = tuple(None if one.is_contiguous() else tuple(one.stride()) for one in outputs)
            own = _whole_of_their_own(values, outputs)
            del values, outputs  # what is alive now is what the tape keeps
            keeps = tuple(ref() is not None for ref in refs)
            keeps_entry, keeps_exit = keeps[: len(sizes)], keeps[len(sizes) :]
            held = {key: i for i, (key, keep) in reversed([*enumerate(zip(keys, keeps, strict=True))]) if keep}
            ledger.pass_on(0, -1, only=held)  # whether it is freed with the tape is for its other holders to say
            kept = ledger.live_bytes.get(0, 0)
            backward = _Backward(gradients=(0,) * len(sizes), handed=(None,) * len(sizes), twins=(None,) * len(sizes))
            if tape is not None:
                backward = self._measure_backward(runner, tape, shapes, ledger, place, held, strides)
        return Footprint(
            entries=sizes,
            exits=exits,
            exit_of_entry=shared,
            exit_of_exit=repeated,
            exit_strides=laid,
            forward_peak=forward_peak,
            kept=kept,
            keeps_entry=keeps_entry,
            keeps_exit=keeps_exit,
            moves_exit=tuple(one and not keep for one, keep in zip(own, keeps_exit, strict=True)),
            backward_peak=max((one.peak for one in backward.stretches), default=0),
            backward=backward.stretches,
            gradients=backward.gradients,
            gradient_of_exit=backward.handed,
            gradient_of_entry=backward.twins,
        )

    def _measure_backward(
        self,
        runner: SegmentRunner,
        tape: Tape,
        shapes: Any,
        ledger: Ledger,
        place: Place,
        held: Mapping[int, int],
        strides: Sequence[Strides],
    ) -> _Backward:
        ledger.watch(-1)
        again = [
            self._fake(entry.tensor, entry.box.shape, one) if entry.again or runner.segment.recompute else None
            for entry, one in zip(runner.segment.entries, strides, strict=True)
        ]
        for value in again:
            if value is not None:
                ledger.charge(value)
        incoming: list[torch.Tensor | None] = []
        for exit, (shape, dtype) in zip(runner.segment.exits, shapes, strict=True):
            incoming.append(torch.empty(shape, dtype=dtype) if exit.grad else None)
            if exit.grad:
                ledger.charge(incoming[-1])  # type: ignore[arg-type]
        ledger.watch(0)
        before = ledger.live_bytes.get(0, 0)
        ledger.peak_bytes[0] = before
        stretches: list[Stretch] = []
        waiting = dict(held)

        def note(key: int) -> None:
            released = waiting.pop(key, None)
            if released is not None:
                stretches.append(Stretch(peak=ledger.peak_bytes[0] - before, released=released))
                ledger.peak_bytes[0] = ledger.live_bytes[0]

        if runner.segment.recompute:
            tape = runner.record_again(tape, again, place)
        if self._whole_tapes:
            recorded_peak = ledger.peak_bytes[0] - before
            recorded = ledger.live_bytes.get(0, 0) - before
            ledger.pass_on(0, -1)
            before = ledger.peak_bytes[0] = 0
        else:
            ledger.on_free = note
        found = runner.differentiate(tape, incoming, values=again)
        ledger.on_free = lambda key: None
        peak = ledger.peak_bytes[0] - before
        if self._whole_tapes:
            peak = max(recorded_peak, recorded + peak)
        stretches.append(Stretch(peak=peak, released=None))
        gradients = tuple(0 if one is None else one.untyped_storage().nbytes() for one in found)
        given = [None if one is None else one.untyped_storage()._cdata for one in incoming]
        made = [None if one is None else one.untyped_storage()._cdata for one in found]
        return _Backward(
            stretches=tuple(stretches),
            gradients=gradients,
            handed=tuple(_place_of(key, given) for key in made),
            twins=tuple(_place_of(key, made[:i]) for i, key in enumerate(made)),
        )

    def _fake(self, tensor: str, widths: tuple[int, ...], strides: Strides = None) -> torch.Tensor:
        shape = local_shape(self._refined.factors[tensor], widths)
        dtype = getattr(torch, self._refined.graph.tensors[tensor].dtype)
        return torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)


def slice_bytes(refined: Refined, tensor: str, outer: Box, inner: Box) -> int:
    """What it takes to cut a box out of a tensor: nothing for a view."""
    shape = local_shape(refined.factors[tensor], outer.shape)
    whole = torch.empty(shape, dtype=getattr(torch, refined.graph.tensors[tensor].dtype), device="meta")
    part = cut(whole, refined.factors[tensor], outer, inner)
    same = part.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return 0 if same else part.untyped_storage().nbytes()


def _charged(ledger: Ledger, value: torch.Tensor) -> int:
    ledger.charge(value)
    return value.untyped_storage().nbytes()


def _exits(
    outputs: Sequence[torch.Tensor], keys: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int | None, ...], tuple[int | None, ...]]:
    """The bytes of each exit, the entry whose memory it shares, and the exit before it whose memory it shares."""
    entries, made = keys[: len(keys) - len(outputs)], keys[len(keys) - len(outputs) :]
    of_entry = tuple(_place_of(key, entries) for key in made)
    of_exit = tuple(_place_of(key, made[:i]) for i, key in enumerate(made))
    sizes = tuple(
        output.untyped_storage().nbytes() if entry is None and exit is None else 0
        for output, entry, exit in zip(outputs, of_entry, of_exit, strict=True)
    )
    return sizes, of_entry, of_exit


def _place_of(key: int | None, keys: Sequence[int | None]) -> int | None:
    return keys.index(key) if key is not None and key in keys else None


def _whole_of_their_own(values: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[bool]:
    """Whether each output fills its memory without gaps, and shares it with nobody."""
    keys = [one.untyped_storage()._cdata for one in (*values, *outputs)]
    found = []
    for output in outputs:
        storage = output.untyped_storage()
        filled = output.numel() * output.element_size() == storage.nbytes() > 0
        found.append(filled and keys.count(storage._cdata) == 1)
    return found


def likeness(refined: Refined, segment: Segment) -> Any:
    """What two segments have in common if they compute the same on tensors of the same shapes."""
    calls = []
    for call in segment.calls:
        case = refined.cases[call.op]
        calls.append(
            (
                case.op.target,
                plain(case.op.args),
                plain(tuple(sorted(case.op.kwargs.items()))),
                case.op.with_grad,
                case.op.autocast,
                case.reads,
                tuple(sorted(call.ranges.items())),
                call.reads,
                call.makes,
            )
        )
    entries = tuple(
        (
            entry.box.shape,
            refined.factors[entry.tensor],
            refined.graph.tensors[entry.tensor].dtype,
            entry.grad,
            entry.again,
        )
        for entry in segment.entries
    )
    exits = tuple((exit.slot, exit.grad) for exit in segment.exits)
    return tuple(calls), entries, exits, segment.recompute, segment.grad


def plain(value: Any) -> Any:
    """An argument without the tensors that it names: what calls that cost the same have in common."""
    if isinstance(value, Ref):
        return "tensor"
    if isinstance(value, tuple | list):
        return tuple(plain(item) for item in value)
    return str(value)
