"""Brings the pieces of a model, with what its optimizer remembers of them, from one layout to another.

Nothing is changed until everything is there: memory is taken first, all processes say whether they have it, and only
then tensors travel. Whoever fails before that leaves all of them as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rota.errors import PeerError
from rota.graph.refine import local_shape
from rota.plan.box import Box
from rota.plan.layout import Piece
from rota.plan.program import Program
from rota.plan.reshard import Copy, copies_between
from rota.runtime.gang import Gang, talking
from rota.runtime.pieces import cut

VALUE = "value"
"""The key of a piece itself among what is held of it,"""
GRADIENT = "gradient"
"""and of its gradient; the others are the optimizer's."""

Held = Mapping[tuple[str, Box], Mapping[str, Any]]
"""Of each piece on this device its tensors by key, and numbers that belong to the parameter as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """A part of a tensor that travels."""

    name: str
    key: str
    copy: Copy
    dtype: torch.dtype


class Resharding:
    """One change of layouts, between two steps."""

    def __init__(self, old: Program, new: Program, gang: Gang, held: Held) -> None:
        """Every process calls it with what it holds."""
        self._gang = gang
        self._rank = gang.rank
        self._new = new
        self._factors = new.refined.factors
        self._held = held
        self._kinds = self._agreed_kinds()
        self._copies = {
            name: list(copies_between(old.stored[name], layout))
            for name, layout in new.stored.items()
            if old.stored[name] != layout
        }
        self._made: dict[tuple[str, Box], dict[str, Any]] = {}
        self._sends: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._receives: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def run(self) -> dict[tuple[str, Box], dict[str, Any]] | None:
        """What this device holds afterwards; None, in every process, if one of them has no room for it."""
        refused: Exception | None = None
        try:
            self._prepare()
        except (RuntimeError, MemoryError) as error:
            refused = error
        ready = self._gang.sum(torch.tensor([0.0 if refused else 1.0], dtype=torch.float64))
        if isinstance(refused, PeerError):
            raise refused
        if ready.item() < self._gang.size:
            return None
        self._exchange()
        self._place()
        return self._made

    @property
    def moved_bytes(self) -> int:
        """What this device sends."""
        return sum(flat.numel() * flat.element_size() for flat in self._sends.values())

    def _agreed_kinds(self) -> dict[str, dict[str, Any]]:
        """For each name its keys: the type of a tensor that is as large as the piece, or a number that all have."""
        mine: dict[str, dict[str, Any]] = {}
        for (name, _), tensors in self._held.items():
            shape = tensors[VALUE].shape
            for key, value in tensors.items():
                large = isinstance(value, torch.Tensor) and value.shape == shape and (key == VALUE or value.dim() > 0)
                mine.setdefault(name, {}).setdefault(key, ("piece", value.dtype) if large else ("same", value))
        found: dict[str, dict[str, Any]] = {}
        for one in self._gang.everyone(mine):
            for name, kinds in one.items():
                for key, kind in kinds.items():
                    found.setdefault(name, {}).setdefault(key, kind)
        return found

    def _keys(self, name: str) -> list[tuple[str, torch.dtype]]:
        """The tensors that are kept of a parameter or buffer, in an order that all share."""
        return sorted((key, what) for key, (how, what) in self._kinds[name].items() if how == "piece")

    def _travelling(self, source: int, target: int) -> list[_Sent]:
        return [
            _Sent(name=name, key=key, copy=copy, dtype=dtype)
            for name, copies in self._copies.items()
            for copy in copies
            if copy.travels and copy.source.device == source and copy.target.device == target
            for key, dtype in self._keys(name)
        ]

    def _prepare(self) -> None:
        """Take all memory that is needed, and fill what is sent."""
        for name, layout in self._new.stored.items():
            for piece in layout:
                if piece.device == self._rank:
                    self._made[(name, piece.box)] = self._empty(name, piece)
        for other in range(self._gang.size):
            if other == self._rank:
                continue
            for dtype, parts in _by_type(self._travelling(self._rank, other)).items():
                flat = torch.empty(sum(one.copy.box.size for one in parts), dtype=dtype)
                at = 0
                for one in parts:
                    flat[at : at + one.copy.box.size].view(one.copy.box.shape).copy_(self._part(one))
                    at += one.copy.box.size
                self._sends[(other, dtype)] = flat
            for dtype, parts in _by_type(self._travelling(other, self._rank)).items():
                self._receives[(other, dtype)] = torch.empty(sum(one.copy.box.size for one in parts), dtype=dtype)

    def _empty(self, name: str, piece: Piece) -> dict[str, Any]:
        """The tensors of a new piece; those that are here already are the very same."""
        if name not in self._copies or (name, piece.box) in self._held:
            return dict(self._held[(name, piece.box)])
        shape = local_shape(self._factors[name], piece.box.shape)
        made: dict[str, Any] = {}
        for key, (how, what) in self._kinds[name].items():
            if how == "piece":
                made[key] = torch.empty(shape, dtype=what)
            else:
                made[key] = what.clone() if isinstance(what, torch.Tensor) else what
        return made

    def _part(self, one: _Sent) -> torch.Tensor:
        return self._from(one.name, one.key, one.copy).reshape(one.copy.box.shape)

    def _from(self, name: str, key: str, copy: Copy) -> torch.Tensor:
        tensor = self._held[(name, copy.source.box)].get(key)
        if tensor is None:  # others have seen a gradient that this device has not
            return torch.zeros(copy.box.shape, dtype=self._kinds[name][key][1])
        return cut(tensor.detach(), self._factors[name], copy.source.box, copy.box)

    def _exchange(self) -> None:
        with talking():
            works = [dist.irecv(flat, src=source, tag=_tag(dtype)) for (source, dtype), flat in self._receives.items()]
            works += [dist.isend(flat, dst=target, tag=_tag(dtype)) for (target, dtype), flat in self._sends.items()]
            for work in works:
                assert work is not None
                work.wait()

    def _place(self) -> None:
        """Put what is here and what came into the new pieces."""
        for name, copies in self._copies.items():
            for copy in copies:
                if copy.travels or copy.target.device != self._rank or (name, copy.target.box) in self._held:
                    continue
                for key, _ in self._keys(name):
                    self._put(name, key, copy, self._from(name, key, copy))
        for (source, dtype), flat in self._receives.items():
            at = 0
            for one in _by_type(self._travelling(source, self._rank))[dtype]:
                self._put(one.name, one.key, one.copy, flat[at : at + one.copy.box.size])
                at += one.copy.box.size

    def _put(self, name: str, key: str, copy: Copy, part: torch.Tensor) -> None:
        target = self._made[(name, copy.target.box)][key].detach()
        place = target.view(copy.target.box.shape)[copy.box.inside(copy.target.box)]
        place.copy_(part.reshape(copy.box.shape))


def _by_type(parts: list[_Sent]) -> dict[torch.dtype, list[_Sent]]:
    found: dict[torch.dtype, list[_Sent]] = {}
    for one in parts:
        found.setdefault(one.dtype, []).append(one)
    return found


def _tag(dtype: torch.dtype) -> int:
    """One message of each type goes from one device to another."""
    return 1 + sorted(map(str, _TYPES)).index(str(dtype))


_TYPES = tuple({value for value in vars(torch).values() if isinstance(value, torch.dtype)})
