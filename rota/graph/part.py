"""Parts of ops: which boxes a part reads and makes, and how it is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rota.graph import positional, vocabulary  # noqa: F401
from rota.graph.refine import Frame, Refined, local_shape
from rota.graph.rules import LocalCut, compute_of, divide_offsets, occurrences, rule_of
from rota.plan.box import Box, Range

Ranges = Mapping[str, Range]
"""dim -> range, of the dims that are cut; a dim that is not here is whole."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and when a part is computed: what random numbers and positions depend on."""

    key: int
    """Of the seed and the step; the same for all parts of a step."""
    shift: int = 0
    """The first sample of the micro-batch."""
    plain: bool = False
    """Use PyTorch's own random numbers, which depend on how the op is cut."""
    products: Callable[[str, list[Any]], Any] | None = None
    """Computes a product with a weight in another way; None where it does not."""


PartCompute = Callable[[Sequence[Any], Place], tuple[Any, ...]]


def is_first(frame: Frame, ranges: Ranges) -> bool:
    """Whether a part is the first along every summed dim: the one that adds what is added once."""
    return all(ranges[name][0] == 0 for name, dim in frame.dims.items() if dim.reduced and name in ranges)


def box_of(frame: Frame, names: tuple[str, ...], ranges: Ranges) -> Box:
    """The box of a tensor whose factors are these dims."""
    return Box(ranges=tuple(ranges[name] if name in ranges else (0, frame.dims[name].size) for name in names))


def reads_of(frame: Frame, ranges: Ranges) -> tuple[Box | None, ...]:
    """The box of each read; None for one that this part leaves to the first part."""
    skipped = frozenset() if is_first(frame, ranges) else frame.once
    return tuple(None if i in skipped else box_of(frame, names, ranges) for i, names in enumerate(frame.reads))


def makes_of(frame: Frame, ranges: Ranges) -> tuple[Box | None, ...]:
    """The box of each output, as if its value were whole."""
    return tuple(None if names is None else box_of(frame, names, ranges) for names in frame.makes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offsets:
    """What a sum reads that is no partial sum: each of its terms adds an equal part of it."""

    reads: frozenset[int]
    terms: int


def compute_part(
    refined: Refined,
    op_name: str,
    ranges: Ranges,
    *,
    shifted: str | None = None,
    offsets: Offsets | None = None,
) -> PartCompute:
    """The function that computes a part from the tensors of its reads (without the skipped ones).

    `shifted` is the dim that counts samples, if the ranges count from the first sample of a micro-batch.
    """
    case, frame = refined.cases[op_name], refined.frames[op_name]
    op = case.op
    rule = rule_of(op)
    shapes_read = tuple(
        local_shape(refined.factors[name], box_of(frame, names, ranges).shape)
        for name, names in zip(occurrences(op), frame.reads, strict=True)
    )
    shapes_made = tuple(
        None
        if name is None or names is None
        else local_shape(refined.factors[name], box_of(frame, names, ranges).shape)
        for name, names in zip(op.outputs, frame.makes, strict=True)
    )
    cut = LocalCut(
        reads=shapes_read,
        makes=shapes_made,
        sizes={name: dim.size for name, dim in frame.dims.items()},
        ranges=ranges,
        first=is_first(frame, ranges),
    )
    if rule is not None and rule.positional:
        numbered = _numbered(refined, op_name)
        return positional.compute(
            case=case,
            cut=cut,
            sizes=tuple(frame.dims[name].size for name in numbered),
            box=box_of(frame, numbered, ranges),
            shifted=numbered.index(shifted) if shifted in numbered else None,
        )
    compute_case = functools.partial(compute_of, cut=cut if any(name in ranges for name in frame.dims) else None)
    if offsets is None:
        compute = compute_case(case)
    else:
        compute = divide_offsets(case, compute_case, offsets.reads, offsets.terms)

    def run(values: Sequence[Any]) -> tuple[Any, ...]:
        result = compute(values)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    if positional.is_random(op):
        return positional.seeded(run, op)
    return lambda values, place: run(values)


def _numbered(refined: Refined, op_name: str) -> tuple[str, ...]:
    """The dims of what a positional op has a number for: each element that it makes, or each attention weight."""
    case, frame = refined.cases[op_name], refined.frames[op_name]
    (made,) = frame.makes
    assert made is not None
    if case.op.kind != "scaled_dot_product_attention":
        return made
    keys, output = refined.factors[occurrences(case.op)[1]], refined.factors[case.op.outputs[0] or ""]
    stop = len(frame.reads[1]) - len(keys[-1])
    return made[: len(made) - len(output[-1])] + frame.reads[1][stop - len(keys[-2]) : stop]
