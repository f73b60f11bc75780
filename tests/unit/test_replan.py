"""What is left to schedule, and whether a switch is worth its cost."""

from dataclasses import replace

import pytest

from rota.profile.estimate import Estimate
from rota.schedule.problem import Node, check, makespan_s, value_of
from rota.schedule.replan import Intent, Left, continued, corrected, intents_of, judge, problem_of
from rota.schedule.solve import Limit, solve

NODES = (Node(name="n", kind="cpu", devices=("a", "b")),)


def way(devices=1, step_s=1.0, label=None, **changes):
    base = {"label": label or f"way{devices}", "kind": "cpu", "devices": devices, "step_s": step_s, "spread": 0.05}
    return Estimate(**(base | {"memory_bytes": 0, "measured": True} | changes))


WAYS = (way(1, 1.0), way(2, 0.6))


def solved(problem):
    return solve(problem, limit=Limit(steps=5), clock=lambda: 0.0).schedule


def test_what_runs_may_go_on_at_no_cost():
    running = Left(task="t", steps=100, estimates=WAYS, label="way1", devices=("a",), switch_s=5.0)
    problem = problem_of([running], NODES)
    held = [option for option in problem.options if option.held]
    assert [(option.held, option.seconds) for option in held] == [(("a",), 100.0)]
    assert sorted(option.seconds for option in problem.options if not option.held) == [65.0, 105.0]


def test_a_task_near_its_end_is_left_alone():
    running = Left(task="t", steps=10, estimates=WAYS, label="way1", devices=("a",), switch_s=5.0)
    assert [option.held for option in problem_of([running], NODES).options] == [("a",)]


def test_the_present_plan_is_a_schedule_of_what_is_left():
    left = [
        Left(task="t", steps=100, estimates=WAYS, label="way1", devices=("a",), switch_s=5.0),
        Left(task="u", steps=50, estimates=WAYS),
        Left(task="v", steps=50, estimates=WAYS),
    ]
    problem = problem_of(left, NODES)
    intents = [
        Intent(task="t", label="way1", devices=("a",), start_s=0.0),
        Intent(task="u", label="way1", devices=("b",), start_s=3.0),
        Intent(task="v", label="way2", devices=("a", "b"), start_s=9.0),
    ]
    schedule = continued(problem, intents)
    check(problem, schedule)
    assert makespan_s(problem, schedule) == pytest.approx(130, abs=0.01)
    assert {one.task: one.devices for one in intents_of(problem, schedule, now_s=7.0)} == {
        one.task: one.devices for one in intents
    }
    assert continued(problem, intents[:2]) is None


@pytest.mark.parametrize(("switch_s", "adopt"), [(1.0, True), (19.0, True), (21.0, False), (45.0, False)])
def test_a_switch_must_gain_more_than_it_costs(switch_s, adopt):
    """One task of 100 s on one device while the other idles: two devices would take 60 s, and the switch."""
    left = [Left(task="t", steps=100, estimates=WAYS, label="way1", devices=("a",), switch_s=switch_s)]
    problem = problem_of(left, NODES)
    present = continued(problem, [])
    found = solved(problem)
    verdict = judge(problem, present, found, switch_s={"t": switch_s})
    assert verdict.adopt == adopt
    if value_of(problem, found) < value_of(problem, present):
        assert verdict.switched == ("t",)


def test_doubt_asks_for_more():
    left = [Left(task="t", steps=100, estimates=WAYS, label="way1", devices=("a",), switch_s=10.0)]
    problem = problem_of(left, NODES)
    present, found = continued(problem, []), solved(problem)
    assert judge(problem, present, found, switch_s={"t": 10.0}).adopt
    assert not judge(problem, present, found, switch_s={"t": 10.0}, doubt=2.0).adopt


def test_what_is_seen_is_believed_and_tells_of_the_others():
    measured = corrected(WAYS, label="way1", devices=1, live_s=2.0)
    assert [one.step_s for one in measured] == [2.0, 1.2]
    guessed = corrected([replace(one, measured=False) for one in WAYS], label="way1", devices=1, live_s=4.0)
    assert [one.step_s for one in guessed] == [4.0, pytest.approx(1.2)]
    assert guessed[0].measured
    assert not guessed[1].measured
    assert corrected(WAYS, label="other", devices=1, live_s=4.0) == WAYS


def test_a_wrong_prediction_says_nothing_of_what_was_measured():
    single, other = WAYS[0], replace(WAYS[1], measured=False)
    seen = corrected([single, other], label=other.label, devices=other.devices, live_s=10 * other.step_s)
    assert seen[0] == single
    assert seen[1].measured
    assert seen[1].step_s == 10 * other.step_s
