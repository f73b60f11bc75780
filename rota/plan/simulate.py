"""Predicts a step of a program: when each node runs, how busy each device is, and how much memory it needs at most."""

from __future__ import annotations

from dataclasses import dataclass

from rota.plan.costs import Costs, received_bytes
from rota.plan.occupancy import Occupancy
from rota.plan.program import Program
from rota.plan.timing import Replay, blocking_times


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A predicted step."""

    makespan_s: float
    start_s: tuple[float, ...]
    """Of each node."""
    end_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    """Of each device: computing."""
    moving_s: tuple[float, ...]
    """Of each device: communicating, with the others already there."""
    peak_bytes: tuple[int, ...]
    """Of each device: parameters, gradients, activations and what is needed in between."""
    stored_bytes: tuple[int, ...]
    """Of each device: parameters and buffers."""
    received_bytes: int
    """Over all devices."""


def simulate(program: Program, costs: Costs | None = None, *, plain_random: bool = False) -> Simulation:
    """Replay a program with a clock and a ledger for each device.

    `plain_random` if random numbers will be drawn as PyTorch draws them, which takes other memory.
    """
    costs = costs or Costs()
    times = blocking_times(program, costs) if costs.calibration is None else Replay(program, costs).run()
    memory = Occupancy(program, plain_random=plain_random)
    peaks = memory.replay()
    return Simulation(
        makespan_s=times.makespan_s,
        start_s=tuple(times.start_s),
        end_s=tuple(times.end_s),
        busy_s=tuple(times.busy_s),
        moving_s=tuple(times.moving_s),
        peak_bytes=tuple(peaks),
        stored_bytes=tuple(memory.stored_bytes),
        received_bytes=sum(received_bytes(program, node) for node in program.nodes),
    )
