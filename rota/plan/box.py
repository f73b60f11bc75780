"""Boxes: parts of a tensor, as an index range for each dim and a share of the value.

A share is an interval within 0 to 1. The whole value is 0 to 1; a matrix product whose contraction dim is cut in two
leaves two partial sums, the shares 0 to 1/2 and 1/2 to 1, and the tensor is their sum. Seen this way the value is one
more dim, with fractions for coordinates, and everything below is the geometry of boxes, in exact numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from rota.errors import InputError

Range = tuple[int, int]
"""From the first index to the one behind the last."""

Share = tuple[Fraction, Fraction]
"""From and to, within 0 and 1."""

WHOLE_VALUE: Share = (Fraction(0), Fraction(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A part of a tensor. Two equal boxes on two devices are replicas of one part."""

    ranges: tuple[Range, ...]
    share: Share = WHOLE_VALUE

    def __hash__(self) -> int:
        """Of the plain numbers: the hash of a fraction is dear, and boxes are keys everywhere."""
        if self.share is WHOLE_VALUE:
            return hash((self.ranges, 0, 1))
        (a, b), (c, d) = self.share[0].as_integer_ratio(), self.share[1].as_integer_ratio()
        return hash((self.ranges, a, c)) if b == d == 1 else hash((self.ranges, a, b, c, d))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls(ranges=tuple((0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """How many indices it has in each dim."""
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def volume(self) -> Fraction:
        """Its elements, weighted by its share of their value: the volumes of parts add up to that of the whole."""
        return self.size * (self.share[1] - self.share[0])

    @property
    def is_partial(self) -> bool:
        """Whether it holds a partial sum."""
        return self.share != WHOLE_VALUE

    def intersect(self, other: Box) -> Box | None:
        """What both have, or None."""
        assert len(self.ranges) == len(other.ranges), "boxes of different tensors"
        if self.ranges == other.ranges:
            ranges = self.ranges
            if any(start >= stop for start, stop in ranges):
                return None
        else:
            found = []
            for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True):
                start, stop = max(a, c), min(b, d)
                if start >= stop:
                    return None
                found.append((start, stop))
            ranges = tuple(found)
        if self.share is other.share:
            return Box(ranges=ranges, share=self.share)
        share = (max(self.share[0], other.share[0]), min(self.share[1], other.share[1]))
        return Box(ranges=ranges, share=share) if share[0] < share[1] else None

    def contains(self, other: Box) -> bool:
        """Whether the other lies within this one."""
        return len(self.ranges) == len(other.ranges) and self.intersect(other) == other

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Where this box is in a tensor that holds `outer`: the slices that cut it out."""
        return tuple(
            slice(start - origin, stop - origin)
            for (start, stop), (origin, _) in zip(self.ranges, outer.ranges, strict=True)
        )

    def part(self, inner: Box) -> Box:
        """The box that `inner` is, if its coordinates count from this box's corner and its share is of this share."""
        low, high = self.share
        return Box(
            ranges=tuple(
                (origin + start, origin + stop)
                for (origin, _), (start, stop) in zip(self.ranges, inner.ranges, strict=True)
            ),
            share=(low + (high - low) * inner.share[0], low + (high - low) * inner.share[1]),
        )

    def split(self, dim: int, widths: Sequence[int]) -> tuple[Box, ...]:
        """Cut it along a dim, into parts of these widths."""
        start, stop = self.ranges[dim]
        if any(width < 1 for width in widths) or sum(widths) != stop - start:
            raise InputError(f"widths {list(widths)} must be at least 1 each and add up to {stop - start}")
        parts = []
        for width in widths:
            ranges = (*self.ranges[:dim], (start, start + width), *self.ranges[dim + 1 :])
            parts.append(replace(self, ranges=ranges))
            start += width
        return tuple(parts)

    def split_value(self, parts: int) -> tuple[Box, ...]:
        """Cut its share into equal ones: the partial sums of a reduction in so many parts."""
        low, high = self.share
        step = (high - low) / parts
        return tuple(replace(self, share=(low + i * step, low + (i + 1) * step)) for i in range(parts))

    def minus(self, other: Box) -> tuple[Box, ...]:
        """What is left of this box without the other: disjoint boxes, at most two for each dim and the value."""
        common = self.intersect(other)
        if common is None:
            return (self,) if self.volume else ()
        left: list[Box] = []
        rest = self
        for dim, (start, stop) in enumerate(common.ranges):
            first, last = rest.ranges[dim]
            for piece in ((first, start), (stop, last)):
                if piece[0] < piece[1]:
                    left.append(replace(rest, ranges=(*rest.ranges[:dim], piece, *rest.ranges[dim + 1 :])))
            rest = replace(rest, ranges=(*rest.ranges[:dim], (start, stop), *rest.ranges[dim + 1 :]))
        for low, high in ((rest.share[0], common.share[0]), (common.share[1], rest.share[1])):
            if low < high:
                left.append(replace(rest, share=(low, high)))
        return tuple(left)

    def __str__(self) -> str:
        """As people write it: [0:4, 8:16] or [0:4] 1/2..1."""
        text = "[" + ", ".join(f"{start}:{stop}" for start, stop in self.ranges) + "]"
        return f"{text} {self.share[0]}..{self.share[1]}" if self.is_partial else text


def even_widths(size: int, parts: int) -> tuple[int, ...]:
    """Widths that differ by at most one, the larger ones first."""
    if not 1 <= parts <= size:
        raise InputError(f"{size} indices cannot be cut into {parts} parts; give 1 to {size}")
    whole, rest = divmod(size, parts)
    return tuple(whole + (1 if i < rest else 0) for i in range(parts))


def weighted_widths(size: int, weights: Sequence[float], *, grain: int = 1) -> tuple[int, ...]:
    """Widths of at least one grain each, such that the largest of width / weight is as small as it can be."""
    units, parts = size // grain, len(weights)
    if units < parts:
        return even_widths(size, parts)
    whole = sum(weights)
    # Such widths never fall short of their whole part of the even share; what is left goes one by one.
    found = [max(1, int(units * weight / whole)) for weight in weights]
    while sum(found) > units:
        last = max((i for i in range(parts) if found[i] > 1), key=lambda i: (found[i] / weights[i], i))
        found[last] -= 1
    while sum(found) < units:
        first = min(range(parts), key=lambda i: ((found[i] + 1) / weights[i], i))
        found[first] += 1
    widths = [one * grain for one in found]
    widths[max(range(parts), key=lambda i: (weights[i], -i))] += size - sum(widths)
    return tuple(widths)


def hull(boxes: Iterable[Box]) -> Box:
    """The smallest box that has the ranges of all of them, with the whole value."""
    ranges = zip(*(box.ranges for box in boxes), strict=True)
    return Box(ranges=tuple((min(a for a, _ in one), max(b for _, b in one)) for one in ranges))


def missing(target: Box, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """What of `target` none of the boxes has: disjoint boxes, none if it is covered."""
    left: tuple[Box, ...] = (target,) if target.volume else ()
    for box in boxes:
        left = tuple(piece for one in left for piece in one.minus(box))
        if not left:
            break
    return left


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that have something in common and are not replicas of each other, or None.

    Sums over boxes are right only where there is no such pair.
    """
    distinct = list(dict.fromkeys(boxes))
    for i, one in enumerate(distinct):
        for other in distinct[i + 1 :]:
            if one.intersect(other) is not None:
                return one, other
    return None
