"""A run in a few words, or as plain values for JSON."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rota.errors import InputError
from rota.execute.asked import Asked
from rota.execute.states import RunState
from rota.report.format import duration, one_line
from rota.report.format import metric as format_metric
from rota.report.ranking import ranking_metric
from rota.result import Result


def run_summary(result: Result) -> dict[str, Any]:
    """Everything that `--json` tells of a run."""
    record = result.record
    return {
        "run": record.name,
        "path": str(result.path),
        "state": result.state.value,
        "report": str(result.report_path),
        "counts": record.counts(),
        "elapsed_s": record.elapsed_s,
        "tasks": [
            {
                "name": task.name,
                "state": task.state.value,
                "settings": task.settings,
                "devices": list(task.devices),
                "step": task.step,
                "total_steps": task.total_steps,
                "saved_step": task.saved_step,
                "attempts": task.attempt,
                "metrics": task.metrics,
                "step_s": task.step_s,
                "strategy": task.strategy,
                "switches": task.switches,
                "switch_s": task.switch_s,
                "model": str(path) if (path := result.task(task.name).model_path) else None,
                "reason": task.reason,
                "notices": task.notices,
                "traceback": task.traceback,
            }
            for task in record.tasks.values()
        ],
    }


def status_words(result: Result) -> str:
    """One line: which run, how it stands, for how long."""
    record = result.record
    counts = ", ".join(f"{count} {state}" for state, count in record.counts().items())
    lasted = duration(record.elapsed_s)
    return one_line(f"{result.path}: {result.state.value}; {counts}; {lasted}")


def going_on(path: Path, source: str) -> str:
    """What takes up a run again: a command, or for one that has no sweep file, the script or notebook that began it."""
    if source:
        return f"rota resume {shlex.quote(str(path))}"
    return f"the script or notebook that began it, with out={str(path)!r}"


def summary_words(result: Result) -> str:
    """What a person wants to read when a run has ended."""
    lines = []
    for task in result.tasks:
        if task.reason:
            lines.append(f"{task.name} {task.state.value}: {task.reason}")
    metric = ranking_metric(result.record)
    try:
        best = result.best(metric)
        lines.append(f"best model  {best.model_path}  ({metric} {format_metric(best.metrics[metric])})")
    except InputError:
        pass  # no task finished
    lines.append(f"report      {result.report_path}")
    if result.state is RunState.INTERRUPTED:
        lines.append(f"interrupted; go on with: {going_on(result.path, result.record.source)}")
        if words := Asked.of(result.record.asked).words():
            lines.append(f"            (it then has {words}, as now)")
    return "\n".join([str(result.table()), "", *map(one_line, lines)])
