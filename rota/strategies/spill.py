"""Spill: one device trains a model that does not fit into its memory; shards of it come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rota.errors import InputError
from rota.graph.graph import Graph
from rota.memory.shards import cut_into_shards
from rota.plan.plan import Plan

Activations = Literal["keep", "spill", "recompute"]
_USUAL_SHARDS = 16


@dataclass(frozen=True, kw_only=True)
class Spill:
    """Cuts a model into shards on one device."""

    shards: int = _USUAL_SHARDS
    """About how many: cuts are where little is alive."""
    activations: Activations = "keep"
    """What happens to what a shard makes for its backward pass."""

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """A plan whose segments are the shards."""
        _check(self)
        plan = Plan(graph, devices=devices)
        plan.assign(graph.ops, 0)
        state = sum(tensor.size_bytes for tensor in graph.parameters)
        for shard in cut_into_shards(graph, most_bytes=-(-state // self.shards)):
            ops = graph.ops[shard.start : shard.stop]
            if self.activations == "recompute":
                plan.recompute(ops)
            else:
                plan.group(ops)
        return plan

    def __str__(self) -> str:
        """As the user writes it."""
        told = [] if self.shards == _USUAL_SHARDS else [f"shards={self.shards}"]
        told += [] if self.activations == "keep" else [f"activations={self.activations!r}"]
        return f"spill({', '.join(told)})" if told else "spill"


def _check(spill: Spill) -> None:
    if not isinstance(spill.shards, int) or isinstance(spill.shards, bool) or spill.shards < 1:
        raise InputError(f"spill: shards must be a whole number of at least 1, not {spill.shards!r}")
    if spill.activations not in get_args(Activations):
        raise InputError(
            f"spill: activations must be one of {', '.join(get_args(Activations))}, not {spill.activations!r}"
        )
