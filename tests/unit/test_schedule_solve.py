"""The solver: limits, hints, what is repeatable, what is refused, windows, and the paper's program."""

import dataclasses
import random
import time

import pytest

from rota.schedule.arrays import Arrays
from rota.schedule.bounds import lower_bound
from rota.schedule.heuristics import HEURISTICS
from rota.schedule.problem import Node, Option, Placement, Problem, Schedule, check, value_of
from rota.schedule.solve import Limit, solve

pytestmark = pytest.mark.timeout(60)


def cluster(nodes, devices=8, **changes):
    return tuple(
        Node(name=f"n{n}", kind="gpu", devices=tuple(f"n{n}/{i}" for i in range(devices)), **changes)
        for n in range(nodes)
    )


def sweep(tasks, nodes, *, seed=0, devices=8, spans=False, **changes):
    """Tasks with an Amdahl-like scaling over widths of powers of two."""
    draw = random.Random(seed)
    options = []
    for task in range(tasks):
        work_s, serial = draw.lognormvariate(0, 0.7) * 1000, draw.uniform(0.02, 0.1)
        widths = [width for width in (1, 2, 4, 8) if width <= devices]
        for width in widths[draw.randrange(len(widths)) // 2 :]:
            seconds = work_s * (serial + (1 - serial) / width)
            options.append(Option(tasks=(f"t{task}",), kind="gpu", devices=width, seconds=seconds, spans=spans))
    return Problem(options=tuple(options), nodes=cluster(nodes, devices), **changes)


def still():
    return 0.0


@pytest.mark.parametrize("tasks", [10, 90])
def test_the_same_seed_and_steps_give_the_same_schedule(tasks):
    problem = sweep(tasks, 3)
    first, second = (solve(problem, limit=Limit(steps=4), seed=1, clock=still) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("objective", "spans"),
    [
        *(("makespan", False), ("completion", True), ("cost", False)),
        *(
            pytest.param(*one, marks=pytest.mark.deep)
            for one in (("makespan", True), ("completion", False), ("cost", True))
        ),
    ],
)
def test_windows_make_a_large_problem_better_and_keep_it_valid(objective, spans):
    problem = sweep(80, 5, seed=3, devices=4, spans=spans, objective=objective, deadlines={"t3": 100.0, "t70": 900.0})
    told = []
    solved = solve(problem, limit=Limit(steps=6), clock=still, better=told.append)
    for one in told:
        check(problem, one.schedule)
        assert one.value == value_of(problem, one.schedule)
    assert all(solved.value <= value for value in solved.heuristics.values())
    assert solved.bound <= solved.value.objective * (1 + 1e-9)


def test_a_large_problem_is_nearly_optimal():
    solved = solve(sweep(300, 10), limit=Limit(steps=10), clock=still)
    assert solved.gap < 0.03


def test_a_limit_of_seconds_is_kept():
    started_s = time.monotonic()
    solve(sweep(200, 4), limit=Limit(seconds=1.5), clock=time.monotonic)
    assert time.monotonic() - started_s < 8


def test_without_steps_the_best_heuristic_is_the_answer():
    problem = sweep(10, 1)
    solved = solve(problem, limit=Limit(steps=0), clock=still)
    assert solved.value == min(solved.heuristics.values())
    assert solved.heuristics.keys() == HEURISTICS.keys()


def test_a_hint_is_never_lost():
    problem = sweep(10, 1, seed=5)
    good = solve(problem, limit=Limit(steps=30), clock=still)
    again = solve(problem, limit=Limit(steps=0), clock=still, hints=[good.schedule])
    assert again.by == "hint"
    assert again.value == good.value


def test_a_hint_of_another_problem_is_left_out():
    problem = sweep(4, 1)
    wrong = [
        Schedule(placements=(Placement(option=99, start_s=0.0, devices=("n0/0",)),)),
        Schedule(placements=(Placement(option=0, start_s=0.0, devices=("gone",)),)),
        Schedule(placements=()),
    ]
    assert solve(problem, limit=Limit(steps=0), clock=still, hints=wrong).by != "hint"


def six_tasks():
    return Problem(
        options=tuple(
            Option(tasks=(f"t{i}",), kind="gpu", devices=width, seconds=seconds)
            for i, length_s in enumerate((7, 6, 5, 4, 4, 3))
            for width, seconds in ((1, length_s), (2, length_s - 2))
        ),
        nodes=cluster(1, 3),
    )


@pytest.mark.parametrize("limit", [Limit(steps=200), Limit(seconds=20.0)])
def test_an_optimum_is_known_as_one(limit):
    solved = solve(six_tasks(), limit=limit, clock=time.monotonic)
    assert solved.gap == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("factor", [1.0, 1.0 / 3.0])
def test_that_a_time_is_too_short_is_proved(factor):
    """With lengths that are whole numbers of a unit, and with others."""
    from rota.schedule.cp_sat import Effort, within

    whole = six_tasks()
    options = tuple(dataclasses.replace(one, seconds=one.seconds * factor) for one in whole.options)
    problem = dataclasses.replace(whole, options=options)
    best = solve(problem, limit=Limit(steps=200), clock=still)
    arrays, known = Arrays.of(problem), HEURISTICS["random"](problem, 0)
    last_s = best.value.makespan_s
    ask = {"known": known, "bound": 0.0, "effort": Effort(work=20.0)}
    assert within(arrays, **ask, target_s=last_s * 0.97) is False
    found = within(arrays, **ask, target_s=last_s * 1.001)
    check(problem, found)
    assert value_of(problem, found).makespan_s <= last_s * 1.002


def test_nothing_to_do():
    solved = solve(Problem(options=(), nodes=cluster(1)), limit=Limit(steps=1), clock=still)
    assert solved.schedule.placements == ()
    assert solved.gap == 0.0


def test_current_practice_uses_all_devices_one_after_another():
    problem = sweep(5, 1)
    schedule = HEURISTICS["max"](problem, 0)
    assert {problem.options[one.option].devices for one in schedule.placements} == {8}
    assert [problem.options[one.option].tasks for one in schedule.placements] == [(f"t{i}",) for i in range(5)]


def test_optimus_gives_devices_where_they_gain_most():
    options = [
        Option(tasks=(task,), kind="gpu", devices=width, seconds=seconds)
        for task, lengths in {"slow": (100.0, 50.0, 40.0), "quick": (10.0, 6.0, 5.0)}.items()
        for width, seconds in zip((1, 2, 3), lengths, strict=True)
    ]
    schedule = HEURISTICS["optimus"](Problem(options=tuple(options), nodes=cluster(1, 4)), 0)
    # Of four devices, two are left after one for each: "slow" gains 50 for the second and 10 for the third.
    chosen = {options[one.option].tasks[0]: options[one.option].devices for one in schedule.placements}
    assert chosen == {"slow": 3, "quick": 1}


# ---- what is refused ----


def test_what_cannot_be_is_refused_in_a_sentence(refused):
    def attempt(*options, nodes=None, **changes):
        problem = Problem(options=options, nodes=nodes or cluster(1), **changes)
        return refused(solve, problem, limit=Limit(steps=1), clock=still)

    fine = Option(tasks=("t",), kind="gpu", devices=1, seconds=1.0)
    assert "same name" in attempt(fine, nodes=cluster(1) * 2)
    assert "'t' fits nowhere" in attempt(Option(tasks=("t",), kind="tpu", devices=1, seconds=1.0))
    assert "'t' fits nowhere" in attempt(Option(tasks=("t",), kind="gpu", devices=9, seconds=1.0))
    assert "cannot be" in attempt(Option(tasks=("t",), kind="gpu", devices=1, seconds=float("nan")))
    assert "objective" in attempt(fine, objective="speed")
    # A pool alone, and a task in it that has no other option and is in another pool as well.
    pools = [Option(tasks=tasks, kind="gpu", devices=1, seconds=1.0) for tasks in (("t", "u"), ("u", "v"))]
    assert "exclude each other" in attempt(*pools)
    # Two tasks that both go on on the same device.
    held = [Option(tasks=(task,), kind="gpu", devices=1, seconds=1.0, held=("n0/0",)) for task in "tu"]
    assert "exclude each other" in attempt(*held)
    # One that says to be on more devices than it takes.
    wide = Option(tasks=("t",), kind="gpu", devices=1, seconds=1.0, held=("n0/0", "n0/1"))
    assert "'t' fits nowhere" in attempt(wide)


def test_a_limit_must_be_one(refused):
    refused(Limit)
    refused(Limit, seconds=-1.0)
    refused(Limit, steps=-1)


# ---- the paper's program ----


def test_the_papers_program_finds_the_same_optimum():
    from rota.schedule.milp import milp

    problem = sweep(3, 1, devices=2)
    exact = solve(problem, limit=Limit(steps=100), clock=still)
    found = milp(problem, 20.0)
    check(problem, found.schedule)
    assert value_of(problem, found.schedule).objective == pytest.approx(exact.value.objective, rel=1e-3)
    assert lower_bound(problem) <= found.bound_s * (1 + 1e-3) + 1e-6


def test_the_papers_program_says_what_it_does_not_know(refused):
    from rota.schedule.milp import milp

    refused(milp, sweep(2, 1, objective="cost"), 1.0)


# ---- options that no schedule needs ----


def test_dominated_options_are_those_that_take_no_less_and_last_no_less():
    shapes = [(1, 10.0), (2, 6.0), (2, 7.0), (4, 6.0), (4, 3.0)]
    options = tuple(Option(tasks=("t",), kind="gpu", devices=width, seconds=length_s) for width, length_s in shapes)
    assert Arrays.of(Problem(options=options, nodes=cluster(1))).dominated == {2, 3}


def test_deadlines_that_are_long_past_and_a_cost_fit_into_the_solvers_numbers():
    """Found by hypothesis: the weights of lateness, cost and makespan together overflowed."""
    lone = [Option(tasks=(task,), kind="a", devices=1, seconds=s) for task in ("t0", "t1") for s in (1.0, 16.9375)]
    both = Option(tasks=("t0", "t1"), kind="a", devices=1, seconds=1.0)
    problem = Problem(
        options=(*lone, both),
        nodes=(Node(name="n", kind="a", devices=("n0",)),),
        objective="cost",
        deadlines={"t0": 0.0, "t1": 0.0},
    )
    assert solve(problem, limit=Limit(steps=1), clock=lambda: 0.0).value.late_s == 2.0
