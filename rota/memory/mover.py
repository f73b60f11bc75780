"""Moves items between memory and disk beside the computation: one thread reads, another writes."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from rota.memory.slab import Loose, Slab
from rota.memory.store import Store

_ENOUGH_BYTES = 2**20
"""Less than that tells nothing of a disk's pace."""


_BOUNCE_BYTES = 2 * 2**20


class Pace:
    """How long moves in one direction took."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        self.moved_s = 0.0

    @contextlib.contextmanager
    def timing(self, size_bytes: int) -> Iterator[None]:
        """One move."""
        begun_s = time.perf_counter()
        yield
        self.moved_bytes += size_bytes
        self.moved_s += time.perf_counter() - begun_s

    def byte_s(self, usual: float) -> float:
        """The seconds of a byte; the usual ones as long as too few have moved."""
        return self.moved_s / self.moved_bytes if self.moved_bytes >= _ENOUGH_BYTES else usual


class Mover:
    """Reads happen in the order in which they were asked for, and so do writes; reads do not wait for writes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rota-read")
        self._writers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rota-write")
        self._bounce = mmap.mmap(-1, _BOUNCE_BYTES)
        """Of the thread that writes: what is not aligned passes through it."""
        self.read = Pace()
        self.written = Pace()

    def load(self, item: str, into: Slab, *, after: Future[None] | None = None) -> Future[None]:
        """Begin to read an item, when what is being written of it is there."""
        return self._readers.submit(self._load, item, [into], after)

    def write(self, item: str, source: Slab | Loose) -> Future[None]:
        """Begin to write an item; its memory stays until that is done."""
        return self._writers.submit(self._write, item, [source])

    def forget(self, item: str) -> None:
        """Its file stays, for when it is written anew."""

    def settle(self) -> None:
        """All that was written is on disk."""

    def close(self) -> None:
        """Finish what was begun."""
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown()

    # A thread keeps what it was given for a moment after it told that it is done: so it is given a box, and empties it.

    def _load(self, item: str, into: list[Slab], after: Future[None] | None) -> None:
        if after is not None:
            after.result()
        with self.read.timing(into[0].size_bytes):
            self._store.read(item, into.pop().bytes)

    def _write(self, item: str, source: list[Slab | Loose]) -> None:
        with self.written.timing(source[0].size_bytes):
            self._store.write_pieces(item, source.pop().chunks(self._bounce))
