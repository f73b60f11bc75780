"""Rewrites ops whose result depends on how many there are of something into ones that can be cut.

The mean of a cross-entropy divides by the number of targets that count, which no part knows alone. So does that of a
negative log-likelihood. Each becomes a sum, a count and a division: equal bit for bit, and each of the three can be
cut. Ops that read a tensor only for its type become ones that read nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from rota.graph.graph import Graph, Op, Ref, Role, Tensor

COUNTED_LOSSES = ("cross_entropy_loss", "nll_loss_nd", "nll_loss")
"""The mean of these is over the targets that are not ignored."""

_MEAN, _SUM = 1, 2
_NEW = {"new_zeros": "zeros", "new_ones": "ones", "new_full": "full", "new_empty": "empty"}


def normalise(graph: Graph) -> Graph:
    """The same computation, in ops that can be cut."""
    tensors = dict(graph.tensors)
    ops = [new for op in graph.ops for new in _rewritten(op, tensors)]
    return replace(graph, ops=tuple(ops), tensors=tensors)


def _rewritten(op: Op, tensors: dict[str, Tensor]) -> Iterator[Op]:
    if op.kind in COUNTED_LOSSES and _argument(op, 3, "reduction", _MEAN) == _MEAN:
        yield from _mean_of_sum(op, tensors)
    elif op.kind in _NEW:
        yield _created(op, tensors)
    else:
        yield op


def _argument(op: Op, position: int, name: str, default: Any) -> Any:
    return op.args[position] if position < len(op.args) else op.kwargs.get(name, default)


def _created(op: Op, tensors: dict[str, Tensor]) -> Op:
    made = tensors[op.outputs[0] or ""]
    kwargs = {name: value for name, value in op.kwargs.items() if name != "dtype"}
    kind = _NEW[op.kind]
    target = f"aten.{kind}.{'memory_format' if kind == 'empty' else 'default'}"
    kwargs["dtype"] = getattr(torch, made.dtype)
    return replace(op, kind=kind, target=target, args=op.args[1:], kwargs=kwargs, inputs=())


def _mean_of_sum(op: Op, tensors: dict[str, Tensor]) -> Iterator[Op]:
    loss = tensors[op.outputs[0] or ""]
    scores, target = op.args[0], op.args[1]
    weight = _argument(op, 2, "weight", None)
    ignored = _argument(op, 4, "ignore_index", -100)
    rest = (_argument(op, 5, "label_smoothing", 0.0),) if op.kind == "cross_entropy_loss" else ()

    def emit(
        name: str, kind: str, overload: str, args: tuple[Any, ...], like: Tensor, *, at: str = "", **kwargs: Any
    ) -> Op:
        made = at or f"{op.name}.{name}"
        tensors[made] = replace(like, name=made, role=Role.ACTIVATION)
        inputs = tuple(dict.fromkeys(one.name for one in _flat(args) if isinstance(one, Ref)))
        return replace(
            op,
            name=f"{op.name}.{name}",
            kind=kind,
            target=f"aten.{kind}.{overload}",
            args=args,
            kwargs=kwargs,
            inputs=inputs,
            outputs=(made,),
        )

    total = emit("sum", op.kind, "default", (scores, target, weight, _SUM, ignored, *rest), loss)
    yield total
    labels = tensors[target.name]
    whole = Tensor(name="", shape=(), dtype="int64", role=Role.ACTIVATION)
    if labels.dtype.startswith(("float", "bfloat")):  # probabilities: every row counts
        count: Any = math.prod(labels.shape) // labels.shape[1 if len(labels.shape) > 1 else 0]
    else:
        flags = emit("valid", "ne", "Scalar", (target, ignored), replace(labels, dtype="bool"))
        yield flags
        valid = Ref(name=flags.outputs[0] or "")
        if weight is not None:
            rows = emit("labels", "mul", "Tensor", (target, valid), labels)
            yield rows
            of_row = emit(
                "weights",
                "index",
                "Tensor",
                (weight, [Ref(name=rows.outputs[0] or "")]),
                replace(labels, dtype=loss.dtype),
            )
            yield of_row
            masked = emit(
                "weighed",
                "mul",
                "Tensor",
                (Ref(name=of_row.outputs[0] or ""), valid),
                replace(labels, dtype=loss.dtype),
            )
            yield masked
            valid, whole = Ref(name=masked.outputs[0] or ""), replace(whole, dtype=loss.dtype)
        counted = emit("count", "sum", "default", (valid,), whole)
        yield counted
        count = Ref(name=counted.outputs[0] or "")
    yield emit("mean", "div", "Tensor", (Ref(name=total.outputs[0] or ""), count), loss, at=loss.name)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    else:
        yield value
