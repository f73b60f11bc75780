"""Regions of a device's memory never overlap nor exceed it, and are free again when nobody uses them."""

import gc
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rota.errors import FitError
from rota.memory.arbiter import DeviceMemory
from rota.memory.arena import Arena, Region, Spans, make_arena
from rota.memory.slab import Slab

STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 60), st.integers(0, 30)), max_size=60)


@given(size=st.integers(1, 100), steps=STEPS)
def test_spans_do_not_overlap_and_what_fits_an_empty_row_has_a_place_there(size, steps):
    spans, taken = Spans(size_bytes=size), {}
    for takes, wanted, which in steps:
        if takes:
            begin = spans.take(wanted)
            free = [True] * size
            for other, width in taken.items():
                free[other : other + width] = [False] * width
            wide_enough = any(all(free[at : at + wanted]) for at in range(size - wanted + 1))
            assert (begin is not None) == wide_enough
            if begin is not None:
                assert all(free[begin : begin + wanted])
                taken[begin] = wanted
        elif taken:
            begin = sorted(taken)[which % len(taken)]
            del taken[begin]
            spans.give(begin)
        assert spans.used_bytes == sum(taken.values()) <= size


@given(room=st.integers(1, 100), steps=STEPS)
def test_a_ledger_never_admits_more_than_there_is(room, steps):
    ledger, held = DeviceMemory(spans=Spans(size_bytes=100)), {}
    for number, (takes, moved, work) in enumerate(steps):
        if takes:
            begin = ledger.take(str(number), moved_bytes=moved, work_bytes=work, room_bytes=room)
            if begin is not None:
                held[begin] = (str(number), moved, work)
        elif held:
            begin = sorted(held)[work % len(held)]
            ledger.give("another", begin)
            ledger.give(held.pop(begin)[0], begin)
        assert sum(one[1] for one in held.values()) + max((one[2] for one in held.values()), default=0) <= room
        assert ledger.spans.used_bytes == sum(one[1] for one in held.values())
        assert ledger.peak_bytes <= room
    for name, _, _ in held.values():
        ledger.leave(name)
    assert ledger.spans.used_bytes == 0


def test_two_processes_would_see_the_same_bytes_and_nothing_beside_their_region():
    handle = make_arena(4 * 4096)
    one, other = Arena(os.dup(handle)), Arena(handle)
    first = Region(one, 0, 2 * 4096, gone=lambda: None)
    second = Region(other, 2 * 4096, 2 * 4096, gone=lambda: None)
    Slab(4096, budget=first, what="a").flat.fill_(1)
    Slab(8192, budget=second, what="b").flat.fill_(2)
    assert bytes(other.part(0, 4 * 4096)) == b"\1" * 4096 + b"\0" * 4096 + b"\2" * 8192
    with pytest.raises(FitError, match="a defect of rota"):
        Slab(8192, budget=first, what="c")


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_region_is_gone_when_it_is_closed_and_the_last_tensor_of_it_is_gone(in_thread):
    gone = []
    region = Region(Arena(make_arena(8192)), 0, 8192, gone=lambda: gone.append(1))
    slab = Slab(4096, budget=region, what="a")
    region.take(4096, "what will be made")
    tensor = slab.flat.view(torch.float32)[3:7]
    del slab
    region.give(4096)
    region.close()
    assert not gone
    box = [tensor]
    del tensor
    if in_thread:
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
    else:
        box.clear()
    gc.collect()
    assert gone == [1]


def test_a_region_of_nothing_is_gone_when_it_is_closed():
    gone = []
    Region(Arena(make_arena(4096)), 0, 4096, gone=lambda: gone.append(1)).close()
    assert gone == [1]
