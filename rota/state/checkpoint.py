"""Checkpoints on disk: safetensors and JSON, committed by a rename, verified by checksums.

A task's checkpoints live side by side in one folder, numbered in the order of writing. The newest committed one counts;
the one before it is kept, so that a damaged file costs a few steps and not the task.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rota.errors import CheckpointError, CorruptCheckpointError, UnfitCheckpointError
from rota.refusals import is_damage, reason, refusal
from rota.state import files, inside
from rota.state.tree import flatten, unflatten

_FORMAT = 1
_MOST_COMMIT_BYTES = 2**16
KEPT = 2
_TENSORS, _STATE, _COMMIT = "tensors.safetensors", "state.json", "commit.json"
FILES = (_TENSORS, _STATE, _COMMIT)
"""In the order in which they are written."""
_NAME = re.compile(r"checkpoint-(\d{8,})")
_TAKEN = re.compile(r"checkpoint-(\d{8,})(\.damaged)?")


UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, SafetensorError)
Use: TypeAlias = Callable[[Any], None]
"""Goes on from a tree; CorruptCheckpointError or UnfitCheckpointError if that cannot be done."""
"""What reading something else than was written may raise."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read back and found whole."""

    path: Path
    tree: Any


def write(folder: Path, tree: Any) -> Path:
    """Commit a new checkpoint and drop the ones that are no longer needed."""
    skeleton, tensors = flatten(tree)
    return write_flat(folder, skeleton, tensors)


def write_flat(folder: Path, skeleton: Any, tensors: dict[str, torch.Tensor]) -> Path:
    """As `write`, for state that `flatten` has already split (the background writer copies it in between)."""
    side = folder / f".writing-{os.getpid()}"
    try:
        inside.check_folder(folder)
        files.make_private_subfolder(folder)
        target = folder / f"checkpoint-{_next_number(folder):08d}"
        state = json.dumps({"format": _FORMAT, "tree": skeleton})
        if len(state) > inside.MOST_TEXT_BYTES:
            raise ValueError(
                f"the numbers and texts in it take {len(state)} bytes, and at most {inside.MOST_TEXT_BYTES} can be; "
                "keep what is large as tensors"
            )
        inside.remove(side, inside.CHECKPOINT)
        side.mkdir(mode=0o700)
        files.make_private_file(side / _TENSORS)
        save_file(_separate(tensors), side / _TENSORS)
        files.sync_file(side / _TENSORS)
        files.write_text(side / _STATE, state)
        files.write_text(side / _COMMIT, json.dumps({name: _fingerprint(side / name) for name in (_TENSORS, _STATE)}))
        files.sync_folder(side)
        files.about_to_commit()
        os.rename(side, target)
        files.sync_folder(folder)
    except Exception as error:  # also what safetensors raises for a type that it lacks
        inside.remove(side, inside.CHECKPOINT)
        raise CheckpointError(f"the checkpoint in {folder} could not be written: {_reason(error)}") from error
    for path in committed(folder)[:-KEPT]:
        inside.remove(path, inside.CHECKPOINT)
    return target


def read_latest(
    folder: Path,
    *,
    notice: Callable[[str], None] | None,
    fetch: Callable[[], None] | None = None,
    use: Use = lambda tree: None,
) -> Checkpoint | None:
    """The newest checkpoint that is whole and of use; a damaged one is set aside, and said through `notice`.

    `fetch` then copies what another place has of those that are missing. Without `notice` nothing is changed: that is
    for the other processes of a task. One that does not fit is damaged if one before it fits; if none does, the task
    has changed: UnfitCheckpointError, and all stay.
    """
    inside.check_folder(folder)
    inside.check(folder, inside.CHECKPOINTS)
    if notice is not None:
        clear_up(folder)
    left = committed(folder)
    asked: set[Path] = set()
    unfit: list[tuple[Path, UnfitCheckpointError]] = []
    while left:
        path = left.pop()
        try:
            found = Checkpoint(path=path, tree=read(path))
            _used(found, use)
        except UnfitCheckpointError as error:
            unfit.append((path, error))
            continue
        except CorruptCheckpointError as error:
            if notice is None:
                continue
            aside = path.with_name(path.name + ".damaged")
            _set_aside(path, aside)
            if fetch is not None and path not in asked:
                asked.add(path)
                fetch()
                left = committed(folder)
            instead = "the one before it is used" if left else "there is no other, so training begins anew"
            if left and left[-1].name >= path.name:
                instead = "its copy in the storage is used"
            notice(f"{error}; it was set aside as {aside.name}, and {instead}")
            continue
        if notice is not None:
            for other, why in unfit:
                aside = other.with_name(other.name + ".damaged")
                _set_aside(other, aside)
                notice(f"checkpoint {other.name}: {why}; {path.name} fits, so it was set aside as {aside.name}")
        return found
    if unfit:
        raise unfit[0][1]
    return None


def _used(found: Checkpoint, use: Use) -> None:
    try:
        use(found.tree)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"checkpoint {found.path.name} {error}") from error


def clear_up(folder: Path) -> None:
    """Remove what killed processes were writing."""
    inside.remove_each(folder, r"\.writing-\d+", inside.CHECKPOINT)


def _set_aside(path: Path, aside: Path) -> None:
    inside.remove(aside, inside.CHECKPOINT)
    try:
        os.rename(path, aside)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} is damaged and cannot be renamed to {aside.name} ({_reason(error)}); "
            f"move the folder {path.name} out of {path.parent}"
        ) from error


def read(path: Path) -> Any:
    """Read one checkpoint, after comparing every byte with what was committed."""
    try:
        commit = _parsed(inside.read_text(path / _COMMIT, most_bytes=_MOST_COMMIT_BYTES))
        # All sizes first: a file that was made larger is not read to its end.
        altered = [name for name in (_TENSORS, _STATE) if commit[name]["bytes"] != _size_bytes(path / name)]
        altered += [name for name in (_TENSORS, _STATE) if not altered and commit[name] != _fingerprint(path / name)]
        if altered:
            raise CorruptCheckpointError(f"checkpoint {path.name} is damaged ({altered[0]} was truncated or altered)")
        state = _parsed(inside.read_text(path / _STATE))
        if state["format"] != _FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {state['format']}, and this rota reads format {_FORMAT}; "
                "use the version of rota that wrote it"
            )
        return unflatten(state["tree"], load_file(path / _TENSORS))
    except (OSError, *UNREADABLE) as error:
        refused = refusal(error)
        if refused is not None and not is_damage(refused):
            raise CheckpointError(f"checkpoint {path} cannot be read ({reason(refused)})") from error
        raise CorruptCheckpointError(f"checkpoint {path.name} is damaged ({_reason(error)})") from error


def adopt(side: Path, folder: Path, number: int) -> None:
    """Take a checkpoint that was copied from elsewhere among those of a folder."""
    target = folder / f"checkpoint-{number:08d}"
    for name in FILES:
        files.sync_file(side / name)
    try:
        os.rename(side, target)
    except OSError:
        inside.remove(side, inside.CHECKPOINT)
        if not target.is_dir():  # otherwise another process of the task was faster
            raise
    files.sync_folder(folder)


def number_of(path: Path) -> int:
    """Of a committed checkpoint."""
    return int(path.name.removeprefix("checkpoint-"))


def committed(folder: Path) -> list[Path]:
    """The committed checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def write_model(path: Path, weights: Mapping[str, Any]) -> None:
    """Write a model's weights under their plain PyTorch names; tied weights are written under each name."""
    # What a module's get_extra_state gives need not be a tensor; it is in the checkpoint, and not here.
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    try:
        with files.replacing(path) as side:
            save_file(_separate(tensors), side)
    except Exception as error:
        raise CheckpointError(f"the model could not be written to {path}: {_reason(error)}") from error


def _separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in memory of their own: safetensors refuses those that share it."""
    separate: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        storage = copy.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != copy.nbytes:
            copy = copy.clone()
        storages.add(copy.untyped_storage().data_ptr())
        separate[name] = copy
    return separate


def _next_number(folder: Path) -> int:
    taken = [int(match[1]) for path in folder.iterdir() if (match := _TAKEN.fullmatch(path.name))]
    return max(taken, default=0) + 1


def _parsed(text: str) -> Any:
    """Of text within bounds: what takes more memory than there is was not written by rota."""
    try:
        return json.loads(text)
    except MemoryError as error:
        raise ValueError("its text does not fit into memory") from error


def _size_bytes(path: Path) -> int:
    with open(inside.opened(path, os.O_RDONLY), "rb") as file:
        return os.fstat(file.fileno()).st_size


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(inside.opened(path, os.O_RDONLY), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.seek(0, os.SEEK_END), "sha256": digest}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return " ".join(str(error).split()) or type(error).__name__
