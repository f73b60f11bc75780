"""Decides how a gang runs a task's batches, when the first batch is there: the user's strategy, or the best one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rota.errors import CaptureError, RotaError
from rota.graph.capture import capture
from rota.graph.graph import Graph
from rota.runtime.executor import Executor, Parts, loss_of, placed
from rota.runtime.gang import Gang
from rota.runtime.planned import Planned, is_elementwise
from rota.runtime.wrapped import Wrapped, Wrapper
from rota.strategies.base import Strategy, describe, find

# A search takes seconds: not for a task that one device trains meanwhile.
_WORTH_S = 20.0

Notice = Callable[[str], None]


def choose(parts: Parts, batch: Any, *, gang: Gang, steps: int, memory_bytes: int, notice: Notice) -> Executor:
    """The executor of a task; every process of the gang comes to the same."""
    strategy: Any = parts.task.strategy
    if isinstance(strategy, Wrapper):
        return Wrapped(parts, batch, gang=gang, wrapper=strategy, notice=notice)
    if strategy != "auto":
        made = find(strategy) if isinstance(strategy, str) else strategy
        return Planned(parts, batch, gang=gang, strategy=made, notice=notice)
    try:
        graph = graph_of(parts, batch)
    except CaptureError as error:
        wrapper = Wrapper(kind="ddp")
        notice(f"{error}; PyTorch's DistributedDataParallel runs it, which assumes a loss that is a mean")
        return Wrapped(parts, batch, gang=gang, wrapper=wrapper, notice=notice)
    text = ""
    if gang.leads:
        text = best(graph, parts, gang.size, steps=steps, memory_bytes=memory_bytes, notice=notice)
    chosen: Strategy = find(gang.told(text))
    return Planned(parts, batch, gang=gang, strategy=chosen, graph=graph, notice=notice)


def graph_of(parts: Parts, batch: Any) -> Graph:
    """The task's model and loss as a graph."""
    kind = parts.device.type
    return capture(parts.model, placed(batch, parts), lambda model, one: loss_of(parts.task, model, one, kind))


def best(graph: Graph, parts: Parts, devices: int, *, steps: int, memory_bytes: int, notice: Notice) -> str:
    """The strategy that is predicted to be the fastest of those that fit, as text."""
    from rota.plan.simulate import Costs
    from rota.search.search import search
    from rota.strategies.single import single

    alone = single()(graph, 1).compile().simulate(Costs())
    fits = alone.peak_bytes[0] + 2 * alone.stored_bytes[0] <= memory_bytes
    if fits and alone.makespan_s * steps < _WORTH_S:
        notice(f"auto: one device trains this in about {alone.makespan_s * steps:.0f} s, so it is not cut")
        return str(single())
    try:
        found = search(graph, devices, memory_bytes=memory_bytes, whole_parameters=not is_elementwise(parts.optimizer))
    except RotaError as error:
        notice(f"auto: {error}; one device runs it")
        return describe(single())
    notice("auto: " + found.sentence())
    return str(found.chosen.text)
