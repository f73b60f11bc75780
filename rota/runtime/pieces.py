"""Cuts boxes out of tensors and puts them together again; boxes count in factors, tensors have their own dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rota.graph.refine import Factors, local_shape
from rota.plan.box import Box, Range, hull
from rota.plan.layout import Kind, Step


def dim_ranges(factors: Factors, box: Box) -> tuple[Range, ...] | None:
    """The range of each dim of a tensor that a box of its factors is; None if it is not one stretch."""
    found: list[Range] = []
    at = 0
    for dim in factors:
        start, length, inner = 0, 1, math.prod(dim)
        for (low, high), size in zip(box.ranges[at : at + len(dim)], dim, strict=True):
            inner //= size
            if length > 1 and (low, high) != (0, size):
                return None
            start, length = start + low * inner, length * (high - low)
        found.append((start, start + length))
        at += len(dim)
    return tuple(found)


def box_of_dims(factors: Factors, ranges: Sequence[Range]) -> Box | None:
    """The box of factors that has these ranges of dims; None if there is none."""
    found: list[Range] = []
    for dim, (start, stop) in zip(factors, ranges, strict=True):
        inner = math.prod(dim)
        for size in dim:
            inner //= size
            if start % inner == 0 and stop % inner == 0:
                found.append((start // inner, stop // inner))
                start, stop = 0, inner
            elif start // inner == (stop - 1) // inner:
                found.append((start // inner, start // inner + 1))
                start, stop = start % inner, (stop - 1) % inner + 1
            else:
                return None
    return Box(ranges=tuple(found))


def cut(tensor: torch.Tensor, factors: Factors, outer: Box, inner: Box) -> torch.Tensor:
    """The part `inner` of a tensor that holds `outer`; a view where that is possible."""
    if inner.ranges == outer.ranges:
        return tensor
    return tensor.reshape(outer.shape)[inner.inside(outer)].reshape(local_shape(factors, inner.shape))


def assemble(parts: Sequence[tuple[Box, torch.Tensor]], factors: Factors, whole: Box) -> torch.Tensor:
    """The tensor of a box, out of parts that tile it: laid side by side, and summed where their shares differ."""
    first = parts[0][1]
    target = Box(ranges=whole.ranges)
    inside = [(box, tensor, Box(ranges=box.ranges).intersect(target)) for box, tensor in parts]
    given = [(box, tensor, common) for box, tensor, common in inside if common is not None]
    tiled = len({box.share for box, _, _ in given}) == 1 and sum(common.size for _, _, common in given) == target.size
    make = torch.empty if tiled else torch.zeros
    result = make(whole.shape, dtype=first.dtype, device=first.device)
    for box, tensor, common in given:
        place, part = result[common.inside(whole)], tensor.reshape(box.shape)[common.inside(box)]
        if tiled:  # nothing lies above anything else
            place.copy_(part)
        else:
            place += part
    return result.reshape(local_shape(factors, whole.shape))


def exchange(step: Step, inputs: Sequence[torch.Tensor], factors: Factors) -> list[torch.Tensor]:
    """What a step makes, with all of its group in one process: a collective on lists."""
    boxes = [piece.box for piece in step.inputs]
    wanted = [piece.box for piece in step.outputs]
    match step.kind:
        case Kind.LOCAL:
            return [_local(boxes, inputs, wanted[0], factors)]
        case Kind.SEND:
            return [inputs[0].clone()]
        case Kind.ALL_REDUCE:
            total = _sum(inputs)
            return [total.clone() for _ in wanted]
        case Kind.ALL_GATHER:
            whole = _concatenate(boxes, inputs, factors)
            return [whole.clone() for _ in wanted]
        case Kind.REDUCE_SCATTER:
            total = _sum(inputs)
            return [cut(total, factors, Box(ranges=boxes[0].ranges), box).clone() for box in wanted]
        case Kind.ALL_TO_ALL:
            whole = _concatenate(boxes, inputs, factors)
            return [cut(whole, factors, hull(boxes), box).clone() for box in wanted]


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _local(boxes: Sequence[Box], tensors: Sequence[torch.Tensor], wanted: Box, factors: Factors) -> torch.Tensor:
    if len(boxes) == 1:
        held = boxes[0]
        if held.share != wanted.share and held.share[0] != wanted.share[0]:
            # Of a value that is cut into shares the first is all of it and the others are nothing.
            return torch.zeros(local_shape(factors, wanted.shape), dtype=tensors[0].dtype, device=tensors[0].device)
        return cut(tensors[0], factors, held, wanted).clone()
    return assemble(list(zip(boxes, tensors, strict=True)), factors, wanted)


def _concatenate(boxes: Sequence[Box], tensors: Sequence[torch.Tensor], factors: Factors) -> torch.Tensor:
    """Tensors side by side along the dim in which their boxes differ, in the order of the group."""
    differing = [dim for dim in range(len(boxes[0].ranges)) if len({box.ranges[dim] for box in boxes}) > 1]
    dim = differing[0] if differing else 0
    joined = torch.cat([tensor.reshape(box.shape) for box, tensor in zip(boxes, tensors, strict=True)], dim)
    return joined.reshape(local_shape(factors, joined.shape))
