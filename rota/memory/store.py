"""Shards on disk, past the page cache, in versions: what a commit refers to is never written over.

Each item has two files. The version that the last commit refers to is in the one; newer ones go to the other, over and
over, until the next commit makes it the one. So a commit copies nothing, and whatever dies at whatever moment, the last
commit can be read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rota.errors import CheckpointError, CorruptCheckpointError
from rota.memory.slab import ALIGNMENT
from rota.state.files import make_private_folder, replacing

_FORMAT = 2
_RECORD = "commit.json"
_CHUNK_BYTES = 8 * 2**20
"""Read or written in one call, so that a request ends soon when it is to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """What is in one of an item's files."""

    slot: int
    size_bytes: int
    checksum: int | None = None
    """Of one that was committed: most are written over before that, and are not worth the time."""


class Store:
    """The items of one task, in a folder of their own."""

    def __init__(self, folder: Path, *, notice: Callable[[str], None] = lambda text: None) -> None:
        self._folder = folder
        self._notice = notice
        self._current: dict[str, Version] = {}
        self._committed: dict[str, Version] = {}
        self._handles: dict[tuple[str, int], int] = {}
        self._unsynced: set[tuple[str, int]] = set()
        self._direct = True
        self._opening = threading.Lock()
        make_private_folder(folder)

    # ---- items ----

    def __contains__(self, item: str) -> bool:
        """Whether there is a version of it."""
        return item in self._current

    def write(self, item: str, data: memoryview) -> None:
        """A new version, which is read from now on. The last commit keeps its own."""
        assert len(data) % ALIGNMENT == 0
        committed = self._committed.get(item)
        slot = 1 - committed.slot if committed is not None else 0
        handle = self._handle(item, slot)
        with _told(f"{item} cannot be written to {self._folder}"):
            done = 0
            while done < len(data):
                done += os.pwrite(handle, data[done : done + _CHUNK_BYTES], done)
        self._unsynced.add((item, slot))
        self._current[item] = Version(slot=slot, size_bytes=len(data))

    def read(self, item: str, into: memoryview) -> None:
        """The last version; CorruptCheckpointError if it is not all there."""
        version = self._current[item]
        if version.size_bytes != len(into):
            raise CorruptCheckpointError(
                f"{self._path(item, version.slot)} has {version.size_bytes} bytes and the task needs {len(into)}"
            )
        done = 0
        while done < len(into):
            done += self._read_some(item, version, into[done : done + _CHUNK_BYTES], done)

    def _read_some(self, item: str, version: Version, into: memoryview, offset: int) -> int:
        with _told(f"{item} cannot be read from {self._folder}"):
            count = os.preadv(self._handle(item, version.slot), [into], offset)
        if count == 0:
            raise CorruptCheckpointError(
                f"{self._path(item, version.slot)} ends after {offset} of {version.size_bytes} bytes; "
                "go on from another checkpoint"
            )
        return count

    def _summed(self, item: str, version: Version) -> Version:
        """With the checksum of what is on disk."""
        with contextlib.closing(mmap.mmap(-1, _CHUNK_BYTES)) as memory, memoryview(memory) as buffer:
            found = done = 0
            while done < version.size_bytes:
                filled = 0
                size = min(_CHUNK_BYTES, version.size_bytes - done)
                while filled < size:  # whole pages, for the sum is of pages
                    filled += self._read_some(item, version, buffer[filled:size], done + filled)
                found = checksum(buffer[:size], found)
                done += size
        return replace(version, checksum=found)

    def mapped(self, item: str, *, writable: bool) -> mmap.mmap:
        """The last version as memory that is read when it is touched; what is written to it stays in memory.

        CorruptCheckpointError if it is not as it was written.
        """
        version = self._current[item]
        path = self._path(item, version.slot)
        with _told(f"{item} cannot be read from {self._folder}"), open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < version.size_bytes:
                raise CorruptCheckpointError(
                    f"{path} has less than the {version.size_bytes} bytes that were committed; "
                    "go on from another checkpoint"
                )
            found = mmap.mmap(
                file.fileno(), version.size_bytes, access=mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
            )
        with memoryview(found) as data:
            if version.checksum is not None and checksum(data) != version.checksum:
                raise CorruptCheckpointError(f"{path} was altered since it was written; go on from another checkpoint")
        return found

    # ---- commits ----

    def start_over(self) -> None:
        """None of the present versions is of use any more; those of the last commit stay until the next one."""
        self._current = {}

    def commit(self, about: Mapping[str, Any]) -> None:
        """Make the present versions what a new start finds, with something to remember about them."""
        with _told(f"a commit cannot be written to {self._folder}"):
            for item, slot in sorted(self._unsynced):
                os.fdatasync(self._handle(item, slot))
            for item, version in self._current.items():
                if version.checksum is None:
                    self._current[item] = self._summed(item, version)
            versions = {
                item: [version.slot, version.size_bytes, version.checksum] for item, version in self._current.items()
            }
            with replacing(self._folder / _RECORD) as side:
                text = json.dumps({"format": _FORMAT, "items": versions, "about": dict(about)})
                side.write_text(text, encoding="utf-8")
                side.chmod(0o600)
        self._unsynced.clear()
        self._committed = dict(self._current)

    def recover(self) -> dict[str, Any] | None:
        """Go back to the last commit: what is to be remembered of it, or None if there is none."""
        try:
            text = (self._folder / _RECORD).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            plain = json.loads(text)
            if plain["format"] != _FORMAT:
                raise CheckpointError(
                    f"{self._folder / _RECORD} was written by another version of rota (format {plain['format']}); "
                    "go on with that version"
                )
            found = {
                str(item): Version(slot=int(slot), size_bytes=int(size), checksum=int(summed))
                for item, (slot, size, summed) in plain["items"].items()
            }
            about = dict(plain["about"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{self._folder / _RECORD} is damaged ({error})") from error
        self._current, self._committed = found, dict(found)
        self._unsynced.clear()
        return about

    def remove_unused(self) -> None:
        """Remove the files of items that the last commit does not have."""
        for path in self._folder.iterdir():
            item = path.name.rpartition(".")[0]
            if path.name != _RECORD and item not in self._current and item not in self._committed:
                for slot in (0, 1):
                    handle = self._handles.pop((item, slot), None)
                    if handle is not None:
                        os.close(handle)
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    # ---- files ----

    def _path(self, item: str, slot: int) -> Path:
        return self._folder / f"{item}.{slot}"

    def _handle(self, item: str, slot: int) -> int:
        with self._opening:  # one thread reads and another writes
            handle = self._handles.get((item, slot))
            if handle is None:
                handle = self._handles[(item, slot)] = self._open(self._path(item, slot))
            return handle

    def _open(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with _told(f"{path} cannot be opened"):
            if self._direct and hasattr(os, "O_DIRECT"):
                try:
                    return os.open(path, flags | os.O_DIRECT, 0o600)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            if self._direct:
                self._direct = False
                self._notice(
                    f"{path.parent} is on a file system without direct access: what leaves memory goes through the "
                    "page cache, which may be slower and takes memory of its own"
                )
            return os.open(path, flags, 0o600)


def checksum(data: memoryview, before: int = 0) -> int:
    """Of whole pages, behind others: a bit that is not as it was changes it, and so does a page at another place.

    Each page is added up and only the sums are hashed, so that it takes as long as to look at the data once.
    """
    pages: Any = np.frombuffer(data, dtype=np.uint64).reshape(-1, ALIGNMENT // 8)
    return zlib.crc32(pages.sum(axis=1, dtype=np.uint64).tobytes(), before)


@contextlib.contextmanager
def _told(what: str) -> Any:
    """CheckpointError with a sentence for what the disk says."""
    try:
        yield
    except OSError as error:
        hint = "; make room on the disk, then resume" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(f"{what} ({error.strerror}){hint}") from error
