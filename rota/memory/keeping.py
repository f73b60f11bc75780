"""The store as a checkpoint: what is in it stays there, and what is not is put beside it, in one commit.

A training state has tensors that are in the store. They stand in its tree as references; so a commit writes what has
changed and nothing else, and whoever wants the whole state maps it from the files.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from rota.errors import CheckpointError, CorruptCheckpointError
from rota.memory.slab import Budget, Shape, Slab, shelf_bytes
from rota.memory.store import Store
from rota.memory.tiers import Held, Tiers
from rota.state.checkpoint import UNREADABLE, Use
from rota.state.tree import flatten, unflatten
from rota.state.writer import Written

_REST = "rest"
"""The item of all tensors that are not in another."""
_MARK = "$stored"


def references(item: str, held: Held) -> list[dict[str, Any]]:
    """What stands for the tensors of an item, in their order."""
    assert held.shelf is not None
    return [{_MARK: [item, *_as_json(shape)]} for shape in held.shelf.shapes]


def _as_json(shape: Shape) -> list[Any]:
    return [list(shape.size), list(shape.stride), str(shape.dtype).removeprefix("torch."), shape.offset_bytes]


class StoreWriter:
    """Commits a task's state to the store its shards are in, while nothing trains."""

    def __init__(self, tiers: Tiers, *, done: Callable[[Written], None]) -> None:
        self._tiers = tiers
        self._done = done
        self.copy_s = 0.0
        """Nothing is copied."""
        self.last: Written | None = None

    @property
    def busy(self) -> bool:
        """A commit is over when `submit` is."""
        return False

    def submit(self, tree: Any, *, step: int, fresh: bool = False) -> None:
        """Make the state durable: what is in memory is written, and what is on disk stays."""
        begun_s = time.perf_counter()
        error, cause = None, None
        try:
            self._tiers.flush()
            skeleton, tensors = flatten(tree)
            # There is always one, because safetensors cannot be empty.
            data = save({**{name: one.contiguous() for name, one in tensors.items()}, "": torch.zeros(1)})
            size = shelf_bytes([len(data)])
            slab = Slab(size, budget=Budget(size), what="what is in no shard")
            slab.bytes[: len(data)] = data
            self._tiers.store.write(_REST, slab.bytes)
            del slab
            # What shards kept for their backward passes is on disk, too, and nobody will read it.
            about = {"step": step, "tree": skeleton, "rest_bytes": len(data)}
            self._tiers.store.commit(about, items={_REST, *_referred(skeleton)})
            self._tiers.store.remove_unused()
        except CheckpointError as failure:
            error, cause = str(failure), failure
        self.last = Written(step=step, write_s=time.perf_counter() - begun_s, error=error, cause=cause)
        self._done(self.last)

    def wait(self) -> None:
        """Nothing is under way."""

    def whole(self, tree: Any) -> Any:
        """What was committed last, with tensors that can be read in the place of references."""
        return _Whole(self._tiers.store, writable=False).of(tree)


def read_latest(
    folder: Path,
    *,
    than: int | None = None,
    notice: Callable[[str], None] | None,
    use: Use = lambda tree: None,
) -> Any:
    """The state of the last commit that is whole, or None if there is none of a later step `than` another checkpoint's.

    A damaged one is set aside, and said through `notice`. Without `notice` nothing is changed and a damaged one is an
    error: that is for the processes of a task that do not lead, after the one that leads has looked. Tensors are read
    when they are touched, and need no memory. One that `use` refuses counts as damaged, and one that does not fit
    stays where it is.
    """
    store = Store(folder)
    try:
        while True:
            try:
                tree = _read(store, than)
                if tree is not None:
                    use(tree)
                return tree
            except CorruptCheckpointError as error:
                if notice is None:
                    raise
                aside, left = store.fall_back()
                other = "the checkpoint before it is used" if than is not None else "training begins anew"
                instead = "the one before it is used" if left else f"there is no other, so {other}"
                notice(f"the last commit of shards is damaged ({error}); it was set aside as {aside}, and {instead}")
    finally:
        store.close()


def _read(store: Store, than: int | None) -> Any:
    about = store.recover()
    try:
        if about is None or (than is not None and int(about["step"]) <= than):
            return None
        data = memoryview(store.mapped(_REST, writable=False))
        rest = load(bytes(data[: int(about["rest_bytes"])]))
        del rest[""]
        return _Whole(store, writable=True).of(unflatten(about["tree"], rest))
    except UNREADABLE as error:
        raise CorruptCheckpointError("commit.json was altered since it was written") from error


def _referred(node: Any) -> Iterator[str]:
    """The items that references in a tree are to."""
    if isinstance(node, Mapping):
        if _MARK in node:
            yield node[_MARK][0]
        else:
            for value in node.values():
                yield from _referred(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _referred(value)


class _Whole:
    """Puts tensors in the place of references."""

    def __init__(self, store: Store, *, writable: bool) -> None:
        self._store = store
        self._writable = writable
        self._maps: dict[str, Any] = {}

    def of(self, node: Any) -> Any:
        """A tree without references."""
        if isinstance(node, Mapping):
            if _MARK in node:
                return self._tensor(*node[_MARK])
            return {key: self.of(value) for key, value in node.items()}
        if isinstance(node, list):
            return [self.of(value) for value in node]
        return tuple(self.of(value) for value in node) if isinstance(node, tuple) else node

    def _tensor(self, item: str, size: list[int], stride: list[int], dtype: str, offset_bytes: int) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"there is no type {dtype}")
        count = 1
        for one in size:
            count *= one
        if count == 0:
            return torch.empty_strided(size, stride, dtype=kind)
        if item not in self._maps:
            self._maps[item] = self._store.mapped(item, writable=self._writable)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            flat: Any = torch.frombuffer(self._maps[item], dtype=kind, count=count, offset=offset_bytes)
        return torch.as_strided(flat, size, stride)
