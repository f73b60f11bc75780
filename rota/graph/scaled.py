"""Divides the terms of a mean cross-entropy by their number before they are summed, not after.

The number depends on the batch alone, which every device has. So a device that has some of the samples need not wait
for the others before its backward pass: the sum over devices is only there to be told.
"""

from __future__ import annotations

from dataclasses import replace

from rota.graph.graph import Graph, Op, Ref, Role, Tensor, refs
from rota.graph.normalise import COUNTED_LOSSES
from rota.graph.rewrite import rewrite

_NONE, _SUM, _REDUCTION = 0, 2, 3


@rewrite
def scale_before_sum(graph: Graph) -> Graph:
    """The same computation up to rounding; the graph itself if it has no such loss."""
    totals = {op.outputs[0]: op for op in graph.ops if _is_total(graph, op)}
    readers: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
    means = {
        name: readers[name][0]
        for name in totals
        if name is not None
        and name not in graph.outputs.values()
        and len(readers.get(name, ())) == 1
        and _is_division(readers[name][0], name)
    }
    if not means:
        return graph
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        if op.outputs[0] in means:
            continue
        total = next((name for name, mean in means.items() if mean is op), None)
        if total is None:
            ops.append(op)
            continue
        ops += _rewritten(graph, totals[total], op, tensors)
        del tensors[total]
    return replace(graph, ops=tuple(ops), tensors=tensors)


def _is_total(graph: Graph, op: Op) -> bool:
    if op.kind not in COUNTED_LOSSES or len(op.args) <= _REDUCTION or op.args[_REDUCTION] != _SUM:
        return False
    target = op.args[1]
    return isinstance(target, Ref) and graph.tensors[target.name].dtype == "int64"


def _is_division(op: Op, total: str) -> bool:
    return op.target == "aten.div.Tensor" and op.args[0] == Ref(name=total) and not op.kwargs


def _rewritten(graph: Graph, total: Op, mean: Op, tensors: dict[str, Tensor]) -> list[Op]:
    base = total.name.removesuffix(".sum")
    loss = graph.tensors[mean.outputs[0] or ""]
    like = replace(loss, shape=graph.tensors[total.args[1].name].shape, role=Role.ACTIVATION)
    terms, scaled = f"{base}.terms", f"{base}.scaled"
    tensors[terms], tensors[scaled] = replace(like, name=terms), replace(like, name=scaled)
    apart = (*total.args[:_REDUCTION], _NONE, *total.args[_REDUCTION + 1 :])
    divided = (Ref(name=terms), *mean.args[1:])
    return [
        replace(total, name=terms, args=apart, outputs=(terms,)),
        replace(mean, name=scaled, args=divided, inputs=tuple(dict.fromkeys(refs(divided))), outputs=(scaled,)),
        replace(
            mean,
            name=f"{base}.sum",
            kind="sum",
            target="aten.sum.default",
            args=(Ref(name=scaled),),
            inputs=(scaled,),
        ),
    ]
