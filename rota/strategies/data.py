"""Data parallelism: each device computes the whole model on its share of the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rota.errors import InputError
from rota.graph.graph import Graph, Op, Role
from rota.graph.scaled import scale_before_sum
from rota.plan.box import weighted_widths
from rota.plan.plan import Plan
from rota.strategies.base import register
from rota.strategies.dims import dim_of
from rota.strategies.mesh import Choice, Copy, Cut, Mesh, Recipe


@dataclass(frozen=True, kw_only=True)
class Data(Recipe):
    """Every op that counts samples is cut along them, the others are copied; the rest is derived."""

    balances: ClassVar[bool] = True

    def prepare(self, graph: Graph, degree: int, *, whole: bool) -> Graph:
        """With a loss for which no device has to wait before its backward pass."""
        return scale_before_sum(graph) if whole and degree > 1 else graph

    def begin(self, plan: Plan, degree: int) -> Samples:
        """Refused if there are fewer samples than devices."""
        return Samples(plan, degree, self.shares)


class Samples:
    """Cuts samples."""

    def __init__(self, plan: Plan, degree: int, shares: tuple[float, ...] | None = None) -> None:
        samples = plan.batch_size or 0
        if samples // plan.microbatches < degree:
            within = f" in {plan.microbatches} micro-batches" if plan.microbatches > 1 else ""
            fewer = "fewer devices or micro-batches" if plan.microbatches > 1 else "fewer devices"
            raise InputError(f"a batch of {samples} samples{within} cannot be shared by {degree} devices; use {fewer}")
        self._plan = plan
        self._samples = samples
        self._widths = None if shares is None else weighted_widths(samples, shares)
        self._families = plan.refined.batch_families()
        self._counts = counted_by_all(plan) if plan.microbatches == 1 else frozenset()

    def choose(self, op: Op) -> Choice:
        """Along the samples, if it has any; what only counts something in the batch, every device does itself."""
        if op.name in self._counts:
            return Copy()
        dim = dim_of(self._plan.refined, op.name, self._families)
        return Copy() if dim is None or dim.size != self._samples else Cut(dim=dim.name, widths=self._widths)

    def finish(self, mesh: Mesh) -> None:
        """Nothing is left to say."""


def counted_by_all(plan: Plan) -> frozenset[str]:
    """The ops that make a number of the batch alone, such as how many targets count: cheaper done than asked for."""
    graph, samples = plan.graph, plan.refined.batch_families()
    light: dict[str, Op] = {}
    """tensor -> the op that makes it, of those that depend on the batch and constants only"""
    made = {name for op in graph.ops for name in op.outputs}
    for op in graph.ops:
        of_batch = all(
            name in light or (name not in made and graph.tensors[name].role in (Role.INPUT, Role.CONSTANT))
            for name in op.inputs
        )
        if of_batch:
            light.update({name: op for name in op.outputs if name is not None})
    found: set[str] = set()
    waiting = [op for name, op in light.items() if _is_number(plan, op, samples)]
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found.add(op.name)
            waiting += [light[name] for name in op.inputs if name in light]
    return frozenset(found)


def _is_number(plan: Plan, op: Op, samples: frozenset[int]) -> bool:
    """Whether an op sums over the samples."""
    dim = dim_of(plan.refined, op.name, samples)
    return dim is not None and dim.reduced


def data(degree: int | None = None, *, microbatches: int | None = None) -> Data:
    """Replicas of the model, each on its share of the samples."""
    return Data(degree=degree, microbatches=microbatches)


register("data", data)
