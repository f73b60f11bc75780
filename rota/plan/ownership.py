"""Who counts what: each element of a tensor is owned by exactly one of the pieces that hold it."""

from __future__ import annotations

from rota.plan.box import Box, missing
from rota.plan.layout import Layout, Piece


def owned(layout: Layout) -> dict[Piece, tuple[Box, ...]]:
    """For each piece the boxes of it that no piece before it has: together they make up the tensor once."""
    seen: list[Box] = []
    found: dict[Piece, tuple[Box, ...]] = {}
    for piece in layout:
        found[piece] = () if piece.box in seen else missing(piece.box, seen)
        seen.append(piece.box)
    return found
