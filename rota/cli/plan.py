"""`rota plan`: decide how a sweep would run on this machine, and do not run it."""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rota.cli.options import device_options, json_option, objective_option, print_json, terminal_width
from rota.cli.output import tell
from rota.cli.sweep_file import load_source
from rota.cluster import Cluster, local
from rota.cluster.device import format_bytes
from rota.errors import InputError
from rota.execute import preflight
from rota.execute.backends.local import LocalBackend
from rota.report.format import duration
from rota.report.live import profile_progress
from rota.schedule.problem import Objective
from rota.scratch import scratch
from rota.state.files import replacing, write_text
from rota.store.cache import cache_trouble

if TYPE_CHECKING:
    from rota.execute.forecast import Forecast


@click.command(short_help="Decide how a sweep would run here, without running it.")
@click.argument("file", metavar="FILE[:NAME]")
@click.option("--strategy", metavar="S", help="How tasks run on devices, instead of what they say.")
@objective_option
@click.option("--seconds", type=click.FloatRange(min=0.0), metavar="S", help="How long to search for a schedule.")
@click.option("--html", "html", type=click.Path(path_type=Path), metavar="TO", help="Write the schedule as a page.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@device_options
@json_option
def plan(
    file: str,
    strategy: str | None,
    objective: Objective,
    seconds: float | None,
    html: Path | None,
    quiet: bool,
    devices: int | None,
    memory: str | None,
    kind: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Decide which task of the sweep that FILE defines runs how, where and when on this machine; train nothing.

    A few steps of each kind of task are timed on the devices, and what is learned is kept for `rota run`.
    """
    # numpy and what needs it: the other commands stay quick
    from rota.execute.forecast import forecast

    if html is not None and not html.absolute().parent.is_dir():
        raise InputError(f"there is no folder {html.parent} to write the page to; create it first")
    if html is not None and html.exists() and not html.is_file():
        raise InputError(f"{html} is not a file that the page can be written to; give the name of one")
    cluster = local(devices=devices, memory=memory, kind=kind, threads=threads)
    preflight.check_memory(cluster)
    sweep = preflight.resolve(load_source(file).sweep, strategy=strategy)
    ready = preflight.ready(sweep, cluster)
    sweep = ready.sweep
    with (
        scratch("plan") as folder,
        closing(LocalBackend(cluster)) as backend,
        nullcontext(lambda *told: None) if quiet else profile_progress() as progress,
    ):
        found = forecast(
            sweep,
            cluster=cluster,
            backend=backend,
            folder=folder,
            widths=ready.widths,
            objective=objective,
            deadlines={task.name: task.deadline_s for task in sweep if task.deadline_s is not None},
            progress=progress,
            seconds=seconds,
            thorough=True,
        )
    _tell(ready, cluster, found, html, as_json=as_json, title=Path(file.partition(":")[0]).stem)


def _tell(
    ready: preflight.Ready, cluster: Cluster, found: Forecast, html: Path | None, *, as_json: bool, title: str
) -> None:
    from rota.report.forecast import Case, Listed, forecast_json, forecast_lines

    profile = found.profile
    if found.solved is None:
        told = [*profile.failures.items(), *profile.unfit.items(), *profile.notices]
        reasons = "; ".join(dict.fromkeys(f"{name}: {why}" for name, why in told))
        raise InputError(f"no task has a way to run: {reasons}")
    case = Case(
        words=_words(cluster),
        problem=found.problem,
        estimates=profile.estimates,
        solved=found.solved,
        notes=(*(("note", text) for text in (*ready.notes, *cache_trouble())), *_notes(found)),
    )
    known = [task for task in ready.sweep if task.name in profile.estimates]
    listed = [
        Listed(name=task.name, steps=profile.steps[task.name], alike=profile.classes[task.name]) for task in known
    ]
    if html is not None:
        from rota.report.plan_page import plan_page

        with replacing(html) as side:
            write_text(side, plan_page(title, listed, case))
    if as_json:
        more = {
            "profiling_s": profile.spent_s,
            "solving_s": found.solving_s,
            "failures": dict(profile.failures),
            "notices": [{"task": name, "text": text} for name, text in profile.notices],
            "html": None if html is None else str(html),
            "pool": None if found.pool is None else asdict(found.pool),
        }
        print_json(forecast_json(listed, case) | more)
        return
    tell("\n".join(forecast_lines(listed, case, width=terminal_width())))
    if html is not None:
        tell(f"page       {html}")


def _notes(found: Forecast) -> list[tuple[str, str]]:
    profile = found.profile
    measured = f"{profile.looked} kinds of tasks looked at, {profile.tried} ways tried on several devices"
    notes = [("profiled", f"in {duration(profile.spent_s)}: {measured if profile.looked else 'all known from before'}")]
    notes += [("note", f"{name}: {text}") for name, text in profile.notices]
    if found.pool is not None:
        told = f"{', '.join(found.pool.tasks)} will share all devices, shard by shard, before the others run"
        took, instead = duration(found.pool.makespan_s), duration(found.pool.instead_s)
        notes.append(("pool", f"{told}: {took} in all instead of the {instead} of this schedule"))
    return notes + [("unknown", f"{name}: {why}") for name, why in profile.failures.items()]


def _words(cluster: Cluster) -> str:
    first = cluster.devices[0]
    return f"{len(cluster.devices)} x {first.kind} with {format_bytes(first.memory_bytes)}"
