"""What measuring is timed with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

import torch

Clock = Callable[[], float]


def timer_of(kind: str, threads: int) -> Clock:
    """What a device of one thread does is timed by its own use of the processor: others do not count, then."""
    return time.thread_time if kind == "cpu" and threads == 1 else time.perf_counter


@contextlib.contextmanager
def threads_set(count: int) -> Iterator[None]:
    """With so many threads, as a device has."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pace_s(timer: Clock) -> float:
    """What a fixed little work takes just now: on a shared machine that changes by half from one second to the next."""
    one = torch.ones(64, 64)
    times = []
    for _ in range(3):
        began_s = timer()
        for _ in range(16):
            torch.relu(one @ one).add_(one)
        times.append(timer() - began_s)
    return min(times)


def product_s(size: int, *, device: torch.device, timer: Clock = time.perf_counter, rounds: int = 9) -> float:
    """What a product of square matrices takes: the best of some, since others may disturb one for a moment."""
    one = torch.ones(size, size, device=device)
    times = []
    for _ in range(rounds):
        began_s = timer()
        one @ one
        if device.type == "cuda":  # written with care, never run
            torch.cuda.synchronize(device)
        times.append(timer() - began_s)
    return min(times)


def low(values: Iterable[float]) -> float:
    """The lower quartile: what it takes if nobody disturbs, without the luck of the very best."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]
