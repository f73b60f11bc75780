"""The profiler asks workers as little as it can, keeps what they say, and survives those that fail."""

from pathlib import Path

import pytest

import rota
from rota.cluster.device import Device
from rota.execute.backends.base import WorkerLost
from rota.execute.profiler import Profiler
from rota.profile.estimate import Estimate
from rota.profile.store import EstimateStore
from rota.runtime.messages import Beat, Failed, Left, Looked, Tried
from rota.schedule.problem import Node

DEVICES = tuple(Device(index=i, kind="cpu", memory_bytes=1, cores=(i,)) for i in range(2))
NODES = (Node(name="n", kind="cpu", devices=("cpu:0", "cpu:1")),)


def task_of(name, lr, width=8, steps=1000):
    return rota.Task(
        name=name,
        model=lambda: width,
        data=lambda: None,
        loss=lambda model, batch: model,
        optimizer=lambda model: lr,
        steps=steps,
    )


def way(devices, step_s, measured):
    fields = {"kind": "cpu", "devices": devices, "step_s": step_s, "spread": 0.05, "memory_bytes": 0}
    return Estimate(label="single" if devices == 1 else "data(2)", measured=measured, **fields)


class Workers:
    """Answers at once; what is asked is written down."""

    def __init__(self, *, look=None, tried=0.55):
        self.asked = []
        self._signs = []
        self._look = look or (lambda task, search: None)
        self._tried = tried
        self._now_s = 0.0

    def look(self, device, task, *, number, folder, counts, known, alike, search):
        self.asked.append(("look", task.name, search))
        odd = self._look(task, search)
        if odd is not None:
            self._signs.append((device, odd))
            return
        ways = [way(1, 1.0, True), *([way(2, 0.6, False)] if search else [])]
        sign = Looked(
            task=task.name,
            attempt=number,
            signature=f"s{task.model()}",
            total_steps=task.steps,
            estimates=tuple(one.to_json() for one in ways),
            known=False,
            counts=tuple(counts) if search else (1,),
        )
        self._signs.append((device, sign))

    def try_out(self, devices, task, *, number, folder):
        self.asked.append(("try", task.name, task.strategy))
        if self._tried is None:
            self._signs.append((devices[0], Failed(task=task.name, attempt=number, step=0, reason="no memory")))
        else:
            self._signs.append(
                (devices[0], Tried(task=task.name, attempt=number, step_s=self._tried, spread=0.0, start_s=1.0))
            )
        self._signs += [(device, Left(task=task.name, attempt=number)) for device in devices[1:]]

    def kill(self, device):
        self.asked.append(("kill", device))

    def poll(self, timeout_s):
        self._now_s += 0.1
        signs, self._signs = self._signs, []
        return signs

    def now_s(self):
        return self._now_s


def profiled(workers, tasks, tmp_path, **options):
    store = EstimateStore(path=Path(tmp_path) / "steps.json")
    profiler = Profiler(backend=workers, devices=DEVICES, nodes=NODES, folder=tmp_path, store=store, **options)
    return profiler.run(tasks, lambda task: (1, 2)), store


def test_tasks_that_cost_the_same_are_looked_at_once(tmp_path):
    tasks = [task_of("a", 1e-3), task_of("b", 1e-2), task_of("c", 1e-3, width=16), task_of("d", 1e-4)]
    workers = Workers()
    profile, _ = profiled(workers, tasks, tmp_path)
    assert [one for one in workers.asked if one[0] == "look"] == [("look", "a", False), ("look", "c", False)]
    assert profile.estimates.keys() == {"a", "b", "c", "d"}
    assert profile.classes == {"a": "a", "b": "a", "c": "c", "d": "a"}


def test_one_task_on_two_devices_is_searched_for_and_tried_and_kept(tmp_path):
    workers = Workers()
    profile, store = profiled(workers, [task_of("a", 1e-3)], tmp_path)
    assert workers.asked == [("look", "a", False), ("look", "a", True), ("try", "a", "data(2)")]
    assert [(one.devices, one.step_s, one.measured) for one in profile.estimates["a"]] == [
        (1, 1.0, True),
        (2, 0.55, True),
    ]
    (kept,) = store.read().values()
    assert kept.estimates == profile.estimates["a"]
    assert kept.counts == (1, 2)


def test_a_way_that_fails_is_left_out_and_it_is_said(tmp_path):
    profile, _ = profiled(Workers(tried=None), [task_of("a", 1e-3)], tmp_path)
    assert [one.label for one in profile.estimates["a"]] == ["single"]
    assert profile.notices == (("a", "data(2) on 2 devices is left out: no memory"),)


@pytest.mark.parametrize("sign", [WorkerLost(reason="gone", retry=True), None])
def test_a_task_that_cannot_be_looked_at_is_unknown(tmp_path, sign):
    def look(task, search):
        if task.name == "bad":
            return sign or Failed(task="bad", attempt=1, step=0, reason="gone")
        return None

    profile, _ = profiled(Workers(look=look), [task_of("bad", 1e-3), task_of("good", 1e-3, width=9)], tmp_path)
    assert profile.failures == {"bad": "gone"}
    assert profile.estimates.keys() == {"good"}


def test_what_a_look_does_for_long_is_told_every_few_seconds(tmp_path):
    class Slow(Workers):
        beats = 0

        def poll(self, timeout_s):
            self.beats += 1
            self._now_s += 1.0
            if self.beats < 25:
                return [("cpu:0", Beat(task="a", phase="the model factory", phase_s=float(self.beats)))]
            return super().poll(timeout_s)

    told = []
    profiled(Slow(), [task_of("a", 0.1)], tmp_path, progress=lambda what, done, total: told.append(what))
    assert [what for what in told if "factory" in what] == [
        "a: the model factory, for 10 s",
        "a: the model factory, for 20 s",
    ]


def test_an_interrupt_ends_it(tmp_path):
    workers = Workers()
    profile, _ = profiled(workers, [task_of("a", 1e-3)], tmp_path, interrupted=lambda: True)
    assert profile.estimates == {}
    assert workers.asked == []


def test_a_store_that_is_damaged_is_empty(tmp_path):
    path = tmp_path / "steps.json"
    path.write_text('{"known": {"s": {"counts": [1], "estimates": [{"label": 1}]}}}')
    assert EstimateStore(path=path).read() == {}


def test_a_task_that_no_way_fits_says_why(tmp_path):
    def look(task, search):
        return Looked(
            task=task.name,
            attempt=1,
            signature="s",
            total_steps=9,
            estimates=(),
            known=False,
            counts=(1, 2),
            notices=("auto on 2 devices: the smallest needs 3 GiB",),
        )

    profile, _ = profiled(Workers(look=look), [task_of("big", 1e-3)], tmp_path)
    assert profile.unfit == {"big": "auto on 2 devices: the smallest needs 3 GiB"}


def test_what_a_schedule_rests_on_is_tried_before_it_is_believed(tmp_path):
    workers = Workers()
    store = EstimateStore(path=tmp_path / "steps.json")
    profiler = Profiler(backend=workers, devices=DEVICES, nodes=NODES, folder=tmp_path, store=store)
    tasks = [task_of("a", 1e-3), task_of("b", 1e-3, width=9)]
    profiler.run(tasks, lambda task: (1, 2))
    profiler._classes[0].estimates = (way(1, 1.0, True), way(2, 0.4, False))
    workers.asked.clear()
    assert profiler.try_chosen({("a", "single", 1), ("b", "data(2)", 4)}) is None
    profile = profiler.try_chosen({("a", "data(2)", 2)})
    assert workers.asked == [("try", "a", "data(2)")]
    assert [(one.devices, one.step_s, one.measured) for one in profile.estimates["a"]][1] == (2, 0.55, True)
    assert store.read()["s8"].estimates == profile.estimates["a"]
    assert profiler.try_chosen({("a", "data(2)", 2)}) is None, "it is known now"


class Delayed(Workers):
    """The first look at "slow" is answered only when nothing else could be asked."""

    def __init__(self):
        super().__init__()
        self.known_then = None
        self._held = []

    def look(self, device, task, **asked):
        super().look(device, task, **asked)
        if asked["search"] and task.name == "long":
            self.known_then = EstimateStore(path=asked["known"]).read()
        if task.name == "slow" and not asked["search"]:
            self._held.append(self._signs.pop())

    def poll(self, timeout_s):
        signs = super().poll(timeout_s)
        if not signs:
            signs, self._held = self._held, []
        return signs


def test_an_idle_device_searches_while_another_still_looks_and_measures_nothing_twice(tmp_path):
    workers = Delayed()
    tasks = [task_of("slow", 1e-3, width=9, steps=1), task_of("long", 1e-3)]
    profile, _ = profiled(workers, tasks, tmp_path)
    assert workers.asked[:3] == [("look", "slow", False), ("look", "long", False), ("look", "long", True)]
    assert workers.known_then["s8"].estimates == (way(1, 1.0, True),), (
        "the second look is told what the first has found"
    )
    assert profile.estimates.keys() == {"slow", "long"}


def test_searches_go_side_by_side_where_both_matter(tmp_path):
    """That one is under way does not make another one useless."""

    class Slow(Workers):
        def look(self, device, task, **asked):
            super().look(device, task, **asked)
            if asked["search"]:
                self.searching = [*getattr(self, "searching", []), self._signs.pop()]

        def poll(self, timeout_s):
            signs = super().poll(timeout_s)
            if not signs and getattr(self, "searching", []):
                self.together = max(getattr(self, "together", 0), len(self.searching))
                signs, self.searching = self.searching, []
            return signs

    workers = Slow()
    devices = tuple(Device(index=i, kind="cpu", memory_bytes=1, cores=(i,)) for i in range(4))
    nodes = (Node(name="n", kind="cpu", devices=tuple(one.name for one in devices)),)
    store = EstimateStore(path=tmp_path / "steps.json")
    profiler = Profiler(backend=workers, devices=devices, nodes=nodes, folder=tmp_path, store=store)
    profiler.run([task_of("a", 1e-3), task_of("b", 1e-3, width=9)], lambda task: (1, 2, 4))
    assert workers.together == 2


def test_what_does_not_matter_beside_those_still_looked_at_is_not_searched_for(tmp_path):
    """Eight tasks alike in length have a device each: the first that is known is no reason to cut it."""

    class OneByOne(Workers):
        def poll(self, timeout_s):
            signs = super().poll(timeout_s)
            self._signs = signs[1:]
            return signs[:1]

    workers = OneByOne()
    devices = tuple(Device(index=i, kind="cpu", memory_bytes=1, cores=(i,)) for i in range(8))
    nodes = (Node(name="n", kind="cpu", devices=tuple(one.name for one in devices)),)
    store = EstimateStore(path=tmp_path / "steps.json")
    profiler = Profiler(backend=workers, devices=devices, nodes=nodes, folder=tmp_path, store=store)
    profiler.run([task_of(f"t{i}", 1e-3, width=8 + i) for i in range(8)], lambda task: (1, 2, 4, 8))
    assert not [one for one in workers.asked if one[0] == "look" and one[2]]
