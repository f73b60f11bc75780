"""Runs a task's batches as one of a pool of tasks that share devices, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psutil

from rota.cluster.device import format_bytes
from rota.errors import FitError, TaskError
from rota.graph.graph import Graph
from rota.memory.pooled import Pooled, Seat, cut_to_fit, pool_units
from rota.memory.spilling import Opening, Spilling, Way
from rota.memory.steps import Step, Training
from rota.memory.units import Unit
from rota.plan.program import Program
from rota.runtime.executor import Parts
from rota.strategies.spill import Spill, spill


class Pooling(Spilling):
    """As `Spilling`, but that units of the model run when and where it is their turn."""

    def __init__(
        self,
        parts: Parts,
        batch: Any,
        *,
        seat: Seat,
        total_batches: int,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._seat = seat
        self._total_batches = total_batches
        super().__init__(parts, batch, spill=spill(), notice=notice)

    def _open(self, graph: Graph, spill: Spill, training: Training) -> Opening:
        self._room_bytes = self._budget_bytes()
        try:
            made = cut_to_fit(graph, training, room_bytes=self._room_bytes)
        except FitError as error:
            raise TaskError(self._too_small(error)) from error
        return Opening(
            cut=made.cut,
            training=training,
            groups=made.groups,
            items=made.step.items,
            # Of what works. What moves is counted by the arbiter, who has the regions of each device.
            budget_bytes=self._room_bytes,
            way=lambda: self._pooled(made.program, made.step, made.units, training),
            told=(
                f"pool: {len(made.units)} units take turns with other tasks on {len(self._seat.cores)} devices, "
                f"each with {format_bytes(self._room_bytes)} for them"
            ),
        )

    def _other_way(self, program: Program, training: Training) -> Way:
        try:
            step, units = pool_units(program, self._groups, training, room_bytes=self._room_bytes)
        except FitError as error:
            raise TaskError(self._too_small(error)) from error
        return self._pooled(program, step, units, training)

    def _pooled(self, program: Program, step: Step, units: Sequence[Unit], training: Training) -> Pooled:
        return Pooled(
            program,
            self._holdings,
            self._buffers(),
            step=step,
            units=units,
            seat=self._seat,
            room_bytes=self._room_bytes,
            total_batches=self._total_batches,
            batches=training.batches,
            seed=self._parts.task.seed,
        )

    def _most_held_bytes(self, budget_bytes: int) -> int:
        """No bound: what a unit makes is on no device, and as much in each step."""
        return psutil.virtual_memory().total

    def _look_again(self) -> None:
        """There is nothing to plan: what is where follows from whose turn it is."""
