"""What leaves memory from where it was made."""

from __future__ import annotations

import mmap
import os
import sys
import threading

import pytest
import torch

from rota.memory.slab import Loose, Shelf


def written(tensors: list[torch.Tensor], bounce: mmap.mmap) -> bytes:
    """What a disk would be given."""
    return b"".join(bytes(chunk) for chunk in Loose(tensors, Shelf.of(tensors), gone=lambda: None).chunks(bounce))


def test_it_lies_as_it_would_in_a_slab():
    tensors = [
        torch.arange(1000.0),
        torch.arange(3000).view(30, 100).t(),
        torch.empty(0),
        torch.ones(5, dtype=torch.bool),
    ]
    data = written(tensors, mmap.mmap(-1, 4096))
    for tensor, shape in zip(tensors, Shelf.of(tensors).shapes, strict=True):
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
