"""Dynamic axial parallelism: each op is cut along whichever of the positions it can be, so that layouts alternate.

Row attention of an Evoformer is cut along rows, column attention along columns; the all-to-all in between is derived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rota.errors import InputError
from rota.graph.graph import Op, Role
from rota.plan.plan import Plan
from rota.strategies.base import register
from rota.strategies.dims import dim_of
from rota.strategies.mesh import Choice, Copy, Cut, Mesh, Recipe


@dataclass(frozen=True, kw_only=True)
class Dap(Recipe):
    """Cut along positions; weights are copied."""

    def begin(self, plan: Plan, degree: int) -> _Positions:
        """Refused if the batch has no dim of positions long enough."""
        return _Positions(plan, degree)


class _Positions:
    def __init__(self, plan: Plan, degree: int) -> None:
        self._refined = plan.refined
        self._graph = plan.graph
        self._degree = degree
        self._families = _position_families(plan, degree)
        if not self._families and degree > 1:
            raise InputError(f"the batch has no dim of positions that can be cut into {degree}; use fewer devices")
        self._cut: dict[str, int] = {}
        """tensor -> the family along which it is cut"""

    def choose(self, op: Op) -> Choice:
        """Along the positions that cost the least to come to from how the inputs are cut."""
        best: tuple[float, int] | None = None
        for family in self._families:
            dim = dim_of(self._refined, op.name, [family])
            if dim is None or dim.size < self._degree or dim.reduced:
                continue
            cost = sum(self._moved(name, family) for name in op.inputs)
            if best is None or cost < best[0]:
                best = (cost, family)
        if best is None:
            return Copy()
        for output in op.outputs:
            if output is not None and best[1] in self._refined.families[output]:
                self._cut[output] = best[1]
        dim = dim_of(self._refined, op.name, [best[1]])
        assert dim is not None
        return Cut(dim=dim.name)

    def _moved(self, name: str, family: int) -> float:
        """How many elements of an input move if the op is cut along a family."""
        tensor = self._graph.tensors[name]
        if tensor.role is not Role.ACTIVATION or self._cut.get(name) == family:
            return 0.0
        size = float(math.prod(tensor.shape))
        if name not in self._cut:
            return 0.0  # every device has it
        return size / self._degree if family in self._refined.families[name] else size

    def finish(self, mesh: Mesh) -> None:
        """Nothing is left to say."""


def _position_families(plan: Plan, degree: int) -> list[int]:
    """The families of the dims of the batch's tensors between the samples and the features."""
    samples = plan.refined.batch_families()
    found: dict[int, None] = {}
    for name in plan.graph.inputs:
        tensor, factors = plan.graph.tensors[name], plan.refined.factors[name]
        stop = len(factors) - (1 if tensor.dtype.startswith(("float", "bfloat")) else 0)
        for dim in range(1, stop):
            offset = sum(len(one) for one in factors[:dim])
            for i, size in enumerate(factors[dim]):
                family = plan.refined.families[name][offset + i]
                if size >= degree and family not in samples:
                    found[family] = None
    return list(found)


def dap(degree: int | None = None, *, microbatches: int | None = None) -> Dap:
    """Positions cut, alternating between dims."""
    return Dap(degree=degree, microbatches=microbatches)


register("dap", dap)
