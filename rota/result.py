"""What a run gave: ranking, histories, and the trained models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rota.errors import InputError
from rota.execute.record import RunRecord, TaskRecord
from rota.execute.states import RunState, TaskState
from rota.report.ranking import rank
from rota.report.table import Table, ranking_table
from rota.state import model_file
from rota.store.journal import read_metrics
from rota.store.run_folder import RunFolder, find_run
from rota.sweep import Sweep

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """How one task ended."""

    name: str
    state: TaskState
    settings: dict[str, Any]
    metrics: dict[str, float]
    """The last value of each metric: "train/loss", "valid/loss", ..."""
    steps: int
    model_path: Path | None
    """model.safetensors, if the task finished."""
    reason: str
    """Why it did not finish."""


class Result:
    """A run, finished or not, as its folder tells it."""

    def __init__(self, folder: RunFolder, record: RunRecord, *, sweep: Sweep | None = None) -> None:
        self._folder = folder
        self._record = record
        self._sweep = sweep

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def report_path(self) -> Path:
        """The HTML report."""
        return self._folder.report

    @property
    def record(self) -> RunRecord:
        """Everything that the journal tells of the run."""
        return self._record

    @property
    def state(self) -> RunState:
        """finished, incomplete, interrupted or running."""
        return self._record.state

    @property
    def tasks(self) -> tuple[TaskResult, ...]:
        """Every task, best first."""
        return tuple(self._task_result(task) for task in rank(self._record))

    def task(self, name: str) -> TaskResult:
        """One task."""
        return self._task_result(self._find(name))

    def table(self) -> Table:
        """The ranking; print it, or let a notebook show it."""
        return ranking_table(self._record)

    def best(self, metric: str = "valid/loss", *, mode: Literal["min", "max"] = "min") -> TaskResult:
        """The finished task with the lowest (or highest) last value of a metric."""
        if mode not in ("min", "max"):
            raise InputError(f"mode must be 'min' or 'max', not {mode!r}")
        finished = [task for task in self._record.tasks.values() if task.state is TaskState.FINISHED]
        scored = [task for task in finished if not math.isnan(task.metrics.get(metric, math.nan))]
        if not scored:
            known = sorted({name for task in finished for name in task.metrics})
            tell = f"the metrics are {', '.join(known)}" if known else "no task has finished"
            raise InputError(f"no finished task has the metric {metric!r}; {tell}")
        sign = 1 if mode == "min" else -1
        return self._task_result(min(scored, key=lambda task: sign * task.metrics[metric]))

    def history(self, task: str | TaskResult) -> list[dict[str, float]]:
        """A dict for each step with "step" and the metrics; `pandas.DataFrame` takes it as it is."""
        return read_metrics(self._folder.journal, self._find(task).name)

    def load(self, task: str | TaskResult, *, model: Callable[[], torch.nn.Module] | None = None) -> torch.nn.Module:
        """The trained model, in eval mode. A result that was opened from its folder needs the `model` factory."""
        from safetensors.torch import load_file

        found = self._find(task)
        path = self._folder.model(found.name)
        if not path.is_file():
            why = f": {found.reason}" if found.reason else ""
            raise InputError(f"task {found.name!r} has no trained model; it is {found.state}{why}")
        if not model_file.is_whole(path):
            raise InputError(f"{path} is damaged; `rota resume` of the run writes it again from its last checkpoint")
        factory = model or (self._sweep[found.name].model if self._sweep is not None else None)
        if factory is None:
            raise InputError("a run folder holds no code: give the model factory, as load(name, model=...)")
        module = factory()
        weights = load_file(path)
        if any(value.dtype.is_floating_point and value.dtype.itemsize == 8 for value in weights.values()):
            module.double()
        missing, unexpected = module.load_state_dict(weights, strict=False)
        wrong = [name for name in missing if not name.endswith("_extra_state")] + list(unexpected)
        if wrong:
            raise InputError(f"{path} does not fit what the model factory makes: {wrong[0]} and {len(wrong) - 1} more")
        return module.eval()

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {state}" for state, count in self._record.counts().items())
        return f"<rota.Result {self.path}: {counts}>"

    def _find(self, task: str | TaskResult) -> TaskRecord:
        name = task.name if isinstance(task, TaskResult) else task
        found = self._record.tasks.get(name)
        if found is None:
            known = ", ".join(list(self._record.tasks)[:6])
            raise InputError(f"the run has no task {name!r}; it has {known}")
        return found

    def _task_result(self, task: TaskRecord) -> TaskResult:
        model = self._folder.model(task.name)
        return TaskResult(
            name=task.name,
            state=task.state,
            settings=task.settings,
            metrics=dict(task.metrics),
            steps=task.step,
            model_path=model if model_file.is_whole(model) else None,
            reason=task.reason,
        )


def open_run(run: str | Path | None = None) -> Result:
    """The result of a run: its folder, its name below ``runs/``, or by default the latest."""
    folder = find_run(run)
    return Result(folder, RunRecord.as_it_stands(folder))
