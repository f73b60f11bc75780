"""A worker's connection to its controller.

What was reported is kept until the controller says that it is in the journal. A worker with a keeper outlives its
controller for a while: it goes on, and tells the next controller what the last one may not have noted. One that hears
nothing although the connection stands is cut off: after the lease it ends, because the controller then takes it for
dead and has its task go on elsewhere. Whoever watches the lease may be late (a machine under load, a call that keeps
the interpreter, a process that was stopped); so what is written is asked for at the last moment, too (`ensure_lease`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rota.errors import MessageError
from rota.runtime import channel
from rota.runtime.messages import Beat, Here, Ready, Report

LEASE_S = 20.0
"""How long a worker trains without being heard by its controller."""
ORPHAN_S = 60.0
"""How long a worker waits for another controller when its own has ended."""
_LOOK_EVERY_S = 1.0
_MOMENT = struct.Struct("d")


def clock_s() -> float:
    """Goes on while the machine sleeps, which others do not wait for; the same for all processes of a machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def hand_over(line: socket.socket, stream: socket.socket, *, since_s: float) -> None:
    """Give a worker a connection to another controller, which cannot have heard of it before a moment of the clock."""
    socket.send_fds(line, [_MOMENT.pack(since_s)], [stream.fileno()])


class Link:
    """One connection after another, to one controller after another; used by all threads of a worker."""

    def __init__(self, stream: socket.socket, *, keeper: socket.socket | None = None) -> None:
        """New connections arrive from the `keeper`; without one, the worker ends with its controller."""
        self._stream: socket.socket | None = stream
        self._keeper = keeper
        self._lock = threading.Lock()
        self._kept: deque[Report] = deque()
        self._first = 0
        """How many were reported on this connection before those that are kept."""
        self._until_s = clock_s() + LEASE_S
        """How long it may train and write: the lease, from the latest moment of which it is known that the controller
        heard of this worker after it; without a controller, as long as it waits for another."""
        self._asked_s = 0.0
        self._granted = threading.Event()
        """Whether a beat was answered that was sent after the latest task came."""
        self._closing = False

    def report(self, report: Report) -> None:
        """Send a report, and keep it; while there is no controller, it is only kept."""
        with self._lock:
            if not isinstance(report, Beat):
                self._kept.append(report)
            self._send(report)

    def stored(self, count: int) -> list[Report]:
        """So many reports of this connection are in the journal: those of them that were kept."""
        # Without the lock, which one has that sends and may have to wait: who listens also watches the lease. Others
        # only append.
        done = [self._kept.popleft() for _ in range(min(count - self._first, len(self._kept)))]
        self._first += len(done)
        return done

    def forget(self) -> None:
        """What was reported of an earlier task is over, and a lease is asked for."""
        with self._lock:
            self._first += len(self._kept)
            self._kept.clear()
        self._granted.clear()
        self._asked_s = clock_s()
        self._until_s = self._asked_s + LEASE_S

    def held(self, here: Here) -> None:
        """The controller answers a beat that was sent at this moment."""
        self._until_s = max(self._until_s, here.at_s + LEASE_S)
        if here.at_s >= self._asked_s:
            self._granted.set()

    def await_lease(self) -> None:
        """Wait until the controller has answered: the task may have been long on its way, and be another's by now."""
        if self._keeper is not None:
            self._granted.wait()  # whoever listens ends the process if nothing comes

    def ensure_lease(self) -> None:
        """End the process if the lease is over: the task may be another's by now. Callable from any thread."""
        if self._keeper is not None and clock_s() > self._until_s:
            os._exit(0)

    def listen(self, hear: Callable[[Any, bytes], None], *, busy: Callable[[], bool], who: Callable[[], Ready]) -> None:
        """Take messages until `close`. Ends the process where nobody is left to work for.

        `busy` tells whether there is a task, and `who` this worker is, for another controller.
        """
        while True:
            self._take_messages(hear, busy)
            if self._closing:
                return
            if (self._keeper is None or not self._await_another(who)) and not self._closing:
                # Whoever resumes the run must not find this process still writing.
                os._exit(0)

    def close(self) -> None:
        """Have `listen` return."""
        self._closing = True
        for one in (self._stream, self._keeper):
            if one is not None:
                with contextlib.suppress(OSError):  # the other end may be gone
                    one.shutdown(socket.SHUT_RDWR)

    def _take_messages(self, hear: Callable[[Any, bytes], None], busy: Callable[[], bool]) -> None:
        """Until the connection is closed."""
        stream = self._stream
        assert stream is not None
        deframer = channel.Deframer()
        while True:
            # Not by a timeout of the socket: other threads send on it.
            if self._keeper is not None and not select.select([stream], [], [], self._look_in_s())[0]:
                self._check_lease(busy)
                continue
            try:
                data = stream.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                self._check_lease(busy)  # one that was given up is not one that waits for another controller
                return
            try:
                for message, payload in deframer.feed(data):
                    hear(message, payload)
            except MessageError as error:
                sys.stderr.write(f"rota worker: {error}\n")
                os._exit(1)
            self._check_lease(busy)

    def _look_in_s(self) -> float:
        """Right after the end of the lease, if that is soon."""
        left_s = self._until_s - clock_s()
        return min(_LOOK_EVERY_S, left_s + 0.001) if left_s > 0 else _LOOK_EVERY_S

    def _check_lease(self, busy: Callable[[], bool]) -> None:
        if busy():
            self.ensure_lease()

    def _await_another(self, who: Callable[[], Ready]) -> bool:
        """A connection to another controller; what may be new to it is told again."""
        assert self._keeper is not None
        self._until_s = clock_s() + ORPHAN_S
        with self._lock:
            self._close()
        self._keeper.settimeout(ORPHAN_S)
        try:
            told, handles, _, _ = socket.recv_fds(self._keeper, _MOMENT.size, 1)
        except OSError:
            return False
        if not handles:  # the keeper has ended
            return False
        with self._lock:
            self._stream = socket.socket(fileno=handles[0])
            self._until_s = _MOMENT.unpack(told)[0] + LEASE_S
            others = [report for report in self._kept if not isinstance(report, Ready)]
            self._kept = deque([who(), *others])
            self._first = 0
            for report in self._kept:
                self._send(report)
        return not self._closing  # `close` may not have seen this connection

    def _send(self, report: Report) -> None:
        if self._stream is None:
            return
        try:
            self._stream.sendall(channel.frame(report))
        except OSError:  # the controller has ended; whoever listens notices it, too
            if self._keeper is None:
                os._exit(0)

    def _close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
        self._stream = None
