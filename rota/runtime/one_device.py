"""Decides how a task runs that has one device for itself: as plain PyTorch, unless it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rota.cluster.discover import memory_limit_bytes
from rota.errors import CaptureError, TaskError
from rota.runtime.executor import Eager, Executor, Parts, Room, device_bytes
from rota.runtime.limits import anonymous_bytes
from rota.state import inside
from rota.task import Task

if TYPE_CHECKING:
    from rota.graph.graph import Graph
    from rota.runtime.gang import Gang

_BUILDING_FOLDER = ".building"
_FOLLOWER = ".rank-"
"""With its number: where a process that follows another one has what leaves its memory."""
TIGHT = 0.5
"""Of a device's memory: where a model with gradients and moments takes more than that, one looks before one runs."""
_OF_HOST = 0.5
"""Of what a host has free, for what leaves its GPUs, together; half as much again is for models being made."""


def room_of(
    task: Task, *, device: torch.device, folder: Path, memory_bytes: int, gang: Gang | None = None
) -> Room | None:
    """For a task that may be larger than its device."""
    alone = gang is None or gang.size == 1
    may_spill = spills(task.strategy) or (task.strategy == "auto" and (alone or device.type == "cpu"))
    if not may_spill or not memory_bytes:
        return None
    from rota.memory.building import Building

    if gang is not None and not gang.leads:
        folder = folder / f"{_FOLLOWER}{gang.rank}"
        inside.remove(folder, inside.ROOM)
    elif alone:
        inside.remove_each(folder, r"\.rank-\d+", inside.ROOM)  # of one that was killed
    far = device.type != "cpu"
    host_bytes = int(_OF_HOST * _host_free_bytes() / _gpus_of_host()) if far else None
    making_bytes = memory_bytes if host_bytes is None else host_bytes
    building = Building(folder / _BUILDING_FOLDER, budget_bytes=making_bytes // 2)
    building.close()  # what a killed process left
    return Room(
        memory_bytes=memory_bytes,
        before_bytes=device_bytes() if far else anonymous_bytes(),
        folder=folder,
        building=building,
        host_bytes=host_bytes,
        devices=1 if gang is None else gang.size,
    )


def _host_free_bytes() -> int:
    return min(psutil.virtual_memory().available, memory_limit_bytes())


def _gpus_of_host() -> int:
    """All that there are: a worker sees its own only."""
    try:
        return max(1, len(list(Path("/proc/driver/nvidia/gpus").iterdir())))
    except OSError:
        return 1


def waits_on_host(model: torch.nn.Module, room: Room | None) -> bool:
    """Whether a model is not to be moved to its GPU before it is known how it runs there."""
    return room is not None and room.host_bytes is not None and not _surely_fits(model, room)


def _surely_fits(model: torch.nn.Module, room: Room) -> bool:
    return not room.building.away and state_bytes(model) <= TIGHT * room.memory_bytes


def is_elsewhere(parts: Parts) -> bool:
    """Whether the model waits on the host of its device."""
    return any(parameter.device.type != parts.device.type for parameter in parts.model.parameters())


def plainly(parts: Parts) -> Executor:
    """Plain PyTorch, with what may have waited on the host (on a GPU: never run)."""
    if is_elsewhere(parts):
        parts.model.to(parts.device)
        parts.optimizer.load_state_dict(parts.optimizer.state_dict())  # puts each value where it belongs
        if parts.room is not None:
            parts.room.building.forget_others(parts.model)
    return Eager(parts)


def choose_alone(parts: Parts, batch: Any, *, notice: Callable[[str], None]) -> Executor:
    """The executor of a task on one device."""
    room = parts.room
    strategy: Any = parts.task.strategy
    if spills(strategy):
        from rota.memory.spilling import Spilling

        try:
            return Spilling(parts, batch, spill=strategy, notice=notice)
        except CaptureError as error:
            check_can_stay(parts.room is not None and parts.room.building.away, error)
            notice(f"{strategy}: {error}; it runs as plain PyTorch, without spilling")
            return plainly(parts)
    if room is None or _surely_fits(parts.model, room):
        return plainly(parts)
    # All that can look at a model takes a second to load, which tasks that fit need not wait for.
    from rota.runtime.choose import graph_of

    try:
        graph = graph_of(parts, batch)
    except CaptureError as error:
        check_can_stay(room.building.away, error)
        return plainly(parts)
    if not room.building.away and alone_bytes(graph, parts) <= room.memory_bytes - room.taken_bytes():
        return plainly(parts)
    from rota.memory.spilling import Spilling
    from rota.strategies.spill import spill

    return Spilling(parts, batch, spill=spill(), graph=graph, notice=notice)


def check_can_stay(away: bool, why: CaptureError) -> None:
    """TaskError where a model that cannot be captured had to leave memory."""
    if away:
        raise TaskError(
            f"the model does not fit into the memory of its device, and spill cannot run it: {why}"
        ) from why


def alone_bytes(graph: Graph, parts: Parts) -> int:
    """What a task needs on one device: a step with its moments, what the optimizer works with, and some for others."""
    from rota.runtime.choose import needed_bytes

    return needed_bytes(graph) + beside_bytes(parts)


def beside_bytes(parts: Parts) -> int:
    """What a task needs beside a step with its moments: what the optimizer works with, and some for others."""
    from rota.memory.optimizers import update_work
    from rota.memory.spillable import margin_bytes

    sizes = tuple(parameter.numel() * parameter.element_size() for parameter in parts.model.parameters())
    work = update_work(parts.optimizer).work_bytes(sizes)
    return work + margin_bytes(4 * sum(sizes) + work)


def spills(strategy: Any) -> bool:
    """Whether a strategy is for models that do not fit."""
    return bool(getattr(strategy, "spills", False))


def state_bytes(model: torch.nn.Module) -> int:
    """Of a model with gradients and Adam's moments."""
    return sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in model.parameters())
