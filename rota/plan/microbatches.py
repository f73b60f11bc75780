"""Micro-batches: which ops run once for each of them, and how cuts of the samples are spread over them.

A micro-batch is a range of the samples. An op with a dim that counts samples runs for each micro-batch on its range. An
op behind a sum over the samples, such as the division that ends a loss, runs for each micro-batch on its share of the
sum if it is linear. All others run once in a step, on everything: so a batch norm sees the whole batch, however it is
cut.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rota.errors import CutError
from rota.graph.graph import Op
from rota.graph.part import Offsets, Ranges
from rota.graph.refine import Frame, Refined
from rota.graph.rules import Linear, added_number, occurrences, rule_of
from rota.plan.box import Box, even_widths
from rota.plan.plan import Part, Plan


class Mode(enum.StrEnum):
    """How often an op runs in a step."""

    ONCE = "once"
    ROWS = "rows"
    """For each micro-batch, on its samples."""
    SHARE = "share"
    """For each micro-batch, on its share of sums over the samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """How an op runs over micro-batches."""

    mode: Mode
    dim: str | None = None
    """The dim that counts samples, for rows."""
    shares: frozenset[int] = frozenset()
    """The reads that are shares and become shares of what is made."""
    offsets: frozenset[int] | None = None
    """The reads of which each share adds an equal part; None if nothing is added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """How a tensor comes about over micro-batches."""

    mode: Mode
    coordinate: int | None = None
    """Which of its factors counts samples, for rows."""


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """The micro-batches of a plan, and what they mean for each op and tensor."""

    starts: tuple[int, ...]
    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    """For each micro-batch the number of its width among the distinct widths; those of one context look alike."""
    running: Mapping[str, Running]
    made: Mapping[str, Made]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.starts)

    @property
    def distinct_widths(self) -> tuple[int, ...]:
        """The width of each context."""
        return tuple(dict.fromkeys(self.widths))

    def offsets_of(self, op: str) -> Offsets | None:
        """What an op adds in equal parts, one for each micro-batch."""
        reads = self.running[op].offsets
        return None if reads is None else Offsets(reads=reads, terms=self.count)

    def everywhere(self, box: Box, made: Made, microbatch: int) -> Box:
        """The box in the whole tensor of a box that counts within a micro-batch."""
        if made.mode is Mode.SHARE:
            # Within the part's share, so that what one device makes at all micro-batches is one interval.
            low, high = box.share
            width = (high - low) / self.count
            return Box(ranges=box.ranges, share=(low + width * microbatch, low + width * (microbatch + 1)))
        return self.shifted(box, made.coordinate, microbatch)

    def shifted(self, box: Box, coordinate: int | None, microbatch: int) -> Box:
        """The box moved from the micro-batch's own count of samples to that of the whole batch."""
        if coordinate is None:
            return box
        start = self.starts[microbatch]
        low, high = box.ranges[coordinate]
        ranges = (*box.ranges[:coordinate], (low + start, high + start), *box.ranges[coordinate + 1 :])
        return Box(ranges=ranges, share=box.share)


def microbatches_of(plan: Plan) -> Microbatches:
    """How each op of a plan runs."""
    size = plan.batch_size
    if plan.microbatches == 1 or size is None:
        widths: tuple[int, ...] = (size or 1,)
        running = {op.name: Running(mode=Mode.ONCE) for op in plan.graph.ops}
        made = {name: Made(mode=Mode.ONCE) for name in plan.graph.tensors}
    else:
        widths = even_widths(size, plan.microbatches)
        running, made = _modes(plan.refined, size)
    starts = tuple(sum(widths[:i]) for i in range(len(widths)))
    distinct = list(dict.fromkeys(widths))
    contexts = tuple(distinct.index(width) for width in widths)
    return Microbatches(starts=starts, widths=widths, contexts=contexts, running=running, made=made)


def local_ranges(part: Part, frame: Frame, running: Running, *, width: int) -> Ranges:
    """The ranges of a part within a micro-batch of so many samples, counted from its first."""
    ranges = dict(part.ranges)
    if running.mode is not Mode.ROWS:
        return ranges
    assert running.dim is not None
    size = frame.dims[running.dim].size
    start, stop = ranges.get(running.dim, (0, size))
    low, high = ((2 * edge * width + size) // (2 * size) for edge in (start, stop))  # to the nearest
    if low == high:
        raise CutError(
            f"{part} gets no sample of a micro-batch of {width}; use fewer micro-batches or fewer parts of the samples"
        )
    ranges[running.dim] = (low, high)
    return ranges


def _modes(refined: Refined, size: int) -> tuple[dict[str, Running], dict[str, Made]]:
    families = refined.batch_families()
    running: dict[str, Running] = {}
    made = {name: Made(mode=Mode.ONCE) for name in refined.graph.tensors}
    for op in refined.graph.ops:
        frame = refined.frames[op.name]
        dim = _samples(frame, families, size)
        if dim is not None:
            running[op.name] = Running(mode=Mode.ROWS, dim=dim)
        else:
            running[op.name] = _of_shares(op, made, refined)
        if running[op.name].mode is Mode.ONCE:
            continue
        for name, names in zip(op.outputs, frame.makes, strict=True):
            if name is not None and names is not None:
                rows = dim is not None and dim in names
                made[name] = (
                    Made(mode=Mode.ROWS, coordinate=names.index(dim)) if rows and dim else Made(mode=Mode.SHARE)
                )
    return running, made


def _samples(frame: Frame, families: frozenset[int], size: int) -> str | None:
    """The dim that counts samples, if the op can be cut along it; one that is kept rather than one that is summed."""
    found = [
        dim
        for dim in frame.dims.values()
        if dim.family in families
        and dim.size == size
        and frame.can_cut(dim)
        and not (dim.reduced and frame.once)  # what is added once would be added for each micro-batch
    ]
    return min(found, key=lambda dim: dim.reduced).name if found else None


def _of_shares(op: Op, made: Mapping[str, Made], refined: Refined) -> Running:
    """An op takes the shares that it reads to shares of what it makes, if it is linear in them."""
    once = Running(mode=Mode.ONCE)
    rule, reads = rule_of(op), occurrences(op)
    shares = frozenset(i for i, name in enumerate(reads) if made[name].mode is Mode.SHARE)
    if rule is None or rule.linear is None or not shares:
        return once
    made_dtypes = {refined.graph.tensors[name].dtype for name in op.outputs if name is not None}
    exact = all("float" in dtype or "complex" in dtype for dtype in made_dtypes)
    if rule.linear is Linear.TOGETHER:
        others = frozenset(range(len(reads))) - shares
        if not others and not added_number(op):
            return Running(mode=Mode.SHARE, shares=shares)
        # An equal part of a whole number is none.
        return Running(mode=Mode.SHARE, shares=shares, offsets=others) if exact else once
    if rule.linear is Linear.EACH:
        return Running(mode=Mode.SHARE, shares=shares) if len(shares) == 1 else once
    if not exact and made_dtypes != {refined.graph.tensors[reads[0]].dtype}:
        return once  # to round, or to ask whether there is any, is not linear
    if 0 not in shares or (op.kind != "div" and len(shares) > 1):
        return once
    return Running(mode=Mode.SHARE, shares=frozenset({0}))


def coordinate_of(refined: Refined, running: Running, op: str, read: int) -> int | None:
    """Which factor of what an op reads counts the samples of its micro-batch."""
    names = refined.frames[op].reads[read]
    return names.index(running.dim) if running.dim in names else None


def is_aligned(refined: Refined, microbatches: Microbatches, op: str, read: int, tensor: str) -> bool:
    """Whether an op needs only what its own micro-batch made of a tensor, or both happen once."""
    running, made = microbatches.running[op], microbatches.made[tensor]
    if running.mode is Mode.ONCE or made.mode is Mode.ONCE:
        return running.mode is made.mode
    if made.mode is Mode.SHARE:
        return read in running.shares
    return coordinate_of(refined, running, op, read) == made.coordinate
