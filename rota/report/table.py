"""Tables for people: the ranking of a run, as text and for notebooks."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from rota.execute.record import RunRecord, TaskRecord
from rota.execute.states import TaskState
from rota.report.ranking import rank, ranking_metric

_TEXT_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text with a heading; prints as a table, and shows as one in a notebook."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=_TEXT_WIDTH, color_system=None).print(self.__rich__())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")

    __repr__ = __str__

    def __rich__(self) -> RichTable:
        table = RichTable(box=SIMPLE_HEAD, pad_edge=False)
        for place, column in enumerate(self.columns):
            numbers = all(_looks_numeric(row[place]) for row in self.rows)
            table.add_column(column, justify="right" if numbers else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def _repr_html_(self) -> str:
        def line(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        return f"<table><thead>{line(self.columns, 'th')}</thead><tbody>{body}</tbody></table>"


def ranking_table(record: RunRecord) -> Table:
    """The tasks, best first, with what distinguishes them and how they ended."""
    metric = ranking_metric(record)
    tasks = rank(record)
    settings = list(dict.fromkeys(name for task in tasks for name in task.settings))
    names = [metric] + (["train/loss"] if metric != "train/loss" else [])
    rows = []
    for place, task in enumerate(tasks, start=1):
        rows.append(
            (
                str(place) if task.state is TaskState.FINISHED else "",
                task.name,
                *(format_value(task.settings.get(name, "")) for name in settings),
                *(format_value(task.metrics.get(name, "")) for name in names),
                format_steps(task),
                format_seconds(task.busy_s),
                task.state.value,
            )
        )
    return Table(columns=("", "task", *settings, *names, "step", "time", "state"), rows=tuple(rows))


def format_value(value: object) -> str:
    """A setting or a metric in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_steps(task: TaskRecord) -> str:
    """How far a task is: 120/400."""
    return str(task.step) if task.total_steps is None else f"{task.step}/{task.total_steps}"


def format_seconds(seconds: float | None) -> str:
    """A duration in few characters: 8.1 s, 2:05, 3:20:00."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _looks_numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-+." or cell in ("nan", "inf")
