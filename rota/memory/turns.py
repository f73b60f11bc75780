"""How a model in a pool takes turns with others: it says which units it has, and is told when and where they run.

A device runs one unit at a time. In its memory are regions: of what runs, of what comes next, and of what leaves. Who
comes next, and where, is decided by the arbiter (arbiter.py), with which each model's process has a socket.
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
    moved_bytes: tuple[int, ...]
    """Of the region that each of them needs,"""
    work_bytes: tuple[int, ...]
    """and of what it needs beside, while it runs."""
    room_bytes: int
    """What a device has for both, as far as this model knows."""
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
    """To the arbiter: what a unit had in a region of a device's memory has left it."""

    device: int
    begin: int


@register
@dataclass(frozen=True, kw_only=True)
class UnitComes:
    """To a model: there is room for its next unit on a device, in a region that begins here."""

    device: int
    begin: int


@register
@dataclass(frozen=True, kw_only=True)
class UnitRuns:
    """To a model: its unit runs now."""

    following: int | None
    """Where the region begins of its next one, if that is the device's next, too, and can come meanwhile.

    After the last unit that is known it is that of the first one of the next that the model will have, as large as that
    of the first one of these.
    """


class Turns:
    """A model's side of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._deframer = channel.Deframer()
        self._heard: list[Any] = []

    def ready(
        self,
        units_s: Sequence[float],
        *,
        moved_bytes: Sequence[int],
        work_bytes: Sequence[int],
        room_bytes: int,
        after_s: float,
    ) -> None:
        """Say which units can run now."""
        self._send(
            UnitsReady(
                units_s=tuple(units_s),
                moved_bytes=tuple(moved_bytes),
                work_bytes=tuple(work_bytes),
                room_bytes=room_bytes,
                after_s=after_s,
            )
        )

    def wait_for_room(self) -> tuple[int, int]:
        """Until there is room for the next unit: the device, and where in its memory."""
        message = self._next()
        assert isinstance(message, UnitComes), message
        return message.device, message.begin

    def wait_for_turn(self) -> int | None:
        """Until it may run; where the following one has room there, if it has."""
        message = self._next()
        assert isinstance(message, UnitRuns), message
        return message.following

    def ran(self, took_s: float) -> None:
        """The unit is over: another may run there."""
        self._send(UnitRan(took_s=took_s))

    def gone(self, device: int, begin: int) -> None:
        """A region is free again. Called by any thread."""
        self._send(UnitGone(device=device, begin=begin))

    def _next(self) -> Any:
        while not self._heard:
            data = self._socket.recv(1 << 16)
            if not data:
                raise TaskError("the pool is gone; try the task again with `rota resume --failed`")
            self._heard += [message for message, _ in self._deframer.feed(data)]
        return self._heard.pop(0)

    def _send(self, message: Any) -> None:
        data = channel.frame(message)
        with self._sending:
            self._socket.sendall(data)
