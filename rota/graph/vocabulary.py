"""Rewrites a cross-entropy so that it can be cut along its classes: block by block, and then over the blocks.

The logsumexp of all classes is that of the blocks' logsumexps, and a target's score is the sum over the blocks of what
each of them has of it: the score in one block and zero in the others. So a device that holds some of the blocks needs
two numbers of each row from the others, and never their scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rota.graph.graph import Graph, Op, Ref, Role, Tensor, refs
from rota.graph.rewrite import rewrite
from rota.graph.rules import register_rule

BLOCK_SCORES = "rota::block_scores"
"""The kind of the op that reads all scores: its dim ``b`` counts blocks of classes."""

_NONE, _SUM = 0, 2
"""The numbers that ATen has for the reductions of losses; a mean was turned into a sum when it was captured."""


@rewrite
def block_classes(graph: Graph, blocks: int) -> Graph:
    """The same computation, with the classes of each cross-entropy in so many blocks.

    A loss stays as it is if its classes do not divide into the blocks, or if it has weights of classes, smoothed
    labels, probabilities as targets, more than two dims, or fewer than 32 bits.
    """
    if blocks == 1 or not any(_can_block(op, graph.tensors, blocks) for op in graph.ops):
        return graph
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        if _can_block(op, tensors, blocks):
            ops += _blocked(op, tensors, blocks)
        else:
            ops.append(op)
    return replace(graph, ops=tuple(ops), tensors=tensors)


def _argument(op: Op, position: int, name: str, default: Any) -> Any:
    return op.args[position] if position < len(op.args) else op.kwargs.get(name, default)


def _can_block(op: Op, tensors: Mapping[str, Tensor], blocks: int) -> bool:
    if op.kind != "cross_entropy_loss" or op.outputs[0] is None:
        return False
    scores, target, loss = (tensors[name] for name in (op.args[0].name, op.args[1].name, op.outputs[0]))
    return (
        len(scores.shape) == 2
        and len(target.shape) == 1
        and 0 not in scores.shape
        and scores.shape[1] % blocks == 0
        and scores.shape[1] > blocks
        and loss.dtype in ("float32", "float64")
        and _argument(op, 2, "weight", None) is None
        and _argument(op, 3, "reduction", 1) in (_NONE, _SUM)
        and _argument(op, 5, "label_smoothing", 0.0) == 0.0
    )


def _blocked(op: Op, tensors: dict[str, Tensor], blocks: int) -> Iterator[Op]:
    scores, target = op.args[0], op.args[1]
    rows, classes = tensors[scores.name].shape
    ignored = _argument(op, 4, "ignore_index", -100)
    loss = tensors[op.outputs[0] or ""]

    def emit(
        name: str, target: str, args: tuple[Any, ...], *shapes: tuple[int, ...], dtype: str = loss.dtype, at: str = ""
    ) -> Op:
        made = [at] if at else [f"{op.name}.{name}{i or ''}" for i in range(len(shapes))]
        wanted = dtype == loss.dtype and loss.requires_grad
        for one, shape in zip(made, shapes, strict=True):
            role = Role.ACTIVATION
            tensors[one] = Tensor(name=one, shape=shape, dtype=dtype, role=role, requires_grad=wanted)
        namespace, kind, _ = target.split(".")
        return replace(
            op,
            name=f"{op.name}.{name}",
            kind=kind if namespace == "aten" else f"{namespace}::{kind}",
            target=target,
            args=args,
            kwargs={},
            inputs=tuple(dict.fromkeys(refs(args))),
            outputs=tuple(made),
        )

    def made(one: Op, output: int = 0) -> Ref:
        return Ref(name=one.outputs[output] or "")

    if tensors[scores.name].dtype != loss.dtype:  # autocast computes a loss in float32
        wide = emit("wide", "aten.to.dtype", (scores, getattr(torch, loss.dtype)), (rows, classes))
        yield wide
        scores = made(wide)
    width = classes // blocks
    taken_apart = emit("blocks", "aten.reshape.default", (scores, [rows, blocks, width]), (rows, blocks, width))
    yield taken_apart
    starts = emit("starts", "aten.arange.start_step", (0, classes, width), (blocks,), dtype="int64")
    yield starts
    of_blocks = emit(
        "scores",
        "rota.block_scores.default",
        (made(taken_apart), target, made(starts), classes, ignored),
        *((rows, blocks), (rows, blocks)),
    )
    yield of_blocks
    total = emit("total", "aten.logsumexp.default", (made(of_blocks), [1]), (rows,))
    yield total
    right = emit("right", "aten.sum.dim_IntList", (made(of_blocks, 1), [1]), (rows,))
    yield right
    of_rows = emit("rows", "aten.sub.Tensor", (made(total), made(right)), (rows,))
    yield of_rows
    left_out = emit("ignored", "aten.eq.Scalar", (target, ignored), (rows,), dtype="bool")
    yield left_out
    summed = _argument(op, 3, "reduction", 1) == _SUM
    at = "" if summed else loss.name
    counted = emit("counted", "aten.masked_fill.Scalar", (made(of_rows), made(left_out), 0.0), (rows,), at=at)
    yield counted
    if summed:
        yield emit("sum", "aten.sum.default", (made(counted),), (), at=loss.name)


# ---- the op ----


class _BlockScores(torch.autograd.Function):
    """Keeps one tensor of the size of the scores, and makes one more for the gradient."""

    @staticmethod
    def forward(
        context: Any, scores: torch.Tensor, target: torch.Tensor, start: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chances = scores.softmax(-1)
        highest = scores.amax(-1)
        # The most likely class of a block has a chance of one over the sum that a logsumexp takes the logarithm of.
        total = highest - chances.amax(-1).log()
        nothing = highest == -math.inf
        total = total.masked_fill(nothing, -math.inf)
        if not isinstance(chances, FakeTensor) and bool(nothing.any()):
            chances.masked_fill_(nothing.unsqueeze(-1), 0)  # else not a number; done only then, since it takes a pass
        place = target.unsqueeze(1) - start
        elsewhere = (place < 0) | (place >= scores.shape[-1])
        place = place.masked_fill(elsewhere, 0).unsqueeze(-1)
        right = scores.gather(-1, place).squeeze(-1).masked_fill(elsewhere, 0)
        context.save_for_backward(chances, place, elsewhere)
        return total, right

    @staticmethod
    def backward(context: Any, of_total: torch.Tensor, of_right: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        chances, place, elsewhere = context.saved_tensors
        gradient = chances * of_total.unsqueeze(-1)
        gradient.scatter_add_(-1, place, of_right.masked_fill(elsewhere, 0).unsqueeze(-1))
        return gradient, None, None


def _block_scores(
    scores: torch.Tensor, target: torch.Tensor, start: torch.Tensor, classes: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of (rows, blocks, classes of a block): each block's logsumexp, and the target's score or zero."""
    known = ((target >= 0) & (target < classes)) | (target == ignored)
    torch._assert_async(known.all(), f"a target is none of the {classes} classes")
    total, right = _BlockScores.apply(scores, target, start)  # type: ignore[no-untyped-call]
    return total, right


_LIBRARY: Any = torch.library.Library("rota", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "block_scores(Tensor scores, Tensor target, Tensor start, int classes, int ignored) -> (Tensor, Tensor)"
)
_LIBRARY.impl("block_scores", _block_scores, "CompositeImplicitAutograd")
register_rule(BLOCK_SCORES, "n b r^, n, b -> n b, n b")
