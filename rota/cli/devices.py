"""`rota devices`: what rota would run on."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

import click

from rota.cli.options import device_options, json_option, print_json
from rota.cli.output import tell
from rota.cluster import local
from rota.cluster.device import Device, format_bytes
from rota.report.table import Table

_PATIENCE_S = 60.0


@click.command()
@device_options
@click.option("--speed/--no-speed", "measured", default=True, help="Measure how fast each device is (a few seconds).")
@json_option
def devices(
    devices: int | None, memory: str | None, kind: str | None, threads: int | None, measured: bool, as_json: bool
) -> None:
    """Show the devices of this machine, and how fast they are."""
    cluster = local(devices=devices, memory=memory, kind=kind, threads=threads)
    speeds = _speeds(cluster.devices) if measured else [None] * len(cluster.devices)
    found = list(zip(cluster.devices, speeds, strict=True))
    if as_json:
        told = [
            {"name": one.name, **dataclasses.asdict(one), "threads": one.thread_count, "flops_per_s": speed}
            for one, speed in found
        ]
        print_json({"devices": told})
        return
    rows = tuple(
        (
            *(one.name, format_bytes(one.memory_bytes), ",".join(map(str, one.cores))),
            *(str(one.thread_count) if one.kind == "cpu" else "", _words(speed, speeds), one.label),
        )
        for one, speed in found
    )
    tell(Table(columns=("device", "memory", "cores", "threads", "speed", "what it is"), rows=rows))
    if any(one.kind == "cpu" for one in cluster.devices):
        tell("\nThe last digits of results depend on the number of threads; --threads N fixes it.")


def _speeds(devices: Sequence[Device]) -> Sequence[float | None]:
    """Of each device, one after another; None where it cannot be measured."""
    asked = [{"kind": one.kind, "index": one.index, "cores": one.cores, "threads": one.thread_count} for one in devices]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rota.calibrate.speeds"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=True,
        )
        speeds: list[float] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return [None] * len(devices)
    return speeds


def _words(speed: float | None, speeds: Sequence[float | None]) -> str:
    if speed is None:
        return ""
    fastest = max(one for one in speeds if one is not None)
    return f"{speed / 1e9:,.0f} GFLOP/s" + (f" ({speed / fastest:.0%})" if len(speeds) > 1 else "")
