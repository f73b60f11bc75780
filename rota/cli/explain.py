"""`rota explain`: how a task's model would run on so many devices, before anything runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rota.cli.options import json_option, print_json, saying, terminal_width
from rota.cli.output import tell
from rota.cli.sweep_file import load_source
from rota.cluster.device import parse_bytes
from rota.errors import InputError
from rota.state.files import replacing, write_text
from rota.sweep import Sweep
from rota.task import Task
from rota.techniques import POOL

if TYPE_CHECKING:
    from rota.graph.graph import Graph
    from rota.memory.explain_pool import PooledTask
    from rota.search.search import Search
    from rota.strategies.spill import Spill


@click.command(short_help="Show how a task's model would be cut over devices.")
@click.argument("file", metavar="FILE[:NAME]")
@click.option("--task", "task_name", metavar="T", help="Which task; not needed if the sweep has one.")
@click.option("--devices", default=1, show_default=True, metavar="N", help="How many devices.")
@click.option("--strategy", default="data", show_default=True, metavar="S", help="The recipe that makes the plan.")
@click.option("--microbatches", type=int, metavar="M", help="In how many parts a batch is taken.")
@click.option("--memory", metavar="SIZE", help="Memory of each device, for example 4GiB; a plan that needs more fails.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="TO", help="Write a trace for ui.perfetto.dev.")
@json_option
def explain(
    file: str,
    task_name: str | None,
    devices: int,
    strategy: str,
    microbatches: int | None,
    memory: str | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Show how a task of the sweep that FILE defines would run on devices, without training it.

    It tells which op is cut how and where it sits, what is communicated and why, the memory of each device, and a
    predicted timeline of one step on the first training batch. The devices need not be there. With --strategy pool it
    tells of all tasks together, or of one with its units.
    """
    memory_bytes = None if memory is None else parse_bytes(memory)
    if trace is not None and not trace.absolute().parent.is_dir():
        raise InputError(f"there is no folder {trace.parent} to write the trace to; create it first")
    if trace is not None and trace.exists() and not trace.is_file():
        raise InputError(f"{trace} is not a file that a trace can be written to; give the name of one")
    sweep = load_source(file).sweep
    task = sweep.tasks[0] if task_name is None and _is_pool(strategy) else _pick(sweep, task_name)
    # Only from here on is torch needed; the other commands stay quick.
    from rota.plan.explain import lines_of
    from rota.plan.explanation import summarise
    from rota.report.timeline import timeline
    from rota.report.trace import trace_events
    from rota.runtime.first_step import first_graph
    from rota.strategies.auto import Auto
    from rota.strategies.base import find, with_microbatches
    from rota.strategies.spill import Spill

    make = find(strategy)
    if _is_pool(strategy):
        tasks = list(sweep) if task_name is None else [task]
        _explain_pool(tasks, memory_bytes, devices=devices, as_json=as_json)
        return
    if isinstance(make, Spill):
        _explain_spill(task, make, memory_bytes, devices=devices, as_json=as_json)
        return
    if microbatches is not None:
        make = with_microbatches(make, microbatches)
    graph = first_graph(task)
    found = None
    if isinstance(make, Auto):
        found = _search(graph, devices, memory_bytes if make.memory is None else parse_bytes(make.memory))
        make = found.chosen.strategy
    program = make(graph, devices).compile(memory_bytes=memory_bytes)
    simulation = program.simulate()
    explanation = summarise(program, simulation)
    if trace is not None:
        with replacing(trace) as side:
            write_text(side, json.dumps(trace_events(program, simulation)))
    if as_json:
        settings: dict[str, Any] = {
            "task": task.name,
            "strategy": strategy,
            "trace": None if trace is None else str(trace),
        }
        if found is not None:
            settings |= found.to_json()
        print_json(settings | explanation.to_json())
        return
    width = terminal_width()
    if found is not None:
        tell("\n".join(["candidates", *found.table(), ""]))
        strategy = f"{found.chosen.text} (chosen by {strategy})"
    tell(f"task  {task.name}, strategy {strategy}")
    tell("\n".join([*lines_of(explanation), "", *timeline(program, simulation, width=width)]))
    if trace is not None:
        tell(f"\ntrace  {trace} (open it at https://ui.perfetto.dev)")


def _explain_spill(task: Task, spill: Spill, memory_bytes: int | None, *, devices: int, as_json: bool) -> None:
    """What a task that does not fit would do; its model is made in no more memory than it would get."""
    if memory_bytes is None:
        raise InputError("spill depends on the memory of the device; say how much that is, such as --memory 1GiB")
    if devices not in (1, spill.fixed_devices):
        raise InputError(f"{spill} is for {spill.fixed_devices or 'several'} devices, not {devices}; change one")
    from rota.memory.explain import lines_of
    from rota.memory.look import look

    with saying() as say:
        explanation = look(task, spill, memory_bytes=memory_bytes, notice=say)
    if as_json:
        print_json({"task": task.name, "strategy": str(spill)} | explanation.to_json())
        return
    tell(f"task    {task.name}, strategy {spill}")
    tell("\n".join(lines_of(explanation)))


def _is_pool(strategy: str) -> bool:
    return strategy.partition("(")[0].strip() == POOL


def _explain_pool(tasks: list[Task], memory_bytes: int | None, *, devices: int, as_json: bool) -> None:
    """What tasks would do as a pool: all of the sweep, or one of them with its units."""
    if memory_bytes is None:
        raise InputError("a pool depends on the memory of its devices; say how much that is, such as --memory 1GiB")
    if devices < 1:
        raise InputError(f"a pool needs at least 1 device, not {devices}")
    from rota.memory.explain_pool import lines_of, summarise
    from rota.memory.look import look_in_pool
    from rota.memory.spillable import margin_bytes
    from rota.profile.likeness import code_key

    alike: dict[str, PooledTask] = {}
    found = []
    with saying() as say:
        for task in tasks:
            key = f"{code_key(task, width=1)} {task.steps} {task.epochs}"
            if key not in alike:
                alike[key] = look_in_pool(task, memory_bytes=memory_bytes, devices=devices, notice=say)
            found.append(replace(alike[key], name=task.name))
    room_bytes = memory_bytes - margin_bytes(memory_bytes)
    told = summarise(found, devices=devices, memory_bytes=memory_bytes, room_bytes=room_bytes)
    if as_json:
        print_json({"strategy": POOL} | told.to_json())
        return
    tell("\n".join(lines_of(told, units_of=tasks[0].name if len(tasks) == 1 else None)))
    if len(tasks) > 1:
        tell(f"\n--task {tasks[0].name} shows its units")


def _pick(sweep: Sweep, name: str | None) -> Task:
    if name is not None:
        return sweep[name]
    if len(sweep) > 1:
        known = ", ".join(task.name for task in sweep.tasks[:6])
        raise InputError(
            f"the sweep has several tasks; say which with --task: {known}{', ...' if len(sweep) > 6 else ''}"
        )
    return sweep.tasks[0]


def _search(graph: Graph, devices: int, memory_bytes: int | None) -> Search:
    """What there is to choose from; on a terminal it says what it looks at."""
    from rota.search.search import search

    with saying() as say:
        return search(graph, devices, memory_bytes=memory_bytes, notice=say)
