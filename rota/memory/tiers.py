"""What is in memory, what is on disk, and what is on its way between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from rota.memory.mover import Mover
from rota.memory.residency import Rates
from rota.memory.slab import Budget, DeviceSlab, Ledger, Loose, Shelf, Slab
from rota.memory.staging import Far, Staging
from rota.memory.store import Store
from rota.runtime.hollow import hollow_like


@dataclass(kw_only=True)
class Held:
    """Tensors that come and go together: those of a group's parameters, or of what the optimizer remembers of them."""

    size_bytes: int
    tensors: Callable[[], Sequence[torch.Tensor]]
    """The tensors themselves stay; only their memory changes."""
    slab: Slab | None = None
    shelf: Shelf | None = None
    """None before there are tensors: an optimizer remembers nothing before its first step."""

    def attach(self, slab: Slab) -> None:
        """Give the tensors what has come."""
        assert self.shelf is not None
        for tensor, view in zip(self.tensors(), slab.tensors(self.shelf), strict=True):
            tensor.data = view
        self.slab = slab

    def detach(self) -> Slab:
        """Take the tensors' memory: they keep their shapes and read as zeros."""
        assert self.slab is not None
        for tensor in self.tensors():
            tensor.data = hollow_like(tensor)
        slab, self.slab = self.slab, None
        return slab


class Tiers:
    """Moves items, and knows where each is."""

    def __init__(self, store: Store, budget: Budget, *, far: Far | None = None) -> None:
        """What leaves a device that is `far` goes to its host first."""
        self.budget = budget
        self.store = store
        self.held: dict[str, Held] = {}
        self._far = far
        self._mover: Mover | Staging = Mover(store) if far is None else Staging(store, far)
        self._coming: dict[str, tuple[Future[None], Slab]] = {}
        self._unborn: dict[str, Ledger] = {}
        """What is expected, and has room, and will be made by the one who needs it."""
        self._leaving: dict[str, Future[None]] = {}
        self._changed: set[str] = set()
        """What is in memory and not, or not as it is, on disk."""

    def _slab(self, size_bytes: int, budget: Ledger, what: str) -> Slab:
        if self._far is not None and self._far.device.type == "cuda":
            return DeviceSlab(size_bytes, budget=budget, what=what, device=self._far.device)
        return Slab(size_bytes, budget=budget, what=what)

    def begin_load(self, item: str, *, budget: Ledger | None = None) -> None:
        """Ask for an item; its memory is of another budget, if one is given."""
        held = self.held[item]
        budget = self.budget if budget is None else budget
        if held.shelf is None:
            budget.take(held.size_bytes, item)
            self._unborn[item] = budget
            return
        slab = self._slab(held.shelf.size_bytes, budget, item)
        self._coming[item] = (self._mover.load(item, slab, after=self._leaving.get(item)), slab)

    def finish_load(self, item: str) -> None:
        """Wait until it is there."""
        if item in self._coming:
            future, slab = self._coming.pop(item)
            future.result()
            self.held[item].attach(slab)

    def admit(self, item: str, *, budget: Ledger | None = None) -> None:
        """Give tensors that have memory of their own, if there are any, room in a slab."""
        held = self.held[item]
        if held.slab is not None:
            return
        tensors = held.tensors()
        shelf = Shelf.of(tensors)
        assert shelf.size_bytes <= held.size_bytes, f"{item}: {shelf.size_bytes} bytes, expected {held.size_bytes}"
        expected = self._unborn.pop(item, None)
        if expected is not None:
            expected.give(held.size_bytes)
        slab = self._slab(shelf.size_bytes, budget or expected or self.budget, item)
        for tensor, view in zip(tensors, slab.tensors(shelf), strict=True):
            view.copy_(tensor.detach())
            tensor.data = view
        held.shelf, held.slab = shelf, slab
        self._changed.add(item)

    def begin_write_loose(self, item: str, taken_bytes: int) -> None:
        """It leaves from memory of its own, of which so many bytes were taken; they are given back when it has left."""
        if isinstance(self._mover, Staging):
            self.budget.give(taken_bytes)
            self.admit(item)
            self.begin_write(item)
            return
        held = self.held[item]
        tensors = held.tensors()
        loose = Loose([tensor.detach() for tensor in tensors], gone=lambda: self.budget.give(taken_bytes))
        assert loose.size_bytes <= held.size_bytes, f"{item}: {loose.size_bytes}, not {held.size_bytes}"
        held.shelf = loose.shelf
        for tensor in tensors:
            tensor.data = hollow_like(tensor)
        self._leaving[item] = self._mover.write(item, loose)

    def drop(self, item: str) -> None:
        """It has not changed."""
        assert item not in self._changed, item
        self.held[item].detach()

    def begin_write(self, item: str) -> Future[None]:
        """It leaves, and stays on disk."""
        slab = self.held[item].detach()
        self._leaving[item] = future = self._mover.write(item, slab)
        self._changed.discard(item)
        return future

    def finish_write(self, item: str) -> None:
        """Wait until its memory is free."""
        future = self._leaving.pop(item, None)
        if future is not None:
            future.result()

    def forget(self, item: str) -> None:
        """Nobody needs it any more."""
        self.held[item].slab = None
        self._changed.discard(item)
        self._mover.forget(item)

    def change(self, item: str) -> None:
        """What is on disk is not true any more."""
        self._changed.add(item)

    def is_changed(self, item: str) -> bool:
        """Whether it is not on disk as it is in memory."""
        return item in self._changed

    def is_near(self, item: str) -> bool:
        """Whether it is in memory, on its way there, or will be made there."""
        return self.held[item].slab is not None or item in self._coming or item in self._unborn

    def flush(self) -> None:
        """Everything is on disk; what is in memory stays there."""
        self._write_changed()
        self._mover.settle()

    def _write_changed(self) -> None:
        for item in list(self._leaving):
            self.finish_write(item)
        for item in sorted(self._changed):
            slab = self.held[item].slab
            assert slab is not None, item
            self._mover.write(item, slab).result()
        self._changed.clear()

    def empty(self) -> None:
        """Everything has left, and nothing is in memory."""
        for item in list(self._coming):
            self.finish_load(item)
        for item, budget in self._unborn.items():
            budget.give(self.held[item].size_bytes)
        self._unborn.clear()
        self._write_changed()
        for item, held in self.held.items():
            if held.slab is not None:
                self.drop(item)

    def abandon(self) -> None:
        """Nothing in memory is of use any more, nor what is on its way."""
        for future in (*(future for future, _ in self._coming.values()), *self._leaving.values()):
            with contextlib.suppress(Exception):
                future.result()
        for item, budget in self._unborn.items():
            budget.give(self.held[item].size_bytes)
        for held in self.held.values():
            if held.slab is not None:
                held.detach()
        for table in (self._coming, self._leaving, self._unborn, self._changed):
            table.clear()

    def await_device(self) -> None:
        """Wait until a GPU has done what it was asked: only then is it known what a stage took (never run)."""
        if self._far is not None and self._far.device.type == "cuda":
            torch.cuda.synchronize(self._far.device)

    def rates(self, usual: Rates) -> Rates:
        """What moves took so far; the usual where nothing was moved."""
        return Rates(
            read_byte_s=self._mover.read.byte_s(usual.read_byte_s),
            write_byte_s=self._mover.written.byte_s(usual.write_byte_s),
        )

    def close(self) -> None:
        """End the threads."""
        self._mover.close()
        self.store.close()
