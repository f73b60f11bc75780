"""Temporary folders: each is held while its process lives, and those that nobody holds are removed by the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"\.rota-(?:[a-z]+)-[a-z0-9_]{8}")


@contextlib.contextmanager
def scratch(purpose: str, *, place: Path | None = None) -> Iterator[Path]:
    """A new folder for this user alone, by default among the system's temporary files; removed at the end."""
    root = Path(tempfile.gettempdir()) if place is None else place
    remove_left(root)
    folder, handle = _made(root, purpose)
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        finally:
            os.close(handle)


def same_disk(folder: Path, others: tuple[Path, ...]) -> Path:
    """The first of the other places that is on the disk of a folder and can be written; else the folder itself."""
    for one in others:
        with contextlib.suppress(OSError):
            if one.stat().st_dev == folder.stat().st_dev and os.access(one, os.W_OK | os.X_OK):
                return one
    return folder


def remove_left(root: Path) -> None:
    """Remove this user's folders there that no process holds, since theirs was killed."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in [one for one in entries if _NAME.fullmatch(one.name)]:
            with contextlib.suppress(OSError):  # somebody else removes it, or it is in use
                _remove_if_left(Path(entry.path))


def _remove_if_left(folder: Path) -> None:
    if folder.lstat().st_uid != os.getuid():
        return
    handle = _opened(folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(handle)


def _made(root: Path, purpose: str) -> tuple[Path, int]:
    """A new folder, and the open file that holds it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".rota-{purpose}-", dir=root))
        try:
            handle = _opened(folder)
        except FileNotFoundError:
            continue  # another process removed it before it was held
        with contextlib.suppress(OSError):  # where the file system has no locks, nobody removes it either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if _is(folder, handle):
            return folder, handle
        os.close(handle)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _is(folder: Path, handle: int) -> bool:
    try:
        there, held = folder.lstat(), os.fstat(handle)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(there.st_mode) and (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)
