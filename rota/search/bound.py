"""What a strategy cannot do better than: the least step and the least memory, told from its cuts without a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rota.graph.cost import element_bytes
from rota.graph.graph import Op
from rota.graph.refine import Refined
from rota.graph.rules import occurrences
from rota.plan.costs import Costs, call_cost
from rota.plan.plan import Plan
from rota.plan.program import ONCE, Call, Segment
from rota.search.prepared import Prepared
from rota.search.space import degree_of, recipes_of
from rota.strategies.base import Strategy
from rota.strategies.coshard import Coshard
from rota.strategies.mesh import Choice, Cut, Pin, Recipe
from rota.strategies.pipeline import Pipeline
from rota.strategies.single import Single
from rota.strategies.zero import Zero

_CALIBRATED = 0.7
"""Of the bound, with measured costs: a smaller part of an op may have been measured to take longer than a larger."""


_REWRITTEN = 0.8
"""Of the work of the ops, for a strategy that may put others in their place."""

_CHAIN = 0.95
"""How much of the time of filling a pipeline counts: some ops of a late stage may need nothing of those before it."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """No plan of the strategy is better."""

    step_s: float
    peak_bytes: float
    """Of the device that needs the most: parameters, gradients and moments alone."""


def bound_of(
    prepared: Prepared,
    strategy: Strategy,
    devices: int,
    *,
    costs: Costs,
    moments: float,
    folded: tuple[int, int] | None,
) -> Bound:
    """Raises InputError if the strategy refuses the graph; `folded` are two numbers of layers to tell it from."""
    recipes = recipes_of(strategy)
    known = all(type(one).__name__ in ("Data", "Zero", "Tensor", "Pipeline", "Dap") for one in recipes)
    if not recipes or not known:
        return _shared_out(prepared, strategy, devices, costs)
    if folded is None or prepared.stack is None:
        return _bound(prepared, prepared.whole, recipes, strategy, costs, moments)
    few, more = folded
    sized = [prepared.sized(layers=layers) for layers in folded]
    one, other = (
        _bound(prepared, refined, recipes, strategy, costs, moments) for refined in sized if refined is not None
    )
    factor = (prepared.stack.layers - few) / (more - few)
    return Bound(
        step_s=one.step_s + factor * (other.step_s - one.step_s),
        peak_bytes=one.peak_bytes + factor * (other.peak_bytes - one.peak_bytes),
    )


def _shared_out(prepared: Prepared, strategy: Strategy, devices: int, costs: Costs) -> Bound:
    """Of a strategy of which nothing is known: each op is computed once, by some device."""
    work = _Work(prepared.whole, getattr(strategy, "microbatches", None) or 1, costs)
    total_s = sum(work.seconds(op, {}) for op in prepared.graph.ops)
    alone = isinstance(strategy, Single | Coshard)
    return Bound(step_s=_trusted(total_s if alone else _REWRITTEN * total_s / devices, costs), peak_bytes=0.0)


def _trusted(step_s: float, costs: Costs) -> float:
    return step_s if costs.calibration is None else step_s * _CALIBRATED


def _bound(
    prepared: Prepared, refined: Refined, recipes: tuple[Recipe, ...], strategy: Strategy, costs: Costs, moments: float
) -> Bound:
    degrees = [recipe.degree or 1 for recipe in recipes]
    count = max(recipe.microbatches or 1 for recipe in recipes)
    refined = prepared.cuttable(refined, recipes, degrees, whole=count == 1)
    plan = Plan(refined.graph, devices=math.prod(degrees), microbatches=count, refined=refined)
    choosers = [
        None if isinstance(recipe, Pipeline) else recipe.begin(plan, degree)
        for recipe, degree in zip(recipes, degrees, strict=True)
    ]
    work = _Work(refined, count, costs)
    total_s = 0.0
    least: dict[str, float] = {}
    """parameter -> the least share of it that a device has"""
    for op in refined.graph.ops:
        choices: list[Choice] = [Pin(place=0) if one is None else one.choose(op) for one in choosers]
        cuts = {choice.dim: degree for choice, degree in zip(choices, degrees, strict=True) if isinstance(choice, Cut)}
        total_s += work.seconds(op, cuts)
        frame = refined.frames[op.name]
        for name, dims in zip(occurrences(op), frame.reads, strict=True):
            share = 1.0 / math.prod(degree for dim, degree in cuts.items() if dim in dims)
            least[name] = min(share, least.get(name, 1.0))
    stages = degree_of(strategy, "pipeline")
    spread = stages * next((recipe.degree or 1 for recipe in recipes if isinstance(recipe, Zero)), 1)
    stored = 0.0
    for tensor in refined.graph.parameters:
        size = math.prod(tensor.shape) * element_bytes(refined, tensor.name) * least.get(tensor.name, 1.0)
        stored += size * (2 + moments if tensor.requires_grad else 1)
    plain = any(isinstance(recipe, Pipeline) and recipe.order != "interleaved" for recipe in recipes)
    step_s = total_s / (min(stages, _fill(count, stages) / _CHAIN) if plain else stages)
    return Bound(step_s=_trusted(step_s, costs), peak_bytes=stored / spread)


def _fill(count: int, stages: int) -> float:
    """How many stages are at work on average, at most, when the first waits for none and each for those before it.

    A stage cannot begin before the first micro-batch went through those before it, nor end before the last went back.
    With stages of t seconds for a micro-batch the step is at least the largest of t_0 + ... + t_(s-1) + count * t_s,
    which is least where they are all equal: each stage shorter than the one before by 1 / count of it.
    """
    return count * (1 - (1 - 1 / count) ** stages)


class _Work:
    """The seconds of parts of ops, forward and backward, over all micro-batches."""

    def __init__(self, refined: Refined, count: int, costs: Costs) -> None:
        self._refined = refined
        self._count = count
        self._costs = costs
        self._samples = refined.batch_families()
        self._size = refined.samples or 1

    def seconds(self, op: Op, cuts: Mapping[str, int]) -> float:
        """No more than a device takes for an op that is cut so."""
        frame = self._refined.frames[op.name]
        widths = {name: max(1, frame.dims[name].size // degree) for name, degree in cuts.items()}
        count = 1
        if self._count > 1:
            for name, dim in frame.dims.items():
                if dim.family in self._samples and dim.size == self._size and frame.can_cut(dim):
                    widths[name] = max(1, widths.get(name, dim.size) // self._count)
                    count = self._count
                    break
        trained = op.with_grad and any(
            name is not None and self._refined.graph.tensors[name].requires_grad for name in op.outputs
        )
        ranges = {name: (0, width) for name, width in widths.items()}
        call = Call(op=op.name, ranges=ranges, reads=(), makes=(), shifted=None)
        segment = Segment(
            index=0, device=0, context=ONCE, grad=trained, recompute=False, calls=(call,), entries=(), exits=(), slots=0
        )
        cost = call_cost(self._refined, segment, call, self._costs)
        return count * (cost.forward_s + (cost.backward_s if trained else 0.0))
