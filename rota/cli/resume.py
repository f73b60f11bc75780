"""`rota resume`: go on with a run that was interrupted, killed or stopped."""

from __future__ import annotations

import click

from rota.cli.options import asked_options, json_option, run_argument, storage_option
from rota.cli.run import check_file_is_given, finish
from rota.cli.sweep_file import read_source
from rota.errors import InputError
from rota.execute.asked import Asked
from rota.execute.record import RunRecord
from rota.execute.run import RunOptions, check_unchanged, run_source
from rota.store.journal import read_summary
from rota.store.run_folder import find_run


@click.command(short_help="Go on with a run from its checkpoints.")
@run_argument
@click.option("--failed", is_flag=True, help="Try failed tasks again too.")
@click.option("--allow-changes", is_flag=True, help="Go on although the sweep file has changed.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@asked_options
@storage_option
@json_option
def resume(
    run: str | None, failed: bool, allow_changes: bool, quiet: bool, asked: Asked, storage: str, as_json: bool
) -> None:
    """Go on with RUN (a folder, or a name below runs/; by default the latest) from its checkpoints.

    The sweep file is imported again and must not have changed. Stopped tasks go on too. Devices, memory,
    strategy and the other options are those that the run had; what is given here is used from now on.
    """
    folder = find_run(run)
    record = RunRecord.replay(read_summary(folder.journal))
    if not record.tasks:
        raise InputError(f"the run in {folder.path} has not begun; run the sweep file with --out {folder.path}")
    check_file_is_given(record.source, folder.path, failed=failed)
    sweep = read_source(record.source)
    file = sweep.path
    if file.resolve().is_relative_to(folder.path.resolve()):  # rota writes none there
        raise InputError(
            f"the journal of {folder.path} names {file} as the run's sweep, which is in the run folder itself; nothing "
            "there is run as code: move it elsewhere and run it with --out"
        )
    if not allow_changes:  # the journal says what is run: not before it is what it was
        check_unchanged(folder, sweep.given, before=record.source_digest, now=sweep.digest)
    options = RunOptions(
        asked=asked,
        code=file.absolute().parent,
        out=folder.path,
        storage=storage,
        progress=not quiet,
        retry_failed=failed,
        allow_changes=allow_changes,
    )
    finish(run_source(sweep.load, options), as_json=as_json)
