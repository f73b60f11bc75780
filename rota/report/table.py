"""Tables for people: the ranking of a run, as text and for notebooks."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from rota.execute.record import RunRecord
from rota.report.format import duration, one_line, setting, steps
from rota.report.format import metric as format_metric
from rota.report.ranking import TRAIN_LOSS, is_ranked, rank, ranking_metric

_TEXT_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text with a heading; prints as a table, and shows as one in a notebook."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=_TEXT_WIDTH, color_system=None, emoji=False).print(self.__rich__())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")

    __repr__ = __str__

    def __rich__(self) -> RichTable:
        table = RichTable(box=SIMPLE_HEAD, pad_edge=False)
        for place, column in enumerate(self.columns):
            numbers = all(_looks_numeric(row[place]) for row in self.rows)
            table.add_column(Text(one_line(column)), justify="right" if numbers else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(one_line(cell)) for cell in row))
        return table

    def _repr_html_(self) -> str:
        def line(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(one_line(cell))}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        return f"<table><thead>{line(self.columns, 'th')}</thead><tbody>{body}</tbody></table>"


def ranking_table(record: RunRecord) -> Table:
    """The tasks, best first, with what distinguishes them and how they ended."""
    metric = ranking_metric(record)
    tasks = rank(record)
    settings = list(dict.fromkeys(name for task in tasks for name in task.settings))
    names = [metric] + ([TRAIN_LOSS] if metric != TRAIN_LOSS else [])
    rows = []
    for place, task in enumerate(tasks, start=1):
        rows.append(
            (
                str(place) if is_ranked(task, metric) else "",
                task.name,
                *(setting(task.settings.get(name, "")) for name in settings),
                *(format_metric(task.metrics.get(name)) for name in names),
                steps(task),
                duration(task.busy_s(now_s=record.last_s)),
                task.state.value,
            )
        )
    return Table(columns=("", "task", *settings, *names, "step", "time", "state"), rows=tuple(rows))


def _looks_numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-+." or cell in ("NaN", "∞", "−∞")
