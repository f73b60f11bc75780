"""Tensor parallelism: attention heads and feed-forward columns are cut from one product to the next."""

from __future__ import annotations

from dataclasses import dataclass

from rota.errors import InputError
from rota.graph.graph import Op
from rota.plan.plan import Plan
from rota.strategies.base import register
from rota.strategies.dims import dim_of, paired_families
from rota.strategies.mesh import Choice, Copy, Cut, Mesh, Recipe


@dataclass(frozen=True, kw_only=True)
class Tensor(Recipe):
    """Megatron's cuts, found in any graph; with `sequence`, what lies outside of them is cut along the sequence."""

    sequence: bool = False
    vocabulary: bool = False
    """Also cut embeddings and the last product along the vocabulary."""

    def begin(self, plan: Plan, degree: int) -> _Columns:
        """Refused if no product of the model can be cut so often."""
        return _Columns(plan, degree, sequence=self.sequence, vocabulary=self.vocabulary)


class _Columns:
    def __init__(self, plan: Plan, degree: int, *, sequence: bool, vocabulary: bool) -> None:
        self._refined = plan.refined
        self._families = paired_families(plan.refined, degree)
        if not self._families and degree > 1:
            raise InputError(f"the model has no heads or columns that can be cut into {degree}; use fewer devices")
        self._sequence = _sequence_families(plan, degree) if sequence else frozenset()
        self._vocabulary = _vocabulary_families(plan, degree) if vocabulary else frozenset()

    def choose(self, op: Op) -> Choice:
        """Along heads or columns; else along the sequence, if wished; else copied."""
        dim = dim_of(self._refined, op.name, self._families)
        if dim is None and op.kind in ("embedding", "linear"):
            dim = dim_of(self._refined, op.name, self._vocabulary)
        if dim is None and op.kind != "scaled_dot_product_attention":
            dim = dim_of(self._refined, op.name, self._sequence)
        return Copy() if dim is None else Cut(dim=dim.name)

    def finish(self, mesh: Mesh) -> None:
        """Nothing is left to say."""


def _sequence_families(plan: Plan, degree: int) -> frozenset[int]:
    """The families of positions: the second dim of what embeddings and norms make of (samples, positions, features)."""
    found = set()
    for op in plan.graph.ops:
        name = op.outputs[0]
        if op.kind not in ("embedding", "layer_norm", "rms_norm") or name is None:
            continue
        factors = plan.refined.factors[name]
        if len(factors) == 3 and factors[1] and factors[1][0] >= degree:
            found.add(plan.refined.families[name][len(factors[0])])
    return frozenset(found)


def _vocabulary_families(plan: Plan, degree: int) -> frozenset[int]:
    """The families that embeddings look rows up in."""
    return frozenset(
        plan.dims(op)["v"].family
        for op in plan.ops(kind="embedding")
        if "v" in plan.dims(op) and plan.dims(op)["v"].size >= degree
    )


def tensor(
    degree: int | None = None, *, sequence: bool = False, vocabulary: bool = False, microbatches: int | None = None
) -> Tensor:
    """Heads and columns cut over devices."""
    return Tensor(degree=degree, sequence=sequence, vocabulary=vocabulary, microbatches=microbatches)


register("tensor", tensor)
