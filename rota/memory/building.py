"""Makes a model that does not fit into memory: its parameters leave while it is being made, and come back when touched.

The user's own code makes it, in its own order, so that it draws the same random numbers and gives the same values as it
would with all the memory in the world.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from rota.memory.slab import Budget, Slab, shelf_bytes
from rota.memory.store import Store
from rota.runtime.hollow import hollow_like
from rota.runtime.limits import return_freed_memory
from rota.state import inside

_LEAST_BYTES = 2**16
"""Smaller parameters stay: all of them together take less than what it costs to move them."""

_PIECE_BYTES = 2**20
"""Parameters are copied in pieces: the largest may leave no room for a second one."""
_SMALL = 8
"""A model of less than this part of the budget will stay."""


class Building:
    """While it is entered, parameters of the modules that are made are in memory only as far as the budget allows.

    As long as all of them fit, nothing is done but count them. Those that left are kept in files of a folder of its
    own: `release` gives them back one at a time, and `close` removes the files.
    """

    def __init__(self, folder: Path, *, budget_bytes: int, least_bytes: int | None = None) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._least_bytes = _LEAST_BYTES if least_bytes is None else least_bytes
        self._known: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """key of a storage -> it, which keeps the key its own, and its bytes"""
        self._here: OrderedDict[int, None] = OrderedDict()
        """Those in memory; what was touched last is last."""
        self._written: set[int] = set()
        """Those whose file is true."""
        self._hollow: dict[int, tuple[torch.nn.Parameter, torch.Tensor]] = {}
        """id of a parameter that has no memory -> it, and what it was"""
        self.here_bytes = 0
        self.peak_bytes = 0
        self._store: Store | None = None
        self._fetching: _Fetching | None = None

    @property
    def away(self) -> bool:
        """Whether anything had to leave."""
        return self._store is not None

    # ---- while the model is made or loaded ----

    def __enter__(self) -> Building:
        self._hook = register_module_parameter_registration_hook(self._registered)
        if self.away:
            self._watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        if self._fetching is not None:
            self._fetching.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            self._fetching = None

    def convert(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """As `model.to(dtype)`."""

        def converted(tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.to(dtype) if tensor.is_floating_point() else tensor
            self._add(made.untyped_storage())
            return made

        model._apply(converted)  # type: ignore[no-untyped-call]
        self.forget_others(model)

    def forget_others(self, model: torch.nn.Module) -> None:
        """Let go of what is no parameter's memory any more."""
        used = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        for key in [key for key in self._known if key not in used]:
            _, size = self._known.pop(key)
            if key in self._here:
                del self._here[key]
                self.here_bytes -= size

    def _registered(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type == "cpu":
            self._add(parameter.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size < self._least_bytes:
            return
        self._known[key] = (storage, size)
        self._note(key)
        self._make_room(0, keep={key})

    def touch(self, tensors: Any) -> None:
        """Have what an op works on in memory."""
        touched = set()
        for one in pytree.tree_leaves(tensors):
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                key = one.untyped_storage()._cdata
                if key in self._known:
                    touched.add(key)
        for key in sorted(touched):
            self._fetch(key, keep=touched)
            self._written.discard(key)  # it may be changed

    # ---- afterwards ----

    def finish(self, model: torch.nn.Module) -> None:
        """Give parameters that are away pages that read as zeros, so that nothing breaks that looks at their shapes."""
        for parameter in model.parameters():
            key = parameter.untyped_storage()._cdata
            if key in self._known and key not in self._here:
                self._hollow[id(parameter)] = (parameter, parameter.data)
                parameter.data = hollow_like(parameter)

    def release(self, parameter: torch.nn.Parameter) -> None:
        """Have a parameter in memory, for good: it is counted by others from now on."""
        _, before = self._hollow.pop(id(parameter), (parameter, parameter.data))
        key = before.untyped_storage()._cdata
        if key in self._known:
            self._fetch(key, keep={key})
            del self._here[key]
            self.here_bytes -= self._known.pop(key)[1]
        parameter.data = before

    def close(self) -> None:
        """Remove the files; what is still away is lost."""
        if self._store is not None:
            self._store.close()
        inside.remove(self._folder, inside.SHARDS)

    # ---- moving ----

    def _watch(self) -> None:
        """From now on ops must be told from: what they work on may be away."""
        self._fetching = _Fetching(self)
        self._fetching.__enter__()  # type: ignore[no-untyped-call]

    def _fetch(self, key: int, *, keep: set[int]) -> None:
        if key in self._here:
            self._here.move_to_end(key)
            return
        assert self._store is not None
        storage, size = self._known[key]
        self._make_room(size, keep=keep)
        storage.resize_(size)
        whole = _bytes_of(storage)
        for start, piece in self._store.read_pieces(f"{key:x}"):
            count = min(len(piece), size - start)
            whole[start : start + count].copy_(torch.frombuffer(piece, dtype=torch.uint8, count=count))
        self._written.add(key)
        self._note(key)

    def _note(self, key: int) -> None:
        self._here[key] = None
        self.here_bytes += self._known[key][1]
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)
        if self.here_bytes > self._budget_bytes // _SMALL:
            return_freed_memory(2 * self._budget_bytes)

    def _make_room(self, size: int, *, keep: set[int]) -> None:
        for key in list(self._here):
            if self.here_bytes + size <= self._budget_bytes:
                return
            if key not in keep:
                if self._store is None:
                    if _get_current_dispatch_mode() is not None:
                        return  # modes end in the order in which they began: ours would be taken for the user's
                    self._store = Store(self._folder)
                    self._watch()
                self._send_away(key)

    def _send_away(self, key: int) -> None:
        assert self._store is not None
        storage, size = self._known[key]
        if key not in self._written:
            self._store.write_pieces(f"{key:x}", _pieces(_bytes_of(storage)))
            self._written.add(key)
        storage.resize_(0)
        del self._here[key]
        self.here_bytes -= size


class _Fetching(TorchDispatchMode):
    """Tells a building what each op works on, before it does."""

    def __init__(self, building: Building) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._building = building

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._building.touch((args, kwargs))
        return func(*args, **(kwargs or {}))


def _pieces(whole: torch.Tensor) -> Iterator[memoryview]:
    """What a disk can write, in memory that is used again; a parameter's own is not aligned for it."""
    size = shelf_bytes([min(whole.numel(), _PIECE_BYTES)])
    slab = Slab(size, budget=Budget(size), what="a piece of a parameter")
    for start in range(0, whole.numel(), size):
        part = whole[start : start + size]
        torch.frombuffer(slab.bytes, dtype=torch.uint8, count=part.numel()).copy_(part)
        yield slab.bytes[: shelf_bytes([part.numel()])]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(storage)
