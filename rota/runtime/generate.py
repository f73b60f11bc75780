"""Turns a segment into an FX module: straight Python code, one line for each op, that can be read or compiled."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rota.graph.part import compute_part
from rota.graph.positional import is_random
from rota.graph.refine import Refined
from rota.graph.rules import rule_of
from rota.plan.program import Call, Segment


def generate(segment: Segment, refined: Refined) -> fx.GraphModule:
    """`forward(place, *entries)` gives the exits of a segment. What is not needed any more is let go of on the way."""
    graph = fx.Graph()
    place = graph.placeholder("place")
    slots: dict[int, fx.Node] = {}
    for entry in segment.entries:
        slots[entry.slot] = graph.placeholder(f"{_identifier(entry.tensor)}_{entry.slot}")
    for call in segment.calls:
        node = graph.call_function(_function(call, refined), ([slots[slot] for slot in call.reads], place))
        if len(call.makes) == 1:
            if call.makes[0] is not None:
                slots[call.makes[0]] = node
            continue
        for i, slot in enumerate(call.makes):
            if slot is not None:
                slots[slot] = graph.call_function(operator.getitem, (node, i))
    graph.output([slots[exit.slot] for exit in segment.exits])
    return fx.GraphModule(torch.nn.Module(), graph)


def is_random_segment(segment: Segment, refined: Refined) -> bool:
    """Whether it draws random numbers, which depend on the step: a compiler would compile it for each."""
    for call in segment.calls:
        op = refined.cases[call.op].op
        rule = rule_of(op)
        if is_random(op) or (rule is not None and rule.positional):
            return True
    return False


def _function(call: Call, refined: Refined) -> Callable[..., Any]:
    """What a line calls: the op's part, in the modes in which the model computes it."""
    compute = compute_part(refined, call.op, call.ranges, shifted=call.shifted, offsets=call.offsets)
    op = refined.cases[call.op].op
    single = len(call.makes) == 1
    dtype = getattr(torch, op.autocast) if op.autocast else None

    def plain(values: list[Any], place: Any) -> Any:
        made = compute(values, place)
        return made[0] if single else made

    def product(values: list[Any], place: Any) -> Any:
        other = None if place.products is None else place.products(call.op, values)
        return compute(values, place)[0] if other is None else other

    def in_modes(values: list[Any], place: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if not op.with_grad:
                stack.enter_context(torch.no_grad())
            if dtype is not None:
                stack.enter_context(torch.autocast(_device_type(values), dtype=dtype))
            return usual(values, place)

    usual = product if op.kind == "linear" else plain
    function = usual if op.with_grad and dtype is None else in_modes
    function.__name__ = function.__qualname__ = _identifier(call.op)
    function.__module__ = __name__
    return function


def _device_type(values: list[Any]) -> str:
    return next((value.device.type for value in values if isinstance(value, torch.Tensor)), "cpu")


def _identifier(name: str) -> str:
    made = re.sub(r"\W", "_", name)
    return made if made.isidentifier() else f"_{made}"
