"""Tensors that leave from memory of their own come back as they were."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import CheckpointError
from rota.memory.mover import Mover
from rota.memory.slab import ALIGNMENT, Budget, Loose, Shelf, Slab
from rota.memory.store import Store

SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 70), st.booleans()), min_size=1, max_size=6)


def tensors_of(shapes, dtype):
    made = []
    for number, (rows, columns, turned) in enumerate(shapes):
        generator = torch.Generator().manual_seed(number)
        one = torch.randint(0, 100, (columns, rows) if turned else (rows, columns), generator=generator).to(dtype)
        made.append(one.t() if turned else one)
    return made


@given(shapes=SHAPES, dtype=st.sampled_from([torch.float32, torch.float64, torch.int8]), pages=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_pieces_make_up_what_a_slab_would_hold(shapes, dtype, pages):
    tensors = tensors_of(shapes, dtype)
    gone = []
    loose = Loose(tensors, gone=lambda: gone.append(True))
    shelf = loose.shelf
    slab = Slab(shelf.size_bytes, budget=Budget(shelf.size_bytes), what="all")
    end = 0
    for piece in loose.chunks(mmap.mmap(-1, pages * ALIGNMENT)):
        assert not gone
        assert len(piece) % ALIGNMENT == 0
        slab.bytes[end : end + len(piece)] = piece
        end += len(piece)
    assert end == shelf.size_bytes
    assert gone == [True]
    for before, after in zip(tensors, slab.tensors(shelf), strict=True):
        assert before.stride() == after.stride() or before.numel() == 0
        assert torch.equal(before, after)


def test_memory_is_given_back_when_it_is_written_and_when_it_cannot_be(tmp_path, monkeypatch):
    tensors = [torch.arange(5000.0), torch.ones(3, 7)]
    shelf, gone = Shelf.of(tensors, paged=True), []
    store = Store(tmp_path / "store")
    mover = Mover(store)
    mover.write("a", Loose(tensors, gone=lambda: gone.append("a"))).result(20)
    slab = Slab(shelf.size_bytes, budget=Budget(shelf.size_bytes), what="a")
    mover.load("a", slab).result(20)
    assert all(torch.equal(one, two) for one, two in zip(tensors, slab.tensors(shelf), strict=True))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(CheckpointError, match="No space left"):
        mover.write("a", Loose(tensors, gone=lambda: gone.append("b"))).result(20)
    assert gone == ["a", "b"]
    mover.close()
    store.close()
