"""Prints what commands say; escape sequences in it, which may come from anywhere, are shown and not obeyed."""

from __future__ import annotations

import contextlib
import sys

import click

from rota.report.format import printable
from rota.streams import cut_off


def tell(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text. Where errors cannot be printed, the exit code has to do."""
    with contextlib.suppress(OSError) if err else contextlib.nullcontext():
        click.echo(printable(str(text)), err=err, nl=nl)


def tell_if_possible(text: str) -> None:
    """Print a text, or drop it with all that waits to be printed."""
    try:
        tell(text)
    except OSError:
        cut_off(sys.stdout)
