"""Moves items between memory and disk beside the computation: one thread reads, another writes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from rota.memory.slab import Slab
from rota.memory.store import Store


class Mover:
    """Reads happen in the order in which they were asked for, and so do writes; reads do not wait for writes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rota-read")
        self._writers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rota-write")

    def load(self, item: str, into: Slab) -> Future[None]:
        """Begin to read an item."""
        return self._readers.submit(self._load, item, [into])

    def write(self, item: str, slab: Slab) -> Future[None]:
        """Begin to write an item; its memory stays until that is done."""
        return self._writers.submit(self._write, item, [slab])

    def close(self) -> None:
        """Finish what was begun."""
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown()

    # A thread keeps what it was given for a moment after it told that it is done: so it is given a box, and empties it.

    def _load(self, item: str, into: list[Slab]) -> None:
        self._store.read(item, into.pop().bytes)

    def _write(self, item: str, slab: list[Slab]) -> None:
        self._store.write(item, slab.pop().bytes)
