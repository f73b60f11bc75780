"""Balances the stages of a pipeline by what ops cost on this machine, instead of by what they seem to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from rota.calibrate.calibrate import calibrate
from rota.graph.graph import Graph
from rota.plan.costs import call_cost
from rota.plan.plan import Plan
from rota.strategies.mesh import Product
from rota.strategies.pipeline import Pipeline
from rota.strategies.single import single

_BUDGET_S = 10.0


def wants_measured_stages(strategy: Any) -> bool:
    """Whether it has stages whose costs nobody gave."""
    recipes = strategy.recipes if isinstance(strategy, Product) else (strategy,)
    return any(type(recipe) is Pipeline and recipe.seconds is None for recipe in recipes)


def op_seconds(graph: Graph, microbatches: int, *, notice: Callable[[str], None] = lambda text: None) -> list[float]:
    """What each op takes on this device, forward and backward, on a micro-batch; cached for this machine."""
    program = single(microbatches=microbatches)(graph, 1).compile()
    costs = calibrate([program], budget_s=_BUDGET_S, threads=torch.get_num_threads(), notice=notice)
    found = dict.fromkeys((op.name for op in graph.ops), 0.0)
    for segment in program.segments:
        for call in segment.calls:
            cost = call_cost(program.refined, segment, call, costs)
            found[call.op] += cost.forward_s + (cost.backward_s if segment.grad else 0.0)
    return list(found.values())


def with_stages(strategy: Any, seconds: list[float]) -> Any:
    """The strategy with its stages balanced by these costs."""
    if isinstance(strategy, Product):
        return dataclasses.replace(strategy, recipes=tuple(with_stages(one, seconds) for one in strategy.recipes))
    if type(strategy) is Pipeline and strategy.seconds is None:
        return dataclasses.replace(strategy, seconds=tuple(seconds))
    return strategy


def microbatches_of(strategy: Any, graph: Graph, devices: int) -> int:
    """In how many parts a strategy takes a batch."""
    plan: Plan = strategy(graph, devices)
    return plan.microbatches
