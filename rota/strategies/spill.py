"""Spill: one device trains a model that does not fit into its memory; shards of it come and go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from rota.errors import InputError
from rota.graph.graph import Graph
from rota.memory.shards import Shard, cut_into_shards
from rota.plan.plan import Plan
from rota.strategies.base import register

Activations = Literal["auto", "keep", "spill", "recompute"]
_USUAL_SHARDS = 16


@dataclass(frozen=True, kw_only=True)
class Spill:
    """Cuts a model into shards on one device."""

    shards: int | None = None
    """About how many: cuts are where little is alive. None: as many as suit the memory."""
    activations: Activations = "auto"
    """What happens to what a shard makes for its backward pass: it stays, it leaves where there is no room for it, it
    is made again; or whatever of that is fastest."""

    fixed_devices = 1
    spills = True
    """It runs in less memory than its plan needs."""

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """A plan whose segments are the shards."""
        if devices != 1:
            raise InputError(f"spill is for one device, not {devices}; give the task one, or use another strategy")
        shards = self.shards or _USUAL_SHARDS
        return cut(graph, shards, recomputed=range(len(graph.ops)) if self.activations == "recompute" else ())

    def __str__(self) -> str:
        """As the user writes it."""
        told = [] if self.shards is None else [f"shards={self.shards}"]
        told += [] if self.activations == "auto" else [f"activations={self.activations!r}"]
        return f"spill({', '.join(told)})" if told else "spill"


def cut(graph: Graph, shards: int, *, recomputed: Collection[int]) -> Plan:
    """A plan of about so many shards; those of these numbers are computed again for their backward passes."""
    plan = Plan(graph, devices=1)
    plan.assign(graph.ops, 0)
    for number, shard in enumerate(shards_of(graph, shards)):
        ops = graph.ops[shard.start : shard.stop]
        if number in recomputed:
            plan.recompute(ops)
        else:
            plan.group(ops)
    return plan


def shards_of(graph: Graph, count: int) -> tuple[Shard, ...]:
    """About so many shards."""
    state = sum(tensor.size_bytes for tensor in graph.parameters)
    return cut_into_shards(graph, most_bytes=-(-state // count))


def spill(*, shards: int | None = None, activations: Activations = "auto") -> Spill:
    """One device, with shards of the model in memory when they are needed and on disk when they are not."""
    if shards is not None and (not isinstance(shards, int) or isinstance(shards, bool) or shards < 1):
        raise InputError(f"spill: shards must be a whole number of at least 1, not {shards!r}")
    if activations not in get_args(Activations):
        raise InputError(f"spill: activations must be one of {', '.join(get_args(Activations))}, not {activations!r}")
    return Spill(shards=shards, activations=activations)


register("spill", spill)
