"""The ways in which a task could run on several devices: searched for, with what was measured of this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rota.calibrate.calibrate import calibrate
from rota.errors import CaptureError, RotaError
from rota.graph.graph import Graph
from rota.plan.costs import Costs
from rota.profile.estimate import Estimate
from rota.runtime.choose import graph_of
from rota.runtime.planned import check_optimizer, needs_of
from rota.runtime.probe import Steps
from rota.runtime.training import Training
from rota.search.search import Search, search
from rota.strategies.base import describe, find
from rota.strategies.single import single

PREDICTED_SPREAD = 0.25
"""By how much a step may differ from what was predicted."""
_LIKELY = 3
_KEPT = 2

Notice = Callable[[str], None]


def captured(training: Training, batch: Any, notice: Notice) -> Graph | None:
    """The graph of a step, if there can be one."""
    try:
        return graph_of(training.parts, batch)
    except CaptureError as error:
        notice(f"auto: {error}; one device runs it (strategy='torch_ddp' would take more)")
        return None


def peak_bytes(graph: Graph) -> int:
    """What one device needs for a step, with Adam's moments."""
    alone = single()(graph, 1).compile().simulate()
    return alone.peak_bytes[0] + 2 * alone.stored_bytes[0]


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
    until_s = time.perf_counter() + budget_s
    rough: dict[int, Search] = {}
    for place, count in enumerate(counts):
        left_s = max(0.5, (until_s - time.perf_counter()) / 2 / (len(counts) - place))
        try:
            rough[count] = _searched(graph, training, count, memory_bytes, budget_s=left_s)
        except RotaError as error:
            notice(f"auto on {count} devices: {error}")
    likely = {
        count: [one.text for one in found.candidates if one.measured and one.fits and one.devices == count][:_LIKELY]
        for count, found in rough.items()
    }
    programs = [find(text)(graph, count).compile() for count, texts in likely.items() for text in texts]
    programs.append(single()(graph, 1).compile())
    costs = calibrate(
        programs,
        budget_s=max(0.5, until_s - time.perf_counter()),
        threads=torch.get_num_threads(),
        notice=lambda t: None,
    )
    anchor = 1.0
    if steps is not None:
        anchor = steps.step_s / max(1e-9, programs[-1].simulate(costs=costs).makespan_s)
    estimates = []
    for count, texts in likely.items():
        if not texts:
            continue
        names = set(texts)
        found = _searched(graph, training, count, memory_bytes, costs=costs, within=lambda one: str(one) in names)  # noqa: B023
        for one in [one for one in found.candidates if one.measured and one.fits][:_KEPT]:
            assert one.step_s is not None
            assert one.peak_bytes is not None
            estimates.append(
                Estimate(
                    label=one.text,
                    kind=training.device.type,
                    devices=count,
                    step_s=one.step_s * anchor,
                    spread=PREDICTED_SPREAD,
                    memory_bytes=one.peak_bytes,
                    measured=False,
                    start_s=2 * steps.start_s if steps is not None else 0.0,
                )
            )
    return estimates + _of_users(graph, training, counts, memory_bytes, steps, strategies, costs, notice)


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
    alone_s = single()(graph, 1).compile().simulate(costs=costs).makespan_s
    anchor = 1.0 if steps is None else steps.step_s / max(1e-9, alone_s)
    for name, strategy in strategies.items():
        for count in counts:
            if hasattr(strategy, "execute"):  # PyTorch's own, of which nothing is known
                step_s, peak = (steps.step_s if steps is not None else 1.0) / count, 0
            else:
                try:
                    program = strategy(graph, count).compile()
                    check_optimizer(training.optimizer, program, name)
                except Exception as error:  # it is the user's
                    notice(f"the strategy {name} is left out on {count} devices: {error}")
                    continue
                simulation = program.simulate(costs=costs)
                step_s = simulation.makespan_s * anchor
                peak = max(a + 2 * b for a, b in zip(simulation.peak_bytes, simulation.stored_bytes, strict=True))
            if peak > memory_bytes:
                notice(f"the strategy {name} needs more memory than {count} devices have")
                continue
            estimates.append(
                Estimate(
                    label=name,
                    kind=training.device.type,
                    devices=count,
                    step_s=step_s,
                    spread=PREDICTED_SPREAD,
                    memory_bytes=peak,
                    measured=False,
                    start_s=2 * steps.start_s if steps is not None else 0.0,
                )
            )
    return estimates


def _searched(graph: Graph, training: Training, count: int, memory_bytes: int, **more: Any) -> Search:
    needs = needs_of(training.optimizer)
    within = more.pop("within", lambda strategy: True)
    costs: Costs | None = more.pop("costs", None)
    return search(
        graph,
        count,
        memory_bytes=memory_bytes,
        whole_parameters=needs != "elements",
        within=lambda one: within(one) and (needs != "everything" or type(one).__name__ in ("Data", "Single")),
        costs=costs,
        **more,
    )
