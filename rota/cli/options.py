"""What several commands share: options, the width of a terminal, a line that says what is being done."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from rota.cluster import Cluster, local
from rota.errors import InputError
from rota.execute.clusters import ray
from rota.schedule.problem import OBJECTIVES

_WIDEST, _NARROWEST = 160, 60

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
objective_option = click.option(
    "--objective", type=click.Choice(OBJECTIVES), default="makespan", show_default=True, help="What counts."
)
profile_option = click.option(
    "--no-profile", is_flag=True, help="Measure nothing before the run; the longest tasks go first."
)
run_argument = click.argument("run", required=False)


cluster_option = click.option(
    "--cluster", metavar="ray[=ADDRESS]", help="Run on a Ray cluster: at ADDRESS or RAY_ADDRESS, or one started here."
)


storage_option = click.option(
    "--storage", metavar="URL", default="", help="Keep checkpoints and models there, too: s3://..., or a shared folder."
)


def cluster_of(cluster: str | None, *, devices: int | None, memory: str | None, kind: str | None) -> Cluster:
    """The devices that options ask for."""
    if cluster is None:
        return local(devices=devices, memory=memory, kind=kind)
    manager, _, address = cluster.partition("=")
    if manager != "ray":
        raise InputError(f"--cluster can be ray or ray=ADDRESS, not {cluster!r}")
    if kind is not None:
        raise InputError("--kind is for one machine; a Ray cluster has the devices that its nodes show")
    return ray(address or None, devices=devices, memory=memory)


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--devices, --memory and --kind: which part of this machine to use."""
    options = [
        click.option("--devices", type=int, metavar="N", help="How many devices to use; by default all."),
        click.option("--memory", metavar="SIZE", help="Memory of each device, for example 4GiB."),
        click.option("--kind", type=click.Choice(["cpu", "cuda"]), help="Use only devices of this kind."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def print_json(value: Any) -> None:
    """Print strict JSON: NaN and infinity, which JSON lacks, become null."""
    click.echo(json.dumps(_strict(value), indent=2))


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
    shown = sys.stderr.isatty()

    def say(sentence: str) -> None:
        if shown:
            click.echo(f"\r{sentence[:_NARROWEST]:{_NARROWEST}}", err=True, nl=False)

    try:
        yield say
    finally:
        say("")
        if shown:
            click.echo("\r", err=True, nl=False)
