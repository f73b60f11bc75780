"""`rota resume`: go on with a run that was interrupted, killed or stopped."""

from __future__ import annotations

import click

from rota.cli.options import (
    cluster_of,
    cluster_option,
    device_options,
    json_option,
    objective_option,
    profile_option,
    run_argument,
    storage_option,
)
from rota.cli.run import check_file_is_given, finish
from rota.cli.sweep_file import load_source, split
from rota.execute.record import RunRecord
from rota.execute.run import RunOptions, run_source
from rota.schedule.problem import Objective
from rota.store.journal import read_summary
from rota.store.run_folder import find_run


@click.command(short_help="Go on with a run from its checkpoints.")
@run_argument
@click.option("--failed", is_flag=True, help="Try failed tasks again too.")
@click.option("--allow-changes", is_flag=True, help="Go on although the sweep file has changed.")
@click.option("--retries", default=2, show_default=True, help="How often a task goes on after its worker died.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--strategy", metavar="S", help="How tasks run on devices from now on.")
@objective_option
@profile_option
@cluster_option
@storage_option
@device_options
@json_option
def resume(
    run: str | None,
    failed: bool,
    allow_changes: bool,
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
    """Go on with RUN (a folder, or a name below runs/; by default the latest) from its checkpoints.

    The sweep file is imported again and must not have changed. Stopped tasks go on too.
    """
    folder = find_run(run)
    record = RunRecord.replay(read_summary(folder.journal))
    check_file_is_given(record.source, folder.path)
    split(record.source)
    options = RunOptions(
        cluster=cluster_of(cluster, devices=devices, memory=memory, kind=kind),
        code=split(record.source)[0].absolute().parent,
        out=folder.path,
        retries=retries,
        storage=storage,
        progress=not quiet,
        retry_failed=failed,
        allow_changes=allow_changes,
        strategy=strategy,
        objective=objective,
        profile=not no_profile,
    )
    finish(run_source(lambda: load_source(record.source), options), as_json=as_json)
