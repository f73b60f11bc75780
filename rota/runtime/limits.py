"""The memory that a worker on a CPU may take: allocations beyond it fail, as they do on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import threading
from collections.abc import Iterator, MutableMapping

from rota.runtime.reservoir import preload, reservoir

HUGE_PAGES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
"""In the environment of a process: large memory comes in pages of 2 MiB, which is faster where it is always new."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SMALL_BYTES, _LARGE_BYTES = 2**16, 2**20
_SHARE = 1 / 4096
"""Of the memory of a device: tensors from that size on, within these bounds, are given back when they are freed."""
_USUAL_STACK_BYTES = 2 * 2**20
"""Of a thread, where stacks have no limit (glibc)."""
_USUAL_BYTES = 32 * 2**20
"""Where glibc ends up by itself; what is free at the end of its memory it then keeps up to twice that."""


def prepare(environment: MutableMapping[str, str]) -> None:
    """Have a process that is started with this get new memory cheaply, and able to hold what it frees."""
    environment.setdefault(*HUGE_PAGES)
    preload(environment)


class _Limit:
    """RLIMIT_DATA of this process: what was asked for, and beside it what code takes that was loaded meanwhile.

    The limit is one for all threads. What other threads allocate while one of them loads code counts as code.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own, self._most = resource.getrlimit(resource.RLIMIT_DATA)
        self._asked: int | None = None
        """Without code; None if nothing was asked for."""
        self._loads = 0
        """How many loads are under way."""
        self._before = (0, 0)
        """What the process had of both when they began."""
        self._code_data_bytes = 0
        self.code_bytes = 0
        """What loaded code really takes."""

    def ask(self, asked: int | None) -> int | None:
        """Change what holds; returns what held before."""
        with self._lock:
            before, self._asked = self._asked, asked
            self._apply()
        return before

    def more(self, memory_bytes: int) -> int:
        """What is to be asked for so that the process can take so much more memory than it has."""
        return data_bytes() - self._code_data_bytes + memory_bytes

    def begin_load(self) -> None:
        """From here on code is loaded, without a limit."""
        with self._lock:
            if self._loads == 0:
                give_back()
                self._before = data_bytes(), _status_bytes("RssAnon:")
            self._loads += 1
            self._apply()

    def end_load(self) -> None:
        """It is loaded."""
        with self._lock:
            self._loads -= 1
            if self._loads == 0:
                give_back()
                self._code_data_bytes += max(0, data_bytes() - self._before[0])
                self.code_bytes += max(0, _status_bytes("RssAnon:") - self._before[1])
            self._apply()

    def _apply(self) -> None:
        soft = self._own if self._asked is None else self._asked
        if self._loads or soft == resource.RLIM_INFINITY:
            soft = self._most
        elif self._asked is not None:
            soft += self._code_data_bytes
        if self._most != resource.RLIM_INFINITY and soft != resource.RLIM_INFINITY:
            soft = min(soft, self._most)
        if soft != resource.getrlimit(resource.RLIMIT_DATA)[0]:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, self._most))


_limit = _Limit()


@contextlib.contextmanager
def limited(memory_bytes: int) -> Iterator[None]:
    """From here on this process may take so much more memory than it has (Linux)."""
    with _asking(_limit.more(memory_bytes) if data_bytes() else resource.RLIM_INFINITY):
        yield


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Without a limit: mapped files count, and take no memory."""
    with _asking(resource.RLIM_INFINITY):
        yield


@contextlib.contextmanager
def _asking(asked: int) -> Iterator[None]:
    before = _limit.ask(asked)
    try:
        yield
    finally:
        _limit.ask(before)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Code is loaded here: without a limit, and what it takes is not counted as the memory of a task."""
    _limit.begin_load()
    try:
        yield
    finally:
        _limit.end_load()


def stacks_bytes(threads: int) -> int:
    """What the stacks of new threads count for; they take memory only as far as they are used."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return threads * (_USUAL_STACK_BYTES if soft == resource.RLIM_INFINITY else soft)


def code_bytes() -> int:
    """What code takes that was loaded since the process began, as far as `loading` saw it (Linux)."""
    return _limit.code_bytes


def has_room_for(size_bytes: int) -> bool:
    """Whether so much more can be kept beside what this process has at its busiest moments (Linux)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        return True
    step_bytes = max(0, _status_bytes("VmHWM:") - _status_bytes("VmRSS:"))
    return data_bytes() + step_bytes + size_bytes <= soft


def anonymous_bytes() -> int:
    """The memory that this process really takes, without files and loaded code (Linux).

    What was freed is given back first.
    """
    give_back()
    return _status_bytes("RssAnon:") - _limit.code_bytes


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
