"""Finds out how much memory a task needs of which the model cannot even be made in what there is."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from rota.errors import FitError, TaskError
from rota.memory.arrange import arrange
from rota.memory.pooled import cut_to_fit
from rota.memory.residency import Rates
from rota.memory.spillable import check_spillable, margin_bytes, too_small, training_of
from rota.runtime.choose import graph_of
from rota.runtime.executor import Room, Watch, placed
from rota.runtime.hollow import hollow_out
from rota.runtime.limits import lifted
from rota.runtime.one_device import spills
from rota.runtime.training import Training
from rota.strategies.spill import spill
from rota.task import Task


def too_large(task: Task, room: Room, told: str, *, watch: Watch) -> TaskError:
    """The error of a task whose model factory ran out of memory, which `told` says, with what would do."""
    if room.host_bytes is not None:  # for a GPU the host makes it
        return TaskError(told)
    room.building.forget_others(torch.nn.Module())
    gc.collect()
    try:
        with lifted():
            least = _least(task, room, watch)
    except Exception:  # what the user's factories do without numbers, or a model that cannot be cut: it stays unknown
        least = ""
    if least and room.devices > 1 and not spills(task.strategy):  # other ways may do with less
        least = f"{told.partition(';')[0]}, and spilled, {least}"
    return TaskError(least or told)


def _least(task: Task, room: Room, watch: Watch) -> str:
    """A sentence with the memory that the task needs; nothing if what cannot be made would fit."""
    made = Training(replace(task, model=lambda: _sketch(task)), device=torch.device("cpu"), watch=watch)
    watch("finding out how much memory it needs", ours=True)
    batch, _ = made.cursor.next()
    graph = graph_of(made.parts, batch)
    check_spillable(made.parts, graph)
    step = training_of(made.parts, graph, placed(batch, made.parts))
    taken_bytes = room.taken_bytes()
    budget_bytes = max(0, room.memory_bytes - taken_bytes - margin_bytes(room.memory_bytes))
    try:
        if getattr(task.strategy, "pooled", False):
            cut_to_fit(graph, step, room_bytes=budget_bytes)
        else:
            how = task.strategy if spills(task.strategy) else spill()
            rates = Rates(read_byte_s=0.0, write_byte_s=0.0)  # how fast it would be is not asked
            arrange(graph, how, step, budget_bytes=budget_bytes, rates=rates, replicas=room.devices)
    except FitError as error:
        return too_small(error, taken_bytes=taken_bytes, memory_bytes=room.memory_bytes)
    return ""


def _sketch(task: Task) -> torch.nn.Module:
    """The model with parameters and buffers that take no memory, and read as zeros."""
    with torch.device("meta"):
        model = task.model()
    if task.precision == "float64":
        model.double()
    hollow_out(model)
    return model
