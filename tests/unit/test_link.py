"""A worker's connection: reports are kept until they are journalled, and told again to the next controller."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rota.runtime import channel, link
from rota.runtime.link import Link
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
    socket.send_fds(keeper, [b"!"], [theirs.fileno()])
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
    answers = [began_s + 0.4]

    def answer() -> None:
        time.sleep(0.3)
        first.sendall(channel.frame(Here(at_s=answers[0])))

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


def test_a_delayed_answer_does_not_renew_the_lease_from_when_it_arrives(pair: Pair) -> None:
    _, theirs = pair()
    made = Link(theirs)
    before_s = made._held_s
    made.held(Here(at_s=before_s - 100))
    assert made._held_s == before_s
    made.held(Here(at_s=before_s + 1))
    assert made._held_s == before_s + 1
