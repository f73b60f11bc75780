"""Coshard: heads and columns cut on one device, one part after another, each recomputed: less memory, no exchange."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from rota.errors import InputError
from rota.graph.graph import Graph, Op
from rota.plan.plan import Part, Plan
from rota.strategies.base import register
from rota.strategies.dims import dim_of, paired_families


@dataclass(frozen=True, kw_only=True)
class Coshard:
    """Cuts each run of ops between two products into parts that follow each other on one device."""

    parts: int = 4
    microbatches: int = 1

    def __str__(self) -> str:
        """As the user writes it."""
        return f"coshard({self.parts})"

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """A plan on one device; others stay idle."""
        plan = Plan(graph, devices=devices, microbatches=self.microbatches)
        plan.assign(graph.ops, 0)
        runs = list(_runs(plan, self.parts))
        if not runs:
            raise InputError(f"the model has no heads or columns that can be cut into {self.parts}; use fewer parts")
        for run in runs:
            lanes: list[list[Part]] = [[] for _ in range(self.parts)]
            for op, dim in run:
                for lane, part in zip(lanes, plan.split(op, dim, self.parts), strict=True):
                    lane.append(part)
            plan.recompute(op for op, _ in run)
            for lane, following in itertools.pairwise(lanes):
                plan.order(lane[-1], before=following[0])
        return plan


def _runs(plan: Plan, parts: int) -> Iterator[list[tuple[Op, str]]]:
    """For each family of heads or columns, its ops in order and the dim of each."""
    taken: set[str] = set()
    for family in paired_families(plan.refined, parts):
        run = []
        for op in plan.graph.ops:
            dim = dim_of(plan.refined, op.name, [family])
            if dim is not None and op.name not in taken:
                run.append((op, dim.name))
                taken.add(op.name)
        if run:
            yield run


def coshard(parts: int = 4, *, microbatches: int = 1) -> Coshard:
    """So many parts, one after another."""
    return Coshard(parts=parts, microbatches=microbatches)


register("coshard", coshard)
