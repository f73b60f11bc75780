"""Lets the models of a pool take turns on its devices: a thread that only passes messages, and decides by `sharp`."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rota.errors import MessageError
from rota.memory.sharp import Pick, Pool, longest_remaining
from rota.memory.turns import UnitComes, UnitGone, UnitRan, UnitRuns, UnitsReady
from rota.runtime import channel

_HALVES = 2
"""Of a device's memory."""


@dataclass(kw_only=True)
class _Device:
    """The halves of a device's memory, by the models that have something there."""

    held: list[str] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        """Whether another unit can come."""
        return len(self.held) < _HALVES

    def free(self, name: str) -> None:
        """A model's unit is gone."""
        if name in self.held:
            self.held.remove(name)


class Arbiter:
    """The devices of a pool, and the models that share them."""

    def __init__(
        self,
        connections: Mapping[str, socket.socket],
        *,
        devices: int,
        pick: Pick = longest_remaining,
        wait: bool = False,
    ) -> None:
        """`wait` lets the first unit run only when every model has one."""
        self._connections = dict(connections)
        self._deframers = {name: channel.Deframer() for name in connections}
        self._devices = [_Device() for _ in range(devices)]
        self._pool = Pool(pick=pick)
        self._waiting_for = set(connections) if wait else set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, "")
        for name, connection in self._connections.items():
            self._selector.register(connection, selectors.EVENT_READ, name)
        self._thread = threading.Thread(target=self._serve, name="rota-arbiter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of everything."""
        self._wake.send(b"x")
        self._thread.join()
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
            self._pool.add(name, message.units_s, after_s=message.after_s)
            self._waiting_for.discard(name)
        elif isinstance(message, UnitRan):
            for device in range(len(self._devices)):
                if self._pool.running(device) == name:
                    self._pool.ended(device)
        elif isinstance(message, UnitGone):
            self._devices[message.device].free(name)

    def _leave(self, name: str) -> None:
        """It has ended, or its process has: what it had is free."""
        self._pool.leave(name)
        self._waiting_for.discard(name)
        self._selector.unregister(self._connections[name])
        for device in self._devices:
            while name in device.held:
                device.free(name)

    def _decide(self) -> None:
        if self._waiting_for:
            return
        for _ in range(2):  # first what runs, then what comes behind it
            for number in range(len(self._devices)):
                if self._pool.coming(number) is None:
                    chosen = self._choose(number)
                    if chosen is not None:
                        self._send(chosen, UnitComes(device=number))
                self._run_next(number)

    def _choose(self, number: int) -> str | None:
        """The model whose unit comes to a device next, if there is room."""
        device = self._devices[number]
        chosen = self._pool.choose(number) if device.has_room else None
        if chosen is not None:
            device.held.append(chosen)
        return chosen

    def _run_next(self, number: int) -> None:
        name = self._pool.coming(number)
        if name is None or not self._pool.is_ready(name) or self._pool.running(number) is not None:
            return
        self._pool.began(number)
        following = self._choose(number)
        self._send(name, UnitRuns(device=number, follows=following == name))
        if following is not None and following != name:
            self._send(following, UnitComes(device=number))

    def _send(self, name: str, message: Any) -> None:
        with contextlib.suppress(OSError):  # its end is seen when it is read
            self._connections[name].sendall(channel.frame(message))
