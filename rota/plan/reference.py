"""The reference lowering: from any layout to any other by slices, sends and assemblies; always right, seldom fast."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rota.errors import PlanError
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
    replicas = _replicas(source)
    wanted = [piece for piece in canonical(target) if piece not in held]
    chosen = [list(_choose(piece, replicas, turn)) for turn, piece in enumerate(wanted)]
    there = set(held)
    slices = list(_slices(itertools.chain.from_iterable(chosen), there))
    sends = list(_sends(wanted, chosen, there))
    return (*slices, *sends, *_assemblies(wanted, chosen, there))


def _replicas(source: Layout) -> dict[Box, list[int]]:
    devices: dict[Box, list[int]] = {}
    for piece in source:
        devices.setdefault(piece.box, []).append(piece.device)
    return devices


def _choose(target: Piece, replicas: dict[Box, list[int]], turn: int) -> Iterator[_Part]:
    """Parts that tile the target; own pieces first, and with each turn another of several replicas."""
    needed: tuple[Box, ...] = (target.box,) if target.box.volume else ()
    for box in _by_preference(target.device, replicas, turn):
        if not needed:
            return
        devices = replicas[box]
        device = target.device if target.device in devices else devices[turn % len(devices)]
        rest: list[Box] = []
        for need in needed:
            common = need.intersect(box)
            if common is None or not _may_cut(box, common, replicas):
                rest.append(need)
            else:
                rest.extend(need.minus(common))
                yield _Part(box=common, origin=Piece(device=device, box=box))
        needed = tuple(rest)
    if needed:
        raise PlanError(_not_covered(target, needed, replicas))


def _by_preference(device: int, replicas: dict[Box, list[int]], turn: int) -> list[Box]:
    own = [box for box, devices in replicas.items() if device in devices]
    others = [box for box, devices in replicas.items() if device not in devices]
    # Each target begins with another box, so that at no time all of them wait for the same device.
    start = turn % len(others) if others else 0
    return own + others[start:] + others[:start]


def _may_cut(box: Box, common: Box, replicas: dict[Box, list[int]]) -> bool:
    """Whether the value of a box may be given to the first of its sub-shares, as far as `common` needs it.

    Not so if another box says how the value is really shared out: the two would not add up.
    """
    if common.share == box.share:
        return True
    region = replace(common, share=box.share)
    return all(other.share == box.share or other.intersect(region) is None for other in replicas)


def _not_covered(target: Piece, left: tuple[Box, ...], replicas: dict[Box, list[int]]) -> str:
    layout = "; ".join(f"{box} on {', '.join(map(str, devices))}" for box, devices in replicas.items()) or "nothing"
    return f"device {target.device} needs {target.box}, of which {left[0]} cannot be made from the layout {layout}"


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
