"""Counts the bytes of all live tensors of each device, as they are allocated and freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Ledger(TorchDispatchMode):
    """While it is entered, every storage that an op makes is charged to the current device until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device: int | None = None
        self.live_bytes: dict[int | None, int] = {}
        self.peak_bytes: dict[int | None, int] = {}
        self._known: dict[int, tuple[int | None, int]] = {}
        """id of a live storage -> its device and bytes"""
        self.on_free: Callable[[int], None] = lambda key: None
        """Called with the id of each storage that was freed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self.charge(one)
        return result

    def watch(self, device: int | None) -> None:
        """What is allocated from here on belongs to this device."""
        self.device = device

    def charge(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = (self.device, size)
        self._change(self.device, size)
        weakref.finalize(storage, self._free, key)

    def claim(self, tensor: torch.Tensor, device: int) -> None:
        """A tensor that was made for all belongs to this device."""
        key = tensor.untyped_storage()._cdata
        owner, size = self._known.get(key, (device, 0))
        if owner != device:
            self._known[key] = (device, size)
            self._change(owner, -size)
            self._change(device, size)

    def pass_on(self, device: int | None, to: int | None, *, only: Collection[int] | None = None) -> None:
        """All that a device has now, or only these storages of it, belongs to another from here on."""
        for key, (owner, size) in self._known.items():
            if owner == device and (only is None or key in only):
                self._known[key] = (to, size)
                self._change(owner, -size)
                self._change(to, size)

    def _free(self, key: int) -> None:
        device, size = self._known.pop(key)
        self._change(device, -size)
        self.on_free(key)

    def _change(self, device: int | None, size: int) -> None:
        live = self.live_bytes.get(device, 0) + size
        self.live_bytes[device] = live
        self.peak_bytes[device] = max(self.peak_bytes.get(device, 0), live)
