"""`rota run`: train the sweep that a file defines."""

from __future__ import annotations

from pathlib import Path

import click

from rota.cli.options import (
    cluster_of,
    cluster_option,
    device_options,
    json_option,
    objective_option,
    print_json,
    profile_option,
    storage_option,
)
from rota.cli.sweep_file import load_source, split
from rota.errors import InputError
from rota.execute.run import RunOptions, run_source
from rota.execute.states import RunState
from rota.report.summary import run_summary, summary_words
from rota.result import Result
from rota.schedule.problem import Objective
from rota.store.run_folder import new_run_path


@click.command()
@click.argument("file", metavar="FILE[:NAME]")
@click.option("--out", type=click.Path(path_type=Path), help="The run folder; by default a new one below runs/.")
@click.option("--retries", default=2, show_default=True, help="How often a task goes on after its worker died.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--strategy", metavar="S", help="How tasks run on devices: tensor, 'data(2) * tensor(2)', ...")
@objective_option
@profile_option
@cluster_option
@storage_option
@device_options
@json_option
def run(
    file: str,
    out: Path | None,
    retries: int,
    quiet: bool,
    strategy: str | None,
    objective: Objective,
    no_profile: bool,
    cluster: str | None,
    storage: str,
    devices: int | None,
    memory: str | None,
    kind: str | None,
    as_json: bool,
) -> None:
    """Train every task of the sweep that FILE defines.

    FILE is Python and defines a rota.Sweep; with several, say which as FILE:NAME. With --out naming the folder of an
    earlier run of the same file, that run goes on.
    """
    path, _ = split(file)
    options = RunOptions(
        cluster=cluster_of(cluster, devices=devices, memory=memory, kind=kind),
        code=path.absolute().parent,
        out=out or new_run_path(path.stem),
        retries=retries,
        storage=storage,
        progress=not quiet,
        strategy=strategy,
        objective=objective,
        profile=not no_profile,
    )
    finish(run_source(lambda: load_source(file), options), as_json=as_json)


def finish(result: Result, *, as_json: bool) -> None:
    """Print how a run ended, and exit with the code that says so."""
    if as_json:
        print_json(run_summary(result))
    else:
        click.echo(summary_words(result))
    codes = {RunState.FINISHED: 0, RunState.INTERRUPTED: 130}
    raise click.exceptions.Exit(codes.get(result.state, 1))


def check_file_is_given(source: str, run_path: Path) -> None:
    """A run that was begun in a script has no file that could be read again."""
    if not source:
        raise InputError(
            f"the run in {run_path} was begun by a script or notebook; resume it by running that again with "
            f"out={str(run_path)!r}"
        )
