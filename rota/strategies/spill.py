"""Spill: a device trains a model that does not fit into its memory; shards of it come and go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from rota.errors import InputError
from rota.given import check_fields
from rota.graph.graph import Graph, Role
from rota.memory.shards import Shard, cut_into_shards
from rota.plan.box import Box
from rota.plan.plan import Plan
from rota.strategies.base import register
from rota.strategies.data import Data, data

Activations = Literal["auto", "keep", "spill", "recompute"]
_USUAL_SHARDS = 16


@dataclass(frozen=True, kw_only=True)
class Spill:
    """Cuts a model into shards on a device, or on each of the devices that share the samples of a batch."""

    shards: int | None = None
    """About how many: cuts are where little is alive. None: as many as suit the memory."""
    activations: Activations = "auto"
    """What happens to what a shard makes for its backward pass: it stays, it leaves where there is no room for it, it
    is made again; or whatever of that is fastest."""

    among: Data | None = None
    """How devices share the samples, if several do; each of them has all shards."""

    spills = True
    """It runs in less memory than its plan needs."""

    def __post_init__(self) -> None:
        check_fields(self, "spill")

    @property
    def fixed_devices(self) -> int | None:
        """How many devices it needs; None if it takes any number."""
        return 1 if self.among is None else self.among.degree

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """A plan whose segments are the shards."""
        if self.fixed_devices not in (None, devices):
            hint = "; several share the samples with data * spill" if self.among is None else ""
            raise InputError(f"{self} is for {self.fixed_devices} devices, not for {devices}{hint}")
        shards = self.shards or _USUAL_SHARDS
        again = range(len(graph.ops)) if self.activations == "recompute" else ()
        return cut(graph, shards, recomputed=again, replicas=devices)

    def __rmul__(self, other: object) -> Spill:
        """On each of the devices that share the samples."""
        if not isinstance(other, Data) or other.microbatches is not None or self.among is not None:
            raise InputError(f"{other} * {self}: spill goes with data alone, as in data(2) * spill")
        return replace(self, among=other)

    def __mul__(self, other: object) -> Spill:
        """Nothing can be within a shard."""
        raise InputError(f"{self} * {other}: spill comes last and goes with data alone, as in data(2) * spill")

    def __str__(self) -> str:
        """As the user writes it."""
        told = [] if self.shards is None else [f"shards={self.shards}"]
        told += [] if self.activations == "auto" else [f"activations={self.activations!r}"]
        one = f"spill({', '.join(told)})" if told else "spill"
        return one if self.among is None else f"{self.among} * {one}"


def cut(graph: Graph, shards: int, *, recomputed: Collection[int], replicas: int = 1) -> Plan:
    """A plan of about so many shards; those of these numbers are computed again for their backward passes."""
    plan = data(replicas)(graph, replicas) if replicas > 1 else Plan(graph, devices=1)
    if replicas == 1:
        plan.assign(graph.ops, 0)
    plan = in_shards(plan, shards, recomputed=recomputed)
    if replicas == 1:
        plan.keep_order()
    return plan


def on_the_first(graph: Graph, shards: int, *, recomputed: Collection[int], replicas: int) -> Plan:
    """The same for a batch that has too few samples for all: one device computes, and all get its gradients."""
    plan = Plan(graph, devices=replicas)
    plan.assign(graph.ops, 0)
    for name, tensor in graph.tensors.items():
        if tensor.role in (Role.PARAMETER, Role.BUFFER):
            plan.store(name, dict.fromkeys(range(replicas), Box.whole(plan.refined.shape(name))))
    return in_shards(plan, shards, recomputed=recomputed)


def in_shards(plan: Plan, shards: int, *, recomputed: Collection[int]) -> Plan:
    """A plan whose segments are shards."""
    graph = plan.graph
    plan.forget_checkpoints()  # which shards are computed again is for the memory that there is to say
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
    return Spill(shards=shards, activations=activations)


register("spill", spill)
