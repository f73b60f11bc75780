"""A position saved anywhere and loaded into a fresh cursor continues with exactly the batches that were to come."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from rota.runtime.batches import Cursor, training_cursor
from rota.state.tree import flatten, unflatten
from rota.task import Data

SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def map_data(draw: st.DrawFn) -> Data:
    length = draw(st.integers(1, 20))
    return Data(
        train=list(range(length)),
        batch_size=draw(st.integers(1, length)),
        drop_last=draw(st.booleans()),
        shuffle=draw(st.booleans()),
        collate=list,
    )


def through_a_checkpoint(state: Any) -> Any:
    skeleton, tensors = flatten(state)
    return unflatten(json.loads(json.dumps(skeleton)), tensors)


def assert_continues(make: Callable[[], Cursor], *, split: int, total: int) -> list[str]:
    """Save after `split` batches, go on in a fresh cursor, and compare; what was noticed is returned."""
    undisturbed = make()
    expected = [undisturbed.next() for _ in range(total)]
    cursor = make()
    assert [cursor.next() for _ in range(split)] == expected[:split]
    state = through_a_checkpoint(cursor.state_dict())
    fresh = make()
    notices: list[str] = []
    fresh.load_state_dict(state, notices.append)
    assert [fresh.next() for _ in range(total - split)] == expected[split:]
    return notices


# ---- datasets with an index ----


@settings(max_examples=150)
@given(data=map_data(), seed=SEEDS, split=st.integers(0, 50), rest=st.integers(0, 30))
def test_a_dataset_with_an_index_continues_exactly(data, seed, split, rest):
    notices = assert_continues(lambda: training_cursor(data, seed=seed), split=split, total=split + rest)
    assert notices == []


@given(data=map_data(), seed=SEEDS, splits=st.lists(st.integers(0, 9), max_size=5))
def test_a_position_may_be_saved_and_loaded_many_times(data, seed, splits):
    total = sum(splits) + 3
    undisturbed = training_cursor(data, seed=seed)
    expected = [undisturbed.next() for _ in range(total)]
    cursor, got = training_cursor(data, seed=seed), []
    for split in splits:
        got += [cursor.next() for _ in range(split)]
        state = through_a_checkpoint(cursor.state_dict())
        cursor = training_cursor(data, seed=seed)
        cursor.load_state_dict(state, lambda text: None)
    got += [cursor.next() for _ in range(3)]
    assert got == expected


@given(data=map_data(), seed=st.integers(0, 2**32 - 1), epochs=st.integers(1, 4))
def test_the_order_is_that_of_torchs_distributed_sampler(data, seed, epochs):
    cursor = training_cursor(data, seed=seed)
    sampler = DistributedSampler(data.train, num_replicas=1, rank=0, seed=seed, shuffle=data.shuffle)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loader = DataLoader(
            data.train, batch_size=data.batch_size, sampler=sampler, drop_last=data.drop_last, collate_fn=list
        )
        assert cursor.batches_per_epoch == len(loader)
        for batch in loader:
            assert cursor.next() == (batch, len(batch))


@given(data=map_data(), seed=SEEDS, epochs=st.integers(1, 3))
def test_every_sample_is_seen_once_an_epoch(data, seed, epochs):
    cursor = training_cursor(data, seed=seed)
    for _ in range(epochs):
        batches = [cursor.next()[0] for _ in range(cursor.batches_per_epoch)]
        seen = [sample for batch in batches for sample in batch]
        assert len(seen) == len(set(seen))
        missing = len(data.train) - len(seen)
        assert missing == (len(data.train) % data.batch_size if data.drop_last else 0)
        assert all(len(batch) == data.batch_size for batch in batches[:-1])


# ---- iterables ----


class Stateless:
    """Nothing but an iterator each time."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self):
        return iter(self.items)


class StatefulIterable(Stateless):
    """Keeps the position itself; a new iterator begins there, and the end of an epoch goes back to the start."""

    position = 0

    def __iter__(self):
        while self.position < len(self.items):
            self.position += 1
            yield self.items[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class StatefulIterator(Stateless):
    """Each iterator keeps its own position."""

    def __iter__(self):
        return Position(self.items)


class Position:
    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self) -> Any:
        if self.position == len(self.items):
            raise StopIteration
        self.position += 1
        return self.items[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": (self.position,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.position,) = state["position"]


class BothStateful(StatefulIterator):
    """Torch's StatefulDataLoader tells its position, and so does its iterator; here the iterator's counts."""

    def state_dict(self) -> dict[str, Any]:
        return {"none": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"none": None}


@st.composite
def iterable_makers(draw: st.DrawFn, cls: type) -> Callable[[], Cursor]:
    length = draw(st.integers(1, 12))
    size = draw(st.none() | st.integers(1, length))
    drop_last = draw(st.booleans())
    items = [[i, i + 1] for i in range(length)] if size is None else list(range(length))
    return lambda: training_cursor(Data(train=cls(items), batch_size=size, drop_last=drop_last, collate=list), seed=0)


SPLITS = {"split": st.integers(0, 30), "rest": st.integers(0, 20)}


@settings(max_examples=100)
@given(make=iterable_makers(Stateless), **SPLITS)
def test_an_iterable_without_a_state_continues_by_skipping_and_says_so(make, split, rest):
    notices = assert_continues(make, split=split, total=split + rest)
    assert len(notices) == (1 if split else 0)


@settings(max_examples=100)
@given(make=iterable_makers(StatefulIterable), **SPLITS)
def test_an_iterable_with_a_state_continues_by_it(make, split, rest):
    assert assert_continues(make, split=split, total=split + rest) == []


@settings(max_examples=100)
@given(make=iterable_makers(StatefulIterator), **SPLITS)
def test_an_iterator_with_a_state_continues_by_it(make, split, rest):
    notices = assert_continues(make, split=split, total=split + rest)
    assert notices == []


@settings(max_examples=50)
@given(make=iterable_makers(BothStateful), **SPLITS)
def test_where_both_have_a_state_the_position_is_kept(make, split, rest):
    assert assert_continues(make, split=split, total=split + rest) == []


@given(length=st.integers(1, 12), size=st.integers(1, 12), epochs=st.integers(1, 3))
def test_an_iterable_gives_every_sample_once_an_epoch_in_its_order(length, size, epochs):
    cursor = training_cursor(Data(train=Stateless(list(range(length))), batch_size=size, collate=list), seed=0)
    for _ in range(epochs):
        seen: list[int] = []
        while len(seen) < length:
            batch, count = cursor.next()
            assert count == len(batch)
            seen += batch
        assert seen == list(range(length))
