"""`rota run`: train the sweep that a file defines."""

from __future__ import annotations

from pathlib import Path

import click

from rota.cli.options import asked_options, json_option, print_json, storage_option
from rota.cli.output import tell_if_possible
from rota.cli.sweep_file import load_source, split
from rota.errors import InputError
from rota.execute.asked import Asked
from rota.execute.run import RunOptions, run_source
from rota.execute.states import RunState
from rota.report.summary import run_summary, summary_words
from rota.result import Result
from rota.store.run_folder import new_run_path


@click.command()
@click.argument("file", metavar="FILE[:NAME]")
@click.option("--out", type=click.Path(path_type=Path), help="The run folder; by default a new one below runs/.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@asked_options
@storage_option
@json_option
def run(file: str, out: Path | None, quiet: bool, asked: Asked, storage: str, as_json: bool) -> None:
    """Train every task of the sweep that FILE defines.

    FILE is Python and defines a rota.Sweep; with several, say which as FILE:NAME. With --out naming the folder of an
    earlier run of the same file, that run goes on, with the options that it had.
    """
    path, _ = split(file)
    options = RunOptions(
        asked=asked,
        code=path.absolute().parent,
        out=out or new_run_path(path.stem),
        storage=storage,
        progress=not quiet,
    )
    finish(run_source(lambda: load_source(file), options), as_json=as_json)


def finish(result: Result, *, as_json: bool) -> None:
    """Print how a run ended, and exit with the code that says so, also where nobody takes what is printed."""
    if as_json:
        print_json(run_summary(result))
    else:
        tell_if_possible(summary_words(result))
    codes = {RunState.FINISHED: 0, RunState.INTERRUPTED: 130}
    raise click.exceptions.Exit(codes.get(result.state, 1))


def check_file_is_given(source: str, run_path: Path, *, failed: bool) -> None:
    """A run that was begun in a script has no file that could be read again."""
    if not source:
        raise InputError(
            f"the run in {run_path} was begun by a script or notebook; resume it by running that again with "
            f"out={str(run_path)!r}{' and retry_failed=True' if failed else ''}"
        )
