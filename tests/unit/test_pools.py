"""When tasks share devices shard by shard, and the policy that lets them."""

from dataclasses import replace

import pytest

from rota.execute.policy import Launch, OpenPool, View, Waiting
from rota.execute.pools import Sharing, pool_of
from rota.execute.record import RunRecord, TaskRecord
from rota.execute.states import TaskState
from rota.profile.estimate import Estimate
from rota.schedule.problem import Node
from rota.schedule.replan import Left, problem_of
from rota.schedule.solve import Limit, solve


def estimate(label, step_s, moves_s=0.0):
    return Estimate(
        label=label,
        kind="cpu",
        devices=1,
        step_s=step_s,
        spread=0.1,
        memory_bytes=1,
        measured=True,
        compute_s=step_s,
        moves_s=moves_s,
    )


def chosen(tasks, *, devices=2, kind="cpu", objective="makespan"):
    nodes = (Node(name="cpu", kind=kind, devices=tuple(f"cpu:{i}" for i in range(devices)), price_per_hour=1.0),)
    left = [Left(task=name, steps=100.0, estimates=tuple(ways)) for name, ways in tasks.items()]
    problem = problem_of(left, nodes, objective=objective)
    solved = solve(problem, limit=Limit(steps=2000), seed=0, clock=lambda: 0.0)

    def others_s(names):
        rest = [one for one in left if one.task not in names]
        if not rest:
            return 0.0
        return solve(problem_of(rest, nodes), limit=Limit(steps=2000), seed=0, clock=lambda: 0.0).value.makespan_s

    return pool_of(
        problem,
        solved.schedule,
        estimates=dict(tasks),
        steps=dict.fromkeys(tasks, 100.0),
        nodes=nodes,
        makespan_s=solved.value.makespan_s,
        others_s=others_s,
    )


def spills(step_s, moves_s=0.0):
    return [estimate("spill", step_s, moves_s)]


def test_three_on_two_devices_are_a_pool():
    found = chosen({name: spills(2.0) for name in "abc"})
    assert set(found.tasks) == set("abc")
    assert found.instead_s == pytest.approx(400, rel=1e-3)
    assert found.makespan_s == pytest.approx(300 / 0.85 + 3 * 3.0 / 2)


@pytest.mark.parametrize(("moves_s", "worth"), [(0.5, True), (1.2, False)])
def test_tasks_that_would_wait_for_their_disk_are_none(moves_s, worth):
    assert (chosen({name: spills(2.0, moves_s) for name in "abc"}) is not None) == worth


def test_tasks_of_which_it_is_not_known_what_they_move_are_none():
    ways = [replace(estimate("spill", 2.0), compute_s=0.0)]
    assert chosen(dict.fromkeys("abc", ways)) is None


def test_what_is_even_without_it_is_none():
    assert chosen({name: spills(2.0) for name in "abcd"}) is None


def test_what_fits_is_not_in_it_and_comes_after_it():
    found = chosen({name: spills(2.0) for name in "abc"} | {"d": [estimate("single", 0.1)]})
    assert set(found.tasks) == set("abc")
    assert found.makespan_s > found.pool_s


@pytest.mark.parametrize("options", [{"devices": 1}, {"kind": "cuda"}, {"objective": "completion"}])
def test_where_there_can_be_none(options):
    kind = options.get("kind", "cpu")
    ways = [Estimate(**{**estimate("spill", 2.0).to_json(), "kind": kind})]
    assert chosen(dict.fromkeys("abc", ways), **options) is None


class Inner:
    def __init__(self):
        self.seen = []

    def decide(self, view):
        self.seen = [one.name for one in view.waiting]
        return [Launch(task=one.name, devices=(view.free[0],)) for one in view.waiting[: len(view.free)]]

    def another_way(self, task):
        return "inner"


def view_of(states, *, free):
    record = RunRecord()
    for index, (name, (state, strategy)) in enumerate(states.items()):
        record.tasks[name] = TaskRecord(name=name, index=index, settings={}, facts={}, state=state, strategy=strategy)
    waiting = [
        Waiting(name=name, index=i, batches=1.0)
        for i, (name, (state, _)) in enumerate(states.items())
        if state is TaskState.PENDING
    ]
    return View(record=record, waiting=waiting, free=free, now_s=0.0)


PENDING, RUNNING, DONE = TaskState.PENDING, TaskState.RUNNING, TaskState.FINISHED


def test_the_pool_comes_first_and_the_others_when_it_is_over():
    tasks = {"a", "b"}
    policy = Sharing(Inner(), tasks=tasks, devices=("x", "y"), chosen=True)
    begin = {"a": (PENDING, ""), "b": (PENDING, ""), "c": (PENDING, "")}
    assert policy.decide(view_of(begin, free=["x"])) == ()
    assert policy.decide(view_of(begin, free=["x", "y"])) == (OpenPool(tasks=("a", "b"), devices=("x", "y")),)
    under_way = {"a": (RUNNING, "pool"), "b": (DONE, "pool"), "c": (PENDING, "")}
    assert policy.decide(view_of(under_way, free=[])) == ()
    lost = {"a": (DONE, "pool"), "b": (PENDING, "pool"), "c": (PENDING, "")}
    assert policy.decide(view_of(lost, free=["x", "y"])) == (OpenPool(tasks=("b",), devices=("x", "y")),)
    over = {"a": (DONE, "pool"), "b": (DONE, "pool"), "c": (PENDING, "")}
    assert policy.decide(view_of(over, free=["x", "y"])) == [Launch(task="c", devices=("x",))]


def test_one_that_the_pool_cannot_run_goes_on_without_it_if_it_may():
    view = view_of({"a": (RUNNING, "pool"), "c": (RUNNING, "single")}, free=[])
    for may, told in ((True, "spill"), (False, "")):
        tasks = {"a"}
        policy = Sharing(Inner(), tasks=tasks, devices=("x",), chosen=may)
        assert policy.another_way(view.record.tasks["a"]) == told
        assert tasks == (set() if may else {"a"})
        assert policy.another_way(view.record.tasks["c"]) == "inner"
