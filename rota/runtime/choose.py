"""Decides how a gang runs a task's batches, when the first batch is there: the user's strategy, or the best one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rota.calibrate.clocks import product_s, timer_of
from rota.calibrate.known import Links, Store
from rota.calibrate.links import measure_links_within
from rota.errors import CaptureError, RotaError
from rota.graph.anywhere import anywhere
from rota.graph.capture import capture
from rota.graph.graph import Graph
from rota.plan.simulate import Simulation, simulate
from rota.profile.estimate import WORTH_S
from rota.runtime.alone import Alone
from rota.runtime.balancing import Tell, silent
from rota.runtime.executor import Executor, Parts, loss_of, outputs_in, placed
from rota.runtime.gang import Gang, talking
from rota.runtime.one_device import alone_bytes, beside_bytes, check_can_stay, spills
from rota.runtime.planned import Planned
from rota.runtime.ranking import rank
from rota.search.stages import microbatches_of, op_seconds, wants_measured_stages, with_stages
from rota.state.rng import keeping_random_state
from rota.store.cache import cache_folder
from rota.strategies.base import find
from rota.strategies.data import data
from rota.strategies.mesh import can_balance, has_shares, with_shares
from rota.strategies.single import single
from rota.strategies.spill import spill

_SEARCH_S = 60.0
# The best few by rough rates are looked at with measured ones.
_MEASURED = 5
_CALIBRATE_S = 20.0
# Devices that differ by less are left to what is measured while they train.
_UNEQUAL = 1.3
_PRODUCT = 384
# Of a device's memory: where the weights alone take more, a device has no room for its part beside them.
_WHOLE = 0.25

Notice = Callable[[str], None]


def choose(
    parts: Parts,
    batch: Any,
    *,
    gang: Gang,
    step: int,
    total_steps: int,
    memory_bytes: int,
    notice: Notice,
    tell: Tell = silent,
) -> Executor:
    """The executor of a task; every process of the gang comes to the same. `step` is the last that was taken."""

    def planned(strategy: Any, graph: Graph) -> Planned:
        strategy = fitted(balanced(strategy, graph, gang, notice), parts, gang, notice)
        return Planned(
            parts,
            batch,
            gang=gang,
            strategy=strategy,
            graph=graph,
            notice=notice,
            total_steps=total_steps,
            tell=tell,
        )

    strategy: Any = parts.task.strategy
    if hasattr(strategy, "execute"):  # it makes no plan: PyTorch's own, or a technique
        executor: Executor = strategy.execute(parts, batch, gang=gang, notice=notice)
        return executor
    if spills(strategy):
        from rota.memory.spilling import Spilling

        try:
            return Spilling(parts, batch, spill=strategy, gang=gang, notice=notice)
        except CaptureError as error:
            check_can_stay(any(gang.everyone(has_left(parts))), error)
            notice(f"{strategy}: {error}; one device runs it as plain PyTorch, without spilling")
            return Alone(parts, gang=gang)
    if strategy != "auto":
        made = find(strategy) if isinstance(strategy, str) else strategy
        return planned(made, graph_of(parts, batch))
    try:
        graph = graph_of(parts, batch)
    except CaptureError as error:
        notice(f"auto: {error}; for all of its devices, say strategy='torch_ddp', which assumes a loss that is a mean")
        return Alone(parts, gang=gang)
    text, shared_spill = "", str(data(gang.size) * spill())
    fits = gang.leads and alone_bytes(graph, parts) <= free_bytes(parts, memory_bytes)
    if any(gang.everyone(has_left(parts))):
        text = shared_spill
    elif gang.leads:
        if fits:
            text = quick_answer(graph, steps=total_steps - step, notice=notice)
        elif cannot_be_cut(parts):
            text = shared_spill
    text = gang.told(text)
    if not text:
        with keeping_random_state():
            parts.watch("measuring how its devices communicate", ours=True)
            links = measured_links(gang)
            if gang.leads:
                parts.watch("the search for a strategy", ours=True)
                left_bytes = free_bytes(parts, memory_bytes) - beside_bytes(parts)
                fallback = str(single()) if fits or parts.room is None else shared_spill
                text = best(
                    graph, parts, gang.size, memory_bytes=left_bytes, links=links, fallback=fallback, notice=notice
                )
        text = gang.told(text)
    if text == str(single()):
        return Alone(parts, gang=gang)
    if text == shared_spill:
        from rota.memory.spilling import Spilling

        return Spilling(parts, batch, spill=data(gang.size) * spill(), gang=gang, graph=graph, notice=notice)
    return planned(find(text), graph)


def needed_bytes(graph: Graph) -> int:
    """What one device needs for a step of plain PyTorch, with Adam's moments."""
    return _with_moments(simulate(single()(graph, 1).compile(), plain_random=True))


def _with_moments(alone: Simulation) -> int:
    return alone.peak_bytes[0] + 2 * alone.stored_bytes[0]


def balanced(strategy: Any, graph: Graph, gang: Gang, notice: Notice) -> Any:
    """A pipeline with its stages balanced by measured costs; the leader measures, for all must cut alike."""
    if not wants_measured_stages(strategy):
        return strategy
    seconds = None
    if gang.leads:
        with keeping_random_state():
            seconds = op_seconds(graph, microbatches_of(strategy, graph, gang.size), notice=notice)
    return with_stages(strategy, gang.told(seconds))


def fitted(strategy: Any, parts: Parts, gang: Gang, notice: Notice) -> Any:
    """The strategy with work divided as the devices are fast, where they differ and nobody has said otherwise."""
    if parts.task.balance == "off" or gang.size == 1 or not can_balance(strategy) or has_shares(strategy):
        return strategy
    # In the time that the device itself uses: others on its core are for what is measured while it trains.
    timer = timer_of(gang.kind, torch.get_num_threads())
    paces = gang.everyone(product_s(_PRODUCT, device=parts.device, timer=timer))
    if max(paces) < min(paces) * _UNEQUAL:
        return strategy
    speeds = [1 / pace for pace in paces]
    shares = tuple(speed / sum(speeds) for speed in speeds)
    told = ", ".join(f"{share:.0%}" for share in shares)
    notice(f"the devices are not equally fast, so they get {told} of the work")
    return with_shares(strategy, shares)


def graph_of(parts: Parts, batch: Any) -> Graph:
    """The task's model and loss as a graph; a model that waits on the host of its device is captured there."""
    parts.watch("capturing the model")
    where = next((parameter.device for parameter in parts.model.parameters()), parts.device)
    batch = placed(batch, replace(parts, device=where))
    graph = capture(parts.model, batch, lambda model, one: outputs_in(loss_of(parts.task, model, one, where.type)))
    return anywhere(graph) if parts.device.type == "cuda" else graph


def has_left(parts: Parts) -> bool:
    """Whether a part of the model had to leave while it was made."""
    return parts.room is not None and parts.room.building.away


def cannot_be_cut(parts: Parts) -> bool:
    """Whether a device has no room for its part of the model beside all of it, which each device makes."""
    if parts.room is None:
        return False
    whole = sum(parameter.numel() * parameter.element_size() for parameter in parts.model.parameters())
    return whole > _WHOLE * parts.room.memory_bytes


def free_bytes(parts: Parts, memory_bytes: int) -> int:
    """What is left for a task beside what its process has taken, for the graph of the model and the user's data."""
    return memory_bytes - (0 if parts.room is None else parts.room.taken_bytes())


def quick_answer(graph: Graph, *, steps: int, notice: Notice) -> str:
    """One device, if that trains a task that fits in less time than a search is worth; else nothing."""
    alone = single()(graph, 1).compile().simulate()
    if alone.makespan_s * steps > WORTH_S:
        return ""
    notice(f"auto: one device trains this in about {alone.makespan_s * steps:.0f} s, so it is not cut")
    return str(single())


def measured_links(gang: Gang) -> Links | None:
    """What it costs this gang to communicate: measured once on a machine, by all processes together."""
    store = Store.open(cache_folder(), threads=torch.get_num_threads(), kind=gang.kind)
    known = store.known.links.get(str(gang.size))
    if gang.told(known is not None):
        return known
    with talking():
        return measure_links_within(kind=gang.kind)


def best(
    graph: Graph,
    parts: Parts,
    devices: int,
    *,
    memory_bytes: int,
    links: Links | None,
    fallback: str,
    notice: Notice,
) -> str:
    """The strategy that is predicted to be the fastest of those that fit, as text; the fallback if there is none."""
    try:
        ranked = rank(
            graph,
            parts.optimizer,
            [devices],
            memory_bytes=memory_bytes,
            search_s=_SEARCH_S,
            calibrate_s=_CALIBRATE_S,
            likely=_MEASURED,
            may_idle=True,
            links=links,
            notice=notice,
        )
        if devices in ranked.refused:
            raise ranked.refused[devices]
    except RotaError as error:
        notice(f"auto: {error}; {fallback} runs it")
        return fallback
    found = ranked.found[devices]
    notice(f"auto: {found.sentence()}")
    return found.chosen.text
