"""How a model in a pool takes turns with others: it says which units it has, and is told when and where they run.

A device runs one unit at a time. Its memory has two halves: in one is what runs, in the other what comes next, or what
leaves. Who comes next is decided by the arbiter (arbiter.py), with which each model's process has a socket.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rota.codec import register
from rota.errors import TaskError
from rota.runtime import channel


@register
@dataclass(frozen=True, kw_only=True)
class UnitsReady:
    """To the arbiter: these units can run now, one after another."""

    units_s: tuple[float, ...]
    after_s: float
    """What the model has to do after them."""


@register
@dataclass(frozen=True, kw_only=True)
class UnitRan:
    """To the arbiter: the unit that was begun is over."""

    took_s: float


@register
@dataclass(frozen=True, kw_only=True)
class UnitGone:
    """To the arbiter: what a unit had in a device's memory has left it."""

    device: int


@register
@dataclass(frozen=True, kw_only=True)
class UnitComes:
    """To a model: there is room for its next unit on a device."""

    device: int


@register
@dataclass(frozen=True, kw_only=True)
class UnitRuns:
    """To a model: its unit runs now. `follows` if its next one is the device's next, too, and can come meanwhile.

    That may be the first one of the next units that it will have.
    """

    device: int
    follows: bool


class Turns:
    """A model's side of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._deframer = channel.Deframer()
        self._heard: list[Any] = []
        self.promised: int | None = None
        """The device on which the first of the next units has room already."""

    def ready(self, units_s: Sequence[float], *, after_s: float) -> None:
        """Say which units can run now."""
        self._send(UnitsReady(units_s=tuple(units_s), after_s=after_s))

    def wait_for_room(self) -> int:
        """Until there is room for the next unit: the device."""
        if self.promised is not None:
            device, self.promised = self.promised, None
            return device
        message = self._next()
        assert isinstance(message, UnitComes), message
        return message.device

    def wait_for_turn(self) -> bool:
        """Until it may run; whether the following one has room there, too."""
        message = self._next()
        assert isinstance(message, UnitRuns), message
        return message.follows

    def ran(self, took_s: float) -> None:
        """The unit is over: another may run there."""
        self._send(UnitRan(took_s=took_s))

    def gone(self, device: int) -> None:
        """Its memory is free again. Called by any thread."""
        self._send(UnitGone(device=device))

    def _next(self) -> Any:
        while not self._heard:
            data = self._socket.recv(1 << 16)
            if not data:
                raise TaskError("the pool is gone; run `rota resume`")
            self._heard += [message for message, _ in self._deframer.feed(data)]
        return self._heard.pop(0)

    def _send(self, message: Any) -> None:
        data = channel.frame(message)
        with self._sending:
            self._socket.sendall(data)
