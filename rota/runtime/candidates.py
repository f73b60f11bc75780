"""The ways in which a task could run on several devices: searched for, with what was measured of this device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rota.errors import CaptureError, RotaError
from rota.graph.graph import Graph
from rota.plan.costs import Costs
from rota.profile.estimate import PREDICTED_SPREAD, Estimate
from rota.runtime.choose import graph_of
from rota.runtime.planned import check_optimizer
from rota.runtime.probe import Steps
from rota.runtime.ranking import rank
from rota.runtime.training import Training
from rota.strategies.base import describe, find
from rota.strategies.data import data
from rota.strategies.single import single
from rota.strategies.spill import Spill

_LIKELY = 3
_KEPT = 2
_EXCHANGED_BYTE_S = 1e-9
"""Of a gradient, between processes of one machine: about that, until it is tried."""

Notice = Callable[[str], None]


def captured(training: Training, batch: Any, notice: Notice) -> Graph | None:
    """The graph of a step, if there can be one."""
    try:
        return graph_of(training.parts, batch)
    except CaptureError as error:
        own = describe(training.task.strategy)
        notice(f"{own}: {error}; one device runs it (strategy='torch_ddp' would take more)")
        return None


def predicted(
    graph: Graph,
    training: Training,
    counts: Sequence[int],
    memory_bytes: int,
    steps: Steps | None,
    budget_s: float,
    notice: Notice,
    *,
    strategies: Mapping[str, Any],
) -> list[Estimate]:
    """The best few strategies for each number of devices, with what is measured of their ops, and of this device.

    A task whose strategy is the user's choice has that one only; the user's own `strategies` take part otherwise.
    """
    own = training.task.strategy
    if own != "auto":
        made = find(own) if isinstance(own, str) else own
        return _of_users(graph, training, counts, memory_bytes, steps, {describe(own): made}, Costs(), notice)
    ranked = rank(
        graph,
        training.optimizer,
        counts,
        memory_bytes=memory_bytes,
        search_s=budget_s / 2,
        calibrate_s=budget_s / 2,
        likely=_LIKELY,
        may_idle=False,
    )
    for count, error in ranked.refused.items():
        notice(f"auto on {count} devices: {error}")
    scale = _scale(training, steps, ranked.alone_s)
    estimates = [
        _estimate(training, one.text, count, (one.step_s or 0.0) * scale, one.peak_bytes or 0, steps)
        for count, found in ranked.found.items()
        for one in [one for one in found.candidates if one.measured and one.fits][:_KEPT]
    ]
    return estimates + _of_users(graph, training, counts, memory_bytes, steps, strategies, ranked.costs, notice)


def without_plan(training: Training, counts: Sequence[int], steps: Steps | None) -> list[Estimate]:
    """A strategy that makes no plan, such as PyTorch's own: of it nothing is known but what one device takes."""
    step_s = 1.0 if steps is None else steps.step_s
    label = describe(training.task.strategy)
    return [_estimate(training, label, count, step_s / count, 0, steps) for count in counts]


def alone_in_gang(training: Training, counts: Sequence[int], steps: Steps) -> list[Estimate]:
    """What cannot be captured runs on one of its devices, however many it gets."""
    return [_estimate(training, "auto", count, steps.step_s, 0, steps) for count in counts]


def spilled(
    graph: Graph,
    training: Training,
    batch: Any,
    strategy: Spill,
    counts: Sequence[int],
    steps: Steps | None,
    notice: Notice,
) -> list[Estimate]:
    """Devices that have less memory than the task needs and share its samples, by what one of them took alone."""
    from rota.memory.arrange import arrange
    from rota.memory.disk import measured_rates
    from rota.memory.spillable import check_spillable, margin_bytes, training_of

    room = training.parts.room
    assert room is not None

    def step_s(count: int) -> float:
        made = arrange(
            graph,
            strategy,
            training_of(training.parts, graph, batch),
            budget_bytes=room.memory_bytes - margin_bytes(room.memory_bytes),
            rates=rates,
            replicas=count,
        )
        return made.forecast.step_s

    found = []
    try:
        check_spillable(training.parts, graph)
        rates = measured_rates(room.folder)
        # Nothing of it was measured; how much less a part of the samples takes is known better than what they take.
        scale = 1.0 if steps is None or not counts else steps.step_s / step_s(1)
    except RotaError as error:
        notice(f"{strategy}: {error}")
        return []
    for count in counts:
        shared = strategy if strategy.among is not None else data(count) * strategy
        try:
            exchanged_s = training.task.accumulate * _EXCHANGED_BYTE_S * sum(one.size_bytes for one in graph.parameters)
            took_s = step_s(count) * scale + exchanged_s
            estimate = _estimate(training, str(shared), count, took_s, room.memory_bytes, None)
        except RotaError as error:
            notice(f"{shared}: {error}")
            continue
        found.append(estimate)
    return found


def _scale(training: Training, steps: Steps | None, alone_s: float) -> float:
    """From a predicted batch to a step: by how far the prediction for one device was off, if that was seen."""
    if steps is None:
        return float(training.task.accumulate)
    return steps.step_s / max(1e-9, alone_s)


def _estimate(training: Training, label: str, count: int, step_s: float, peak: int, steps: Steps | None) -> Estimate:
    return Estimate(
        label=label,
        kind=training.device.type,
        devices=count,
        step_s=step_s,
        spread=PREDICTED_SPREAD,
        memory_bytes=peak,
        measured=False,
        start_s=2 * steps.start_s if steps is not None else 0.0,
    )


def _of_users(
    graph: Graph,
    training: Training,
    counts: Sequence[int],
    memory_bytes: int,
    steps: Steps | None,
    strategies: Mapping[str, Any],
    costs: Costs,
    notice: Notice,
) -> list[Estimate]:
    """What the user's own strategies are predicted to take; one that does not suit is left out."""
    estimates = []
    scale = _scale(training, steps, single()(graph, 1).compile().simulate(costs=costs).makespan_s)
    for name, strategy in strategies.items():
        for count in counts:
            try:
                program = strategy(graph, count).compile()
                check_optimizer(training.optimizer, program, name)
            except Exception as error:  # it is the user's
                notice(f"the strategy {name} is left out on {count} devices: {error}")
                continue
            simulation = program.simulate(costs=costs)
            step_s = simulation.makespan_s * scale
            peak = max(a + 2 * b for a, b in zip(simulation.peak_bytes, simulation.stored_bytes, strict=True))
            if peak > memory_bytes:
                notice(f"the strategy {name} needs more memory than {count} devices have")
                continue
            estimates.append(_estimate(training, name, count, step_s, peak, steps))
    return estimates
