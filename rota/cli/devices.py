"""`rota devices`: what rota would run on."""

from __future__ import annotations

import dataclasses

import click

from rota.cli.options import device_options, json_option, print_json
from rota.cluster import local
from rota.cluster.device import format_bytes
from rota.report.table import Table


@click.command()
@device_options
@json_option
def devices(devices: int | None, memory: str | None, kind: str | None, as_json: bool) -> None:
    """Show the devices of this machine."""
    cluster = local(devices=devices, memory=memory, kind=kind)
    if as_json:
        print_json({"devices": [{"name": one.name, **dataclasses.asdict(one)} for one in cluster.devices]})
        return
    rows = tuple(
        (one.name, format_bytes(one.memory_bytes), ",".join(map(str, one.cores)), one.label) for one in cluster.devices
    )
    click.echo(Table(columns=("device", "memory", "cores", "what it is"), rows=rows))
