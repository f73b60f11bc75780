"""When a worker works on something for longer than it may, as its backend sees it."""

from __future__ import annotations

import pytest

from rota.execute.backends import local
from rota.execute.backends.base import WorkerLost
from rota.execute.backends.local import Peer
from rota.runtime.messages import Beat


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(local.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def beat(task="a", phase="the model factory", phase_s=1.0, limit_s: float | None = 5.0, retry=False):
    return Beat(task=task, phase=phase, phase_s=phase_s, limit_s=limit_s, retry=retry)


def test_a_phase_that_takes_too_long_is_named(clock):
    peer = Peer("cpu:0")
    peer.begin("a")
    peer.take_beat(beat(phase_s=4.0))
    assert peer.overrun() is None
    peer.take_beat(beat(phase_s=5.5))
    assert peer.overrun() == WorkerLost(reason="the model factory did not end within 5 s", retry=False)


def test_the_clock_goes_on_when_no_more_beats_come(clock):
    peer = Peer("cpu:0")
    peer.begin("a")
    peer.take_beat(beat(phase_s=1.0, retry=True))
    clock.now_s += 4.5
    found = peer.overrun()
    assert found is not None
    assert found.retry


def test_a_worker_that_never_says_that_it_has_begun_with_its_task_is_given_up(clock):
    """It may hold the interpreter before its first beat, or hang while it imports torch."""
    peer = Peer("cpu:0")
    peer.take_beat(beat(task="the one before", phase_s=0.0, limit_s=None))
    peer.begin("a")
    clock.now_s += 599
    assert peer.overrun() is None
    clock.now_s += 2
    assert peer.overrun() == WorkerLost(reason="starting its worker did not end within 600 s", retry=True)


def test_nothing_is_expected_of_a_worker_without_a_task(clock):
    peer = Peer("cpu:0")
    peer.begin("a")
    peer.task = None
    peer.take_beat(beat(phase_s=1e9))
    assert peer.overrun() is None
