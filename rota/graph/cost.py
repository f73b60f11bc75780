"""How much work a part of an op is: multiplications and additions, and the elements that it touches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rota.graph.graph import ELEMENT_BYTES
from rota.graph.part import Ranges
from rota.graph.refine import Refined
from rota.graph.rules import occurrences

_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "einsum"})
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_FREE = frozenset(
    {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "permute", "t", "expand", "select"}
    | {"split", "chunk", "unbind", "slice", "detach", "movedim"}
)
"""Views: they touch nothing, unless a copy is needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Of a part of an op, forward."""

    flops: float
    touched_bytes: float


def element_bytes(refined: Refined, tensor: str) -> int:
    """Of one element of a tensor."""
    return ELEMENT_BYTES[refined.graph.tensors[tensor].dtype]


def work_of(refined: Refined, op_name: str, ranges: Ranges) -> Work:
    """How much there is to do for a part."""
    case, frame = refined.cases[op_name], refined.frames[op_name]
    kind = case.op.kind
    width = {
        name: ranges[name][1] - ranges[name][0] if name in ranges else dim.size for name, dim in frame.dims.items()
    }

    def size(names: tuple[str, ...] | None) -> float:
        return math.prod(width[name] for name in names) if names is not None else 0.0

    flops = 0.0
    if kind in _PRODUCTS:
        flops = 2.0 * math.prod(width.values())
    elif kind in _CONVOLUTIONS:  # each output element takes a whole filter
        filters = size(tuple(name for name in frame.reads[1] if name not in (frame.makes[0] or ())))
        flops = 2.0 * size(frame.makes[0]) * filters
    elif kind == "scaled_dot_product_attention":
        keys = size(tuple(name for name in frame.reads[1] if name not in frame.reads[0]))
        flops = 2.0 * keys * (size(frame.reads[0]) + size(frame.makes[0]))
    touched = 0.0
    if kind not in _FREE:
        for tensor, names in [
            *zip(occurrences(case.op), frame.reads, strict=True),
            *zip(case.op.outputs, frame.makes, strict=True),
        ]:
            if tensor is not None and names is not None:
                touched += size(names) * element_bytes(refined, tensor)
    return Work(flops=flops, touched_bytes=touched)
