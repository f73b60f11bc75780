"""Ranks strategies for a task twice: all by rough rates, and the likely ones again by what their ops take here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rota.calibrate.calibrate import calibrate
from rota.calibrate.known import Links
from rota.cluster.device import format_bytes
from rota.errors import FitError, RotaError
from rota.graph.graph import Graph
from rota.plan.costs import Costs
from rota.runtime.planned import moments_of, needs_of
from rota.search.search import Candidate, Search, search
from rota.strategies.base import Strategy, find
from rota.strategies.single import single

_LEAST_S = 0.5

Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """What a task's strategies are predicted to take."""

    found: Mapping[int, Search]
    """number of devices -> the likely ones, by measured costs"""
    refused: Mapping[int, RotaError]
    """number of devices -> why none suits"""
    costs: Costs
    alone_s: float
    """What a batch takes on one device, by the same costs."""


def rank(
    graph: Graph,
    optimizer: torch.optim.Optimizer,
    counts: Sequence[int],
    *,
    memory_bytes: int,
    search_s: float,
    calibrate_s: float,
    likely: int,
    may_idle: bool,
    links: Links | None = None,
    notice: Notice = lambda text: None,
) -> Ranked:
    """For each number of devices. `may_idle` also takes what leaves some of them without work."""
    until_s = time.perf_counter() + search_s
    rough: dict[int, Search] = {}
    refused: dict[int, RotaError] = {}
    for place, count in enumerate(counts):
        saving = _saving_bytes(graph, optimizer, count)
        if saving > memory_bytes:
            refused[count] = FitError(
                f"checkpoints are put together on one device, which takes {format_bytes(saving)}, and it has "
                f"{format_bytes(memory_bytes)}",
                needed_bytes=saving,
            )
            continue
        left_s = max(_LEAST_S, (until_s - time.perf_counter()) / (len(counts) - place))
        try:
            rough[count] = _searched(graph, optimizer, count, memory_bytes=memory_bytes, budget_s=left_s)
        except RotaError as error:
            refused[count] = error
    texts = {
        count: [
            one.text for one in found.candidates if one.measured and one.fits and (may_idle or _is_busy(one, count))
        ][:likely]
        for count, found in rough.items()
    }
    alone = single()(graph, 1).compile()
    costs = calibrate(
        [*(find(text)(graph, count).compile() for count, some in texts.items() for text in some), alone],
        budget_s=max(_LEAST_S, calibrate_s),
        threads=torch.get_num_threads(),
        links=links,
        notice=notice,
    )
    return Ranked(
        found={
            count: _searched(graph, optimizer, count, memory_bytes=memory_bytes, costs=costs, texts=frozenset(some))
            for count, some in texts.items()
            if some
        },
        refused=refused,
        costs=costs,
        alone_s=alone.simulate(costs=costs).makespan_s,
    )


def _saving_bytes(graph: Graph, optimizer: torch.optim.Optimizer, count: int) -> int:
    """What the device that saves needs for it: the whole state, beside its own part."""
    if count == 1:
        return 0
    weights = sum(tensor.size_bytes for tensor in graph.parameters)
    return round((1 + moments_of(optimizer)) * weights * (1 + 1 / count))


def _is_busy(one: Candidate, count: int) -> bool:
    return one.devices == count


def _searched(
    graph: Graph,
    optimizer: torch.optim.Optimizer,
    count: int,
    *,
    memory_bytes: int,
    costs: Costs | None = None,
    budget_s: float | None = None,
    texts: frozenset[str] | None = None,
) -> Search:
    """What an optimizer can be given, among these `texts`."""
    needs = needs_of(optimizer)

    def suits(strategy: Strategy) -> bool:
        whole = needs != "everything" or type(strategy).__name__ in ("Data", "Single")
        return whole and (texts is None or str(strategy) in texts)

    return search(
        graph,
        count,
        memory_bytes=memory_bytes,
        whole_parameters=needs != "elements",
        within=suits,
        costs=costs,
        budget_s=budget_s,
    )
