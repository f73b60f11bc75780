"""Lets the models of a pool take turns on its devices: a thread that only passes messages, and decides by `sharp`."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rota.errors import MessageError
from rota.memory.arena import Spans
from rota.memory.sharp import Pick, Pool, longest_remaining
from rota.memory.turns import UnitComes, UnitGone, UnitRan, UnitRuns, UnitsReady
from rota.runtime import channel
from rota.threads import OwnedThread


@dataclass(frozen=True, kw_only=True)
class _Region:
    """Of a unit that runs, comes or leaves."""

    name: str
    work_bytes: int


@dataclass(kw_only=True)
class DeviceMemory:
    """A device's memory: regions of what runs, comes and leaves, and what the one that runs needs beside them."""

    spans: Spans
    peak_bytes: int = field(default=0, init=False)
    _regions: dict[int, _Region] = field(default_factory=dict, init=False)
    """where they begin -> what they are for"""

    def take(self, name: str, *, moved_bytes: int, work_bytes: int, room_bytes: int) -> int | None:
        """Where the region of a unit begins; None if there is no room for it now."""
        # Only one of them works at a time.
        work = max((work_bytes, *(one.work_bytes for one in self._regions.values())))
        if self.spans.used_bytes + moved_bytes + work > room_bytes:
            return None
        begin = self.spans.take(moved_bytes)
        if begin is not None:
            self._regions[begin] = _Region(name=name, work_bytes=work_bytes)
            self.peak_bytes = max(self.peak_bytes, self.spans.used_bytes + work)
        return begin

    def give(self, name: str, begin: int) -> None:
        """A region is gone; nothing happens if it was another's."""
        if begin in self._regions and self._regions[begin].name == name:
            del self._regions[begin]
            self.spans.give(begin)

    def leave(self, name: str) -> None:
        """All regions of a model are gone."""
        for begin in [begin for begin, one in self._regions.items() if one.name == name]:
            self.give(name, begin)


class Arbiter:
    """The devices of a pool, and the models that share them."""

    def __init__(
        self,
        connections: Mapping[str, socket.socket],
        *,
        devices: int,
        memory_bytes: int,
        pick: Pick = longest_remaining,
        wait: bool = False,
    ) -> None:
        """Each device has an arena of so many bytes; `wait` lets the first unit run only when every model has one."""
        self._connections = dict(connections)
        self._deframers = {name: channel.Deframer() for name in connections}
        self._memories = [DeviceMemory(spans=Spans(size_bytes=memory_bytes)) for _ in range(devices)]
        self._comes_to: dict[int, int] = {}
        """device -> where the region begins of what comes next"""
        self._ready: dict[str, UnitsReady] = {}
        self._pool = Pool(pick=pick)
        self._waiting_for = set(connections) if wait else set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, "")
        for name, connection in self._connections.items():
            self._selector.register(connection, selectors.EVENT_READ, name)
        self._thread = OwnedThread(self._serve, name="arbiter", wake=lambda: self._wake.sendall(b"x"))
        self._thread.start()

    @property
    def peak_bytes(self) -> int:
        """The most that a device had, of what was admitted."""
        return max(memory.peak_bytes for memory in self._memories)

    def close(self) -> None:
        """Let go of everything."""
        self._thread.end()
        for connection in (*self._connections.values(), self._wake, self._woken):
            connection.close()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if not key.data:
                    return
                self._read(key.data)
            self._decide()

    def _read(self, name: str) -> None:
        try:
            data = self._connections[name].recv(1 << 16)
            messages = [message for message, _ in self._deframers[name].feed(data)]
        except (OSError, MessageError):
            data, messages = b"", []
        if not data:
            self._leave(name)
        for message in messages:
            self._hear(name, message)

    def _hear(self, name: str, message: Any) -> None:
        if isinstance(message, UnitsReady):
            self._ready[name] = message
            self._pool.add(name, message.units_s, after_s=message.after_s)
            self._waiting_for.discard(name)
        elif isinstance(message, UnitRan):
            for device in range(len(self._memories)):
                if self._pool.running(device) == name:
                    self._pool.ended(device)
        elif isinstance(message, UnitGone):
            self._go(name, message.device, message.begin)

    def _go(self, name: str, device: int, begin: int) -> None:
        """A region is gone; if nothing has come to it yet, what was to come there does not."""
        if self._pool.coming(device) == name and self._comes_to[device] == begin:
            self._pool.give_up(device)
        self._memories[device].give(name, begin)

    def _leave(self, name: str) -> None:
        """It has ended, or its process has: what it had is free."""
        self._pool.leave(name)
        self._waiting_for.discard(name)
        self._selector.unregister(self._connections[name])
        for memory in self._memories:
            memory.leave(name)

    def _decide(self) -> None:
        if self._waiting_for:
            return
        for _ in range(2):  # first what runs, then what comes behind it
            for device in range(len(self._memories)):
                if self._pool.coming(device) is None:
                    # The first of its next units may be larger than that of these, and it would not know how large its
                    # room is: that a model is told with its turn only, so that it can give it back before it has them.
                    chosen = self._choose(device, known=True)
                    if chosen is not None:
                        self._send(chosen, UnitComes(device=device, begin=self._comes_to[device]))
                self._run_next(device)

    def _choose(self, device: int, *, known: bool = False) -> str | None:
        """The model whose unit comes to a device next, if there is room."""

        def has_room(name: str, unit: int) -> bool:
            ready = self._ready[name]
            begin = self._memories[device].take(
                name,
                moved_bytes=ready.moved_bytes[unit],
                work_bytes=ready.work_bytes[unit],
                room_bytes=ready.room_bytes,
            )
            if begin is None:
                return False
            self._comes_to[device] = begin
            return True

        return self._pool.choose(device, has_room=has_room, known=known)

    def _run_next(self, device: int) -> None:
        name = self._pool.coming(device)
        if name is None or not self._pool.is_ready(name) or self._pool.running(device) is not None:
            return
        self._pool.began(device)
        following = self._choose(device)
        begin = self._comes_to.get(device)
        self._send(name, UnitRuns(following=begin if following == name else None))
        if following is not None and following != name:
            assert begin is not None
            self._send(following, UnitComes(device=device, begin=begin))

    def _send(self, name: str, message: Any) -> None:
        with contextlib.suppress(OSError):  # its end is seen when it is read
            self._connections[name].sendall(channel.frame(message))
