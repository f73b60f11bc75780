"""Looks at a task as one that comes and goes, without training it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rota.calibrate.calibrate import calibrate
from rota.cluster.device import too_little_to_spill
from rota.cluster.discover import available_cores
from rota.errors import FitError, InputError
from rota.graph.graph import Graph
from rota.memory.arrange import Arrangement, arrange, update_seconds
from rota.memory.building import Building
from rota.memory.disk import measured_rates
from rota.memory.explain import SpillExplanation, summarise
from rota.memory.explain_pool import PooledTask, pooled_task
from rota.memory.pooled import Fitting, cut_to_fit
from rota.memory.residency import Rates
from rota.memory.spillable import check_spillable, margin_bytes, too_small, training_of
from rota.memory.steps import Training as Step
from rota.plan.costs import Costs
from rota.plan.program import Program
from rota.runtime.choose import graph_of
from rota.runtime.executor import Room, placed
from rota.runtime.limits import anonymous_bytes
from rota.runtime.loading import code_is_free
from rota.runtime.training import Training
from rota.runtime.user_code import calling
from rota.scratch import same_disk, scratch
from rota.store.cache import cache_folder
from rota.strategies.spill import Spill
from rota.task import Task

_CALIBRATE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A task of which the model and the first batch were made."""

    graph: Graph
    step: Step
    rates: Rates
    budget_bytes: int
    total_steps: int


def look(task: Task, spill: Spill, *, memory_bytes: int, notice: Callable[[str], None]) -> SpillExplanation:
    """How it would run on a device of this machine with so much memory, or on the first of those that share samples."""
    with _opened(task, memory_bytes=memory_bytes, notice=notice) as found:

        def made(costs: Costs | None = None) -> Arrangement:
            return arrange(
                found.graph,
                spill,
                found.step,
                budget_bytes=found.budget_bytes,
                rates=found.rates,
                costs=costs,
                replicas=spill.fixed_devices or 1,
            )

        costs = _measured(made().program, threads=torch.get_num_threads(), notice=notice)
        return summarise(made(costs), memory_bytes=memory_bytes)


def look_in_pool(task: Task, *, memory_bytes: int, devices: int, notice: Callable[[str], None]) -> PooledTask:
    """How it would run as one of a pool on so many devices of this machine, each with so much memory."""
    with _opened(task, memory_bytes=memory_bytes, notice=notice) as found:

        def made(costs: Costs | None = None) -> Fitting:
            step = found.step
            if costs is not None:
                step = replace(step, update_s=lambda sizes: sum(update_seconds(costs, size) for size in sizes))
            return cut_to_fit(found.graph, step, room_bytes=found.budget_bytes, costs=costs)

        costs = _measured(made().program, threads=max(1, len(available_cores()) // devices), notice=notice)
        return pooled_task(task.name, made(costs), steps=found.total_steps, rates=found.rates)


def _measured(program: Program, *, threads: int, notice: Callable[[str], None]) -> Costs:
    notice("measuring what its ops take")
    return calibrate([program], budget_s=_CALIBRATE_S, threads=threads, notice=notice)


def check_captured(task: Task, *, memory_bytes: int) -> None:
    """CaptureError for a task that cannot be captured."""
    with _captured(task, memory_bytes=memory_bytes, notice=lambda text: None):
        pass


@contextlib.contextmanager
def _captured(
    task: Task, *, memory_bytes: int, notice: Callable[[str], None]
) -> Iterator[tuple[Training, Any, Graph, Room]]:
    """The task with its first batch and graph, in no more memory than it would get."""
    if memory_bytes <= margin_bytes(memory_bytes):
        raise InputError(too_little_to_spill(memory_bytes))
    # The speed of the disk counts on which a run here would have its shards.
    place = same_disk(Path.cwd(), (cache_folder(), Path(tempfile.gettempdir())))
    with code_is_free(), scratch("explain", place=place) as folder:
        building = Building(folder / "building", budget_bytes=memory_bytes // 2)
        room = Room(memory_bytes=memory_bytes, before_bytes=anonymous_bytes(), folder=folder, building=building)
        try:
            notice(f"making the model of {task.name}")
            training = Training(task, device=torch.device("cpu"), room=room)
            building.finish(training.model)
            with calling("reading the training data"):
                batch, _ = training.cursor.next()
            yield training, batch, graph_of(training.parts, batch), room
        finally:
            building.close()


@contextlib.contextmanager
def _opened(task: Task, *, memory_bytes: int, notice: Callable[[str], None]) -> Iterator[_Opened]:
    """The task as it begins, in no more memory than it would get."""
    with _captured(task, memory_bytes=memory_bytes, notice=notice) as (training, batch, graph, room):
        check_spillable(training.parts, graph)
        taken_bytes = room.taken_bytes()
        try:
            yield _Opened(
                graph=graph,
                step=training_of(training.parts, graph, placed(batch, training.parts)),
                rates=measured_rates(room.folder),
                budget_bytes=max(0, memory_bytes - taken_bytes - margin_bytes(memory_bytes)),
                total_steps=training.total_steps,
            )
        except FitError as error:
            told = too_small(error, taken_bytes=taken_bytes, memory_bytes=memory_bytes)
            raise FitError(f"{task.name}: {told}") from error
