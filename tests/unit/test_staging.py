"""What leaves a device that is far goes to its host, and to disk only when it must; nothing old ever comes back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import CheckpointError
from rota.memory.slab import ALIGNMENT, Budget, Slab
from rota.memory.staging import Far, Host, Staging
from rota.memory.store import Store

PAGE = ALIGNMENT


class Disk(Store):
    """Counts what goes over it, and can be full."""

    def __init__(self, folder):
        super().__init__(folder)
        self.reads, self.writes, self.full = [], [], False

    def read(self, item, into):
        self.reads.append(item)
        super().read(item, into)

    def write(self, item, data):
        if self.full:
            raise CheckpointError("no space left")
        self.writes.append(item)
        super().write(item, data)


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "store")
    yield made
    made.close()


def put(host, item, value, pages=1):
    copy = host.made(pages * PAGE)
    copy.fill_(value)
    host.put(item, copy)


def test_what_has_room_on_the_host_never_sees_the_disk(disk):
    host = Host(disk, room_bytes=3 * PAGE, pinned=False)
    for number, item in enumerate("abc"):
        put(host, item, number)
    assert [int(host.fetched(item, PAGE)[0]) for item in "abc"] == [0, 1, 2]
    assert (disk.reads, disk.writes) == ([], [])


def test_what_was_used_longest_ago_is_written_before_it_goes_and_comes_back_from_disk(disk):
    host = Host(disk, room_bytes=2 * PAGE, pinned=False)
    put(host, "a", 1)
    put(host, "b", 2)
    host.fetched("a", PAGE)
    host.made(PAGE)
    assert disk.writes == ["b"]
    assert int(host.fetched("b", PAGE)[0]) == 2
    assert disk.reads == ["b"]


def test_what_nobody_wants_any_more_is_not_written(disk):
    host = Host(disk, room_bytes=PAGE, pinned=False)
    put(host, "activations", 1)
    host.forget("activations")
    host.made(PAGE)
    host.settle()
    assert disk.writes == []
    host.forget("again")
    put(host, "again", 3)
    host.settle()
    assert disk.writes == ["again"], "it was made anew after it had been forgotten"


def test_settling_writes_what_changed_once(disk):
    host = Host(disk, room_bytes=9 * PAGE, pinned=False)
    put(host, "a", 1)
    host.settle()
    host.settle()
    assert disk.writes == ["a"]


def test_one_item_has_room_however_large(disk):
    host = Host(disk, room_bytes=PAGE, pinned=False)
    put(host, "large", 7, pages=5)
    assert int(host.fetched("large", 5 * PAGE)[-1]) == 7


def test_a_full_disk_is_told_and_loses_nothing(disk):
    host = Host(disk, room_bytes=PAGE, pinned=False)
    put(host, "a", 1)
    disk.full = True
    with pytest.raises(CheckpointError):
        host.made(PAGE)
    disk.full = False
    assert int(host.fetched("a", PAGE)[0]) == 1
    host.settle()
    assert disk.writes == ["a"]


MOVES = st.tuples(st.sampled_from(["write", "load", "settle", "forget"]), st.sampled_from("abcd"))


@settings(max_examples=40, deadline=None)
@given(room=st.integers(1, 6), moves=st.lists(MOVES, max_size=40))
def test_whatever_comes_is_what_left_last(tmp_path_factory, room, moves):
    store = Store(tmp_path_factory.mktemp("store"))
    budget = Budget(64 * PAGE)
    staging = Staging(store, Far(device=torch.device("cpu"), host_bytes=room * PAGE))
    left: dict[str, int] = {}
    leaving = {}
    try:
        for number, (move, item) in enumerate(moves):
            if move == "write":
                slab = Slab(PAGE, budget=budget, what=item)
                slab.flat.fill_(number)
                leaving[item], left[item] = staging.write(item, slab), number
            elif move == "forget":
                if item in leaving:
                    leaving[item].result()
                staging.forget(item)
                left.pop(item, None)
            elif move == "settle":
                for future in leaving.values():
                    future.result()
                staging.settle()
            elif item in left:
                slab = Slab(PAGE, budget=budget, what=item)
                staging.load(item, slab, after=leaving.get(item)).result()
                assert set(slab.flat.tolist()) == {left[item]}
    finally:
        staging.close()
        store.close()
