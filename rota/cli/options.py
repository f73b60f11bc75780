"""What several commands share: options, the width of a terminal, a line that says what is being done."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from rota.cli.output import tell
from rota.execute.asked import Asked
from rota.execute.run import RETRIES
from rota.report.format import one_line
from rota.schedule.problem import OBJECTIVES
from rota.streams import Droppable

_WIDEST, _NARROWEST = 160, 60

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
objective_option = click.option(
    "--objective", type=click.Choice(OBJECTIVES), default="makespan", show_default=True, help="What counts."
)
run_argument = click.argument("run", required=False)


storage_option = click.option(
    "--storage", metavar="URL", default="", help="Keep checkpoints and models there, too: s3://..., or a shared folder."
)


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--devices, --memory, --kind and --threads: which part of this machine to use, and how."""
    options = [
        click.option("--devices", type=int, metavar="N", help="How many devices to use; by default all."),
        click.option("--memory", metavar="SIZE", help="Memory of each device, for example 4GiB."),
        click.option("--kind", type=click.Choice(["cpu", "cuda"]), help="Use only devices of this kind."),
        click.option(
            "--threads", type=int, metavar="N", help="Threads that compute on each CPU device; by default one a core."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def asked_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How to run: what is kept with the run, for a resume. The command gets one `asked`."""

    @functools.wraps(command)
    def asking(**given: Any) -> Any:
        asked = Asked(**{field.name: given.pop(field.name) for field in dataclasses.fields(Asked)})
        return command(asked=asked, **given)

    options = [
        click.option(
            "--retries", type=int, show_default=str(RETRIES), help="How often a task goes on after its worker died."
        ),
        click.option("--strategy", metavar="S", help="How tasks run on devices: tensor, 'data(2) * tensor(2)', ..."),
        click.option("--objective", type=click.Choice(OBJECTIVES), show_default="makespan", help="What counts."),
        click.option(
            "--profile/--no-profile",
            default=None,
            help="Whether to measure before the run (the default); otherwise the longest tasks go first.",
        ),
        click.option(
            "--strict/--no-strict",
            default=None,
            help="Refuse a sweep with a model that cannot be captured; otherwise that one runs on one device.",
        ),
        click.option(
            "--shards",
            metavar="DIR",
            callback=lambda context, option, value: value and str(Path(value).absolute()),
            help="Keep what does not fit into memory in this folder, such as one on another disk.",
        ),
        click.option(
            "--cluster",
            metavar="ray[=ADDRESS]",
            help="Run on a Ray cluster: at ADDRESS or RAY_ADDRESS, or one started here.",
        ),
    ]
    wrapped = device_options(asking)
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def print_json(value: Any) -> None:
    """Print strict JSON: NaN and infinity, which JSON lacks, become null."""
    tell(json.dumps(_strict(value), indent=2))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def terminal_width() -> int:
    """How wide what is printed may be."""
    return min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((100, 24)).columns))


@contextmanager
def saying() -> Iterator[Callable[[str], None]]:
    """Says on a terminal what is being looked at, in a line that is gone afterwards."""
    stream = Droppable(sys.stderr)
    shown = stream.isatty()

    def say(sentence: str) -> None:
        if shown:
            stream.write(f"\r{one_line(sentence)[:_NARROWEST]:{_NARROWEST}}")
            stream.flush()

    try:
        yield say
    finally:
        say("")
        if shown:
            stream.write("\r")
            stream.flush()
