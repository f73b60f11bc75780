"""What leaves memory from where it was made."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading

import pytest
import torch

from rota.memory.slab import Loose, Shelf
from rota.runtime.limits import prepare


def written(tensors: list[torch.Tensor], bounce: mmap.mmap) -> bytes:
    """What a disk would be given."""
    return b"".join(bytes(chunk) for chunk in Loose(tensors, gone=lambda: None).chunks(bounce))


def test_it_lies_as_it_would_in_a_slab():
    tensors = [
        torch.arange(1000.0),
        torch.arange(3000).view(30, 100).t(),
        torch.empty(0),
        torch.ones(5, dtype=torch.bool),
    ]
    data = written(tensors, mmap.mmap(-1, 4096))
    for tensor, shape in zip(tensors, Shelf.of(tensors, paged=True).shapes, strict=True):
        if tensor.numel():
            flat = torch.frombuffer(
                bytearray(data), dtype=tensor.dtype, count=tensor.numel(), offset=shape.offset_bytes
            )
            assert torch.equal(flat.as_strided(shape.size, shape.stride), tensor)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_thread_that_copies_makes_no_team_of_threads():
    """With two teams on as many cores as one has, both sleep at the end of every op."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    counts: list[int] = []

    def copy() -> None:
        counts.append(len(os.listdir("/proc/self/task")))
        written([torch.empty(2**21)], mmap.mmap(-1, 2**21))
        counts.append(len(os.listdir("/proc/self/task")))

    try:
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join(60)
    finally:
        torch.set_num_threads(threads)
    assert len(counts) == 2
    assert counts[1] <= counts[0]


_SCRIPT = """
import ctypes, mmap, random, torch
from rota.memory.slab import Budget, Loose, Slab
from rota.runtime.reservoir import reservoir

held = reservoir()
assert held.hold(2**28)
dice = random.Random(0)
for _ in range(30):
    counts = [dice.choice([3, 1000, 2**18, 2**18 + 5, 2**19 - 1, 2**20]) for _ in range(dice.randint(1, 5))]
    tensors = [torch.rand(count) for count in counts]
    expected = [one.clone() for one in tensors]
    loose, bounce = Loose(tensors, gone=lambda: None), mmap.mmap(-1, 2**16)
    slab = Slab(loose.size_bytes, budget=Budget(2**28), what="all")
    end = direct = 0
    for piece in loose.chunks(bounce):
        place = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        direct += any(place == one.data_ptr() for one in tensors)
        slab.bytes[end : end + len(piece)] = piece
        end += len(piece)
    assert end == loose.size_bytes
    assert direct == sum(count >= 2**18 for count in counts), (direct, counts)
    assert all(torch.equal(one, two) for one, two in zip(expected, slab.tensors(loose.shelf)))
assert held.has(slab.flat.data_ptr())
del slab, piece, tensors, expected, loose
held.trim()
assert held.counts_bytes[:2] == (0, 0), held.counts_bytes
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_large_tensors_that_lie_in_pages_of_their_own_are_not_copied():
    environment = dict(os.environ)
    prepare(environment)
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
