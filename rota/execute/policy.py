"""Which waiting task gets which free device. A policy returns decisions; the controller acts on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rota.execute.record import TaskRecord


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A task that could run now."""

    name: str
    index: int
    """Its place in the sweep."""
    batches: float
    """How many batches it has still to train on; infinite if that is not known yet."""

    @property
    def order(self) -> tuple[float, int]:
        """Sorts the longest first, and equal ones as the user listed them."""
        return (-self.batches, self.index)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A decision: this task starts on this device now."""

    task: str
    device: str


class Policy(Protocol):
    """Decides what to launch."""

    def decide(self, waiting: Sequence[Waiting], free: Sequence[str]) -> Sequence[Launch]:
        """What to launch, given the tasks that wait (longest first) and the devices that are free."""
        ...


class LongestFirst:
    """One device for each task, the one with the most batches left first.

    With equal devices and equal batches the makespan is at most 4/3 of the best.
    """

    def decide(self, waiting: Sequence[Waiting], free: Sequence[str]) -> Sequence[Launch]:
        """Pair the longest tasks with the free devices."""
        return [Launch(task=task.name, device=device) for task, device in zip(waiting, free, strict=False)]


def waiting(task: TaskRecord) -> Waiting:
    """How the policy sees a task. A task of unknown length goes first: it may be the longest."""
    steps = task.remaining_steps
    batches = math.inf if steps is None else float(steps * task.facts.get("accumulate", 1))
    return Waiting(name=task.name, index=task.index, batches=batches)
