"""Whether to move work between devices, or to leave some out: a pure function of what was measured.

Every process of a task hears the same numbers after each step and comes to the same decision, so that nobody has to be
asked. A decision needs several slow steps in a row (one slow step is no slow device), must be worth more than it
costs, and is followed by a pause that grows while changes follow each other closely.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from rota.balance.pace import Shares, Times, even, fitted_fixed, level, medians, slowness, step_s
from rota.plan.box import weighted_widths

Mode = Literal["off", "migrate", "resize", "semi"]

WORTH = 0.07
"""What a change must save at least, as a part of the step. With two devices, one 1.1 times as slow costs 0.05."""
_AROUND = 3
"""Steps are looked at by the median of so many."""
_SLOW_STEPS = 3
"""So many in a row must be slow before work is moved, for so long,"""
_SLOW_S = 0.6
_EVIDENCE = 0.6
"""and what they could have saved beyond what counts must add up to this: slow devices are answered at once, those that
are a little slow when that is certain,"""
_KNOWN_STEPS = 2
"""and of no change at all is there talk before so many steps are known."""
_LEARN_STEPS = 3
"""So many after a change tell what it did."""
_LASTING_STEPS = 10
"""Where work may be left out meanwhile, a slow device must be slow for as long before work is moved."""
_COOL_DOWN = 8
"""Steps without another change."""
_MOST_COOL_DOWN = 512
_EVEN = 0.03
"""Even shares are taken if they cost no more than this."""
_UNITS = 64
"""Shares are multiples of one in so many, so that programs can be used again."""
MOST_LEFT_OUT = 0.9
_FINER_LEFT_OUT = 0.05
_EXPECTED_STEPS = 12
"""A device that has been slow for n steps is expected to be so for as many, and for this many at least."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What does not change while a task runs."""

    mode: Mode
    ranks: int
    least: float
    """The smallest share that a device can have."""
    products: float = 0.0
    """Which part of the work that can be moved are products that resizing makes smaller; 0 if it cannot."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What everybody heard of a step."""

    step: int
    times: Times
    steps_left: int
    cost_s: float
    """What moving work would take, as far as is known."""


@dataclass(frozen=True, kw_only=True)
class Migrate:
    """Move work between two steps, for good."""

    shares: Shares
    why: str


@dataclass(frozen=True, kw_only=True)
class Resize:
    """From the next step on, leave out these parts of the products; it moves nothing, and the result is another."""

    left_out: tuple[float, ...]
    why: str


Decision = Migrate | Resize | None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How things stand: what a decision depends on besides the newest step."""

    shares: Shares
    fixed: float
    """The part that every device does, against the sum of all shares."""
    left_out: tuple[float, ...]
    rows: tuple[Times, ...] = ()
    """Of the latest steps since the last change, the first one left out."""
    since: int = 0
    """Steps since the last change."""
    cool_down: int = _COOL_DOWN
    """Steps from the last change to the next, at least."""
    slow_steps: int = 0
    """For how many steps, one after another, a change would have paid,"""
    slow_s: float = 0.0
    """for how long,"""
    evidence: float = 0.0
    """and by how much in all, in steps."""
    last_shares: Shares | None = None
    """Those before the last change."""
    before: tuple[Times, Shares] | None = None
    """What steps took with which shares before the last change of these, until it has been learned from."""
    under_way: Shares | None = None
    """What is being prepared."""

    @classmethod
    def begin(cls, shares: Shares, *, fixed: float) -> Standing:
        """At the first step."""
        return cls(shares=shares, fixed=fixed, left_out=(0.0,) * len(shares))

    def work(self, facts: Facts) -> tuple[float, ...]:
        """What each device really does, without what is left out."""
        return tuple(
            share * (1 - facts.products * gone) for share, gone in zip(self.shares, self.left_out, strict=True)
        )


class Policy(Protocol):
    """Decides; `after_step` is the one that tasks have, and users may give theirs."""

    def __call__(self, standing: Standing, seen: Seen, facts: Facts) -> tuple[Standing, Decision]:
        """How things stand now, and what is to be done. Pure, and the same in every process."""
        ...


def after_step(standing: Standing, seen: Seen, facts: Facts) -> tuple[Standing, Decision]:
    """One more step was taken."""
    since = standing.since + 1
    rows = (*standing.rows, seen.times)[-_LASTING_STEPS:] if since > 1 else ()
    now = _learned(replace(standing, since=since, rows=rows))
    if facts.mode == "off" or facts.ranks == 1 or len(rows) < _KNOWN_STEPS or min(seen.times) <= 0:
        return now, None
    if now.under_way is not None:
        return now, None
    now = _weighed(now, seen.times, facts)
    if facts.mode in ("migrate", "semi"):
        decision = _migrate(now, seen, facts)
        if decision is not None:
            before = (medians(rows[-_SLOW_STEPS:]), now.shares)
            return replace(now, under_way=decision.shares, before=None if any(now.left_out) else before), decision
    if facts.mode in ("resize", "semi"):
        resize = _resize(now, facts)
        if resize is not None:
            return replace(now, left_out=resize.left_out, rows=(), since=0), resize
    return now, None


def moved(standing: Standing, shares: Shares) -> Standing:
    """Work was moved; `shares` is what devices really have now."""
    # What comes back soon after it went may be a device that is slow now and then.
    last = standing.last_shares
    back = last is not None and _reverses(last, standing.shares, shares)
    soon = standing.since < 4 * standing.cool_down
    return replace(
        standing,
        shares=shares,
        last_shares=standing.shares,
        left_out=(0.0,) * len(shares),
        rows=(),
        since=0,
        slow_steps=0,
        slow_s=0.0,
        evidence=0.0,
        cool_down=min(_MOST_COOL_DOWN, 2 * standing.cool_down) if back and soon else _COOL_DOWN,
        under_way=None,
    )


def given_up(standing: Standing) -> Standing:
    """What was prepared is not to be, or would change nothing: not again so soon."""
    cool_down = min(_MOST_COOL_DOWN, 2 * standing.cool_down)
    cleared = replace(standing, slow_steps=0, slow_s=0.0, evidence=0.0)
    return replace(cleared, under_way=None, since=1, rows=(), before=None, cool_down=cool_down)


def _weighed(now: Standing, times: Times, facts: Facts) -> Standing:
    """With what the newest steps say for a change: one that is unlike those around it says nothing."""
    part, _, _ = _saved(now, medians(now.rows[-_AROUND:]), facts)
    if part < WORTH:
        return replace(now, slow_steps=0, slow_s=0.0, evidence=0.0)
    evidence = now.evidence + part - WORTH
    return replace(now, slow_steps=now.slow_steps + 1, slow_s=now.slow_s + max(times), evidence=evidence)


def _learned(now: Standing) -> Standing:
    """With the fixed part as the last change of shares has shown it."""
    if now.before is None or len(now.rows) < _LEARN_STEPS or now.under_way is not None:
        return now
    times, shares = now.before
    found = fitted_fixed(times, medians(now.rows[:_LEARN_STEPS]), shares, now.shares)
    return replace(now, before=None, fixed=now.fixed if found is None else (now.fixed + found) / 2)


def _saved(now: Standing, times: Times, facts: Facts) -> tuple[float, float, Shares]:
    """What the best shares would save, as a part of a step and in seconds, if nothing is left out; and these shares."""
    slow = slowness(times, now.work(facts), now.fixed)
    best = _rounded(level(slow, now.fixed, least=facts.least), facts)
    best_s = step_s(slow, best, now.fixed)
    if step_s(slow, even(facts.ranks), now.fixed) <= best_s * (1 + _EVEN):
        best = even(facts.ranks)
        best_s = step_s(slow, best, now.fixed)
    now_s = max(step_s(slow, now.shares, now.fixed), 1e-12)
    return 1 - best_s / now_s, now_s - best_s, best


def _rounded(shares: Shares, facts: Facts) -> Shares:
    units = max(_UNITS, 8 * facts.ranks)
    return tuple(width / units for width in weighted_widths(units, shares))


def _migrate(now: Standing, seen: Seen, facts: Facts) -> Migrate | None:
    patience = _LASTING_STEPS if facts.mode == "semi" and facts.products > 0 else _SLOW_STEPS
    if now.slow_steps < patience or now.slow_s < _SLOW_S or now.evidence < _EVIDENCE:
        return None
    if len(now.rows) < _SLOW_STEPS or now.since < now.cool_down:
        return None
    times = medians(now.rows[-_SLOW_STEPS:])
    part, saved_s, shares = _saved(now, times, facts)
    expected = min(seen.steps_left, max(_EXPECTED_STEPS, now.slow_steps))
    if part < WORTH or saved_s * expected <= seen.cost_s:
        return None
    slow = slowness(times, now.work(facts), now.fixed)
    why = f"{_described(slow)}; moving work saves {part:.0%} of a step"
    return Migrate(shares=shares, why=why)


def _resize(now: Standing, facts: Facts) -> Resize | None:
    if facts.products <= 0 or (now.slow_steps == 0 and not any(now.left_out)):
        return None
    slow = slowness(medians(now.rows[-_SLOW_STEPS:]), now.work(facts), now.fixed)
    full = [one * (now.fixed + share) for one, share in zip(slow, now.shares, strict=True)]
    target_s = statistics.median_low(full)
    found = []
    for one, time, share in zip(slow, full, now.shares, strict=True):
        part = (time - target_s) / max(one * share * facts.products, 1e-12)
        found.append(min(MOST_LEFT_OUT, part) if part >= _FINER_LEFT_OUT else 0.0)
    left_out = tuple(found)
    if all(abs(a - b) < _FINER_LEFT_OUT for a, b in zip(left_out, now.left_out, strict=True)):
        return None
    return Resize(left_out=left_out, why=_described(slow))


def _reverses(first: Shares, then: Shares, now: Shares) -> bool:
    """Whether the share that changed most goes back."""
    rank = max(range(len(now)), key=lambda i: abs(then[i] - first[i]))
    return (then[rank] - first[rank]) * (now[rank] - then[rank]) < 0


def _described(slow: tuple[float, ...]) -> str:
    """Which devices are slow, for people."""
    fastest = min(slow)
    found = [f"device {i} is {one / fastest:.1f} times as slow" for i, one in enumerate(slow) if one > 1.1 * fastest]
    return "; ".join(found) if found else "all devices are equally fast"
