"""Measures how fast a disk takes and gives what leaves memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rota.memory.residency import Rates
from rota.memory.slab import Budget, Slab
from rota.memory.store import Store

_SIZE_BYTES = 16 * 2**20
_ITEMS = 3


def measured_rates(folder: Path) -> Rates:
    """What a byte takes there, past the page cache; a look of a fraction of a second."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".disk-") as place:
        store = Store(Path(place))
        try:
            slab = Slab(_SIZE_BYTES, budget=Budget(_SIZE_BYTES), what="a look at the disk")
            slab.bytes[:] = bytes(_SIZE_BYTES)
            write_s = min(_timed(lambda item: store.write(item, slab.bytes)))
            read_s = min(_timed(lambda item: store.read(item, slab.bytes)))
        finally:
            store.close()
    return Rates(read_byte_s=read_s / _SIZE_BYTES, write_byte_s=write_s / _SIZE_BYTES)


def _timed(move: Callable[[str], None]) -> list[float]:
    found = []
    for number in range(_ITEMS):
        begun_s = time.perf_counter()
        move(f"item{number}")
        found.append(time.perf_counter() - begun_s)
    return found
