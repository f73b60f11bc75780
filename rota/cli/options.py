"""Options that several commands share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
run_argument = click.argument("run", required=False)


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
