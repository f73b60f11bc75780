"""A worker's connection: reports are kept until they are journalled, and told again to the next controller."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rota.runtime import channel, link
from rota.runtime.link import LEASE_S, ORPHAN_S, Link, clock_s, hand_over
from rota.runtime.messages import Beat, Halt, Here, Measured, Ready, Saved

Pair = Callable[[], tuple[socket.socket, socket.socket]]


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(link.os, "_exit", ended)


@pytest.fixture
def pair() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Makes connected sockets, which are closed in the end."""
    made: list[socket.socket] = []

    def make() -> tuple[socket.socket, socket.socket]:
        made.extend(socket.socketpair())
        return made[-2], made[-1]

    yield make
    for one in made:
        one.close()


def saved(step: int) -> Saved:
    return Saved(task="a", attempt=1, step=step, write_s=0.0)


def heard(stream: socket.socket, count: int) -> list[Any]:
    """The next messages."""
    stream.settimeout(5)
    deframer, found = channel.Deframer(), []
    while len(found) < count:
        data = stream.recv(1 << 16)
        assert data
        found += [message for message, _ in deframer.feed(data)]
    return found


def who() -> Ready:
    return Ready(pid=1, task="a", attempt=1)


def test_what_is_stored_is_not_kept(pair: Pair) -> None:
    ours, theirs = pair()
    made = Link(theirs)
    reports = [saved(step) for step in range(4)]
    for report in reports:
        made.report(report)
    made.report(Beat())
    assert heard(ours, 5) == [*reports, Beat()]
    assert made.stored(2) == reports[:2]
    assert made.stored(2) == []
    assert made.stored(4) == reports[2:]
    made.report(saved(9))
    assert made.stored(5) == [saved(9)]


def test_what_was_reported_of_an_earlier_task_counts_but_is_not_told(pair: Pair) -> None:
    ours, theirs = pair()
    made = Link(theirs)
    made.report(saved(1))
    made.forget()
    made.report(saved(2))
    assert made.stored(1) == []
    assert made.stored(2) == [saved(2)]
    assert heard(ours, 2) == [saved(1), saved(2)]


def test_without_a_keeper_it_ends_with_its_controller(pair: Pair) -> None:
    ours, theirs = pair()
    made = Link(theirs)
    ours.close()
    with pytest.raises(Ended):
        made.listen(lambda message, payload: None, busy=lambda: True, who=who)


def test_nonsense_ends_it(pair: Pair) -> None:
    ours, theirs = pair()
    ours.sendall(b"GET / HTTP/1.1\r\nHost: nowhere\r\n\r\n")
    with pytest.raises(Ended) as ended:
        Link(theirs).listen(lambda message, payload: None, busy=lambda: True, who=who)
    assert ended.value.args == (1,)


def test_another_controller_hears_what_the_first_did_not_store(pair: Pair) -> None:
    first, theirs = pair()
    keeper, line = pair()
    made = Link(theirs, keeper=line)
    messages: list[Any] = []
    listening = threading.Thread(target=_until_ended, args=(made, messages), daemon=True)  # ends with the keeper
    listening.start()
    for step in (1, 2, 3):
        made.report(saved(step))
    heard(first, 3)
    made.stored(1)
    first.close()
    time.sleep(0.1)
    made.report(Measured(task="a", attempt=1, number=1, rows=((4, {}),), latest={}, step_s=None))
    second, theirs = pair()
    hand_over(keeper, theirs, since_s=clock_s())
    theirs.close()
    told = heard(second, 4)
    assert told[:3] == [who(), saved(2), saved(3)]
    assert told[3].rows == ((4, {}),)
    second.sendall(channel.frame(Halt(task="a")))
    made.report(saved(5))
    assert heard(second, 1) == [saved(5)]
    assert [type(report) for report in made.stored(4)] == [Ready, Saved, Saved, Measured]
    second.close()
    keeper.close()
    listening.join(5)
    assert not listening.is_alive()
    assert messages == [Halt(task="a")]


def _until_ended(made: Link, messages: list[Any]) -> None:
    try:
        made.listen(lambda message, payload: messages.append(message), busy=lambda: True, who=who)
    except Ended:
        return


def test_a_connection_that_stands_without_a_word_ends_it_after_the_lease(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LEASE_S", 0.5)
    monkeypatch.setattr(link, "_LOOK_EVERY_S", 0.05)
    first, theirs = pair()
    _, line = pair()
    made = Link(theirs, keeper=line)
    began_s = time.monotonic()
    answered_s = clock_s() + 0.4

    def answer() -> None:
        time.sleep(0.3)
        first.sendall(channel.frame(Here(at_s=answered_s)))

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(Ended):
        made.listen(lambda message, payload: made.held(message), busy=lambda: True, who=who)
    assert 0.85 < time.monotonic() - began_s < 3.0


def test_one_that_has_no_task_has_no_lease(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LEASE_S", 0.1)
    monkeypatch.setattr(link, "_LOOK_EVERY_S", 0.05)
    first, theirs = pair()
    keeper, line = pair()
    made = Link(theirs, keeper=line)
    threading.Timer(0.5, lambda: (keeper.close(), first.close())).start()
    began_s = time.monotonic()
    with pytest.raises(Ended):
        made.listen(lambda message, payload: None, busy=lambda: False, who=who)
    assert time.monotonic() - began_s > 0.4


class Clock:
    """One that goes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(link, "clock_s", lambda: self.now_s)

    def allows(self, made: Link, until_s: float) -> bool:
        """Whether this is the very moment until which may be written."""
        self.now_s = until_s
        made.ensure_lease()
        self.now_s = until_s + 0.01
        with pytest.raises(Ended):
            made.ensure_lease()
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_delayed_answer_does_not_renew_the_lease_from_when_it_arrives(pair: Pair, clock: Clock) -> None:
    made = Link(pair()[0], keeper=pair()[0])
    made.held(Here(at_s=900.0))
    assert clock.allows(made, 1000.0 + LEASE_S)
    made.held(Here(at_s=1001.0))
    assert clock.allows(made, 1001.0 + LEASE_S)


def test_without_a_keeper_there_is_no_lease(pair: Pair, clock: Clock) -> None:
    made = Link(pair()[0])
    clock.now_s += 1e6
    made.ensure_lease()
    made.forget()
    made.await_lease()


def test_it_ends_with_the_lease_and_not_when_it_would_look_next(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LEASE_S", 0.3)
    monkeypatch.setattr(link, "_LOOK_EVERY_S", 5.0)
    made = Link(pair()[0], keeper=pair()[0])
    began_s = time.monotonic()
    with pytest.raises(Ended):
        made.listen(lambda message, payload: None, busy=lambda: True, who=who)
    assert 0.25 < time.monotonic() - began_s < 2.0


def test_a_task_waits_for_an_answer_to_what_was_sent_after_it_came(pair: Pair, clock: Clock) -> None:
    made = Link(pair()[0], keeper=pair()[0])
    clock.now_s = 1030.0  # a controller that was busy did not answer an idle worker
    made.forget()
    began = threading.Event()
    threading.Thread(target=lambda: (made.await_lease(), began.set()), daemon=True).start()
    made.held(Here(at_s=1029.9))
    assert not began.wait(0.1)
    made.ensure_lease()
    made.held(Here(at_s=1030.1))
    assert began.wait(5)
    assert clock.allows(made, 1030.1 + LEASE_S)


def test_the_lease_is_watched_while_something_cannot_be_sent(pair: Pair) -> None:
    ours, theirs = pair()
    made = Link(theirs, keeper=pair()[0])
    for step in range(3):
        made.report(saved(step))
    sending = threading.Thread(target=lambda: [made.report(saved(9)) for _ in range(1000)], daemon=True)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    sending.start()
    sending.join(0.3)
    assert sending.is_alive()
    heard = threading.Event()
    threading.Thread(target=lambda: (made.stored(2), heard.set()), daemon=True).start()
    assert heard.wait(5)
    drained = threading.Thread(target=lambda: _drain(ours), daemon=True)
    drained.start()
    sending.join(5)
    assert not sending.is_alive()
    theirs.shutdown(socket.SHUT_RDWR)
    drained.join(5)


def _drain(stream: socket.socket) -> None:
    while stream.recv(1 << 16):
        pass


def test_one_that_was_given_up_does_not_wait_for_another_controller(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped wakes up after its lease, and finds its connection closed."""
    first, theirs = pair()
    _, line = pair()
    made = Link(theirs, keeper=line)
    first.close()
    now_s = clock_s()
    monkeypatch.setattr(link, "clock_s", lambda: now_s + LEASE_S + 1)
    monkeypatch.setattr(Link, "_await_another", lambda self, who: pytest.fail("it waits"))
    with pytest.raises(Ended):
        made.listen(lambda message, payload: None, busy=lambda: True, who=who)


def test_the_lease_of_the_next_controller_counts_from_before_it_could_hear(pair: Pair, clock: Clock) -> None:
    keeper, line = pair()
    made = Link(pair()[0], keeper=line)
    clock.now_s = 1055.0
    hand_over(keeper, pair()[0], since_s=1050.0)
    assert made._await_another(who)
    assert clock.allows(made, 1050.0 + LEASE_S)
    made._close()


def test_who_waits_for_another_controller_may_write_for_as_long_as_it_waits(
    pair: Pair, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, line = pair()
    made = Link(pair()[0], keeper=line)
    keeper.close()
    clock.now_s = 1010.0
    assert not made._await_another(who)
    assert clock.allows(made, 1010.0 + ORPHAN_S)


def test_the_clock_does_not_stop_with_the_machine() -> None:
    if sys.platform == "linux":
        assert abs(clock_s() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 1
