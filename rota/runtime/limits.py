"""The memory that a worker on a CPU may take: allocations beyond it fail, as they do on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Iterator


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
def loosened(by_bytes: int | None = None) -> Iterator[None]:
    """With a limit that is higher by so much, or with none: mapped files count, and take no memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (hard if by_bytes is None else soft + by_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def anonymous_bytes() -> int:
    """The memory that this process really takes, without files; what was freed is given back first (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("RssAnon:")


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
