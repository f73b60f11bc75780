"""The standard streams of a process: any of them may be closed, or lead to somebody who has gone."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any, TextIO


def open_standard() -> None:
    """Open the null device in place of each standard stream that is closed.

    Otherwise the next file or socket gets the number of a closed one, and what is printed goes there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one in most cases
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def cut_off(stream: TextIO | None) -> None:
    """Drop what a stream cannot write, so that the end of the process does not try again."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, stream.fileno())
            finally:
                os.close(null)
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class Droppable:
    """A text stream for progress: what cannot be printed now is dropped, and whoever prints goes on."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def write(self, text: str) -> int:
        """Print, or drop."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Print what waits, or drop it."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()
