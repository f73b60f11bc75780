"""A graph with fewer samples in its batch: replicas that compute the same need not all be looked at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rota.graph.functional import overload
from rota.graph.graph import Graph, Op, Role
from rota.graph.part import Ranges, box_of
from rota.graph.refine import Refined, local_shape
from rota.graph.rules import occurrences
from rota.graph.run import run_op

_SIZES = ("size", "shape", "sizes")
"""What ATen calls the arguments that say how large the result is to be."""


def with_samples(refined: Refined, samples: int) -> Graph | None:
    """The same graph on so many samples; None if that cannot be told from it.

    For predictions only: a number that the model's code made of the batch's size stays what it was.
    """
    graph, families, whole = refined.graph, refined.batch_families(), refined.samples
    if whole is None or samples >= whole or _counts_samples_apart(refined, whole):
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for name in graph.tensors:
        sizes = zip(refined.shape(name), refined.families[name], strict=True)
        widths = [samples if family in families and size == whole else size for size, family in sizes]
        shapes[name] = local_shape(refined.factors[name], widths)
    ops: list[Op] = []
    for op in graph.ops:
        frame = refined.frames[op.name]
        ranges = {
            name: (0, samples) for name, dim in frame.dims.items() if dim.family in families and dim.size == whole
        }
        ops.append(_resized(refined, op, ranges) if ranges else op)
    tensors = {name: replace(tensor, shape=shapes[name]) for name, tensor in graph.tensors.items()}
    made = replace(graph, tensors=tensors, ops=tuple(ops))
    return made if _is_sound(made) else None


def _counts_samples_apart(refined: Refined, whole: int) -> bool:
    """Whether something that the batch is not read for is as long as the batch, such as an index of the samples."""
    tensors = refined.graph.tensors
    made = [name for op in refined.graph.ops if not op.inputs for name in op.outputs if name is not None]
    return any(whole in tensors[name].shape for name in (*made, *refined.graph.constants))


def _resized(refined: Refined, op: Op, ranges: Ranges) -> Op:
    target: Any = overload(op.target)
    names = [argument.name for argument in target._schema.arguments]
    asked = [name for name in names if name in _SIZES]
    frame = refined.frames[op.name]
    output, dims = op.outputs[0], frame.makes[0]
    if not asked or output is None or dims is None:
        return op
    size = list(local_shape(refined.factors[output], box_of(frame, dims, ranges).shape))
    args = tuple(size if name == asked[0] else value for name, value in zip(names, op.args, strict=False))
    return replace(op, args=args, kwargs={key: size if key == asked[0] else one for key, one in op.kwargs.items()})


def _is_sound(graph: Graph) -> bool:
    """Whether every op makes what the graph says, on tensors without data."""
    values: dict[str, Any] = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for name, tensor in graph.tensors.items()
        if tensor.role is not Role.ACTIVATION
    }
    with torch.no_grad():
        for op in graph.ops:
            if not all(name in values for name in occurrences(op)):
                return False
            try:
                results = run_op(op, values)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                return False
            for name, value in zip(op.outputs, results, strict=False):
                if name is None:
                    continue
                if tuple(value.shape) != graph.tensors[name].shape:
                    return False
                values[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return True
