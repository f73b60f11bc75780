"""The reference lowering: from any layout to any other by slices, sends and assemblies; always right, seldom fast."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rota.errors import CoverError
from rota.plan.box import Box
from rota.plan.layout import Kind, Layout, Piece, Step, canonical


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A part of a target's box, and the piece of the source that it is cut out of."""

    box: Box
    origin: Piece


def lower_reference(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The steps that turn the source into the target: all slices, then all sends, then all assemblies.

    Where a target has less of the value than the piece it is made from, the sub-share that begins where the held share
    begins gets all of the held value, and every other sub-share is zero, so that they add up.
    """
    source = canonical(source)
    held = set(source)
    replicas = _Replicas(source)
    wanted = [piece for piece in canonical(target) if piece not in held]
    chosen = [_choose(piece, replicas, turn) for turn, piece in enumerate(wanted)]
    there = set(held)
    slices = list(_slices(itertools.chain.from_iterable(chosen), there))
    sends = list(_sends(wanted, chosen, there))
    return (*slices, *sends, *_assemblies(wanted, chosen, there))


class _Replicas:
    """Which devices hold each box of a layout."""

    def __init__(self, source: Layout) -> None:
        self.devices: dict[Box, list[int]] = {}
        for piece in source:
            self.devices.setdefault(piece.box, []).append(piece.device)
        self._rivals: dict[Box, list[Box]] = {}

    def by_preference(self, device: int, turn: int) -> list[Box]:
        """The boxes of a device, then all others."""
        own = [box for box, devices in self.devices.items() if device in devices]
        others = [box for box, devices in self.devices.items() if device not in devices]
        # Each target begins with another box, so that at no time all of them wait for the same device.
        start = turn % len(others) if others else 0
        return own + others[start:] + others[:start]

    def by_volume(self) -> list[Box]:
        """All boxes, the largest first."""
        return sorted(self.devices, key=lambda box: box.volume, reverse=True)

    def may_cut(self, box: Box, common: Box) -> bool:
        """Whether the value of a box may be given to the first of its sub-shares, as far as `common` needs it.

        Not so if another box says how the value is really shared out: the two would not add up.
        """
        if common.share == box.share:
            return True
        if box not in self._rivals:
            unequal = (other for other in self.devices if other.share != box.share)
            self._rivals[box] = [other for other in unequal if other.intersect(box) is not None]
        region = replace(common, share=box.share)
        return all(other.intersect(region) is None for other in self._rivals[box])

    def __str__(self) -> str:
        """As people write it."""
        texts = (f"{box} on {', '.join(map(str, devices))}" for box, devices in self.devices.items())
        return "; ".join(texts) or "nothing"


def _choose(target: Piece, replicas: _Replicas, turn: int) -> list[_Part]:
    """Parts that tile the target; own pieces first, and with each turn another of several replicas."""
    parts, left = _cover(target, replicas.by_preference(target.device, turn), replicas, turn)
    if left:
        # A small piece that was taken first may leave a rest that cannot be cut out of the larger ones.
        parts, still_left = _cover(target, replicas.by_volume(), replicas, turn)
        if still_left:
            needed = f"device {target.device} needs {target.box}"
            raise CoverError(f"{needed}, of which {left[0]} cannot be made from the layout {replicas}")
    return parts


def _cover(target: Piece, boxes: list[Box], replicas: _Replicas, turn: int) -> tuple[list[_Part], tuple[Box, ...]]:
    """Parts of the boxes, each of what those before it leave, and what is left in the end."""
    parts: list[_Part] = []
    needed: tuple[Box, ...] = (target.box,) if target.box.volume else ()
    for box in boxes:
        if not needed:
            break
        devices = replicas.devices[box]
        device = target.device if target.device in devices else devices[turn % len(devices)]
        rest: list[Box] = []
        for need in needed:
            common = need.intersect(box)
            if common is None or not replicas.may_cut(box, common):
                rest.append(need)
            else:
                rest.extend(need.minus(common))
                parts.append(_Part(box=common, origin=Piece(device=device, box=box)))
        needed = tuple(rest)
    return parts, needed


def _slices(parts: Iterable[_Part], there: set[Piece]) -> Iterator[Step]:
    for part in parts:
        cut = replace(part.origin, box=part.box)
        if cut not in there:
            there.add(cut)
            yield Step(kind=Kind.LOCAL, inputs=(part.origin,), outputs=(cut,))


def _sends(wanted: list[Piece], chosen: list[list[_Part]], there: set[Piece]) -> Iterator[Step]:
    """First one part for every target, then the next one for each: all devices are busy."""
    for parts in itertools.zip_longest(*chosen):
        for target, part in zip(wanted, parts, strict=True):
            if part is None or part.origin.device == target.device:
                continue
            arrived = Piece(device=target.device, box=part.box)
            if arrived not in there:
                there.add(arrived)
                yield Step(kind=Kind.SEND, inputs=(replace(part.origin, box=part.box),), outputs=(arrived,))


def _assemblies(wanted: list[Piece], chosen: list[list[_Part]], there: set[Piece]) -> Iterator[Step]:
    for target, parts in zip(wanted, chosen, strict=True):
        if target not in there:
            there.add(target)
            inputs = tuple(Piece(device=target.device, box=part.box) for part in parts)
            yield Step(kind=Kind.LOCAL, inputs=canonical(inputs), outputs=(target,))
