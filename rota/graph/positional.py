"""Ops whose result depends on where an element is: arange, and random numbers keyed by position.

PyTorch's generators hand out numbers in the order of calls, so that a mask of dropout depends on how the op is cut and
when it runs. Here each number is a hash of the step's key, the op and the element's index in the whole tensor: however
an op is cut, every element gets the same one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rota.graph.functional import overload
from rota.graph.graph import Op
from rota.graph.rules import Case, LocalCut, argument_of, causal_mask
from rota.plan.box import Box

if TYPE_CHECKING:
    from rota.graph.part import Place

_MASK_63 = (1 << 63) - 1


def compute(
    *, case: Case, cut: LocalCut, sizes: tuple[int, ...], box: Box, shifted: int | None
) -> Callable[[Sequence[Any], Place], tuple[Any, ...]]:
    """How a part is computed: `box` of what has a number for each element, with these factors."""
    op, shape = case.op, cut.made
    whole = box == Box.whole(sizes)
    salt = zlib.crc32(op.name.encode())

    def moved(place: Place) -> Box:
        if shifted is None or not place.shift:
            return box
        start, stop = box.ranges[shifted]
        moved = (start + place.shift, stop + place.shift)
        return Box(ranges=(*box.ranges[:shifted], moved, *box.ranges[shifted + 1 :]))

    def arange(values: Sequence[Any], place: Place) -> tuple[Any, ...]:
        everything = overload(op.target)(*op.args, **op.kwargs)
        if whole:
            return (everything,)
        found = moved(place)
        slices = tuple(slice(start, stop) for start, stop in found.ranges)
        return (everything.reshape(sizes)[slices].reshape(shape).clone(),)

    def dropout(values: Sequence[Any], place: Place) -> tuple[Any, ...]:
        value, rate, training = values[0], float(op.args[1]), bool(op.args[2])
        if not training or rate == 0.0:
            return (value,)
        if place.plain:
            return (torch.dropout(value, rate, True),)
        if rate == 1.0:
            return (value * 0.0,)
        kept = uniform(_op_key(place.key, salt), sizes, moved(place), value.device).reshape(shape) >= rate
        return (value * kept.to(value.dtype).mul_(1.0 / (1.0 - rate)),)

    def attention(values: Sequence[Any], place: Place) -> tuple[Any, ...]:
        rate, causal = float(case.argument("dropout_p")), bool(case.argument("is_causal"))
        scale, grouped = case.argument("scale"), bool(case.argument("enable_gqa"))
        query, key, value, *masks = values
        mask = masks[0] if masks else None
        if causal:
            rows = cut.positions("l", case.reads[0][-2])
            mask = causal_mask(rows, key.shape[-2]).to(query.device)
        if place.plain:
            mixed = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, mask, rate, scale=scale, enable_gqa=grouped
            )
            return (mixed,)
        if grouped:
            key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
        scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
        weights = scores.softmax(-1)
        if rate == 1.0:
            return (weights * 0.0 @ value,)
        numbers = uniform(_op_key(place.key, salt), sizes, moved(place), query.device).reshape(
            *shape[:-1], key.shape[-2]
        )
        return (weights * (numbers >= rate).to(weights.dtype).mul_(1.0 / (1.0 - rate)) @ value,)

    def rand(values: Sequence[Any], place: Place) -> tuple[Any, ...]:
        kwargs = {name: one for name, one in op.kwargs.items() if name in ("dtype", "device")}
        if place.plain:
            return (getattr(torch, op.kind)(shape, **kwargs),)
        numbers = uniform(
            _op_key(place.key, salt), sizes, moved(place), kwargs.get("device") or torch.get_default_device()
        )
        if op.kind == "randn":  # Box and Muller
            other = uniform(_op_key(place.key, salt + 1), sizes, moved(place), numbers.device)
            numbers = torch.sqrt(-2 * torch.log1p(-numbers)) * torch.cos(2 * math.pi * other)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        numbers = numbers.reshape(shape).to(dtype)
        # A double just below one is one in fewer bits.
        return (numbers if op.kind == "randn" else numbers.clamp_(max=1 - torch.finfo(dtype).eps),)

    def bernoulli(values: Sequence[Any], place: Place) -> tuple[Any, ...]:
        given = op.target.endswith((".p", ".float")) or "bernoulli_" in op.target
        chance = float(case.argument("p")) if given else values[0]
        if place.plain:
            return (torch.bernoulli(values[0], chance) if isinstance(chance, float) else torch.bernoulli(chance),)
        numbers = uniform(_op_key(place.key, salt), sizes, moved(place), values[0].device).reshape(shape)
        return ((numbers < chance).to(values[0].dtype),)

    return {
        "arange": arange,
        "dropout": dropout,
        "scaled_dot_product_attention": attention,
        "rand": rand,
        "randn": rand,
        "bernoulli": bernoulli,
    }[op.kind]


def uniform(key: int, sizes: Sequence[int], box: Box, device: torch.device) -> torch.Tensor:
    """A number in [0, 1) for each element of a box, from its index in the whole tensor (double, 53 bits)."""
    with torch.no_grad():
        index = torch.zeros((), dtype=torch.int64, device=device)
        inner = 1
        for size, (start, stop) in reversed(list(zip(sizes, box.ranges, strict=True))):
            steps = torch.arange(start, stop, dtype=torch.int64, device=device) * inner
            index = steps.reshape(-1, *(1,) * index.dim()) + index
            inner *= size
        return (_hash(index, key) >> 11).to(torch.float64).mul_(2.0**-52)


def step_key(seed: int, step: int) -> int:
    """The key of a step's random numbers."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK_63
    mixed ^= mixed >> 31
    return mixed * 0x7FB5D329728EA185 & _MASK_63


def _op_key(key: int, salt: int) -> int:
    """Of one op: mixed, so that two ops do not get the same numbers at shifted positions."""
    return step_key(key, salt)


def seeded(
    run: Callable[[Sequence[Any]], tuple[Any, ...]], op: Op
) -> Callable[[Sequence[Any], Place], tuple[Any, ...]]:
    """A random op that has no numbers keyed by position: it draws the same ones wherever it runs as a whole."""
    salt = zlib.crc32(op.name.encode())

    def compute(values: Sequence[Any], place: Place) -> tuple[Any, ...]:
        if place.plain:
            return run(values)
        # Not torch.manual_seed: that goes through all kinds of devices, which takes a millisecond.
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(_op_key(place.key, salt))
        try:
            return run(values)
        finally:
            generator.set_state(before)

    return compute


def is_random(op: Op) -> bool:
    """Whether an op draws random numbers. PyTorch marks attention as such, also without dropout."""
    if op.kind == "scaled_dot_product_attention":
        return bool(argument_of(op, "dropout_p"))
    return torch.Tag.nondeterministic_seeded in getattr(overload(op.target), "tags", ())


def _hash(index: torch.Tensor, key: int) -> torch.Tensor:
    """Two rounds of multiply and xor-shift on 63 bits (int64 wraps around; the sign bit is dropped)."""
    mixed = (index + (key & _MASK_63)) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) & _MASK_63
