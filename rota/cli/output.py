"""Prints what commands say; escape sequences in it, which may come from anywhere, are shown and not obeyed."""

from __future__ import annotations

import click

from rota.report.format import printable


def tell(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text."""
    click.echo(printable(str(text)), err=err, nl=nl)
