"""A worker on a node, seen from the controller, when its keeper says nothing."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from rota.execute.backends import ray as backend
from rota.execute.backends.ray_nodes import ANSWER_S, START_S


class Clock:
    """One that goes when it is told to."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """And a Ray that keeps no promise."""
    made = Clock()
    monkeypatch.setattr(backend, "time", made)
    monkeypatch.setattr(backend, "ray_", SimpleNamespace(wait=lambda promises, timeout: ([], promises)))
    return made


def remote() -> Any:
    keeper = SimpleNamespace(look=SimpleNamespace(remote=lambda: "promise"))
    return backend._Remote("node/cpu:0", keeper, "started")


def test_one_whose_actor_starts_slowly_is_not_lost_before_it_had_the_time_to_start(clock: Clock) -> None:
    one = remote()
    began_s = clock.now_s
    while clock.now_s < began_s + START_S - 1:
        assert not one.is_still()
        assert one.exit_code() is None, clock.now_s - began_s
        clock.now_s += 1
    clock.now_s = began_s + START_S + 1
    assert one.exit_code() == backend.LOST


def test_one_that_hung_up_and_whose_keeper_says_nothing_is_lost(clock: Clock) -> None:
    one = remote()
    one.socket = socket.socket()
    one.hung_up()
    assert one.exit_code() is None
    clock.now_s += ANSWER_S + 1
    assert one.exit_code() == backend.LOST
    one.socket.close()


def test_one_that_says_nothing_is_lost_only_when_its_lease_is_over(clock: Clock) -> None:
    one = remote()
    one.socket, one.heard_s = socket.socket(), clock.now_s
    lease_over_s = clock.now_s + backend._CUT_OFF_S
    while clock.now_s < lease_over_s:
        one.is_still()
        assert one.exit_code() is None
        clock.now_s += 1
    clock.now_s += 1
    one.is_still()
    assert one.exit_code() == backend.LOST
    one.socket.close()
