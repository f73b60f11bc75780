"""What a step takes on each device, by its share of the work: seconds = slowness x (fixed + share).

Every device does the fixed part (norms, what is copied); the shares of the rest add up to one. So the slowness of a
device follows from its own time, whatever its share is, and the best shares follow from the slownesses.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Shares = tuple[float, ...]
"""What part of the work that can be moved each device has; they add up to one."""

Times = tuple[float, ...]
"""Seconds that each device computed in a step, without its waits for others."""


_LEAST = 1e-9


def even(ranks: int) -> Shares:
    """The same for all."""
    return (1 / ranks,) * ranks


def slowness(times: Sequence[float], work: Sequence[float], fixed: float) -> tuple[float, ...]:
    """Of each device: seconds for a unit of work."""
    # A device may have nothing to do, and a clock may not have moved.
    return tuple(max(time, _LEAST) / max(fixed + share, _LEAST) for time, share in zip(times, work, strict=True))


def step_s(slow: Sequence[float], work: Sequence[float], fixed: float) -> float:
    """What a step takes: as long as its slowest device."""
    return max(one * (fixed + share) for one, share in zip(slow, work, strict=True))


def level(slow: Sequence[float], fixed: float, *, least: float) -> Shares:
    """The shares with which all devices take equally long; none gets less than `least`."""
    ranks = len(slow)
    low: set[int] = set()
    while True:
        open_ranks = [i for i in range(ranks) if i not in low]
        rest = 1 - least * len(low)
        level_s = (fixed * len(open_ranks) + rest) / sum(1 / slow[i] for i in open_ranks)
        found = [least if i in low else level_s / slow[i] - fixed for i in range(ranks)]
        below = {i for i in open_ranks if found[i] < least}
        if not below or len(below) == len(open_ranks):
            return tuple(found) if not below else even(ranks)
        low |= below


def medians(rows: Sequence[Times]) -> Times:
    """Of each device."""
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def fitted_fixed(before: Times, after: Times, old: Sequence[float], new: Sequence[float]) -> float | None:
    """The fixed part, from what devices took with two shares while their slowness stayed: it cancels out.

    The device whose share changed most in proportion tells most. None if what was measured cannot be.
    """
    found = []
    for b, a, s, n in zip(before, after, old, new, strict=True):
        if b <= 0 or a <= 0 or abs(n - s) < 0.05 * s:
            continue
        ratio = a / b  # (fixed + n) / (fixed + s)
        if abs(1 - ratio) < 0.02:
            continue
        found.append((abs(n - s), (ratio * s - n) / (1 - ratio)))
    if not found:
        return None
    total = sum(weight for weight, _ in found)
    fixed = sum(weight * value for weight, value in found) / total
    return fixed if 0 <= fixed <= 3 else None
