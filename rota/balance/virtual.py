"""The same decisions on a virtual clock: what they make of slow devices, without any device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rota.balance.decide import Decision, Facts, Migrate, Policy, Resize, Seen, Standing, after_step, given_up, moved
from rota.balance.pace import Shares, even


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step on the virtual clock."""

    step_s: float
    shares: Shares
    left_out: tuple[float, ...]
    decision: Decision


@dataclass(frozen=True, kw_only=True)
class World:
    """What the virtual devices are like."""

    slowness: Callable[[int], Sequence[float]]
    """Of each device at a step; 1 is a device as it should be."""
    fixed: float = 0.1
    products: float = 0.8
    noise: float = 0.0
    """A step's time is off by this part, either way."""
    prepare_steps: int = 2
    """From a decision to the move."""
    rounded: Callable[[Shares], Shares] = lambda shares: shares
    """What shares come out as, in heads and columns."""
    believed_fixed: float | None = None


def play(world: World, facts: Facts, *, steps: int, seed: int = 0, policy: Policy = after_step) -> list[Step]:
    """All steps."""
    draw = random.Random(seed)
    believed = world.fixed if world.believed_fixed is None else world.believed_fixed
    standing = Standing.begin(even(facts.ranks), fixed=believed)
    found: list[Step] = []
    due: tuple[int, Shares] | None = None
    for step in range(steps):
        if due is not None and step >= due[0]:
            shares, due = world.rounded(due[1]), None
            standing = given_up(standing) if shares == standing.shares else moved(standing, shares)
        slow = world.slowness(step)
        times = tuple(
            one * (world.fixed + share * (1 - world.products * gone)) * (1 + draw.uniform(-world.noise, world.noise))
            for one, share, gone in zip(slow, standing.shares, standing.left_out, strict=True)
        )
        shares, left_out = standing.shares, standing.left_out
        seen = Seen(step=step, times=times, steps_left=steps - step - 1, cost_s=max(times))
        standing, decision = policy(standing, seen, facts)
        if isinstance(decision, Migrate):
            due = (step + 1 + world.prepare_steps, decision.shares)
        found.append(Step(step_s=max(times), shares=shares, left_out=left_out, decision=decision))
    return found


def moves(steps: Sequence[Step]) -> list[int]:
    """At which steps it was decided to move work."""
    return [i for i, step in enumerate(steps) if isinstance(step.decision, Migrate)]


def resizes(steps: Sequence[Step]) -> list[int]:
    """At which steps it was decided to leave work out, or to stop it."""
    return [i for i, step in enumerate(steps) if isinstance(step.decision, Resize)]
