"""Bounds on problems whose optimum is known."""

import pytest

from rota.schedule.bounds import lower_bound
from rota.schedule.problem import Node, Option, Problem

CLOSE = 1e-6


def node(name="n", devices=4, kind="a", **changes):
    return Node(name=name, kind=kind, devices=tuple(f"{name}/{i}" for i in range(devices)), **changes)


def option(task, devices, seconds, kind="a", **changes):
    return Option(tasks=(task,), kind=kind, devices=devices, seconds=seconds, **changes)


def bound(options, *nodes, **changes):
    return lower_bound(Problem(options=tuple(options), nodes=nodes, **changes))


def test_the_area_must_fit():
    assert bound([option(f"t{i}", 2, 10.0) for i in range(6)], node()) == pytest.approx(30.0)


def test_each_task_takes_its_least_seconds():
    assert bound([option("t", 1, 10.0), option("t", 2, 7.0)], node()) == pytest.approx(7.0)


def test_an_option_that_is_too_long_for_the_bound_itself_does_not_count():
    # The least area is 10 on one device, but then the makespan is 10; on four devices it is 4, with an area of 16.
    assert bound([option("t", 1, 10.0), option("t", 4, 4.0)], node()) == pytest.approx(4.0)
    # Two of them: 2 x 16 / 4 devices = 8 with both wide, 10 with one or both narrow; (10 + 16) / 4 is less.
    two = [one for task in "tu" for one in (option(task, 1, 10.0), option(task, 4, 4.0))]
    assert bound(two, node()) == pytest.approx(8.0)


def test_wide_options_block_a_node():
    # Three of four devices each: no two are side by side, although the area would fit.
    assert bound([option(f"t{i}", 3, 10.0) for i in range(4)], node()) == pytest.approx(40.0)
    # Three of eight: two are side by side, not two and two thirds.
    assert bound([option(f"t{i}", 3, 10.0) for i in range(4)], node(devices=8)) == pytest.approx(20.0)


def test_wide_options_that_span_do_not_block():
    inside, spanning = ([option(f"t{i}", 3, 10.0, spans=spans) for i in range(8)] for spans in (False, True))
    assert bound(inside, node("n"), node("m")) == pytest.approx(40.0)
    assert bound(spanning, node("n"), node("m")) == pytest.approx(30.0)


def test_long_options_block_a_device():
    # Three tasks of 6 on two devices: two are one after another.
    assert bound([option(f"t{i}", 1, 6.0) for i in range(3)], node(devices=2)) == pytest.approx(12.0, rel=1e-4)


def test_two_kinds_share_the_work_at_their_speeds():
    # On b each task takes twice as long: with x of 30 on two a and the others on two b, x / 2 = (30 - x) * 2 / 2.
    options = [one for i in range(30) for one in (option(f"t{i}", 1, 1.0), option(f"t{i}", 1, 2.0, kind="b"))]
    assert bound(options, node(devices=2), node("m", 2, "b")) == pytest.approx(10.0, rel=0.01)


def test_nodes_with_little_memory_do_not_help():
    options = [option(f"t{i}", 1, 10.0, memory_bytes=16) for i in range(4)]
    assert bound(options, node("n", 1, memory_bytes=16), node("m", 7, memory_bytes=8)) == pytest.approx(40.0)


def test_a_pool_shares_its_area():
    pool = Option(tasks=("t", "u"), kind="a", devices=2, seconds=6.0)
    assert bound([pool, option("t", 2, 10.0), option("u", 2, 10.0)], node(devices=2)) == pytest.approx(6.0)


def test_completion_is_bounded_by_lengths_and_by_the_area():
    # One device: shortest first, ends at 1, 3, 6.
    lone = [option("t", 1, 1.0), option("u", 1, 2.0), option("v", 1, 3.0)]
    assert bound(lone, node(devices=1), objective="completion") == pytest.approx(10 / 3)
    assert bound(lone, node(devices=9), objective="completion") == pytest.approx(2.0)


def test_cost_is_the_sum_of_the_cheapest():
    options = [option("t", 2, 3600.0), option("t", 1, 9000.0), option("u", 4, 360.0)]
    cheap, dear = node("n", 4, price_per_hour=2.0), node("m", 4, price_per_hour=3.0)
    assert bound(options, cheap, dear, objective="cost") == pytest.approx(4.0 + 0.8)


def test_nothing_takes_no_time():
    assert bound([], node()) == 0.0
