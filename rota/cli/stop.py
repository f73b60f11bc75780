"""`rota stop`: let a running run, or one task of it, save itself and end."""

from __future__ import annotations

import shlex
import time

import click

from rota.cli.options import json_option, print_json, run_argument
from rota.cli.output import tell
from rota.errors import InputError, RotaError
from rota.report.format import one_line
from rota.report.summary import going_on
from rota.result import open_run
from rota.store.journal import ask
from rota.store.run_folder import DEFAULT_ROOT, RunFolder, find_run, list_runs

_WAIT_S = 15.0


@click.command(short_help="Let a run, or one task of it, save itself and end.")
@run_argument
@click.argument("task", required=False)
@json_option
def stop(run: str | None, task: str | None, as_json: bool) -> None:
    """Stop RUN, or only TASK of it; checkpoints are saved first, and `rota resume` goes on from them.

    RUN is a folder, or a name below runs/. Without it, the run below runs/ that goes is stopped, if only one does.
    """
    folder = _only_one() if run is None else find_run(run)
    result = open_run(folder.path)
    if task is not None and result.task(task).state.ended:
        raise InputError(f"task {task!r} has already ended: it is {result.task(task).state}")
    if not folder.is_held():
        raise InputError(f"the run in {folder.path} is not running; there is nothing to stop")
    ask(folder.journal, verb="stop", task=task or "")
    _wait(folder, task)
    if as_json:
        print_json({"run": str(folder.path), "stopped": task or "all"})
    else:
        tell(one_line(f"stopped {task or 'the run'}; go on with: {going_on(folder.path, result.record.source)}"))


def _only_one() -> RunFolder:
    """The run that goes; InputError if that may be another than the one that the user means."""
    going = [folder for folder in list_runs() if folder.is_held()]
    if not going:
        raise InputError(f"no run in {DEFAULT_ROOT} is running; name the folder of the run: `rota stop RUN`")
    if len(going) > 1:
        ways = " or ".join(f"`rota stop {shlex.quote(str(folder.path))}`" for folder in going)
        raise InputError(f"{len(going)} runs are running; say which one is to stop: {ways}")
    return going[0]


def _wait(folder: RunFolder, task: str | None) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline_s:
        if not folder.is_held() or (task is not None and open_run(folder.path).task(task).state.ended):
            return
        time.sleep(0.1)
    raise RotaError(f"the run in {folder.path} has not answered for {_WAIT_S:g} s; see `rota status`")
