"""Writes files so that after a crash there is either the old content or the new, never a mixture."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_ask: Callable[[], None] = lambda: None  # noqa: E731


def ask_before_commits(ask: Callable[[], None]) -> None:
    """Have this process ask whether it still may, right before anything that it has written is made to count.

    `ask` does not come back if it may not.
    """
    global _ask
    _ask = ask


def about_to_commit() -> None:
    """Called right before the rename, or the like, that makes something count."""
    _ask()


def sync_file(path: Path) -> None:
    """Wait until a file's content is on disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file and wait until it is on disk."""
    make_private_file(path)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of an empty file to write to, which replaces `path` once the block ends well."""
    side = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        make_private_file(side)
        yield side
        sync_file(side)
        about_to_commit()
        os.replace(side, path)
        sync_folder(path.parent)
    finally:
        remove(side)


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    with contextlib.suppress(OSError):
        path.unlink()


def write_private(path: Path, text: str) -> None:
    """Replace a file that only this user can read; its folder is made if it is not there."""
    make_private_folder(path.parent)
    with replacing(path) as side:
        side.write_text(text, encoding="utf-8")


def make_private_file(path: Path) -> None:
    """Create an empty file that only this user can read, for whoever writes it: libraries go by the umask."""
    remove(path)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def make_private_folder(path: Path) -> None:
    """Create a folder that only this user can read, with those above it that are missing; others are left alone.

    It is on disk when this is over: what is committed to it later would be lost with it.
    """
    missing = itertools.takewhile(lambda one: not one.exists(), (path, *path.parents))
    for one in reversed(list(missing)):
        one.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(PermissionError):  # a folder in which others may make files and not see them
            sync_folder(one.parent)
    path.mkdir(exist_ok=True)  # an error where it is a file


def make_private_subfolder(path: Path) -> None:
    """The same in a folder that is there: one that somebody moved or removed meanwhile is not made again."""
    path.parent.stat()
    make_private_folder(path)
