"""A graph that was captured on one kind of device, for any: what its ops make is made where they run."""

from __future__ import annotations

from dataclasses import replace

from rota.graph.graph import Graph, Op


def anywhere(graph: Graph) -> Graph:
    """The graph without the devices that were written into its ops when it was captured."""
    return replace(graph, ops=tuple(_anywhere(op) for op in graph.ops))


def _anywhere(op: Op) -> Op:
    kwargs = {name: value for name, value in op.kwargs.items() if name != "device"}
    if op.target == "aten.to.device":
        return replace(op, target="aten.to.dtype", args=(op.args[0], *op.args[2:]), kwargs=kwargs)
    return replace(op, kwargs=kwargs) if "device" in op.kwargs else op
