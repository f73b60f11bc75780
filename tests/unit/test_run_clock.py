"""A clock that somebody sets changes neither how long a run takes nor whether it ends well."""

from __future__ import annotations

from contextlib import closing

import pytest

import rota
from rota.execute.backends.local import LocalBackend
from rota.execute.backends.simulated import SimulatedBackend, SimulatedTask
from rota.execute.clock import RunClock
from rota.execute.record import RunRecord
from rota.execute.states import RunState
from rota.runtime.metrics import MetricsLog
from rota.store.journal import read_events


class Machine:
    """Its wall clock can be set; what goes on steadily cannot."""

    def __init__(self):
        self.wall_s, self.steady_s = 1_000_000.0, 50.0

    def passes(self, seconds):
        self.wall_s += seconds
        self.steady_s += seconds

    def clock(self):
        return RunClock(wall_s=lambda: self.wall_s, steady_s=lambda: self.steady_s)


@pytest.mark.parametrize("jump_s", [-1e6, -3600.0, 3600.0])
def test_the_clock_of_a_run_does_not_follow_one_that_is_set(jump_s):
    machine = Machine()
    clock = machine.clock()
    assert clock.now_s() == 1_000_000.0
    machine.passes(5.0)
    machine.wall_s += jump_s
    machine.passes(5.0)
    assert clock.now_s() == 1_000_010.0


def test_a_run_that_is_resumed_goes_on_after_its_last_event():
    machine = Machine()
    clock = machine.clock()
    clock.not_before(2_000_000.0)
    assert clock.now_s() == 2_000_000.0
    machine.passes(1.0)
    clock.not_before(1.0)
    assert clock.now_s() == 2_000_001.0


def test_the_time_of_this_machines_backend_never_goes_back(monkeypatch):
    wall = iter(range(10**9, 0, -1000))
    monkeypatch.setattr("time.time", lambda: float(next(wall)))
    with closing(LocalBackend(rota.local(devices=1))) as backend:
        times = [backend.now_s() for _ in range(5)]
    assert times == sorted(times)
    assert times[-1] - times[0] < 10


class SetBack(SimulatedBackend):
    """A backend on a machine whose clock is set back before each run of a controller."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.wall_s = 0.0

    def now_s(self):
        return self._now_s + self.wall_s


def test_a_journal_in_which_time_goes_back_between_controllers_makes_no_span_negative(tmp_path, simulate):
    run = simulate(tmp_path, {"a": SimulatedTask(steps=40, step_s=0.5)}, devices=1, backend=SetBack)

    def interrupt(record, event):
        if event is None and run.backend._now_s > 8:
            run.controller.interrupt()

    run.backend.wall_s = 5000.0
    assert run.run(observer=interrupt) is RunState.INTERRUPTED
    run.backend.wall_s = 0.0
    assert run.run() is RunState.FINISHED
    record = RunRecord.replay(read_events(run.folder.journal))
    for span in record.tasks["a"].spans:
        assert span.begin_s <= span.end_s
    assert record.elapsed_s >= 0
    assert 0 < record.tasks["a"].busy_s(now_s=record.last_s) < 40


def test_steps_that_took_no_time_by_a_clock_that_went_back_have_no_speed(monkeypatch):
    now_s, told = 10.0, []
    monkeypatch.setattr("rota.runtime.metrics.time.perf_counter", lambda: now_s)
    log = MetricsLog("a", 1, told.append)
    for step, now_s in ((1, 4.0), (2, 6.0)):  # noqa: B007
        log.add(step, {"train/loss": 1.0})
        log.flush()
    assert [one.step_s for one in told] == [None, 2.0]
