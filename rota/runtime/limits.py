"""The memory that a worker on a CPU may take: allocations beyond it fail, as they do on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Iterator, MutableMapping

from rota.runtime.reservoir import preload, reservoir

HUGE_PAGES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
"""In the environment of a process: large memory comes in pages of 2 MiB, which is faster where it is always new."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SMALL_BYTES, _LARGE_BYTES = 2**16, 2**20
_SHARE = 1 / 4096
"""Of the memory of a device: tensors from that size on, within these bounds, are given back when they are freed."""
_USUAL_BYTES = 32 * 2**20
"""Where glibc ends up by itself; what is free at the end of its memory it then keeps up to twice that."""


def prepare(environment: MutableMapping[str, str]) -> None:
    """Have a process that is started with this get new memory cheaply, and able to hold what it frees."""
    environment.setdefault(*HUGE_PAGES)
    preload(environment)


@contextlib.contextmanager
def limited(memory_bytes: int) -> Iterator[None]:
    """From here on this process may take so much more memory than it has (Linux)."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used_bytes = data_bytes()
    if used_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + memory_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Without a limit: mapped files count, and take no memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def has_room_for(size_bytes: int) -> bool:
    """Whether so much more can be kept beside what this process has at its busiest moments (Linux)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        return True
    step_bytes = max(0, _status_bytes("VmHWM:") - _status_bytes("VmRSS:"))
    return data_bytes() + step_bytes + size_bytes <= soft


def anonymous_bytes() -> int:
    """The memory that this process really takes, without files; what was freed is given back first (Linux)."""
    give_back()
    return _status_bytes("RssAnon:")


def give_back() -> None:
    """Give freed memory that is kept for later back to the system (glibc)."""
    held = reservoir()
    if held is not None:
        held.trim()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def return_freed_memory(memory_bytes: int) -> None:
    """From now on, give the memory of tensors that are large for a device back to the system when they are freed.

    What is kept for the next ones cannot be used for anything else, and there can be more of it than of what is in use
    (glibc). Memory that is always new takes time; where workers are started with huge pages, less of it. What a
    reservoir serves does not come here.
    """
    _set_malloc(min(_LARGE_BYTES, max(_SMALL_BYTES, int(_SHARE * memory_bytes))))


def keep_freed_memory() -> None:
    """From now on, keep it for the next ones, as usual."""
    _set_malloc(_USUAL_BYTES)


def _set_malloc(threshold_bytes: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, threshold_bytes)
        # By itself it follows the other one, but not any more when that is set.
        mallopt(_M_TRIM_THRESHOLD, 2 * threshold_bytes)


def data_bytes() -> int:
    """The writable private memory of this process, which is what RLIMIT_DATA counts (Linux)."""
    return _status_bytes("VmData:")


def _status_bytes(field: str) -> int:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(field):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
