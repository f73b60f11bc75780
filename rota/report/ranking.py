"""Which task did best: the order of the tasks in every table."""

from __future__ import annotations

import math

from rota.execute.record import RunRecord, TaskRecord
from rota.execute.states import TaskState

VALID_LOSS = "valid/loss"
TRAIN_LOSS = "train/loss"

_STATES = (
    TaskState.FINISHED,
    TaskState.RUNNING,
    TaskState.INTERRUPTED,
    TaskState.PENDING,
    TaskState.STOPPED,
    TaskState.DIVERGED,
    TaskState.FAILED,
)


def rank(record: RunRecord, metric: str | None = None) -> list[TaskRecord]:
    """The finished tasks, lowest `metric` first, then the others by state.

    A task whose metric is NaN or missing comes after those that have it. Equal tasks keep the order of the sweep.
    """
    metric = metric if metric is not None else ranking_metric(record)

    def place(task: TaskRecord) -> tuple[int, bool, float, int]:
        value = task.metrics.get(metric, math.nan) if task.state is TaskState.FINISHED else math.nan
        unknown = math.isnan(value)
        return _STATES.index(task.state), unknown, 0.0 if unknown else value, task.index

    return sorted(record.tasks.values(), key=place)


def ranking_metric(record: RunRecord) -> str:
    """What tasks are ranked by: the validation loss, or the training loss where nothing was validated."""
    validated = any(VALID_LOSS in task.metrics for task in record.tasks.values())
    return VALID_LOSS if validated else TRAIN_LOSS


def is_ranked(task: TaskRecord, metric: str) -> bool:
    """Whether a task has a place: it finished, and its metric is a number."""
    return task.state is TaskState.FINISHED and not math.isnan(task.metrics.get(metric, math.nan))
