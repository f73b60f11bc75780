"""Makes a model that does not fit into memory: its parameters leave while it is being made, and come back when touched.

The user's own code makes it, in its own order, so that it draws the same random numbers and gives the same values as it
would with all the memory in the world.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rota.memory.slab import Budget, Slab, shelf_bytes
from rota.memory.store import Store

_LEAST_BYTES = 2**16
"""Smaller parameters stay: all of them together take less than what it costs to move them."""


class Building(TorchDispatchMode):
    """While it is entered, parameters of the modules that are made are in memory only as far as the budget allows.

    It keeps them in files of a folder of its own, also afterwards: `release` gives them back one at a time, and `close`
    removes the files.
    """

    def __init__(self, folder: Path, *, budget_bytes: int, least_bytes: int = _LEAST_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._least_bytes = least_bytes
        self._known: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """key of a storage -> it, which keeps the key its own, and its bytes"""
        self._here: OrderedDict[int, None] = OrderedDict()
        """Those in memory; what was touched last is last."""
        self._written: set[int] = set()
        """Those whose file is true."""
        self.here_bytes = 0
        self.peak_bytes = 0
        self._store = Store(folder)

    # ---- while the model is made ----

    def __enter__(self) -> Building:
        self._hook = register_module_parameter_registration_hook(self._registered)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._hook.remove()

    def _registered(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is None or parameter.device.type != "cpu":
            return
        storage = parameter.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size < self._least_bytes:
            return
        self._known[key] = (storage, size)
        self._note(key)
        self._make_room(0, keep={key})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        touched = set()
        for one in pytree.tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                key = one.untyped_storage()._cdata
                if key in self._known:
                    touched.add(key)
        for key in sorted(touched):
            self._fetch(key, keep=touched)
            self._written.discard(key)  # it may be changed
        return func(*args, **(kwargs or {}))

    # ---- afterwards ----

    def release(self, parameter: torch.nn.Parameter) -> None:
        """Have a parameter in memory, for good: it is counted by others from now on."""
        key = parameter.untyped_storage()._cdata
        if key in self._known:
            self._fetch(key, keep={key})
            del self._here[key]
            self.here_bytes -= self._known.pop(key)[1]

    def close(self) -> None:
        """Remove the files; what is still away is lost."""
        self._store.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- moving ----

    def _fetch(self, key: int, *, keep: set[int]) -> None:
        if key in self._here:
            self._here.move_to_end(key)
            return
        storage, size = self._known[key]
        self._make_room(size, keep=keep)
        storage.resize_(size)
        slab = self._slab(size)
        self._store.read(f"{key:x}", slab.bytes)
        _bytes_of(storage).copy_(torch.frombuffer(slab.bytes, dtype=torch.uint8, count=size))
        self._written.add(key)
        self._note(key)

    def _note(self, key: int) -> None:
        self._here[key] = None
        self.here_bytes += self._known[key][1]
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)

    def _make_room(self, size: int, *, keep: set[int]) -> None:
        for key in list(self._here):
            if self.here_bytes + size <= self._budget_bytes:
                return
            if key not in keep:
                self._send_away(key)

    def _send_away(self, key: int) -> None:
        storage, size = self._known[key]
        if key not in self._written:
            slab = self._slab(size)
            torch.frombuffer(slab.bytes, dtype=torch.uint8, count=size).copy_(_bytes_of(storage))
            self._store.write(f"{key:x}", slab.bytes)
            self._written.add(key)
        storage.resize_(0)
        del self._here[key]
        self.here_bytes -= size

    @staticmethod
    def _slab(size: int) -> Slab:
        """What disks can read into; a parameter's own memory is not aligned for them."""
        aligned = shelf_bytes([size])
        return Slab(aligned, budget=Budget(aligned), what="a parameter")


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(storage)
