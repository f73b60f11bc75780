"""Looks at a task as one that comes and goes, without training it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from rota.calibrate.calibrate import calibrate
from rota.errors import InputError
from rota.memory.arrange import arrange
from rota.memory.building import Building
from rota.memory.disk import measured_rates
from rota.memory.explain import SpillExplanation, summarise
from rota.memory.spillable import check_spillable, margin_bytes, training_of
from rota.runtime.choose import graph_of
from rota.runtime.executor import Room, placed
from rota.runtime.training import Training
from rota.runtime.user_code import calling
from rota.strategies.spill import Spill
from rota.task import Task

_CALIBRATE_S = 10.0


def look(task: Task, spill: Spill, *, memory_bytes: int, notice: Callable[[str], None]) -> SpillExplanation:
    """How it would run on a device of this machine with so much memory, or on the first of those that share samples."""
    budget_bytes = memory_bytes - margin_bytes(memory_bytes)
    if budget_bytes <= 0:
        raise InputError(f"{memory_bytes:,} bytes are too few for any model; give more")
    with tempfile.TemporaryDirectory(prefix=".rota-", dir=Path.cwd()) as folder:
        building = Building(Path(folder) / "building", budget_bytes=memory_bytes // 2)
        room = Room(memory_bytes=memory_bytes, before_bytes=0, folder=Path(folder), building=building)
        try:
            notice("making the model")
            training = Training(task, device=torch.device("cpu"), room=room)
            building.finish(training.model)
            with calling("reading the training data"):
                batch, _ = training.cursor.next()
            graph = graph_of(training.parts, batch)
            check_spillable(training.parts, graph)
            settings = training_of(training.parts, graph, placed(batch, training.parts))
            rates = measured_rates(Path(folder))
            replicas = spill.fixed_devices or 1
            rough = arrange(graph, spill, settings, budget_bytes=budget_bytes, rates=rates, replicas=replicas)
            notice("measuring what its ops take")
            costs = calibrate([rough.program], budget_s=_CALIBRATE_S, threads=torch.get_num_threads(), notice=notice)
            made = arrange(
                graph, spill, settings, budget_bytes=budget_bytes, rates=rates, costs=costs, replicas=replicas
            )
        finally:
            building.close()
    return summarise(made, memory_bytes=memory_bytes)
