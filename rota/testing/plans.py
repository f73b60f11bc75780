"""Plans to test with: a random legal one, and the simplest of each known kind of parallelism."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rota.errors import CutError
from rota.graph.batch import Leaf, Skeleton
from rota.graph.graph import Graph, Op, Tensor
from rota.graph.refine import Dim, Refined
from rota.plan.box import Box, even_widths
from rota.plan.layout import Piece
from rota.plan.microbatches import Mode, Running, local_ranges
from rota.plan.plan import Gather, Part, Plan
from rota.strategies.mesh import lay_out
from rota.strategies.tensor import tensor

_ATTENTION = "scaled_dot_product_attention"


def random_plan(
    graph: Graph,
    rng: random.Random,
    *,
    devices: int,
    microbatches: int = 1,
    cut_rate: float = 0.6,
    refined: Refined | None = None,
) -> Plan:
    """A legal plan drawn at random: cuts within cuts, copies, groups, an order, and parameters in pieces.

    `cut_rate` is how many of the ops are cut, between none (0) and all that can be (1).
    """
    plan = Plan(graph, devices=devices, microbatches=microbatches, refined=refined)
    for op in graph.ops:
        parts = list(plan.parts(op))
        for _ in range(rng.choice([1, 1, 2, 3]) if rng.random() < cut_rate else 0):
            part = parts.pop(rng.randrange(len(parts)))
            parts += _cut(plan, part, rng)
        if devices > 1 and rng.random() < 0.25:
            copied = parts.pop(rng.randrange(len(parts)))
            chosen = rng.sample(range(devices), rng.randint(2, min(devices, 3)))
            for copy, device in zip(plan.replicate(copied, len(chosen)), chosen, strict=True):
                plan.assign(copy, device)
        for part in parts:
            plan.assign(part, rng.randrange(devices))
    for _ in range(rng.choice([0, 0, 1, 2])):
        start = rng.randrange(len(graph.ops))
        apart = rng.choice([plan.group, plan.recompute, plan.recompute])
        apart(graph.ops[start : start + rng.randint(1, 6)])
    for _ in range(rng.choice([0, 0, 0, 2]) if len(graph.ops) > 1 else 0):
        first, second = sorted(rng.sample(range(len(graph.ops)), 2))  # along with the data flow
        plan.order(rng.choice(plan.parts(graph.ops[first])), before=rng.choice(plan.parts(graph.ops[second])))
    if rng.random() < 0.4:
        for parameter in graph.parameters:
            if rng.random() < 0.5:
                gather: Gather = "step" if rng.random() < 0.5 else "use"
                plan.store(parameter.name, tuple(_pieces(plan, parameter, rng)), gather=gather)
    return plan


def single_plan(graph: Graph, *, microbatches: int = 1, refined: Refined | None = None) -> Plan:
    """Everything on one device."""
    plan = Plan(graph, devices=1, microbatches=microbatches, refined=refined)
    plan.assign(graph.ops, 0)
    return plan


def data_plan(
    graph: Graph,
    degree: int,
    *,
    microbatches: int = 1,
    widths: Sequence[int] | None = None,
    refined: Refined | None = None,
) -> Plan:
    """Each device has some of the samples, evenly or in these widths; what does not know of samples is everywhere."""
    plan = Plan(graph, devices=degree, microbatches=microbatches, refined=refined)
    samples = plan.refined.batch_families()
    for op in graph.ops:
        once = plan.refined.frames[op.name].once
        dims = [dim for dim in cuttable(plan, op, samples) if not (dim.reduced and once)]
        if not dims:
            _spread(plan, plan.replicate(op, degree))
        elif widths is None:
            _spread(plan, plan.split(op, dims[0].name, degree))
        else:
            _spread(plan, plan.split(op, dims[0].name, widths=widths))
    return plan


def tensor_plan(graph: Graph, degree: int, *, microbatches: int = 1, refined: Refined | None = None) -> Plan:
    """Megatron's, as the strategy makes it: heads and the inner columns of feed-forward layers are cut."""
    return lay_out(graph, [(tensor(), degree)], microbatches=microbatches, refined=refined)


def pipeline_plan(graph: Graph, stages: int, microbatches: int = 1, *, refined: Refined | None = None) -> Plan:
    """Ranges of equally many ops, in their order, one on each device."""
    plan = Plan(graph, devices=stages, microbatches=microbatches, refined=refined)
    ops = iter(graph.ops)
    for stage, count in enumerate(even_widths(len(graph.ops), stages)):
        plan.assign([next(ops) for _ in range(count)], stage)
    return plan


def in_double(graph: Graph) -> Graph:
    """The same graph with float64 wherever the model's code asks for float32, so that sums can be compared closely."""
    doubled = {name: replace(tensor, dtype=_double_name(tensor.dtype)) for name, tensor in graph.tensors.items()}
    return replace(
        graph,
        tensors=doubled,
        ops=tuple(_op_in_double(op, graph) for op in graph.ops),
        constants={
            name: value.double() if value.dtype == torch.float32 else value for name, value in graph.constants.items()
        },
        batch=_skeleton_in_double(graph.batch),
    )


def _skeleton_in_double(skeleton: Skeleton) -> Skeleton:
    if isinstance(skeleton, Leaf):
        return replace(skeleton, dtype=_double_name(skeleton.dtype))
    return replace(skeleton, parts=tuple(map(_skeleton_in_double, skeleton.parts)))


def cuttable(plan: Plan, target: Op | Part, families: frozenset[int] | set[int] | None = None) -> list[Dim]:
    """The dims along which an op may be cut, of these families if any are given."""
    frame = plan.refined.frames[target.op if isinstance(target, Part) else target.name]
    return [dim for dim in frame.dims.values() if frame.can_cut(dim) and (families is None or dim.family in families)]


def _spread(plan: Plan, parts: Sequence[Part]) -> None:
    for device, part in enumerate(parts):
        plan.assign(part, device)


# ---- at random ----


def _cut(plan: Plan, part: Part, rng: random.Random) -> list[Part]:
    """The part in two or three along some dim, if there is one."""
    dims = cuttable(plan, part)
    rng.shuffle(dims)
    for dim in dims:
        start, stop = dict(part.ranges).get(dim.name, (0, dim.size))
        if stop - start < 2:
            continue
        count = rng.choice([2, 2, 3]) if stop - start > 2 else 2
        borders = sorted(rng.sample(range(1, stop - start), count - 1))
        widths = [b - a for a, b in zip([0, *borders], [*borders, stop - start], strict=True)]
        if rng.random() < 0.5:
            widths = list(even_widths(stop - start, count))
        if _leaves_samples(plan, part, dim, start, widths):
            return plan.split(part, dim.name, widths=widths)
    return [part]


def _leaves_samples(plan: Plan, part: Part, dim: Dim, start: int, widths: Sequence[int]) -> bool:
    """Whether each of the parts gets a sample of every micro-batch."""
    samples = plan.batch_size
    if plan.microbatches == 1 or samples is None or dim.family not in plan.refined.batch_families():
        return True
    frame, running = plan.refined.frames[part.op], Running(mode=Mode.ROWS, dim=dim.name)
    for width in widths:
        cut = Part(op=part.op, ranges=((dim.name, (start, start + width)),))
        try:
            for of_micro in set(even_widths(samples, plan.microbatches)):
                local_ranges(cut, frame, running, width=of_micro)
        except CutError:
            return False
        start += width
    return True


def _pieces(plan: Plan, parameter: Tensor, rng: random.Random) -> Iterator[Piece]:
    """Pieces that cover a parameter, some of them on several devices."""
    boxes = [Box.whole(plan.refined.shape(parameter.name))]
    for _ in range(rng.randint(0, 4)):
        box = boxes.pop(rng.randrange(len(boxes)))
        wide = [dim for dim, width in enumerate(box.shape) if width > 1]
        if not wide:
            boxes.append(box)
            continue
        dim = rng.choice(wide)
        width = rng.randint(1, box.shape[dim] - 1)
        boxes += box.split(dim, (width, box.shape[dim] - width))
    for box in boxes:
        for device in rng.sample(range(plan.devices), 1 if rng.random() < 0.8 else min(2, plan.devices)):
            yield Piece(device=device, box=box)


# ---- Megatron ----


# ---- precision ----


def _op_in_double(op: Op, graph: Graph) -> Op:
    kwargs = {name: _double(value) for name, value in op.kwargs.items()}
    made = [graph.tensors[name].dtype for name in op.outputs if name is not None]
    if not op.inputs and "float32" in made:  # zeros, arange and the like, which may leave the dtype to PyTorch
        kwargs["dtype"] = torch.float64
    return replace(op, args=tuple(_double(one) for one in op.args), kwargs=kwargs)


def _double(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    if isinstance(value, tuple | list):
        return type(value)(_double(one) for one in value)
    return value


def _double_name(dtype: str) -> str:
    return "float64" if dtype == "float32" else dtype
