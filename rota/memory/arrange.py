"""Decides how a model that does not fit is cut, and what of it is where when: the fastest of some arrangements."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from rota.errors import FitError, InputError
from rota.graph.graph import Graph
from rota.graph.positional import is_random
from rota.memory.residency import Forecast, Rates, Residency, plan_residency
from rota.memory.steps import Group, SegmentSeconds, Step, Training, groups_of, item_of, step_of
from rota.plan.costs import Costs, segment_costs
from rota.plan.program import NodeKind, Program
from rota.plan.timing import interpolated
from rota.runtime.footprint import Footprints
from rota.strategies.spill import Spill, cut, on_the_first, shards_of

_AT_ONCE = 4
"""So many shards, with gradients and moments, are to have room at once: one is used, others come and go."""
_FEWEST, _MOST = 4, 256


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a graph is cut: what `rota.strategies.spill.cut` needs."""

    shards: int
    recomputed: frozenset[int] = frozenset()
    replicas: int = 1
    """The devices that share the samples."""

    def program(self, graph: Graph, *, forward_only: bool = False, any_size: bool = False) -> Program:
        """The program of a graph that is cut like this; `any_size` if a batch may have too few samples for all."""
        try:
            plan = cut(graph, self.shards, recomputed=self.recomputed, replicas=self.replicas)
        except InputError:
            if not any_size or self.replicas == 1:
                raise
            plan = on_the_first(graph, self.shards, recomputed=self.recomputed, replicas=self.replicas)
        if forward_only:
            plan.forward_only()
        return plan.compile()


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A program, and what of its step is where when."""

    cut: Cut
    training: Training
    program: Program
    groups: dict[str, Group]
    step: Step
    residency: Residency
    forecast: Forecast
    footprints: Footprints = field(repr=False, compare=False)
    """Of the program, for other arrangements of it."""


def arrange(
    graph: Graph,
    spill: Spill,
    training: Training,
    *,
    budget_bytes: int,
    rates: Rates,
    costs: Costs | None = None,
    replicas: int = 1,
) -> Arrangement:
    """The fastest arrangement that the user's choice leaves open, for the first of the devices that share the samples.

    FitError tells the least budget if none fits.
    """
    costs = costs or Costs()
    found: list[Arrangement] = []
    least: FitError | None = None
    for shards in _shard_counts(graph, spill, training, budget_bytes):
        for one in _arrangements(graph, spill, shards, training, budget_bytes, rates, costs, replicas):
            if isinstance(one, FitError):
                least = one if least is None or (one.needed_bytes or 0) < (least.needed_bytes or 0) else least
            else:
                found.append(one)
        if found:
            best = min(found, key=lambda one: one.forecast.step_s)
            return min([best, *_together(best, rates, costs)], key=lambda one: one.forecast.step_s)
    assert least is not None
    raise least


def _together(found: Arrangement, rates: Rates, costs: Costs) -> Iterator[Arrangement]:
    """The same with several batches that go through a shard at once, so that it comes once for all of them."""
    if not may_go_together(found.program):
        return
    counts = {found.training.batches, *(2**power for power in range(1, found.training.batches.bit_length()))}
    for count in sorted(counts - {1}):
        if count <= found.training.batches:
            with contextlib.suppress(FitError):
                yield arranged(
                    found.cut,
                    found.program,
                    found.groups,
                    replace(found.training, at_once=count),
                    budget_bytes=found.residency.budget_bytes,
                    rates=rates,
                    costs=costs,
                    footprints=found.footprints,
                )


def may_go_together(program: Program) -> bool:
    """Whether batches come out the same when they go through each shard side by side.

    Not where the next one sees what the last one changed: buffers, and the state of the random generator.
    """
    random = any(is_random(op) for op in program.refined.graph.ops)
    return program.devices == 1 and not random and not program.updates


def _shard_counts(graph: Graph, spill: Spill, training: Training, budget_bytes: int) -> Iterator[int]:
    """Few enough to be large, and many enough for some of them to fit; then more."""
    if spill.shards is not None:
        yield spill.shards
        return
    state = sum(tensor.size_bytes for tensor in graph.parameters) * (2 + training.moments)
    shards = min(_MOST // 4, max(_FEWEST, -(-_AT_ONCE * state // max(1, budget_bytes))))
    while shards <= _MOST:
        yield shards
        shards *= 2


def _arrangements(
    graph: Graph,
    spill: Spill,
    shards: int,
    training: Training,
    budget_bytes: int,
    rates: Rates,
    costs: Costs,
    replicas: int,
) -> Iterator[Arrangement | FitError]:
    def of(recomputed: Collection[int], *, move: bool) -> Arrangement | FitError:
        made = Cut(shards=shards, recomputed=frozenset(recomputed), replicas=replicas)
        program = made.program(graph)
        moving = replace(training, activations_move=move)
        try:
            return arranged(
                made, program, groups_of(program), moving, budget_bytes=budget_bytes, rates=rates, costs=costs
            )
        except FitError as error:
            return error

    everything = range(len(graph.ops))
    if spill.activations != "auto":
        again = everything if spill.activations == "recompute" else ()
        yield of(again, move=spill.activations != "keep")
        return
    kept = of((), move=True)
    yield kept
    if isinstance(kept, FitError) or any(":tape:" in load.item for load in kept.residency.loads):
        yield of(everything, move=True)
    if isinstance(kept, Arrangement):
        cheaper = _cheaper_made_again(kept, rates, costs)
        if cheaper:
            yield of(cheaper, move=True)


def arranged(
    made: Cut,
    program: Program,
    groups: dict[str, Group],
    training: Training,
    *,
    budget_bytes: int,
    rates: Rates,
    costs: Costs,
    seconds: SegmentSeconds | None = None,
    rank: int = 0,
    footprints: Footprints | None = None,
) -> Arrangement:
    """What is where when on a device, for one way to cut.

    `seconds` are measured ones of segments, if there are any, and so is then what the training says of updates.
    """
    if seconds is None:
        seconds = predicted_seconds(program, costs)
        training = replace(training, update_s=lambda sizes: sum(update_seconds(costs, size) for size in sizes))
    footprints = footprints or Footprints(program.refined, plain_random=made.replicas == 1, whole_tapes=True)
    step = step_of(program, groups, footprints, training, seconds, device=rank)
    residency, forecast = plan_residency(step.stages, step.items, budget_bytes=budget_bytes, rates=rates)
    return Arrangement(
        cut=made,
        training=training,
        program=program,
        groups=groups,
        step=step,
        residency=residency,
        forecast=forecast,
        footprints=footprints,
    )


def predicted_seconds(program: Program, costs: Costs) -> SegmentSeconds:
    """What the passes of segments take by these costs."""
    known = segment_costs(program, costs)
    return lambda segment: (known[segment.index].forward_s, known[segment.index].backward_s)


def update_seconds(costs: Costs, size_bytes: int) -> float:
    """What it takes to update a parameter: four tensors are read and three written, if nothing was measured."""
    if costs.calibration is None:
        return 7 * size_bytes / costs.bytes_per_s
    return interpolated(costs.calibration.optimizer, size_bytes)


def _cheaper_made_again(kept: Arrangement, rates: Rates, costs: Costs) -> set[int]:
    """The shards whose activations leave though it takes less time to make them again than to move them."""
    moved = {load.item for load in kept.residency.loads}
    seconds = segment_costs(kept.program, costs)
    graph = kept.program.refined.graph
    places = {op.name: place for place, op in enumerate(graph.ops)}
    starts = [shard.start for shard in shards_of(graph, kept.cut.shards)]
    found = set()
    for node in kept.program.nodes:
        item = item_of(0, (node.segment, node.microbatch))
        if node.kind is NodeKind.FORWARD and item in moved:
            size = kept.step.items[item].size_bytes
            if seconds[node.segment].forward_s < size * (rates.read_byte_s + rates.write_byte_s):
                first = places[kept.program.segments[node.segment].calls[0].op]
                found.add(bisect.bisect_right(starts, first) - 1)
    return found
