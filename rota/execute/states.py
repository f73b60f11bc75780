"""The states of tasks and runs, and which may follow which."""

from __future__ import annotations

import enum


class TaskState(enum.StrEnum):
    """Where a task stands."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    DIVERGED = "diverged"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    """It ran when the controller was killed, which could not write that down: only readers see this, in no journal."""

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to it in this run, unless the user asks."""
        return self not in (TaskState.PENDING, TaskState.RUNNING, TaskState.INTERRUPTED)


class RunState(enum.StrEnum):
    """Where a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    """Every task finished."""
    INCOMPLETE = "incomplete"
    """Every task ended, and not all of them well."""
    INTERRUPTED = "interrupted"
    """Stopped before its end; it can be resumed."""


TASK_TRANSITIONS: dict[TaskState, frozenset[TaskState]] = {
    TaskState.PENDING: frozenset({TaskState.RUNNING, TaskState.STOPPED}),
    TaskState.RUNNING: frozenset(TaskState) - {TaskState.RUNNING, TaskState.INTERRUPTED},
    TaskState.FINISHED: frozenset(),
    # A resume may ask for another try of these; a diverged task would only diverge again.
    TaskState.FAILED: frozenset({TaskState.PENDING}),
    TaskState.STOPPED: frozenset({TaskState.PENDING}),
    TaskState.DIVERGED: frozenset(),
    TaskState.INTERRUPTED: frozenset(),
}

RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.RUNNING: frozenset(RunState),
    RunState.FINISHED: frozenset({RunState.RUNNING}),
    RunState.INCOMPLETE: frozenset({RunState.RUNNING}),
    RunState.INTERRUPTED: frozenset({RunState.RUNNING}),
}
