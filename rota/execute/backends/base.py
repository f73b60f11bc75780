"""What the controller needs of the place where tasks run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rota.runtime.messages import Report
from rota.task import Task


@dataclass(frozen=True, kw_only=True)
class WorkerLost:
    """The worker of a device died or hung, and has been ended. The next launch starts a new one."""

    reason: str
    retry: bool
    """Whether another attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class DeviceGone:
    """A device is not there any more; what ran on it was told as lost before."""

    reason: str
    in_doubt: bool = False
    """Whether this may be for a moment: it comes again, or is told to be gone once more, for good."""


@dataclass(frozen=True, kw_only=True)
class DeviceCame:
    """There is a new device."""

    memory_bytes: int


Sign = tuple[str, Report | WorkerLost | DeviceGone | DeviceCame]
"""A device, and what was heard of it."""


class Backend(Protocol):
    """Runs tasks on devices; one at a time on each."""

    def now_s(self) -> float:
        """The time, as the journal keeps it; it never goes back."""
        ...

    def launch(self, devices: Sequence[str], task: Task, *, attempt: int, folder: Path, storage: str = "") -> None:
        """Start a task on devices that have none; the first leads. TaskError if it cannot be sent there."""
        ...

    def open_pool(self, devices: Sequence[str], count: int) -> tuple[str, ...]:
        """Let so many tasks share devices that have none: the names of their places, each like a device."""
        ...

    def close_place(self, place: str) -> None:
        """A place in a pool is not needed any more; with the last one the pool is gone."""
        ...

    def halt(self, device: str) -> None:
        """Ask the device's task to save itself and leave; it reports Halted."""
        ...

    def kill(self, device: str) -> None:
        """End the device's worker at once; nothing more is heard of its task."""
        ...

    def stored(self, devices: Sequence[str]) -> None:
        """Tell these workers that what was heard of them is in the journal."""
        ...

    def poll(self, timeout_s: float) -> list[Sign]:
        """What was heard, in order; waits up to `timeout_s` for the first."""
        ...

    def close(self) -> None:
        """End every worker and let go of everything."""
        ...
