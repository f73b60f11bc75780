"""Writes checkpoints in the background: training waits for the copy to memory and for nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rota.errors import CheckpointError
from rota.state import checkpoint
from rota.state.mirror import Mirror
from rota.state.tree import flatten
from rota.threads import OwnedThread

_SMALL_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of a checkpoint that was handed to the writer."""

    step: int
    write_s: float
    error: str | None
    """Why it was not written, or None."""
    cause: Exception | None = None
    """What that comes from."""


class Saver(Protocol):
    """Makes the state of a task durable."""

    copy_s: float
    """How long training waited for the last copy."""
    last: Written | None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written now."""
        ...

    def submit(self, tree: Any, *, step: int, fresh: bool = False) -> None:
        """Keep the state as it is now; training may go on when this is over. What is `fresh` nobody else changes."""
        ...

    def wait(self) -> None:
        """Wait until nothing is being written."""
        ...

    def whole(self, tree: Any) -> Any:
        """A tree that was submitted, with all of its tensors."""
        ...


class CheckpointWriter:
    """One background thread that writes one checkpoint at a time; `done` is called from it."""

    def __init__(
        self,
        folder: Path,
        *,
        done: Callable[[Written], None],
        mirror: Mirror | None = None,
        has_room: Callable[[int], bool] = lambda size_bytes: True,
    ) -> None:
        """A checkpoint counts as written when the `mirror` has it, too.

        Where there is no room for a copy of so many bytes beside what a step takes, training waits for the write.
        """
        self._has_room = has_room
        self._folder = folder
        self._mirror = mirror
        self._done = done
        self._thread: OwnedThread | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._keeps_buffers = True
        self.copy_s = 0.0
        """How long training waited for the last copy."""
        self.last: Written | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, tree: Any, *, step: int, fresh: bool = False) -> None:
        """Copy the state and write it in the background. Waits for the write before it, if that is still going.

        Of what is `fresh`, only small tensors are copied: counters of steps may still be the optimizer's own.
        """
        self.wait()
        started_s = time.perf_counter()
        skeleton, tensors = flatten(tree)
        held = sum(buffer.nbytes for buffer in self._buffers.values())
        copies = fresh or self._has_room(sum(tensor.nbytes for tensor in tensors.values()) - held)
        self._keeps_buffers = copies and not fresh
        if not copies:
            self._buffers = {name: tensor.detach() for name, tensor in tensors.items()}
            self._write(skeleton, step)
            return
        self._buffers = {
            name: tensor if fresh and tensor.nbytes > _SMALL_BYTES else self._copy(name, tensor)
            for name, tensor in tensors.items()
        }
        self.copy_s = time.perf_counter() - started_s
        thread = OwnedThread(lambda: self._write(skeleton, step), name="checkpoint")
        try:
            thread.start()
        except RuntimeError:  # no memory is left for the stack of a thread; the checkpoint matters more than the wait
            self._write(skeleton, step)
        else:
            self._thread = thread

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def whole(self, tree: Any) -> Any:
        """A tree that was submitted, with all of its tensors: it had them."""
        return tree

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        # Fresh memory costs a page fault per 4 KiB, which is dearer than the copy: use the last copy's again.
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffer.copy_(tensor)

    def _write(self, skeleton: Any, step: int) -> None:
        started_s = time.perf_counter()
        error: str | None = None
        cause: Exception | None = None
        try:
            path = checkpoint.write_flat(self._folder, skeleton, self._buffers)
            if self._mirror is not None:
                self._mirror.send(path)
        except CheckpointError as failure:
            error, cause = str(failure), failure
        except Exception as failure:  # a bug here must not end as a checkpoint that is silently missing
            error, cause = f"{type(failure).__name__}: {failure}", failure
        if not self._keeps_buffers:
            self._buffers = {}
        self.last = Written(step=step, write_s=time.perf_counter() - started_s, error=error, cause=cause)
        self._done(self.last)
