"""Opens and removes what rota makes in a run folder: never what a link in it leads to, and nothing that others made.

A run folder may come from anybody. The folder itself is named by the user, so its own path may have links. Whatever
rota uses below it is a plain file or folder: a link at one of rota's names is refused with its name. Other names are
left alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from rota.errors import RunFolderError
from rota.state.files import make_private_folder

Names: TypeAlias = "Mapping[str, Names | None]"
"""What rota makes in a folder: the pattern of a name -> the names in that folder, or None for a file."""

MOST_TEXT_BYTES = 2**30
"""Of a text file that is read back: what is larger is damaged, and is not read into memory."""
_SAFETENSORS_SIDE = r"\.tmp\w{6}"
"""What safetensors writes, beside the file that it is asked for, until it is whole."""
CHECKPOINT: Names = {rf"tensors\.safetensors|state\.json|commit\.json|{_SAFETENSORS_SIDE}": None}
CHECKPOINTS: Names = {r"checkpoint-\d{8,}(\.damaged)?|\.writing-\d+": CHECKPOINT}
ITEM = r"(group\d+-(weights|moments|gradients)|rest|\d+:[^/]+|[0-9a-f]+|item\d)"
ITEM_FILE = rf"{ITEM}\.[012]"
SHARDS: Names = {
    ITEM_FILE: None,
    r"commit\.json(\.damaged)?|commit-before\.json|\.commit\.json\.tmp": None,
}
DISK_LOOK = r"\.disk-\w{8}"
"""Where the pace of the disk is measured."""
ROOM: Names = {rf"shards|\.building|{DISK_LOOK}": SHARDS}
"""Where a process of a task keeps what leaves its memory."""
MODEL_SIDE = rf"\.model\.safetensors\.\d+\.tmp|{_SAFETENSORS_SIDE}"
"""What was written of a model in a process that was killed."""
TASK: Names = {
    rf"lock|model\.safetensors|output(-\d+)?\.log|gang-\d+|{MODEL_SIDE}": None,
    "checkpoints": CHECKPOINTS,
    r"\.rank-\d+": ROOM,
    **ROOM,
}
PROFILE: Names = {r"\d+": TASK}
RUN: Names = {
    r"lock|report\.html|journal\.db(-wal|-shm|-journal)?|\.(report\.html|journal\.db)\..+\.tmp(-journal)?": None,
    r"\.profile": PROFILE,
}
"""Beside `tasks`, in which only the folders of the run's own tasks are rota's."""


def opened(path: Path, flags: int) -> int:
    """A handle of a plain file that has no other name; where it is made, it is for this user alone."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            check_file(path)
        raise
    try:
        _check_kind(path, os.fstat(handle), wanted=stat.S_IFREG, written=bool(flags & (os.O_WRONLY | os.O_RDWR)))
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_text(path: Path, *, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """The content of a plain file; ValueError if it is larger than what rota writes there, or than the memory."""
    with open(opened(path, os.O_RDONLY), encoding="utf-8") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > most_bytes:
            raise ValueError(f"{path.name} has {size_bytes} bytes, and at most {most_bytes} can be")
        try:
            return file.read(size_bytes)
        except MemoryError as error:
            raise ValueError(f"{path.name} does not fit into memory") from error


def check_file(path: Path, *, written: bool = False) -> None:
    """RunFolderError if something else than a plain file is there; `written` is one whose content is changed."""
    with contextlib.suppress(FileNotFoundError):
        _check_kind(path, path.lstat(), wanted=stat.S_IFREG, written=written)


def check_folder(path: Path) -> None:
    """RunFolderError if something else than a folder is there."""
    with contextlib.suppress(FileNotFoundError):
        _check_kind(path, path.lstat(), wanted=stat.S_IFDIR)


def check(folder: Path, names: Names) -> None:
    """RunFolderError for the first of rota's names in a folder, and below, that is a link or another kind of file."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            for pattern, inner in names.items():
                if re.fullmatch(pattern, entry.name):
                    path = folder / entry.name
                    (check_file if inner is None else check_folder)(path)
                    if inner is not None:
                        check(path, inner)


def check_task(folder: Path) -> None:
    """RunFolderError if something leads out of a task's folder, or the folder out of that of its run."""
    check_folder(folder.parent)
    check_folder(folder)
    check(folder, TASK)


def enter(folder: Path) -> None:
    """Make the folder of a task, where it is not there and nothing leads out."""
    check_task(folder)
    make_private_folder(folder)


def remove(folder: Path, names: Names) -> None:
    """Remove of a folder what rota made, and the folder if nothing else is in it; what cannot be removed stays."""
    with contextlib.suppress(OSError), _listing(folder) as handle:
        _remove_in(handle, names)
        folder.rmdir()


def remove_each(
    folder: Path, pattern: str, names: Names | None = None, *, but: Callable[[str], bool] = lambda name: False
) -> None:
    """Remove the files in a folder whose names have the pattern, or with `names` such folders and those in them."""
    with contextlib.suppress(OSError), _listing(folder) as handle:
        _remove_in(handle, {pattern: names}, but=but)


def _remove_in(handle: int, names: Names, *, but: Callable[[str], bool] = lambda name: False) -> None:
    for name in os.listdir(handle):
        for pattern, inner in names.items():
            if re.fullmatch(pattern, name) and not but(name):
                with contextlib.suppress(OSError):
                    _remove(handle, name, inner)


def _remove(parent: int, name: str, names: Names | None) -> None:
    """By the handle of the folder that it is in: whatever becomes of the path meanwhile, this is what was looked at."""
    if names is not None:
        with _listing(name, parent) as handle:
            _remove_in(handle, names)
        os.rmdir(name, dir_fd=parent)
    elif stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=parent)


@contextlib.contextmanager
def _listing(path: Path | str, parent: int | None = None) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield handle
    finally:
        os.close(handle)


def _check_kind(path: Path, info: os.stat_result, *, wanted: int, written: bool = False) -> None:
    if stat.S_ISLNK(info.st_mode):
        disk = "; to have shards on another disk, use --shards DIR" if path.name == "shards" else ""
        raise RunFolderError(
            f"{path} is a link, and rota follows none in a run folder; put what it leads to in its place, or remove it"
            f"{disk}"
        )
    if stat.S_IFMT(info.st_mode) != wanted:
        what = "folder" if wanted == stat.S_IFDIR else "plain file"
        raise RunFolderError(f"{path} is not a {what}, which rota needs there; move it away")
    if written and info.st_nlink > 1:
        raise RunFolderError(
            f"{path} has a second name (a hard link), and what rota writes to it would be seen there; "
            "put a copy of it in its place"
        )
