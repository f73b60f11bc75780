"""Layouts: which device holds which boxes of a tensor, and the steps that turn one layout into another."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rota.plan.box import Box


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a tensor on a device."""

    device: int
    box: Box

    def __str__(self) -> str:
        """As people write it: 2:[0:4, 0:8]."""
        return f"{self.device}:{self.box}"


Layout = tuple[Piece, ...]
"""All pieces of a tensor. A device may hold several; equal boxes on several devices are replicas."""


class Kind(enum.StrEnum):
    """The ways to make pieces from others."""

    LOCAL = "local"
    """One output, from inputs on the same device that tile it (or contain it): slice, concatenate, sum."""
    SEND = "send"
    """One input on one device, the same box as the one output on another device."""
    ALL_GATHER = "all_gather"
    """Inputs that tile the output along a dim; each device of the group gets all of it."""
    ALL_REDUCE = "all_reduce"
    """Inputs with equal ranges whose shares tile the output's; each device of the group gets the sum."""
    REDUCE_SCATTER = "reduce_scatter"
    """As all_reduce, and each device keeps only its part along a dim."""
    ALL_TO_ALL = "all_to_all"
    """Inputs that tile a box along one dim; the outputs tile the same box along another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One communication, or one local assembly.

    Of a collective, the n-th input and the n-th output are on the n-th device of its group.
    """

    kind: Kind
    inputs: Layout
    outputs: Layout

    @property
    def group(self) -> tuple[int, ...]:
        """The devices that take part, in order."""
        if self.kind is Kind.SEND:
            return (self.inputs[0].device, self.outputs[0].device)
        return tuple(piece.device for piece in self.outputs)

    @property
    def received_elements(self) -> int:
        """How many elements arrive at devices, over all of the group, by the best known algorithm of its kind."""
        count = len(self.outputs)
        total = sum(piece.box.size for piece in self.outputs)
        match self.kind:
            case Kind.LOCAL:
                return 0
            case Kind.SEND:
                return total
            case Kind.ALL_REDUCE:  # a reduce-scatter and an all-gather
                return 2 * (count - 1) * self.outputs[0].box.size
            case Kind.ALL_GATHER:
                return total - sum(piece.box.size for piece in self.inputs)
            case Kind.REDUCE_SCATTER:
                return (count - 1) * total
            case Kind.ALL_TO_ALL:
                kept = (a.box.intersect(b.box) for a, b in zip(self.inputs, self.outputs, strict=True))
                return total - sum(box.size for box in kept if box is not None)

    def __str__(self) -> str:
        """As people read it."""
        return f"{self.kind} {_text(self.inputs)} -> {_text(self.outputs)}"


def canonical(layout: Iterable[Piece]) -> Layout:
    """The same layout, each piece once, in the order of devices and boxes."""
    return tuple(sorted(set(layout), key=lambda piece: (piece.device, piece.box.ranges, piece.box.share)))


def describe(layout: Layout, shape: tuple[int, ...]) -> str:
    """A layout in words: replicated on 0-3; dim 1 cut in 4 on 0-3; partial sums on 0, 2; ..."""
    boxes = {piece.box for piece in layout}
    devices = sorted({piece.device for piece in layout})
    where = f"on {_ranges(devices)}"
    words = list(_cuts(boxes, shape))
    copies = len(layout) / max(1, len(boxes))
    if not words:
        return f"whole {where}" if len(layout) == 1 else f"replicated {where}"
    if copies > 1 and math.isclose(copies, int(copies)):
        words.append(f"{int(copies)} copies")
    return ", ".join(words) + f" {where}"


def _cuts(boxes: set[Box], shape: tuple[int, ...]) -> Iterator[str]:
    for dim in range(len(shape)):
        ranges = {box.ranges[dim] for box in boxes}
        if ranges != {(0, shape[dim])}:
            yield f"dim {dim} cut in {len(ranges)}"
    shares = {box.share for box in boxes}
    if any(box.is_partial for box in boxes):
        yield f"{len(shares)} partial sums"


def _ranges(numbers: list[int]) -> str:
    """0-3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _text(layout: Layout) -> str:
    return " ".join(str(piece) for piece in layout)
