"""What is wrong with a step, by the algebra of its boxes alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from rota.plan.box import Box, first_overlap, missing
from rota.plan.layout import Kind, Step

_VALUE = -1
"""Stands for the share where a dim is meant."""


def check_step(step: Step) -> str | None:
    """One sentence on why the step does not make its outputs from its inputs, or None if it does."""
    match step.kind:
        case Kind.LOCAL:
            problem = _local(step)
        case Kind.SEND:
            problem = _send(step)
        case _:
            problem = _group(step) or _collective(step)
    return f"{step}: {problem}" if problem else None


def _local(step: Step) -> str | None:
    if len(step.outputs) != 1:
        return "a local step makes exactly one piece"
    (output,) = step.outputs
    if any(piece.device != output.device for piece in step.inputs):
        return "a local step reads only what is on its device"
    boxes = [piece.box for piece in step.inputs]
    if output.box in boxes:
        return "the output is one of the inputs"
    if len(boxes) == 1 and boxes[0].contains(output.box):
        return None
    if outside := [box for box in boxes if not output.box.contains(box)]:
        return f"{outside[0]} is not a part of the output"
    if len(set(boxes)) < len(boxes) or first_overlap(boxes):
        return "inputs overlap"
    if left := missing(output.box, boxes):
        return f"no input has {left[0]}"
    return None


def _send(step: Step) -> str | None:
    if len(step.inputs) != 1 or len(step.outputs) != 1:
        return "a send has one input and one output"
    if step.inputs[0].device == step.outputs[0].device:
        return "a send goes to another device"
    if step.inputs[0].box != step.outputs[0].box:
        return "what arrives is not what was sent"
    return None


def _group(step: Step) -> str | None:
    readers = [piece.device for piece in step.inputs]
    writers = [piece.device for piece in step.outputs]
    if readers != writers:
        return "the n-th input and the n-th output must be on the same device"
    if len(writers) < 2 or len(set(writers)) < len(writers):
        return "a collective needs at least two devices, each once"
    if len({len(piece.box.ranges) for piece in (*step.inputs, *step.outputs)}) > 1:
        return "the boxes have different numbers of dims"
    return None


def _collective(step: Step) -> str | None:
    inputs = [piece.box for piece in step.inputs]
    outputs = [piece.box for piece in step.outputs]
    sums = step.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
    # The order of a sum's terms does not matter; the order of all other parts says where they go.
    gathered = _tiled(sorted(inputs, key=lambda box: box.share) if sums else inputs)
    if gathered is None:
        return "the inputs do not tile a box in the order of the group"
    cut, whole = gathered
    if sums and cut != _VALUE:
        return "the inputs are not partial sums of the same elements"
    if not sums and cut == _VALUE:
        return "the inputs are partial sums, which this kind does not add"
    if step.kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE):
        return None if all(box == whole for box in outputs) else f"each output must be {whole}"
    scattered = _tiled(outputs)
    if scattered is None or scattered[1] != whole:
        return f"the outputs do not tile {whole} in the order of the group"
    if scattered[0] in (_VALUE, cut):
        return "the outputs must be cut along another dim than the inputs"
    return None


def _tiled(boxes: Sequence[Box]) -> tuple[int, Box] | None:
    """The one dim along which the boxes follow each other without a gap, and the box that they form."""
    first = boxes[0]
    dims = [dim for dim in range(len(first.ranges)) if any(box.ranges[dim] != first.ranges[dim] for box in boxes)]
    if any(box.share != first.share for box in boxes):
        dims.append(_VALUE)
    if len(dims) != 1:
        return None
    (dim,) = dims
    edges = [box.share if dim == _VALUE else box.ranges[dim] for box in boxes]
    if any(one[1] != next_one[0] for one, next_one in itertools.pairwise(edges)):
        return None
    if dim == _VALUE:
        return _VALUE, replace(first, share=(first.share[0], boxes[-1].share[1]))
    ranges = (*first.ranges[:dim], (first.ranges[dim][0], boxes[-1].ranges[dim][1]), *first.ranges[dim + 1 :])
    return dim, replace(first, ranges=ranges)
