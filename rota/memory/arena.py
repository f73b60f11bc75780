"""The memory of a device that several processes use in turn: one of them has a region of it, and then another.

Memory that a process gives back and another one gets is made zero in between, which takes longer than to read into it
from a fast disk. So the processes of a pool map the same memory, and who may use which part of it is decided in one
place (arbiter.py).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rota.errors import FitError
from rota.memory.slab import rounded


@dataclass(kw_only=True)
class Spans:
    """Where things lie in a row of bytes: each at the first place that is wide enough."""

    size_bytes: int
    _taken: dict[int, int] = field(default_factory=dict, init=False)
    """where it begins -> where it ends"""

    @property
    def used_bytes(self) -> int:
        """By all of them."""
        return sum(end - begin for begin, end in self._taken.items())

    def take(self, size_bytes: int) -> int | None:
        """Where it begins; None if there is no place."""
        assert size_bytes > 0
        begin = 0
        for other, end in sorted(self._taken.items()):
            if other - begin >= size_bytes:
                break
            begin = end
        if begin + size_bytes > self.size_bytes:
            return None
        self._taken[begin] = begin + size_bytes
        return begin

    def give(self, begin: int) -> None:
        """It is gone."""
        del self._taken[begin]


class Arena:
    """A device's memory, as a process sees it that shares it with others."""

    def __init__(self, handle: int) -> None:
        """`handle` is of a file as `make_arena` makes it; it is closed here."""
        try:
            self._memory = memoryview(mmap.mmap(handle, os.fstat(handle).st_size))
        finally:
            os.close(handle)

    def part(self, begin: int, size_bytes: int) -> memoryview:
        """Of it."""
        found = self._memory[begin : begin + size_bytes]
        assert len(found) == size_bytes, "beyond the end"
        return found


def make_arena(size_bytes: int) -> int:
    """Memory that can be handed to other processes, as an open file: nobody else can open it, and it has no name."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("rota-device", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, rounded(size_bytes))
    return handle


class Region:
    """A part of a device's memory that this process has for a unit; slabs of it are counted as those of a `Budget`."""

    def __init__(self, arena: Arena, begin: int, size_bytes: int, *, gone: Callable[[], None]) -> None:
        """`gone` is told, by whatever thread, when nobody uses any of it any more and nobody will."""
        self._arena = arena
        self._begin = begin
        self._size_bytes = size_bytes
        self._gone = gone
        self._used_bytes = self._mapped_bytes = 0
        self._is_open = True
        self._lock = threading.RLock()  # memory may be put back by whatever frees it, also in the midst of this

    def take(self, size_bytes: int, what: str) -> None:
        """FitError if there is no room."""
        with self._lock:
            assert self._is_open
            if self._used_bytes + size_bytes > self._size_bytes:
                raise self._too_small(size_bytes, what)
            self._used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """They are free again."""
        with self._lock:
            self._used_bytes -= size_bytes
            gone = self._used_bytes == 0 and not self._is_open
        if gone:
            self._gone()

    def map(self, size_bytes: int, what: str) -> memoryview:
        """Memory that is behind all that was mapped before: a unit has each of its items once."""
        with self._lock:
            if self._mapped_bytes + size_bytes > self._size_bytes:
                raise self._too_small(size_bytes, what)
            self.take(size_bytes, what)
            begin = self._begin + self._mapped_bytes
            self._mapped_bytes += rounded(size_bytes)
        return self._arena.part(begin, size_bytes)

    def put_back(self, memory: mmap.mmap | memoryview, size_bytes: int) -> None:
        """Nobody uses it any more."""
        self.give(size_bytes)

    def close(self) -> None:
        """Nothing more comes to it. It is gone when what is there is."""
        with self._lock:
            self._is_open = False
            gone = self._used_bytes == 0
        if gone:
            self._gone()

    def _too_small(self, size_bytes: int, what: str) -> FitError:
        return FitError(
            f"{what} needs {size_bytes:,} bytes, and {self._used_bytes:,} of a unit's {self._size_bytes:,} are in use: "
            "a defect of rota; please report it"
        )
