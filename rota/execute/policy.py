"""Which waiting task gets which free devices, and how it runs there. Policies decide; the controller acts on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rota.execute.record import RunRecord, TaskRecord


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A task that could run now."""

    name: str
    index: int
    """Its place in the sweep."""
    batches: float
    """How many batches it has still to train on; infinite if that is not known yet."""
    width: int = 1
    """How many devices it gets, unless the policy knows better."""

    @property
    def order(self) -> tuple[float, int]:
        """Sorts the longest first, and equal ones as the user listed them."""
        return (-self.batches, self.index)


@dataclass(frozen=True, kw_only=True)
class View:
    """What a policy sees."""

    record: RunRecord
    """All tasks and what is known of them; only to be read."""
    waiting: Sequence[Waiting]
    """The longest first."""
    free: Sequence[str]
    """Devices that have no task."""
    now_s: float
    devices: Sequence[str] = ()
    """All that there are, free or not."""
    in_doubt: int = 0
    """How many others cannot be reached, and may be there again in a moment."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A decision: this task starts on these devices now."""

    task: str
    devices: tuple[str, ...]
    strategy: str = ""
    """How it runs; empty for what the task itself says."""


@dataclass(frozen=True, kw_only=True)
class OpenPool:
    """A decision: these tasks share these devices from now on, shard by shard."""

    tasks: tuple[str, ...]
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A decision: this task saves itself and leaves its devices, to go on in another way."""

    task: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Tell:
    """A decision that changes nothing but what the user should know."""

    text: str


Decision = Launch | OpenPool | Switch | Tell


class Policy(Protocol):
    """Decides what to do."""

    def decide(self, view: View) -> Sequence[Decision]:
        """What to do now."""
        ...

    def another_way(self, task: TaskRecord) -> str:
        """The way in which a task runs has failed: drop it, and say what is left; empty if nothing is."""
        ...


class LongestFirst:
    """The task with the most batches left first, on as many devices as it wants.

    With equal devices and equal batches on one device each, the makespan is at most 4/3 of the best. A task that wants
    more devices than are free is waited for, so that narrower ones cannot keep it out for ever. It gets fewer where
    there are no more; not for the moment that it takes to learn whether a device is gone: nobody would widen it again.
    """

    def decide(self, view: View) -> Sequence[Decision]:
        """Give the longest tasks the free devices."""
        decisions = []
        left = list(view.free)
        for task in view.waiting:
            there = len(view.devices) + view.in_doubt
            width = min(task.width, there) if there else task.width  # some may have gone
            if width > len(left):
                break
            decisions.append(Launch(task=task.name, devices=tuple(left[:width])))
            del left[:width]
        return decisions

    def another_way(self, task: TaskRecord) -> str:
        """It knows of none."""
        return ""


def waiting(task: TaskRecord, width: int = 1) -> Waiting:
    """How the policy sees a task. A task of unknown length goes first: it may be the longest."""
    steps = task.remaining_steps
    batches = math.inf if steps is None else float(steps * task.facts.get("accumulate", 1))
    return Waiting(name=task.name, index=task.index, batches=batches, width=width)
