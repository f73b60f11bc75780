"""Checkpoints on storage that outlives a machine: a folder that all see, or an object store, through fsspec.

The local disk stays the fast tier: a checkpoint is committed there first, then copied, its commit record last. Where a
task starts and the storage has a newer one than the local disk, that is fetched; its checksums are compared as always.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rota.errors import CheckpointError, InputError
from rota.refusals import advice, reason, refusal
from rota.state import checkpoint, files, inside

_NAME = re.compile(r"checkpoint-(\d{8,})-(\d+)")


class Mirror:
    """What storage has of one task. Attempts write beside each other, never into the same place."""

    def __init__(self, url: str, *, attempt: int = 0) -> None:
        self.url = url.rstrip("/")
        self._attempt = attempt

    def send(self, path: Path) -> None:
        """Copy a committed checkpoint, and drop those that are no longer needed."""
        with self._speaking("written to") as (system, root):
            place = f"{root}/{path.name}-{self._attempt:04d}"
            _make_folder(system, place)
            try:
                for name in checkpoint.FILES:  # what commits it comes last
                    files.about_to_commit()
                    _put(system, path / name, f"{place}/{name}")
            except OSError:
                with contextlib.suppress(Exception):  # the half of a checkpoint takes room that the next one needs
                    system.rm(place, recursive=True)
                raise
            for old in self._stored(system, root)[: -checkpoint.KEPT]:
                system.rm(old[2], recursive=True)

    def fetch(self, folder: Path) -> None:
        """Copy what is newer than the checkpoints in a folder into it; nobody else may write there meanwhile."""
        inside.check_folder(folder)
        checkpoint.clear_up(folder)
        local = checkpoint.committed(folder)
        newest = checkpoint.number_of(local[-1]) if local else 0
        with self._speaking("read from") as (system, root):
            stored = self._stored(system, root)
            # Of several attempts' checkpoints with one number, the latest attempt's counts.
            wanted = {number: place for _, number, place in stored if newest < number <= stored[-1][1]}
            for number, place in sorted(wanted.items())[-checkpoint.KEPT :]:
                side = folder / f".writing-{os.getpid()}"
                files.make_private_subfolder(folder)
                side.mkdir(mode=0o700)
                for name in checkpoint.FILES:
                    files.make_private_file(side / name)
                    system.get_file(f"{place}/{name}", str(side / name))
                checkpoint.adopt(side, folder, number)

    def send_file(self, path: Path) -> None:
        """Copy a file."""
        with self._speaking("written to") as (system, root):
            _make_folder(system, root)
            files.about_to_commit()
            _put(system, path, f"{root}/{path.name}")

    def fetch_file(self, path: Path) -> None:
        """Copy a file that is not there; whole, or not at all."""
        with self._speaking("read from") as (system, root):
            files.make_private_folder(path.parent)
            with files.replacing(path) as side:
                system.get_file(f"{root}/{path.name}", str(side))

    def _stored(self, system: Any, root: str) -> list[tuple[int, int, str]]:
        """(attempt, number, place) of each whole checkpoint; the last one counts.

        A later attempt begins where the one before was given up, and is never behind it. So what that one wrote
        afterwards, by whatever accident, is older, and what has a higher number than the last one is of that kind.
        """
        system.invalidate_cache()
        if not system.exists(root):
            return []
        found = []
        for place in system.ls(root, detail=False):
            match = _NAME.fullmatch(place.rstrip("/").rsplit("/", 1)[-1])
            if match and system.exists(f"{place.rstrip('/')}/{checkpoint.FILES[-1]}"):
                found.append((int(match[2]), int(match[1]), place.rstrip("/")))
        return sorted(found)

    @contextmanager
    def _speaking(self, verb: str) -> Iterator[tuple[Any, str]]:
        """The file system and the place in it; whatever it raises becomes one sentence."""
        try:
            yield open_storage(self.url)
        except (CheckpointError, InputError):
            raise
        except Exception as error:  # each file system has its own
            raise CheckpointError(f"the storage {self.url} could not be {verb}: {_why(error)}") from error


def open_storage(url: str) -> tuple[Any, str]:
    """The file system that a URL names, and the place in it; InputError if there is none."""
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise InputError(f"the storage {url!r} cannot be used: {' '.join(str(error).split())}") from error
    return system, str(root).rstrip("/")


def check(url: str) -> None:
    """See that storage can be written; InputError if not."""
    system, root = open_storage(url)
    try:
        _make_folder(system, root)
        probe = f"{root}/.rota-{os.getpid()}"
        try:
            system.pipe_file(probe, b"rota")
            if system.cat_file(probe) != b"rota":
                raise OSError("it does not give back what was written")
        except Exception:
            with contextlib.suppress(Exception):  # that it cannot be written is what counts
                system.rm_file(probe)
            raise
        system.rm_file(probe)
    except Exception as error:  # each file system has its own
        raise InputError(f"the storage {url} cannot be written: {_why(error)}") from error


def _why(error: Exception) -> str:
    """What a file system says, and what helps where the system of this machine refused it."""
    if (refused := refusal(error)) is not None:
        return f"{reason(refused)}; {advice(refused)}"
    return " ".join(str(error).split()) or type(error).__name__


def _make_folder(system: Any, place: str) -> None:
    """Make the place; where it is a folder of this machine, for this user alone."""
    if _is_here(system):
        files.make_private_folder(Path(place))
    else:
        system.makedirs(place, exist_ok=True)


def _put(system: Any, path: Path, place: str) -> None:
    """Copy a file to storage; to a folder of this machine, for this user alone."""
    if _is_here(system):
        files.make_private_file(Path(place))
    system.put_file(str(path), place)


def _is_here(system: Any) -> bool:
    return "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,))
