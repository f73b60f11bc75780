"""`rota status`: how a run stands, read from its journal, while it goes or after."""

from __future__ import annotations

import click

from rota.cli.options import json_option, print_json, run_argument
from rota.cli.output import tell
from rota.report.format import one_line
from rota.report.summary import run_summary, status_words
from rota.result import Result, open_run


@click.command(short_help="Show how a run stands.")
@run_argument
@click.option("--task", help="Show one task, with the traceback if its own code raised.")
@json_option
def status(run: str | None, task: str | None, as_json: bool) -> None:
    """Show how RUN stands (a folder, or a name below runs/; by default the latest)."""
    result = open_run(run)
    if task is not None:
        _show_task(result, task, as_json=as_json)
    elif as_json:
        print_json(run_summary(result))
    else:
        tell(status_words(result))
        tell(result.table())


def _show_task(result: Result, name: str, *, as_json: bool) -> None:
    result.task(name)  # an unknown name is an error
    (summary,) = (one for one in run_summary(result)["tasks"] if one["name"] == name)
    if as_json:
        print_json(summary)
        return
    for key, value in summary.items():
        if key == "traceback":
            tell(f"traceback:\n{value}" if value else "", nl=bool(value))
        else:
            tell(one_line(f"{key}: {value}"))
