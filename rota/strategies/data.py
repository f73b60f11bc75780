"""Data parallelism: each device computes the whole model on its share of the samples."""

from __future__ import annotations

from dataclasses import dataclass

from rota.errors import InputError
from rota.graph.graph import Op
from rota.plan.plan import Plan
from rota.strategies.base import register
from rota.strategies.dims import dim_of
from rota.strategies.mesh import Choice, Copy, Cut, Mesh, Recipe


@dataclass(frozen=True, kw_only=True)
class Data(Recipe):
    """Every op that counts samples is cut along them, the others are copied; the rest is derived."""

    def begin(self, plan: Plan, degree: int) -> Samples:
        """Refused if there are fewer samples than devices."""
        return Samples(plan, degree)


class Samples:
    """Cuts samples."""

    def __init__(self, plan: Plan, degree: int) -> None:
        samples = plan.batch_size or 0
        if samples // plan.microbatches < degree:
            within = f" in {plan.microbatches} micro-batches" if plan.microbatches > 1 else ""
            fewer = "fewer devices or micro-batches" if plan.microbatches > 1 else "fewer devices"
            raise InputError(f"a batch of {samples} samples{within} cannot be shared by {degree} devices; use {fewer}")
        self._plan = plan
        self._samples = samples
        self._families = plan.refined.batch_families()

    def choose(self, op: Op) -> Choice:
        """Along the samples, if it has any."""
        dim = dim_of(self._plan.refined, op.name, self._families)
        return Copy() if dim is None or dim.size != self._samples else Cut(dim=dim.name)

    def finish(self, mesh: Mesh) -> None:
        """Nothing is left to say."""


def data(degree: int | None = None, *, microbatches: int | None = None) -> Data:
    """Replicas of the model, each on its share of the samples."""
    return Data(degree=degree, microbatches=microbatches)


register("data", data)
