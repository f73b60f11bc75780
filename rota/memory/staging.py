"""Moves items between a GPU and disk by way of its host, whose memory keeps what it has room for.

On CUDA this was written with care and never run; tests run all but the streams with the host in the place of the GPU.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from rota.memory.mover import Pace
from rota.memory.slab import ALIGNMENT, Slab
from rota.memory.store import Store


@dataclass(frozen=True, kw_only=True)
class Far:
    """A device whose memory is not that of its host."""

    device: torch.device
    host_bytes: int
    """Of the host, for what leaves the device."""


class Staging:
    """Loads happen in the order in which they were asked for, and so do writes; each copies on a stream of its own."""

    def __init__(self, store: Store, far: Far) -> None:
        self._host = Host(store, room_bytes=far.host_bytes, pinned=far.device.type == "cuda")
        self._in, self._out = Copies(far.device), Copies(far.device)
        self._loaders = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rota-load")
        self._savers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rota-save")
        self.read = Pace()
        self.written = Pace()

    def load(self, item: str, into: Slab, *, after: Future[None] | None = None) -> Future[None]:
        """Begin to bring an item, when what leaves of it has left."""
        return self._loaders.submit(self._load, item, [into], after, self._in.asked())

    def write(self, item: str, slab: Slab) -> Future[None]:
        """Begin to take an item to the host; its memory on the device stays until that is done."""
        return self._savers.submit(self._write, item, [slab], self._out.asked())

    def forget(self, item: str) -> None:
        """Nobody will load it before it is written anew."""
        self._host.forget(item)

    def settle(self) -> None:
        """Have on disk what left the device."""
        self._host.settle()

    def close(self) -> None:
        """Finish what was begun."""
        self._loaders.shutdown(cancel_futures=True)
        self._savers.shutdown()
        self._host.close()

    # Given in boxes, as in `Mover`.

    def _load(self, item: str, into: list[Slab], after: Future[None] | None, asked: Any) -> None:
        if after is not None:
            after.result()
        with self.read.timing(into[0].size_bytes):
            self._in.copy(into[0].flat, self._host.fetched(item, into[0].size_bytes), after=asked)
        into.clear()

    def _write(self, item: str, slab: list[Slab], asked: Any) -> None:
        with self.written.timing(slab[0].size_bytes):
            copy = self._host.made(slab[0].size_bytes)
            self._out.copy(copy, slab[0].flat, after=asked)
            self._host.put(item, copy)
        slab.clear()


class Copies:
    """Copies to or from a device, beside what it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def asked(self) -> Any:
        """All that the device was asked to compute so far: what used the memory before, or made what is in it."""
        if self._stream is None:
            return None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, into: torch.Tensor, source: torch.Tensor, *, after: Any) -> None:
        """After something that was asked; it is done when this returns, so that nothing else need wait for it."""
        if self._stream is None:
            into.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            into.copy_(source, non_blocking=True)
        self._stream.synchronize()


class Host:
    """Copies of items in the host's memory. What is not on disk as it is here is written before it goes.

    What was used last stays: a backward pass wants first what the forward pass used last. There is room for one item,
    however large it is.
    """

    def __init__(self, store: Store, *, room_bytes: int, pinned: bool) -> None:
        self._store = store
        self._room_bytes = room_bytes
        self._pinned = pinned
        self._copies: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._changed: set[str] = set()
        self._over: set[str] = set()
        """Items that nobody wants any more: noted without waiting for a disk, and taken away with the next change."""
        self._lock = threading.Lock()

    def fetched(self, item: str, size_bytes: int) -> torch.Tensor:
        """The copy of an item, from disk if there is none."""
        with self._lock:
            found = self._copies.get(item)
            if found is None:
                found = self._made(size_bytes)
                self._store.read(item, _view(found))
                self._copies[item] = found
            self._copies.move_to_end(item)
            return found

    def made(self, size_bytes: int) -> torch.Tensor:
        """Room for a copy."""
        with self._lock:
            return self._made(size_bytes)

    def put(self, item: str, copy: torch.Tensor) -> None:
        """An item is now this."""
        with self._lock:
            self._over.discard(item)
            self._copies[item] = copy
            self._copies.move_to_end(item)
            self._changed.add(item)

    def forget(self, item: str) -> None:
        """It need not be written."""
        self._over.add(item)

    def settle(self) -> None:
        """Have everything on disk."""
        with self._lock:
            self._take_away_what_is_over()
            for item in sorted(self._changed):
                self._write(item)

    def close(self) -> None:
        """Let go of everything; pinned memory goes back to the system."""
        with self._lock:
            self._copies.clear()
        if self._pinned and hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()

    def _made(self, size_bytes: int) -> torch.Tensor:
        self._take_away_what_is_over()
        while self._copies and sum(map(self._taken_bytes, self._sizes(size_bytes))) > self._room_bytes:
            oldest = next(iter(self._copies))
            if oldest in self._changed:
                self._write(oldest)
            del self._copies[oldest]
        if self._pinned:  # which begins with a page
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        whole = torch.empty(size_bytes + ALIGNMENT, dtype=torch.uint8)
        return whole[-whole.data_ptr() % ALIGNMENT :][:size_bytes]

    def _sizes(self, another: int) -> list[int]:
        return [another, *map(len, self._copies.values())]

    def _taken_bytes(self, size_bytes: int) -> int:
        """PyTorch takes pinned memory in powers of two."""
        return 1 << (size_bytes - 1).bit_length() if self._pinned else size_bytes

    def _write(self, item: str) -> None:
        self._store.write(item, _view(self._copies[item]))
        self._changed.discard(item)

    def _take_away_what_is_over(self) -> None:
        while self._over:
            item = self._over.pop()
            self._copies.pop(item, None)
            self._changed.discard(item)


def _view(copy: torch.Tensor) -> memoryview:
    rows: Any = copy.numpy()
    return memoryview(rows)
