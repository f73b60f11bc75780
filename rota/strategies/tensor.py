"""Tensor parallelism: attention heads and feed-forward columns are cut from one product to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rota.errors import InputError
from rota.graph.graph import Graph, Op
from rota.graph.refine import Dim, Refined
from rota.graph.vocabulary import BLOCK_SCORES, block_classes
from rota.plan.box import weighted_widths
from rota.plan.plan import Plan
from rota.strategies.base import register
from rota.strategies.dims import dim_of, paired_families
from rota.strategies.mesh import Choice, Copy, Cut, Mesh, Recipe


@dataclass(frozen=True, kw_only=True)
class Tensor(Recipe):
    """Megatron's cuts, found in any graph; with `sequence`, what lies outside of them is cut along the sequence."""

    balances: ClassVar[bool] = True
    sequence: bool = False
    vocabulary: bool = False
    """Also cut embeddings, the last product and the loss along the vocabulary."""

    def prepare(self, graph: Graph, degree: int, *, whole: bool) -> Graph:
        """With a loss that can be cut along the vocabulary, if that is wished."""
        return block_classes(graph, degree) if self.vocabulary else graph

    def begin(self, plan: Plan, degree: int) -> _Columns:
        """Refused if no product of the model can be cut so often."""
        return _Columns(plan, degree, self)


class _Columns:
    def __init__(self, plan: Plan, degree: int, recipe: Tensor) -> None:
        self._refined = plan.refined
        self._shares = recipe.shares
        self._families = paired_families(plan.refined, degree)
        if not self._families and degree > 1:
            raise InputError(f"the model has no heads or columns that can be cut into {degree}; use fewer devices")
        self._sequence = _sequence_families(plan, degree) if recipe.sequence else frozenset()
        self._vocabulary = Vocabulary(plan.refined, degree) if recipe.vocabulary else None

    def choose(self, op: Op) -> Choice:
        """Along the vocabulary, if wished; along heads or columns; else along the sequence, if wished; else copied."""
        dim = self._vocabulary.dim_of(op) if self._vocabulary is not None else None
        if dim is None:
            dim = dim_of(self._refined, op.name, self._families)
        if dim is None and op.kind != "scaled_dot_product_attention":
            dim = dim_of(self._refined, op.name, self._sequence)
        return Copy() if dim is None else Cut(dim=dim.name, widths=self._widths(dim.size))

    def _widths(self, size: int) -> tuple[int, ...] | None:
        """Each family for itself: devices meet after each pair of products, so that none can make up for another."""
        if self._shares is None:
            return None
        return weighted_widths(size, self._shares, grain=_GRAIN if size >= _FINE and size % _GRAIN == 0 else 1)

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


class Vocabulary:
    """The dims that count the rows of large embeddings and the blocks of a loss's classes, which may be the same."""

    def __init__(self, refined: Refined, degree: int) -> None:
        self._refined = refined
        self.looked_up = _looked_up(refined, degree)
        """The families that embeddings look rows up in."""
        self.scored = frozenset(
            dim.family
            for op in refined.graph.find(kind=BLOCK_SCORES)
            for name, dim in refined.frames[op.name].dims.items()
            if name == "b" and dim.size >= degree
        )
        """The families of blocks of classes."""

    def dim_of(self, op: Op) -> Dim | None:
        """The dim of the vocabulary along which an op is to be cut.

        From the product to the loss everything is cut. Where a loss has no blocks only the product is, and its scores
        are gathered. What sums over blocks is left whole: it reads two small tensors, which come in one message.
        """
        dim = dim_of(self._refined, op.name, self.scored)
        if dim is not None and not (dim.reduced and op.kind == "sum"):
            return dim
        return dim_of(self._refined, op.name, self.looked_up) if op.kind in ("embedding", "linear") else None


def _looked_up(refined: Refined, degree: int) -> frozenset[int]:
    """Of the largest table and of those that are not much smaller: positions and the like are not worth a message."""
    graph = refined.graph
    tables = {op.name: math.prod(graph.tensors[op.inputs[0]].shape) for op in graph.find(kind="embedding")}
    found = set()
    for name, elements in tables.items():
        if elements * _SMALL_TABLE >= max(tables.values()):
            rows = [dim for word, dim in refined.frames[name].dims.items() if word.partition(".")[0] == "v"]
            found |= {dim.family for dim in rows[:1] if dim.size >= degree}
    return frozenset(found)


_GRAIN = 16
"""Products are fast on blocks of columns."""
_FINE = 32 * _GRAIN
_SMALL_TABLE = 10
"""A table is small if it has less than one in so many of the elements of the largest."""


def tensor(
    degree: int | None = None, *, sequence: bool = False, vocabulary: bool = False, microbatches: int | None = None
) -> Tensor:
    """Heads and columns cut over devices."""
    return Tensor(degree=degree, sequence=sequence, vocabulary=vocabulary, microbatches=microbatches)


register("tensor", tensor)
