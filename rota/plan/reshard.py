"""From one layout of a tensor to another: what each device keeps, and what travels between which two devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rota.plan.box import Box
from rota.plan.layout import Layout, Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A part of a piece that becomes a part of another piece, on the same device or on another."""

    box: Box
    source: Piece
    target: Piece

    @property
    def travels(self) -> bool:
        """Whether it goes to another device."""
        return self.source.device != self.target.device


def copies_between(old: Layout, new: Layout) -> Iterator[Copy]:
    """What makes up each new piece: first what its device has, the rest from the first that has it.

    Together the boxes of a target tile it, so that each of its elements comes from exactly one place.
    """
    for target in new:
        left: tuple[Box, ...] = (target.box,)
        for source in sorted(old, key=lambda piece: piece.device != target.device):
            if not left:
                break
            for box in left:
                common = box.intersect(source.box)
                if common is not None:
                    yield Copy(box=common, source=source, target=target)
            left = tuple(rest for box in left for rest in box.minus(source.box))
        assert not left, f"nobody has {left[0]}"
