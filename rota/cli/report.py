"""`rota report`: write the HTML report of a run."""

from __future__ import annotations

import click

from rota.cli.options import json_option, print_json, run_argument
from rota.cli.output import tell
from rota.report.format import one_line
from rota.report.html import write_report
from rota.store.run_folder import find_run


@click.command(short_help="Write the HTML report of a run.")
@run_argument
@json_option
def report(run: str | None, as_json: bool) -> None:
    """Write RUN's report.html anew (a folder, or a name below runs/; by default the latest) and say where it is."""
    path = write_report(find_run(run))
    if as_json:
        print_json({"report": str(path)})
    else:
        tell(one_line(str(path)))
