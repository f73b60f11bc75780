"""Longest first: how long a task is expected to take, and who gets which device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rota.execute.policy import Launch, LongestFirst, View, Waiting, waiting
from rota.execute.record import RunRecord, TaskRecord
from rota.execute.scheduled import Scheduled
from rota.execute.solvers import InlineSolver
from rota.execute.states import TaskState
from rota.profile.estimate import Estimate
from rota.schedule.problem import Node
from rota.schedule.replan import Intent


def decide(queue, free):
    return LongestFirst().decide(View(record=RunRecord(), waiting=queue, free=free, now_s=0.0))


def test_a_task_gets_fewer_devices_where_there_are_no_more_but_not_while_one_is_in_doubt():
    queue = [Waiting(name="a", index=0, batches=2.0, width=2), Waiting(name="b", index=1, batches=1.0)]
    view = View(record=RunRecord(), waiting=queue, free=["cpu:0"], now_s=0.0, devices=["cpu:0"])
    assert LongestFirst().decide(view) == [Launch(task="a", devices=("cpu:0",))]
    assert LongestFirst().decide(replace(view, in_doubt=1)) == []


def test_what_was_planned_for_a_device_waits_while_that_is_in_doubt():
    node = Node(name="here", kind="cpu", devices=("cpu:0", "cpu:1"), memory_bytes=2**30)
    intents = [Intent(task="a", label="data(2)", devices=("cpu:0", "cpu:1"), start_s=0.0)]
    view = View(
        record=RunRecord(),
        waiting=[Waiting(name="a", index=0, batches=2.0, width=1)],
        free=["cpu:0"],
        now_s=0.0,
        devices=["cpu:0"],
        in_doubt=1,
    )

    def scheduled():
        return Scheduled(estimates={}, classes={}, nodes=[node], solver=InlineSolver(), intents=intents, replan=False)

    policy = scheduled()
    assert policy.decide(view) == []
    back = replace(view, in_doubt=0, free=["cpu:0", "cpu:1"], devices=["cpu:0", "cpu:1"])
    assert policy.decide(back) == [Launch(task="a", devices=("cpu:0", "cpu:1"), strategy="data(2)")]
    assert scheduled().decide(replace(view, in_doubt=0)) == [Launch(task="a", devices=("cpu:0",))]


def test_nothing_is_planned_while_a_gang_ends_whose_device_is_in_use_again():
    """Two tasks on one device are no question that a solver can answer; it would have ended the run."""
    node = Node(name="here", kind="cpu", devices=("cpu:0", "cpu:1"), memory_bytes=2**30)
    ways = {
        name: (Estimate(label=label, kind="cpu", devices=width, step_s=1.0, spread=0.1, memory_bytes=1, measured=True),)
        for name, label, width in (("wide", "data(2)", 2), ("next", "single", 1))
    }
    record = RunRecord()
    for index, (name, devices) in enumerate((("wide", ("cpu:0", "cpu:1")), ("next", ("cpu:1",)))):
        record.tasks[name] = task_of(
            name=name,
            index=index,
            state=TaskState.RUNNING,
            devices=devices,
            total_steps=9,
            strategy=ways[name][0].label,
        )
    policy = Scheduled(estimates=ways, classes={}, nodes=[node], solver=InlineSolver())
    view = View(record=record, waiting=[], free=[], now_s=100.0, devices=["cpu:0", "cpu:1"])
    assert policy.decide(view) == []
    assert policy.plans == 0


def task_of(**changes):
    return TaskRecord(**({"name": "a", "index": 0, "settings": {}, "facts": {}} | changes))


def test_the_longest_tasks_get_the_free_devices():
    queue = [Waiting(name=name, index=i, batches=9.0 - i) for i, name in enumerate("abc")]
    assert decide(queue, ["cpu:1", "cpu:3"]) == [
        Launch(task="a", devices=("cpu:1",)),
        Launch(task="b", devices=("cpu:3",)),
    ]


def test_each_device_gets_one_task_and_some_may_get_none():
    queue = [Waiting(name="a", index=0, batches=1.0)]
    assert decide(queue, ["cpu:0", "cpu:1"]) == [Launch(task="a", devices=("cpu:0",))]
    assert decide([], ["cpu:0"]) == []
    assert decide(queue, []) == []


def test_waiting_tasks_sort_longest_first_and_then_as_listed():
    lengths = [3.0, 7.0, 3.0, math.inf, 7.0]
    queue = sorted((Waiting(name=str(i), index=i, batches=s) for i, s in enumerate(lengths)), key=lambda w: w.order)
    assert [one.name for one in queue] == ["3", "1", "4", "0", "2"]


@pytest.mark.parametrize(
    ("changes", "batches"),
    [
        ({"total_steps": 100}, 100.0),
        ({"total_steps": 100, "facts": {"accumulate": 4}}, 400.0),
        ({"total_steps": 100, "saved_step": 60}, 40.0),
        ({"total_steps": 100, "saved_step": 60, "step_s": 0.5}, 40.0),
        ({"total_steps": 100, "saved_step": 100}, 0.0),
        ({"total_steps": 100, "step_s": 0.0}, 100.0),
        ({"total_steps": None}, math.inf),
        ({"total_steps": None, "step_s": 0.5}, math.inf),
    ],
)
def test_what_is_left_of_a_task_is_what_counts(changes, batches):
    assert waiting(task_of(**changes)).batches == batches


def test_measured_and_unmeasured_tasks_are_compared_in_one_unit():
    # Both take 50 ms a step; the one that has begun has measured it, and has 190 of 200 steps to go.
    begun = task_of(name="begun", total_steps=200, saved_step=10, step_s=0.05)
    fresh = task_of(name="fresh", index=1, total_steps=100)
    assert min([waiting(begun), waiting(fresh)], key=lambda one: one.order).name == "begun"
