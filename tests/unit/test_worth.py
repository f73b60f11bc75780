"""Only what can move the schedule is searched for and tried."""

from rota.profile.estimate import Estimate
from rota.profile.worth import Alike, Trial, next_trial, worth_searching
from rota.schedule.problem import Node

NODES = (Node(name="n", kind="cpu", devices=("a", "b")),)


def way(devices, step_s, *, measured=True, label=None, spread=0.05):
    return Estimate(
        label=label or f"way{devices}",
        kind="cpu",
        devices=devices,
        step_s=step_s,
        spread=spread,
        memory_bytes=0,
        measured=measured,
    )


def alike(name, count, *ways, steps=100):
    return Alike(name=name, steps={f"{name}{i}": steps for i in range(count)}, estimates=ways)


def test_nobody_searches_where_one_device_each_is_as_good_as_can_be():
    many = [alike("a", 4, way(1, 1.0)), alike("b", 2, way(1, 0.5))]
    assert worth_searching(many, NODES, {"a": (1, 2), "b": (1, 2)}) == []


def test_a_task_that_alone_decides_the_end_is_searched_for():
    classes = [alike("big", 1, way(1, 9.0)), alike("small", 2, way(1, 1.0))]
    assert worth_searching(classes, NODES, {"big": (1, 2), "small": (1, 2)})[0] == "big"
    assert worth_searching(classes, NODES, {"big": (1,), "small": (1, 2)}) == []


def test_what_would_be_chosen_is_tried_first():
    classes = [alike("t", 1, way(1, 1.0), way(2, 0.6, measured=False), way(2, 0.9, measured=False, label="worse"))]
    trial = next_trial(classes, NODES)
    assert trial == Trial(alike="t", estimate=classes[0].estimates[1])
    assert next_trial(classes, NODES, among=["other"]) is None


def test_what_might_be_better_is_tried_and_what_cannot_be_is_not():
    maybe = way(2, 0.7, measured=False, label="maybe", spread=0.25)
    never = way(2, 1.4, measured=False, label="never", spread=0.25)
    classes = [alike("t", 1, way(1, 1.0), way(2, 0.6), maybe, never)]
    assert next_trial(classes, NODES) == Trial(alike="t", estimate=maybe)
    assert next_trial(classes, NODES, besides=[Trial(alike="t", estimate=maybe)]) is None


def test_nothing_is_tried_where_tasks_fit_nowhere():
    assert next_trial([alike("t", 1, way(4, 1.0, measured=False))], NODES) is None
