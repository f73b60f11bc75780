"""Runs a segment of a program: forward under autograd, and backward from the gradients that come back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rota.graph.part import Place
from rota.graph.refine import Refined
from rota.plan.program import Segment
from rota.runtime.generate import generate, is_random_segment
from rota.runtime.trial import Trial

RandomState = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(kw_only=True)
class Tape:
    """What a forward run keeps for its backward run."""

    entries: list[GradientEdge | None]
    """For each entry that returns a gradient, where it is in the graph of autograd."""
    exits: list[tuple[GradientEdge, torch.dtype] | None] = field(default_factory=list)
    """The same for each exit that depends on an entry. Edges keep no tensor alive that autograd does not need."""
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    """Of the entries, for gradients that turn out to be zero."""
    returned: Sequence[torch.Tensor | None] = ()
    """The entries that were dropped, back for the backward run."""
    generator: RandomState | None = None
    """The state of PyTorch's generators before the run, if it is to be repeated."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """What the run made and the backward pass needs, where somebody wants to move it; else autograd holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A note of a view of an entry."""

    entry: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Entry(torch.autograd.Function):
    """Begins the graph of autograd at a tensor, without keeping the tensor as a leaf would."""

    @staticmethod
    def forward(context: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


class SegmentRunner:
    """A segment, ready to run."""

    def __init__(self, segment: Segment, refined: Refined, *, compiled: bool = False) -> None:
        """`compiled` passes its code through torch.compile, and keeps what comes out if that is faster."""
        self.segment = segment
        self.module = generate(segment, refined)
        self._call: Callable[..., Any] = self.module.forward
        self._trial = Trial(self.module) if compiled and not is_random_segment(segment, refined) else None

    def forward(self, values: Sequence[torch.Tensor], place: Place) -> tuple[list[torch.Tensor], Tape | None]:
        """What goes out, detached, and the tape for the backward run."""
        if self._trial is None:
            return self._forward(values, place)
        with self._trial.timing(ends=not self.segment.grad):
            return self._forward(values, place)

    def _forward(self, values: Sequence[torch.Tensor], place: Place) -> tuple[list[torch.Tensor], Tape | None]:
        segment = self.segment
        if not segment.grad:
            with torch.no_grad():
                return self._run(list(values), place), None
        if segment.recompute:
            tape = Tape(entries=[], generator=_random_state() if place.plain else None)
            with torch.no_grad():
                return self._run(list(values), place), tape
        tape, outputs = self._record(values, place)
        return [output.detach() for output in outputs], tape

    def backward(
        self,
        tape: Tape,
        gradients: Sequence[torch.Tensor | None],
        *,
        values: Sequence[torch.Tensor | None] = (),
        place: Place | None = None,
        before: Sequence[torch.Tensor | None] = (),
    ) -> list[torch.Tensor | None]:
        """The gradient of each entry. `values` are the entries that it needs again: all if it is recomputed.

        `before` is what others have found of an entry's gradient, to which this is added term by term, as autograd does
        it when it differentiates all in one go.
        """
        if self._trial is None:
            return self._backward(tape, gradients, values, place, before)
        with self._trial.timing(ends=True):
            return self._backward(tape, gradients, values, place, before)

    def _backward(
        self,
        tape: Tape,
        gradients: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor | None],
        place: Place | None,
        before: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        if self.segment.recompute:
            assert place is not None
            tape = self.record_again(tape, values, place)
        return self.differentiate(tape, gradients, values=values, before=before)

    def record_again(self, tape: Tape, values: Sequence[torch.Tensor | None], place: Place) -> Tape:
        """The tape of the forward run, made once more."""
        with _generator(tape.generator):
            return self._record([value for value in values if value is not None], place)[0]

    def differentiate(
        self,
        tape: Tape,
        gradients: Sequence[torch.Tensor | None],
        *,
        values: Sequence[torch.Tensor | None],
        before: Sequence[torch.Tensor | None] = (),
    ) -> list[torch.Tensor | None]:
        """`backward`, when the tape is there."""
        tape.returned = values
        entries = [edge for edge in tape.entries if edge is not None]
        wanted = [
            (exit[0], gradient.to(exit[1]))
            for exit, gradient in zip(tape.exits, gradients, strict=True)
            if exit is not None and gradient is not None
        ]
        wanted += [
            (edge, term)
            for edge, term in zip(tape.entries, before, strict=bool(before))
            if edge is not None and term is not None
        ]
        found: Sequence[torch.Tensor | None] = [None] * len(entries)
        if wanted and entries:
            found = torch.autograd.grad(
                [edge for edge, _ in wanted], entries, [gradient for _, gradient in wanted], allow_unused=True
            )
        rest = iter(found)
        result: list[torch.Tensor | None] = []
        for edge, (shape, dtype) in zip(tape.entries, tape.shapes, strict=True):
            gradient = None if edge is None else next(rest)
            result.append(torch.zeros(shape, dtype=dtype) if edge is not None and gradient is None else gradient)
        return result

    def _record(self, values: Sequence[torch.Tensor], place: Place) -> tuple[Tape, list[torch.Tensor]]:
        tape = Tape(entries=[], shapes=[(tuple(value.shape), value.dtype) for value in values])
        inputs: list[torch.Tensor] = []
        anchor = torch.empty((), requires_grad=True)
        with torch.enable_grad():
            for entry, value in zip(self.segment.entries, values, strict=True):
                begun = _Entry.apply(anchor, value) if entry.grad else value  # type: ignore[no-untyped-call]
                tape.entries.append(get_gradient_edge(begun) if entry.grad else None)
                inputs.append(begun)
                del begun
            with self._dropping(tape, values):
                outputs = self._run(inputs, place)
        tape.exits = [(get_gradient_edge(output), output.dtype) if output.requires_grad else None for output in outputs]
        return tape, outputs

    def _dropping(self, tape: Tape, values: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Where autograd would keep an entry that comes back for the backward pass, it keeps a note of it."""
        dropped = {
            value.untyped_storage()._cdata: i
            for i, (entry, value) in enumerate(zip(self.segment.entries, values, strict=True))
            if entry.again
        }
        if not dropped:
            return contextlib.nullcontext()

        def pack(tensor: torch.Tensor) -> torch.Tensor | Dropped:
            entry = dropped.get(tensor.untyped_storage()._cdata)
            if entry is None:
                return tensor
            return Dropped(entry=entry, size=tensor.size(), stride=tensor.stride(), offset=int(tensor.storage_offset()))

        def unpack(kept: torch.Tensor | Dropped) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            value = tape.returned[kept.entry]
            assert value is not None
            return value.detach().as_strided(kept.size, kept.stride, kept.offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _run(self, inputs: list[torch.Tensor], place: Place) -> list[torch.Tensor]:
        call = self._call if self._trial is None else self._trial.choice
        return list(call(place, *inputs))


@contextlib.contextmanager
def _generator(state: RandomState | None) -> Any:
    """PyTorch's generators as they were, for as long as this lasts."""
    if state is None:
        yield
        return
    before = _random_state()
    _set_random_state(state)
    try:
        yield
    finally:
        _set_random_state(before)


def _random_state() -> RandomState:
    """Of the host's generator, and of the GPU's while one runs (never run)."""
    on_gpu = torch.get_default_device().type == "cuda"
    return torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None


def _set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
