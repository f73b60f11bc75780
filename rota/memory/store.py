"""Shards on disk, past the page cache, in versions: what a commit refers to is never written over.

Each item has up to three files. Those that the last commit and the one before it refer to are left alone; what is newer
goes to another, over and over, until the next commit. So a commit copies nothing, whatever dies at whatever moment, the
last commit can be read, and where that is damaged, the one before it can.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rota.errors import CheckpointError, CorruptCheckpointError, FullDiskError
from rota.memory.slab import ALIGNMENT
from rota.refusals import is_damage
from rota.state import inside
from rota.state.files import about_to_commit, make_private_folder, remove, sync_folder, write_text
from rota.store.run_folder import again

_FORMAT = 3
_RECORD = "commit.json"
_BEFORE = "commit-before.json"
"""The commit before the last one."""
_DAMAGED = f"{_RECORD}.damaged"
_SIDE = f".{_RECORD}.tmp"
_SLOTS = (0, 1, 2)
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
        self._before: dict[str, Version] = {}
        """Of the commit before the last one."""
        self._handles: dict[tuple[str, int], int] = {}
        self._unsynced: set[tuple[str, int]] = set()
        self._forgotten: set[tuple[str, int]] = set()
        """Files of which the system could not write all, and may not try to again."""
        self._settled = True
        """Whether the names of the records would be there after a power failure."""
        self._direct = True
        self._opening = threading.Lock()
        inside.check_folder(folder)
        make_private_folder(folder)

    # ---- items ----

    def __contains__(self, item: str) -> bool:
        """Whether there is a version of it."""
        return item in self._current

    def write(self, item: str, data: memoryview) -> None:
        """A new version, which is read from now on. The last two commits keep their own."""
        self.write_pieces(item, iter((data,)))

    def write_pieces(self, item: str, pieces: Iterator[memoryview]) -> None:
        """The same, of pieces that may be made one after another in the same memory."""
        taken = {commit[item].slot for commit in (self._committed, self._before) if item in commit}
        slot = next(slot for slot in _SLOTS if slot not in taken)
        handle = self._handle(item, slot)
        if item in self._current and self._current[item].slot == slot:
            del self._current[item]  # a write that fails leaves a mixture
        with _told(f"{item} cannot be written to {self._folder}"):
            end = 0
            for data in pieces:
                assert len(data) % ALIGNMENT == 0
                _write_all(handle, data, end)
                end += len(data)
        self._unsynced.add((item, slot))
        self._forgotten.discard((item, slot))
        self._current[item] = Version(slot=slot, size_bytes=end)

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
                f"run {again(self._folder.parent)} to go on from the last commit"
            )
        return count

    def read_pieces(self, item: str) -> Iterator[tuple[int, memoryview]]:
        """The last version, piece by piece: where each begins, and it, in memory that is used again."""
        return self._chunks(item, self._current[item])

    def _chunks(self, item: str, version: Version) -> Iterator[tuple[int, memoryview]]:
        """A version as it is on disk: where each chunk begins, and the chunk, in memory that is used again."""
        # Not closed: an error that is on its way may hold a part of it.
        buffer = memoryview(mmap.mmap(-1, _CHUNK_BYTES))
        for start in range(0, version.size_bytes, _CHUNK_BYTES):
            filled = 0
            size = min(_CHUNK_BYTES, version.size_bytes - start)
            while filled < size:  # whole pages, for the sum is of pages
                filled += self._read_some(item, version, buffer[filled:size], start + filled)
            yield start, buffer[:size]

    def _summed(self, item: str, version: Version) -> Version:
        """With the checksum of what is on disk."""
        found = 0
        for _, chunk in self._chunks(item, version):
            found = checksum(chunk, found)
        return replace(version, checksum=found)

    def _sync(self, item: str, version: Version) -> None:
        """Wait until a version is on disk."""
        key = (item, version.slot)
        if key not in self._unsynced:
            return
        handle = self._handle(item, version.slot)
        if key in self._forgotten:  # to wait once more would succeed, whatever is on disk
            for start, chunk in self._chunks(item, version):
                _write_all(handle, chunk, start)
            self._forgotten.discard(key)
        try:
            os.fdatasync(handle)
        except OSError:
            self._forgotten.add(key)
            raise
        self._unsynced.discard(key)

    def mapped(self, item: str, *, writable: bool) -> mmap.mmap:
        """The last version as memory that is read when it is touched; what is written to it stays in memory.

        CorruptCheckpointError if it is not as it was written.
        """
        version = self._current[item]
        path = self._path(item, version.slot)
        try:
            with open(inside.opened(path, os.O_RDONLY), "rb") as file:
                if os.fstat(file.fileno()).st_size < version.size_bytes:
                    raise CorruptCheckpointError(
                        f"{path.name} has less than the {version.size_bytes} bytes that were committed"
                    )
                found = mmap.mmap(
                    file.fileno(), version.size_bytes, access=mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
                )
        except OSError as error:
            raise _unread(path, error) from error
        with memoryview(found) as data:
            if version.checksum is not None and checksum(data) != version.checksum:
                raise CorruptCheckpointError(f"{path.name} was altered since it was written")
        return found

    # ---- commits ----

    def start_over(self) -> None:
        """None of the present versions is of use any more; those of the last commit stay until the next one."""
        self._current = {}

    def commit(self, about: Mapping[str, Any], *, items: Collection[str] | None = None) -> None:
        """Make the present versions what a new start finds, with something to remember about them.

        Of `items` only, if they are given: what nobody will ask for then need not be looked at.
        """
        lost = sorted(set(items or ()) - set(self._current))
        if lost:
            raise CheckpointError(f"{lost[0]} is not in {self._folder}, because it could not be written")
        wanted = {item: one for item, one in self._current.items() if items is None or item in items}
        with _told(f"a commit cannot be written to {self._folder}"):
            for item, version in wanted.items():
                self._sync(item, version)
                if version.checksum is None:
                    self._current[item] = wanted[item] = self._summed(item, version)
            self._settle()
            versions = {item: [one.slot, one.size_bytes, one.checksum] for item, one in wanted.items()}
            text = json.dumps({"items": versions, "about": dict(about)})
            if len(text) > inside.MOST_TEXT_BYTES // 2:
                raise CheckpointError(
                    f"the numbers and texts of the state take {len(text)} bytes, which is too much for a commit; keep "
                    "what is large as tensors"
                )
            self._put(f"{json.dumps(_header(text))}\n{text}", wanted)
            self._settle()

    def _put(self, record: str, wanted: dict[str, Version]) -> None:
        """Let a record count, and the one that did be the one before it."""
        side = self._folder / _SIDE
        try:
            write_text(side, record)
            about_to_commit()
            # Whoever dies between the two leaves the one before, which is then the last one.
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._folder / _RECORD, self._folder / _BEFORE)
            try:
                os.replace(side, self._folder / _RECORD)
            finally:
                # Some file systems rename and report an error. From here on a new start may find this commit: its
                # files are left alone, also if what follows fails.
                if not side.exists():
                    self._before, self._committed, self._settled = self._committed, wanted, False
        finally:
            remove(side)

    def _settle(self) -> None:
        """Wait until the names of the records are on disk.

        As long as this fails there is no other commit. So after a power failure the last commit that was waited for is
        found, or the one behind it, and the files of both are left alone.
        """
        if not self._settled:
            sync_folder(self._folder)
            self._settled = True

    def recover(self) -> dict[str, Any] | None:
        """Go back to the last commit: what is to be remembered of it, or None if there is none.

        CorruptCheckpointError if it is damaged; `fall_back` then makes the one before it the last one.
        """
        self._current, self._committed, self._before = {}, {}, {}
        self._unsynced.clear()
        self._forgotten.clear()
        record, before = self._folder / _RECORD, self._folder / _BEFORE
        with _told(f"the last commit in {self._folder} cannot be used"):
            if not record.exists() and before.exists():
                os.replace(before, record)
            self._settled = False  # who wrote it may have ended before that
            self._settle()
        if not record.exists():
            return None
        self._committed, about = self._read_record(_RECORD)
        self._current = dict(self._committed)
        with contextlib.suppress(CorruptCheckpointError):
            self._before, _ = self._read_record(_BEFORE) if before.exists() else ({}, None)
        return about

    def _read_record(self, name: str) -> tuple[dict[str, Version], dict[str, Any]]:
        path = self._folder / name
        try:
            first, _, text = inside.read_text(path).partition("\n")
            header = json.loads(first)
            if header["format"] != _FORMAT:
                raise CheckpointError(
                    f"{path} was written by another version of rota (format {header['format']}); "
                    "go on with that version"
                )
            if header != _header(text):
                raise ValueError("another checksum")
            plain = json.loads(text)
            found = {_item(name): _version(*facts) for name, facts in plain["items"].items()}
            return found, dict(plain["about"])
        except OSError as error:
            raise _unread(path, error) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            raise CorruptCheckpointError(f"{name} was altered since it was written") from error

    def fall_back(self) -> tuple[str, bool]:
        """Set the last commit aside: under which name, and whether there is one before it, which is now the last."""
        with _told(f"what is damaged in {self._folder} cannot be set aside"):
            os.replace(self._folder / _RECORD, self._folder / _DAMAGED)
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._folder / _BEFORE, self._folder / _RECORD)
            sync_folder(self._folder)
        return _DAMAGED, (self._folder / _RECORD).exists()

    def remove_unused(self) -> None:
        """Remove the files of items that neither of the last commits has; what cannot be removed stays."""
        known = {*self._current, *self._committed, *self._before}
        for key in [key for key in self._handles if key[0] not in known]:
            os.close(self._handles.pop(key))
        inside.remove_each(self._folder, inside.ITEM_FILE, but=lambda name: name.rpartition(".")[0] in known)

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
                    return inside.opened(path, flags | os.O_DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            if self._direct:
                self._direct = False
                self._notice(
                    f"{path.parent} is on a file system without direct access: what leaves memory goes through the "
                    "page cache, which may be slower and takes memory of its own"
                )
            return inside.opened(path, flags)


def _unread(path: Path, error: OSError) -> CheckpointError:
    """What to raise for a file that the system does not read: it is damaged, or it cannot be read now."""
    kind = CorruptCheckpointError if is_damage(error) else CheckpointError
    return kind(f"{path.name if is_damage(error) else path} cannot be read: {error.strerror}")


def _write_all(handle: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done : done + _CHUNK_BYTES], start + done)


def _header(text: str) -> dict[str, Any]:
    """What stands above a record: numbers in it are as much a part of the state as tensors are."""
    return {"format": _FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _item(name: str) -> str:
    if "/" in name or name.startswith("."):  # it names a file
        raise ValueError(f"there is no item {name!r}")
    return name


def _version(slot: int, size_bytes: int, summed: int) -> Version:
    if slot not in _SLOTS:
        raise ValueError(f"there is no file {slot}")
    return Version(slot=int(slot), size_bytes=int(size_bytes), checksum=int(summed))


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
        kind = FullDiskError if error.errno in (errno.ENOSPC, errno.EDQUOT) else CheckpointError
        raise kind(f"{what} ({error.strerror})") from error
