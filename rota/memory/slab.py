"""Memory that a disk can read into: aligned, counted, and given back to the system when nobody uses it any more."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rota.errors import FitError
from rota.runtime.reservoir import reservoir

ALIGNMENT = 4096
"""Of what is read and written without the page cache."""
_TENSOR_ALIGNMENT = 64
PAGED_BYTES = 2**20
"""Tensors from this size on have pages of their own where that spares a copy."""
_HUGE = 2 * 2**20


class Ledger(Protocol):
    """Counts the bytes of slabs, and gives them their memory."""

    def take(self, size_bytes: int, what: str) -> None:
        """FitError if there is no room; then nothing is taken."""
        ...

    def give(self, size_bytes: int) -> None:
        """They are free again."""
        ...

    def map(self, size_bytes: int, what: str) -> mmap.mmap | memoryview:
        """Memory of this size, which is taken; FitError if there is no room."""
        ...

    def put_back(self, memory: Any, size_bytes: int) -> None:
        """Nobody uses it any more."""
        ...


class Budget:
    """Admits bytes as long as there is room. Every byte of a slab is counted until nobody uses its memory any more.

    Memory that nobody uses is kept for the next slab as long as nothing else needs the room, because the system would
    have to make it zero once more before it is read into: by the reservoir that tensors have theirs from, too; in a
    process without one, for a slab of its size.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._spare: dict[int, list[mmap.mmap]] = {}
        self._spare_bytes = 0
        self._lock = threading.RLock()  # memory may be put back by whatever frees it, also in the midst of this

    def take(self, size_bytes: int, what: str) -> None:
        """FitError if there is no room; then nothing is taken."""
        with self._lock:
            while self._spare_bytes and self.used_bytes + self._spare_bytes + size_bytes > self.budget_bytes:
                largest = max(size for size, maps in self._spare.items() if maps)
                self._spare[largest].pop()
                self._spare_bytes -= largest
            if self.used_bytes + size_bytes > self.budget_bytes:
                raise FitError(
                    f"{what} needs {size_bytes:,} bytes, and {self.used_bytes:,} of {self.budget_bytes:,} are in use: "
                    "a defect of rota; please report it"
                )
            self.used_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give(self, size_bytes: int) -> None:
        """They are free again."""
        with self._lock:
            self.used_bytes -= size_bytes

    def map(self, size_bytes: int, what: str) -> mmap.mmap | memoryview:
        """Memory of this size, which is taken; FitError if there is no room."""
        held = reservoir()
        if held is not None:
            self.take(size_bytes, what)
            memory = held.take(size_bytes)
            if memory is not None:
                return memory
            self.give(size_bytes)
        with self._lock:
            spare = self._spare.get(size_bytes)
            found = spare.pop() if spare else None
            if found is not None:
                self._spare_bytes -= size_bytes
            self.take(size_bytes, what)
        if found is not None:
            return found
        made = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size_bytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):  # one fault for 2 MiB instead of 512
            made.madvise(mmap.MADV_HUGEPAGE)
        return made

    def trim(self) -> None:
        """Give back what is kept for later."""
        with self._lock:
            self._spare.clear()
            self._spare_bytes = 0

    def put_back(self, memory: mmap.mmap | memoryview, size_bytes: int) -> None:
        """Nobody uses it any more."""
        held = reservoir()
        with self._lock:
            self.used_bytes -= size_bytes
            if held is not None and isinstance(memory, memoryview):
                held.give(memory)
                return
            assert isinstance(memory, mmap.mmap)
            self._spare.setdefault(size_bytes, []).append(memory)
            self._spare_bytes += size_bytes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A tensor in a slab."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """How tensors lie in a slab."""

    shapes: tuple[Shape, ...]
    size_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, paged: bool = False) -> Shelf:
        """One behind the other. Their strides stay, so that they must be dense.

        `paged`: large ones have pages of their own, so that they can be written from where they are (`Loose`).
        """
        shapes = []
        places, size_bytes = _places([tensor.nbytes for tensor in tensors], paged=paged)
        for tensor, place in zip(tensors, places, strict=True):
            dense = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            assert tensor.numel() in (0, dense), "a tensor with gaps"
            size, stride = tuple(tensor.shape), tensor.stride()
            shapes.append(Shape(size=size, stride=stride, dtype=tensor.dtype, offset_bytes=place))
        return cls(shapes=tuple(shapes), size_bytes=max(ALIGNMENT, size_bytes))


class Slab:
    """A row of bytes. It is gone when the slab and all tensors that were made of it are."""

    def __init__(self, size_bytes: int, *, budget: Ledger, what: str) -> None:
        assert size_bytes > 0
        assert size_bytes % ALIGNMENT == 0
        self.size_bytes = size_bytes
        memory = budget.map(size_bytes, what)
        # All tensors and views are of this object, so that its end is the end of their use.
        self._used: Any = (ctypes.c_char * size_bytes).from_buffer(memory)
        weakref.finalize(self._used, budget.put_back, memory, size_bytes)

    @property
    def flat(self) -> torch.Tensor:
        """All of it."""
        return torch.frombuffer(self._used, dtype=torch.uint8)

    @property
    def bytes(self) -> memoryview:
        """To be read into, or written from."""
        return memoryview(self._used).cast("B")

    def chunks(self, bounce: mmap.mmap) -> Iterator[memoryview]:
        """All of it: it is where a disk can take it from."""
        yield self.bytes

    def tensors(self, shelf: Shelf) -> list[torch.Tensor]:
        """Views of it; each keeps all of its memory."""
        assert shelf.size_bytes <= self.size_bytes
        return [self._tensor(shape) for shape in shelf.shapes]

    def _tensor(self, shape: Shape) -> torch.Tensor:
        count = 1
        for size in shape.size:
            count *= size
        if count == 0:
            return torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype)
        flat: Any = torch.frombuffer(self._used, dtype=shape.dtype, count=count, offset=shape.offset_bytes)
        return torch.as_strided(flat, shape.size, shape.stride)


class Loose:
    """Tensors that have memory of their own, on their way to disk as if they lay in a slab."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, gone: Callable[[], None]) -> None:
        """`gone` is told when their memory is not needed any more."""
        self.shelf = Shelf.of(tensors, paged=True)
        self.size_bytes = self.shelf.size_bytes
        self._tensors = list(tensors)
        self._gone = gone

    def chunks(self, bounce: mmap.mmap) -> Iterator[memoryview]:
        """All of it, piece by piece: from where it is if a disk can take it from there, and otherwise copied."""
        try:
            start = 0
            for tensor, shape in zip(self._tensors, self.shelf.shapes, strict=True):
                pages = _pages_of(tensor)
                if pages is not None:
                    yield from self._copied(start, shape.offset_bytes, bounce)
                    yield pages
                    start = shape.offset_bytes + len(pages)
            yield from self._copied(start, self.size_bytes, bounce)
        finally:
            self._tensors.clear()
            self._gone()

    def _copied(self, start: int, stop: int, bounce: mmap.mmap) -> Iterator[memoryview]:
        """What lies between these, in memory that a disk can take it from."""
        into = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
        for begin in range(start, stop, len(bounce)):
            end = min(begin + len(bounce), stop)
            for tensor, shape in zip(self._tensors, self.shelf.shapes, strict=True):
                _copy_part(into, begin, end, tensor, shape.offset_bytes)
            yield memoryview(bounce)[: end - begin]


def _pages_of(tensor: torch.Tensor) -> memoryview | None:
    """The whole pages that a large tensor begins and ends in, if nothing else can be in its first one."""
    held, place = reservoir(), tensor.data_ptr()
    if held is None or tensor.nbytes < PAGED_BYTES or place % ALIGNMENT or not held.has(place):
        return None
    return memoryview((ctypes.c_char * rounded(tensor.nbytes)).from_address(place)).cast("B")


def _copy_part(into: int, start: int, stop: int, tensor: torch.Tensor, offset: int) -> None:
    """Of a dense tensor that lies at an offset of a row of bytes, what lies between these.

    Not by PyTorch: a second thread that asks it to work makes a second team of threads, and with more threads than
    cores each team sleeps where it would wait awake, at the end of every op.
    """
    low, high = max(start, offset), min(stop, offset + tensor.nbytes)
    if low < high:
        ctypes.memmove(into + low - start, tensor.data_ptr() + low - offset, high - low)


class DeviceSlab(Slab):
    """A row of bytes on a GPU: written with care, never run."""

    def __init__(self, size_bytes: int, *, budget: Ledger, what: str, device: torch.device) -> None:
        self.size_bytes = size_bytes
        budget.take(size_bytes, what)
        try:
            owner = _Owner(torch.empty(size_bytes, dtype=torch.uint8, device=device))
        except BaseException:
            budget.give(size_bytes)
            raise
        weakref.finalize(owner, budget.give, size_bytes)
        self._owner = owner

    def _part(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """With a storage of its own: what segments keep counts from its beginning."""
        # A tensor of somebody else's memory keeps that one for as long as any tensor shares its storage.
        made: torch.Tensor = torch.as_tensor(_Part(self._owner, offset_bytes, size_bytes), device=self._owner.device)
        return made

    @property
    def flat(self) -> torch.Tensor:
        """All of it."""
        return self._part(0, self.size_bytes)

    def _tensor(self, shape: Shape) -> torch.Tensor:
        count = math.prod(shape.size)
        if count == 0:
            return torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=self._owner.device)
        flat = self._part(shape.offset_bytes, count * shape.dtype.itemsize)
        return torch.as_strided(flat.view(shape.dtype), shape.size, shape.stride)


class _Owner:
    """Memory of a GPU that is counted until nobody uses it any more."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.device = memory.device
        self.address = memory.data_ptr()


class _Part:
    """A part of it, as other libraries describe theirs to PyTorch."""

    def __init__(self, owner: _Owner, offset_bytes: int, size_bytes: int) -> None:
        self._owner = owner
        self._address = owner.address + offset_bytes
        self._size_bytes = size_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size_bytes,), "typestr": "|u1", "data": (self._address, False), "version": 2}


def paged_bytes(size_bytes: int) -> int:
    """What tensors of this size in all take at most where large ones have pages of their own, but for small ones."""
    return rounded(size_bytes + 2 * ALIGNMENT * (size_bytes // PAGED_BYTES + 1))


def shelf_bytes(sizes_bytes: Iterable[int], *, paged: bool = False) -> int:
    """What tensors of these sizes take in a slab."""
    return _places(sizes_bytes, paged=paged)[1]


def _places(sizes_bytes: Iterable[int], *, paged: bool) -> tuple[list[int], int]:
    """Where each tensor begins, and where all of them end."""
    found, end = [], 0
    for size in sizes_bytes:
        alignment = ALIGNMENT if paged and size >= PAGED_BYTES else _TENSOR_ALIGNMENT
        found.append(rounded(end, alignment))
        end = rounded(found[-1] + size, alignment)
    return found, rounded(end)


def rounded(size: int, alignment: int = ALIGNMENT) -> int:
    """Up to a multiple: of pages, if nothing is said."""
    return -(-size // alignment) * alignment
