"""Balance on the virtual clock: quick, worth it, calm, and back to even."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.balance.decide import Facts, Migrate, Seen, Standing, after_step, given_up, moved
from rota.balance.pace import even, fitted_fixed, level, slowness, step_s
from rota.balance.virtual import World, moves, play, resizes
from rota.plan.box import weighted_widths


def _facts(ranks: int = 2, **other: Any) -> Facts:
    return Facts(**{"mode": "migrate", "ranks": ranks, "least": 1 / 64, **other})


@given(st.lists(st.floats(0.2, 20), min_size=1, max_size=8), st.floats(0, 1))
def test_level_shares_take_equally_long(slow: list[float], fixed: float) -> None:
    shares = level(slow, fixed, least=0.01)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0.01 - 1e-12
    times = [one * (fixed + share) for one, share in zip(slow, shares, strict=True)]
    free = [time for time, share in zip(times, shares, strict=True) if share > 0.01 + 1e-9]
    assert max(free, default=1.0) == pytest.approx(min(free, default=1.0))
    # Nobody who has the least would be faster than the others.
    assert all(t >= max(free, default=0) - 1e-9 for t, s in zip(times, shares, strict=True) if s <= 0.01 + 1e-9)
    assert step_s(slow, shares, fixed) <= step_s(slow, even(len(slow)), fixed) + 1e-9


@given(st.floats(0.02, 1), st.floats(0.05, 0.9), st.floats(0.05, 0.9), st.floats(0.5, 8))
def test_the_fixed_part_is_found_from_two_shares(fixed: float, old: float, new: float, slow: float) -> None:
    if abs(old - new) < 0.1:
        return
    before = (slow * (fixed + old), fixed + 1 - old)
    after = (slow * (fixed + new), fixed + 1 - new)
    found = fitted_fixed(before, after, (old, 1 - old), (new, 1 - new))
    assert found is None or found == pytest.approx(fixed, rel=1e-6)


@pytest.mark.parametrize("chi", [2.0, 4.0])
def test_a_slow_device_is_answered_within_eight_steps_and_forgiven(chi: float) -> None:
    world = World(slowness=lambda step: (chi if 20 <= step < 80 else 1.0, 1.0), noise=0.03)
    steps = play(world, _facts(), steps=150)
    found = moves(steps)
    assert 20 < found[0] + 2 < 28
    assert any(80 <= one < 90 for one in found)
    assert steps[-1].shares == even(2)
    assert len(found) <= 3
    static, best = chi * 0.6, 1.2 / (1 + 1 / chi)
    late = statistics.median(step.step_s for step in steps[40:80])
    assert (static - late) / (static - best) > 0.9


def test_eight_ranks_of_the_paper() -> None:
    chi = (8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    fixed = 0.1 / 8  # a tenth of what a device does
    world = World(slowness=lambda step: chi if step >= 10 else (1.0,) * 8, noise=0.02, fixed=fixed)
    steps = play(world, _facts(8, least=1 / 512), steps=200)
    static = 8 * (fixed + 1 / 8)
    best = static * 8 / (8 * sum(1 / one for one in chi))
    late = statistics.median(step.step_s for step in steps[100:])
    assert (static - late) / (static - best) > 0.9


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.floats(1.0, 1.09), st.floats(0.0, 0.05), st.integers(2, 8))
def test_nothing_moves_where_nothing_is_slow(seed: int, chi: float, noise: float, ranks: int) -> None:
    world = World(slowness=lambda step: (chi,) + (1.0,) * (ranks - 1), noise=noise if chi < 1.05 else 0.02)
    assert not moves(play(world, _facts(ranks), steps=300, seed=seed))


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.floats(0, 0.4))
def test_one_slow_step_now_and_then_is_no_slow_device(seed: int, believed: float) -> None:
    world = World(slowness=lambda step: (4.0 if step % 7 == 0 else 1.0, 1.0), noise=0.03, believed_fixed=believed)
    assert not moves(play(world, _facts(), steps=200, seed=seed))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(8, 40), st.floats(0.0, 0.5), st.sampled_from([2, 4]))
def test_never_swinging(seed: int, period: int, believed: float, ranks: int) -> None:
    """A device that is slow every other moment costs at most a few moves, however wrong the first belief is."""
    world = World(
        slowness=lambda step: (3.0 if step // period % 2 else 1.0,) + (1.0,) * (ranks - 1),
        noise=0.03,
        believed_fixed=believed,
    )
    steps = play(world, _facts(ranks), steps=600, seed=seed)
    if period < 32:
        assert len(moves(steps)) < 600 / period / 2 + 6
    steady = World(slowness=lambda step: (3.0,) + (1.0,) * (ranks - 1), noise=0.03, believed_fixed=believed)
    assert len(moves(play(steady, _facts(ranks), steps=600, seed=seed))) <= 4


def test_heads_that_do_not_divide_are_no_reason_to_go_on_moving() -> None:
    def rounded(shares: Any) -> Any:
        return tuple(width / 6 for width in weighted_widths(6, shares))

    world = World(slowness=lambda step: (2.5, 1.0), noise=0.02, rounded=rounded)
    assert len(moves(play(world, _facts(), steps=400))) <= 6


def test_semi_leaves_work_out_at_once_and_moves_it_when_that_lasts() -> None:
    def slow(step: int) -> tuple[float, float]:
        spike = 20 <= step < 26 or 60 <= step < 66
        return (3.0 if spike or 100 <= step < 200 else 1.0, 1.0)

    steps = play(World(slowness=slow, noise=0.02), _facts(mode="semi", products=0.8), steps=260)
    assert [one for one in moves(steps) if one < 100] == []
    assert 20 <= resizes(steps)[0] <= 24
    moved_at = next(one for one in moves(steps))
    assert 105 < moved_at < 125
    assert all(not any(step.left_out) for step in steps[130:200])
    assert steps[-1].shares == even(2)
    assert not any(steps[-1].left_out)
    alone = play(World(slowness=slow, noise=0.02), _facts(mode="migrate"), steps=260)
    assert sum(step.step_s for step in steps) < sum(step.step_s for step in alone)


def test_resizing_alone_never_moves() -> None:
    steps = play(World(slowness=lambda step: (2.0, 1.0), noise=0.02), _facts(mode="resize", products=0.8), steps=100)
    assert not moves(steps)
    assert steps[-1].left_out[0] > 0.3
    assert steps[-1].left_out[1] == 0


def test_short_moments_are_no_reason_on_fast_steps() -> None:
    """Of a task with steps of 20 ms, a device that is slow for half a second is forgiven."""

    def slow(step: int) -> tuple[float, float]:
        return (0.08 if step % 50 < 12 else 0.03, 0.03)

    assert not moves(play(World(slowness=slow, noise=0.03), _facts(), steps=400))


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1e-6, 0.5, 1.0, 30.0]), min_size=3, max_size=3), min_size=20, max_size=60),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
    st.sampled_from(["migrate", "semi", "resize"]),
    st.floats(0, 1),
)
def test_whatever_is_measured_there_is_a_decision(
    rows: list[list[float]], shares: list[float], mode: Any, fixed: float
) -> None:
    """Also of devices that have nothing to do, and of clocks that stand still."""
    standing = Standing.begin(tuple(shares), fixed=fixed)
    for step, row in enumerate(rows):
        seen = Seen(step=step, times=tuple(row), steps_left=100, cost_s=0.1)
        standing, decision = after_step(standing, seen, _facts(3, mode=mode, products=0.5))
        if isinstance(decision, Migrate):
            assert sum(decision.shares) == pytest.approx(1)
            assert min(decision.shares) > 0
            standing = moved(standing, decision.shares)
        elif decision is not None:
            assert all(0 <= one <= 0.9 for one in decision.left_out)


def test_near_the_end_nothing_is_moved() -> None:
    standing = Standing.begin(even(2), fixed=0.1)
    for step in range(40):
        seen = Seen(step=step, times=(2.0, 1.0), steps_left=1, cost_s=5.0)
        standing, decision = after_step(standing, seen, _facts())
        assert decision is None


def test_what_was_given_up_is_not_tried_again_at_once() -> None:
    standing = Standing.begin(even(2), fixed=0.1)
    tries = 0
    for step in range(100):
        seen = Seen(step=step, times=(2.0, 1.0), steps_left=1000, cost_s=0.1)
        standing, decision = after_step(standing, seen, _facts())
        if isinstance(decision, Migrate):
            tries += 1
            standing = given_up(standing)
    assert 1 <= tries <= 4


def test_what_is_under_way_is_waited_for() -> None:
    standing = Standing.begin(even(2), fixed=0.0)
    decisions = []
    for step in range(30):
        seen = Seen(step=step, times=(2.0, 1.0), steps_left=1000, cost_s=0.1)
        standing, decision = after_step(standing, seen, _facts())
        decisions.append(decision)
    (made,) = [one for one in decisions if one is not None]
    assert isinstance(made, Migrate)
    assert "device 0 is 2.0 times as slow" in made.why
    assert made.shares[0] == pytest.approx(1 / 3, abs=0.02)
    standing = moved(standing, made.shares)
    assert standing.under_way is None
    assert standing.shares == made.shares
    assert slowness((2 / 3, 2 / 3), made.shares, 0.0)[0] == pytest.approx(2, rel=0.05)
