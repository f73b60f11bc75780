"""Where a task stands in its data: batches in an order that depends on the seed alone, resumable at any batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from rota.errors import InputError
from rota.state import rng
from rota.task import Data, is_map_style

_CPU = torch.device("cpu")

Batch = tuple[Any, int]
"""What the loss function gets, and how many samples it holds (1 where that is unknown)."""


class Cursor(Protocol):
    """An endless stream of training batches with a position that can be saved."""

    batches_per_epoch: int | None
    """None where the dataset does not tell its length."""

    def next(self) -> Batch:
        """The next batch; the one after the end of an epoch is the first of the next."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as a tree that a checkpoint can hold."""
        ...

    def load_state_dict(self, state: dict[str, Any], notice: Callable[[str], None]) -> None:
        """Go to a saved position; `notice` hears what the user should know about how."""
        ...


def training_cursor(data: Data, *, seed: int) -> Cursor:
    """The cursor that fits the training dataset."""
    if is_map_style(data.train):
        return MapCursor(data, seed=seed)
    return IterableCursor(data)


def validation_batches(data: Data) -> Iterator[Batch]:
    """One pass over the validation data, in its own order."""
    size = data.valid_batch_size or data.batch_size
    collate = data.collate or default_collate
    if is_map_style(data.valid):
        assert size is not None
        for first in range(0, len(data.valid), size):
            indices = list(range(first, min(first + size, len(data.valid))))
            yield _collated(collate, _fetch(data.valid, indices)), len(indices)
    else:
        yield from _batched(iter(data.valid), size, collate)


class MapCursor:
    """Batches of a dataset with an index. Each epoch is a permutation drawn from the seed and the epoch's number."""

    def __init__(self, data: Data, *, seed: int) -> None:
        assert data.batch_size is not None
        self._data = data
        self._seed = seed
        self._size = data.batch_size
        self._collate = data.collate or default_collate
        self._length = len(data.train)
        whole, rest = divmod(self._length, self._size)
        self._last = whole + (1 if rest and not data.drop_last else 0)
        self.batches_per_epoch: int | None = self._last
        self._epoch = 0
        self._batch = 0
        self._order = self._draw()

    def next(self) -> Batch:
        """The next batch."""
        if self._batch == self._last:
            self._epoch += 1
            self._batch = 0
            self._order = self._draw()
        first = self._batch * self._size
        indices = self._order[first : first + self._size]
        batch = _collated(self._collate, _fetch(self._data.train, indices))
        self._batch += 1
        return batch, len(indices)

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the batches taken of it."""
        return {"epoch": self._epoch, "batch": self._batch, "length": self._length}

    def load_state_dict(self, state: dict[str, Any], notice: Callable[[str], None]) -> None:
        """Go to the batch at once: the order is drawn again, no sample is read."""
        if state["length"] != self._length:
            notice(
                f"the training dataset has {self._length} samples now and had {state['length']} when the checkpoint "
                "was written; the order of the data changes"
            )
        self._epoch, self._batch = state["epoch"], min(state["batch"], self._last)
        self._order = self._draw()

    def _draw(self) -> list[int]:
        if not self._data.shuffle:
            return list(range(self._length))
        # The same order as torch's DistributedSampler(seed=seed) after set_epoch(epoch).
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(self._length, generator=generator).tolist()
        return order


class IterableCursor:
    """Batches of an iterable, in its own order; each epoch asks it for a new iterator."""

    def __init__(self, data: Data) -> None:
        self._dataset = data.train
        self._size = data.batch_size
        self._drop_last = data.drop_last
        self._collate = data.collate or default_collate
        self.batches_per_epoch: int | None = None
        with contextlib.suppress(TypeError):  # no length, or one that its dataset refuses to tell
            whole, rest = divmod(len(data.train), self._size or 1)
            self.batches_per_epoch = whole + (1 if rest and not data.drop_last else 0)
        self._epoch = 0
        self._batch = 0
        self._iterator: Any = None
        self._epoch_rng: dict[str, Any] | None = None
        """Where the generators stood when this epoch's iterator was made: it may have drawn its order from them."""

    def next(self) -> Batch:
        """The next batch."""
        batch = self._take()
        if batch is None:
            if self._batch == 0:
                raise InputError(self._nothing())
            self._epoch, self._batch, self._iterator = self._epoch + 1, 0, None
            batch = self._take()
            if batch is None:
                raise InputError(self._nothing())
        self._batch += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the batches taken of it, and the state of the iterator or the iterable, if one has any."""
        state = {"epoch": self._epoch, "batch": self._batch, "owner": None, "own": None, "rng": self._epoch_rng}
        for owner, holder in (("iterator", self._iterator), ("iterable", self._dataset)):
            if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
                return state | {"owner": owner, "own": holder.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any], notice: Callable[[str], None]) -> None:
        """Let the iterable restore itself where it can; otherwise read and drop what was already used."""
        self._epoch, self._batch, self._epoch_rng = state["epoch"], state["batch"], state["rng"]
        if state["owner"] == "iterable":
            self._dataset.load_state_dict(state["own"])
            self._iterator = iter(self._dataset)
        elif state["owner"] == "iterator":
            self._iterator = iter(self._dataset)
            self._iterator.load_state_dict(state["own"])
        elif self._epoch or self._batch:
            notice(
                f"the training iterable has no state_dict, so {self._batch} batches were read again and dropped to "
                "get back to where it was"
            )
            self._skip()

    def _skip(self) -> None:
        for _ in range(self._epoch):  # an iterable may count its epochs by how often it was begun
            next(iter(self._dataset), None)
        if self._epoch_rng is not None:
            rng.set_state(self._epoch_rng, _CPU)
        self._iterator = iter(self._dataset)
        for _ in range(self._batch):
            if self._take() is None:
                raise InputError("the training iterable is shorter now than when the checkpoint was written")

    def _take(self) -> Batch | None:
        if self._iterator is None:
            self._epoch_rng = rng.get_state(_CPU)
            self._iterator = iter(self._dataset)
        taken = next(_batched(self._iterator, self._size, self._collate), None)
        if taken is not None and self._drop_last and self._size is not None and taken[1] < self._size:
            return None
        return taken

    def _nothing(self) -> str:
        if self._epoch:
            return (
                "the training iterable was used up and gave nothing when it was iterated again; give an iterable that "
                "can be iterated more than once, or fewer steps"
            )
        if self._drop_last and next(iter(self._dataset), None) is not None:
            return f"the training iterable has fewer samples than batch_size ({self._size}), and drop_last drops them"
        return "the training iterable is empty; give at least one sample"


def _fetch(dataset: Any, indices: list[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        samples: list[Any] = dataset.__getitems__(indices)
        return samples
    return [dataset[index] for index in indices]


def _batched(iterator: Iterator[Any], size: int | None, collate: Callable[[list[Any]], Any]) -> Iterator[Batch]:
    """Group samples into batches, reading no sample ahead of the batch that is asked for."""
    while True:
        if size is None:
            for batch in iterator:
                yield batch, 1
            return
        samples = []
        for sample in iterator:
            samples.append(sample)
            if len(samples) == size:
                break
        if not samples:
            return
        yield _collated(collate, samples), len(samples)


def _collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    batch = collate(samples)
    if batch is None:
        raise InputError(f"collate returned None for {len(samples)} samples; end it with a return of the batch")
    return batch
