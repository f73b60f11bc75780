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
    expected_s: float
    """How long it is expected to take; only the order matters where no step was measured yet."""

    @property
    def order(self) -> tuple[float, int]:
        """Sorts the longest first, and equal ones as the user listed them."""
        return (-self.expected_s, self.index)


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
    """One device for each task, the longest task first: with equal devices at most 4/3 of the best makespan."""

    def decide(self, waiting: Sequence[Waiting], free: Sequence[str]) -> Sequence[Launch]:
        """Pair the longest tasks with the free devices."""
        return [Launch(task=task.name, device=device) for task, device in zip(waiting, free, strict=False)]


def waiting(task: TaskRecord) -> Waiting:
    """How the policy sees a task. A task of unknown length goes first: it may be the longest."""
    steps = task.remaining_steps
    step_s = task.step_s if task.step_s is not None else float(task.facts.get("accumulate", 1))
    return Waiting(name=task.name, index=task.index, expected_s=math.inf if steps is None else steps * step_s)
