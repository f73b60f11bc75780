"""Runs a graph on one device, op by op: the reference for everything that plans do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from rota.errors import InputError
from rota.graph.batch import tensors_of
from rota.graph.functional import overload
from rota.graph.graph import Graph, Op


def run_graph(graph: Graph, state: Mapping[str, torch.Tensor], batch: Any) -> dict[str, torch.Tensor]:
    """The outputs of a graph. `state` has the parameters and buffers; buffers are updated in place."""
    values: dict[str, Any] = {**graph.constants, **state}
    for name, leaf in zip(graph.inputs, tensors_of(batch, graph.batch), strict=True):
        if tuple(leaf.shape) != graph.tensors[name].shape:
            raise InputError(
                f"the graph was captured for a batch whose {name} has shape {graph.tensors[name].shape}, "
                f"and this one has {tuple(leaf.shape)}; capture it again for this shape"
            )
        values[name] = leaf
    for op in graph.ops:
        results = run_op(op, values)
        values.update((name, value) for name, value in zip(op.outputs, results, strict=True) if name is not None)
    with torch.no_grad():
        for name, new in graph.updates.items():
            values[name].data.copy_(values[new])  # autograd kept the old value, and does not look at it
    return {metric: values[name] for metric, name in graph.outputs.items()}


def run_op(op: Op, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an op makes of the values it reads."""
    args, kwargs = op.bind(values.__getitem__)
    cast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if op.autocast:
        kind = next((one.device.type for one in args if isinstance(one, torch.Tensor)), "cpu")
        cast = torch.autocast(kind, dtype=getattr(torch, op.autocast))
    with torch.set_grad_enabled(op.with_grad and torch.is_grad_enabled()), cast:
        result = overload(op.target)(*args, **kwargs)
    return tuple(result) if isinstance(result, tuple | list) else (result,)
