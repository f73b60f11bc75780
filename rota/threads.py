"""Threads that somebody owns: whoever starts one ends it and waits for it, on every way out."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

_LOOK_EVERY_S = 1.0


class StoppedError(Exception):
    """What a thread does is given up at a safe point, because its owner ends. It never leaves the thread."""


class OwnedThread(threading.Thread):
    """A thread of one owner, who calls `end`, or uses it in a `with`.

    It is no daemon: the interpreter would tear down a daemon in the midst of C++, which ends the process by SIGABRT.
    So an interpreter that ends waits for it. A thread that its owner forgot, because an error came between, is told
    and woken then, and stops at its next safe point.
    """

    def __init__(self, work: Callable[[], None], *, name: str, wake: Callable[[], None] = lambda: None) -> None:
        """`work` calls `safe_point` where it may stop; `wake` ends what it waits for."""
        super().__init__(name=f"rota-{name}", daemon=False)
        self._work = work
        self._wake = wake
        self._told = threading.Event()
        _threads.add(self)

    def run(self) -> None:
        """Do the work, to its end or to a safe point."""
        with contextlib.suppress(StoppedError):
            self._work()

    @property
    def told(self) -> bool:
        """Whether it is to stop."""
        return self._told.is_set()

    def end(self) -> None:
        """Have it stop at its next safe point, and wait until it has. What it waits for is woken."""
        self.tell()
        if self.is_alive():
            self.join()

    def tell(self) -> None:
        """Have it stop at its next safe point. What it waits for is woken."""
        self._told.set()
        if self.is_alive():
            self._wake()

    def __enter__(self) -> OwnedThread:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


_threads: weakref.WeakSet[OwnedThread] = weakref.WeakSet()


def _tell_all() -> None:
    for thread in list(_threads):
        with contextlib.suppress(OSError):  # what it waits for may be closed; the others are told all the same
            thread.tell()


# What `atexit` knows is called when the threads have ended. This is called before, as for the pools of
# concurrent.futures.
threading._register_atexit(_tell_all)  # type: ignore[attr-defined]


def safe_point() -> None:
    """Here a thread can stop: StoppedError if its owner wants that. Other threads than owned ones go on."""
    current = threading.current_thread()
    if isinstance(current, OwnedThread) and current.told:
        raise StoppedError


@contextlib.contextmanager
def ending_with_parent() -> Iterator[None]:
    """End this process when its parent ends: the parent's end of stdin closes, or this process gets another parent."""
    parent = os.getppid()
    woken, wake = os.pipe()

    def watch() -> None:
        while os.getppid() == parent:
            readable, _, _ = select.select([0, woken], [], [], _LOOK_EVERY_S)
            if woken in readable:
                return
            if readable and not os.read(0, 1):
                break
        os._exit(1)

    try:
        with OwnedThread(watch, name="parent", wake=lambda: os.close(wake)):
            yield
    finally:
        os.close(woken)
