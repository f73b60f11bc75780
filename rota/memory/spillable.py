"""What a task must be like to be trained in less memory than it needs, and what a step of it is then."""

from __future__ import annotations

import math
from typing import Any

from rota.cluster.device import LEAST_MARGIN_BYTES, format_bytes
from rota.errors import FitError, TaskError
from rota.graph.batch import tensors_in
from rota.graph.graph import Graph, Role
from rota.memory.optimizers import update_work
from rota.memory.steps import Training
from rota.runtime.executor import Parts, check_gradient
from rota.runtime.planned import needs_of

_MARGIN = 0.03
WANDERS_BYTES = 4 * 2**20
"""By about so much does what a process takes beside a task differ from one start to the next."""


def check_spillable(parts: Parts, graph: Graph) -> None:
    """TaskError if it cannot be done."""
    if needs_of(parts.optimizer) == "everything":
        raise TaskError(
            f"{type(parts.optimizer).__name__} may look at all parameters at once, and spill has some of them in "
            "memory; use one of PyTorch's own optimizers without hooks"
        )
    check_gradient(graph.loss.requires_grad)
    check_outputs(graph)


def check_outputs(graph: Graph) -> None:
    """TaskError for a metric that may be away when it is asked for."""
    for metric, name in graph.outputs.items():
        if name in graph.tensors and graph.tensors[name].role is Role.PARAMETER:
            raise TaskError(
                f"spill: the metric {metric!r} is the parameter {name} itself, which may be away when it is asked for; "
                "return a copy of it (.clone())"
            )


def training_of(parts: Parts, graph: Graph, batch: Any) -> Training:
    """What a step depends on, beside its program."""
    work = update_work(parts.optimizer)
    return Training(
        batches=parts.task.accumulate,
        clipped=parts.task.clip_norm is not None,
        moments=work.moments,
        update_bytes=work.work_bytes,
        fixed_bytes=_fixed_bytes(graph, batch),
    )


def _fixed_bytes(graph: Graph, batch: Any) -> int:
    """The batch, and parameters that no op reads."""
    read = {name for op in graph.ops for name in op.inputs}
    idle = [tensor.size_bytes for tensor in graph.parameters if tensor.name not in read]
    return sum(one.untyped_storage().nbytes() for one in tensors_in(batch)) + sum(idle)


def too_small(error: FitError, *, taken_bytes: int, memory_bytes: int) -> str:
    """What to tell of a device that has less than a task needs, with what its process takes beside the task."""
    if error.needed_bytes is None:
        return str(error)
    own_bytes = error.needed_bytes + taken_bytes + WANDERS_BYTES
    needed_bytes = max(own_bytes + LEAST_MARGIN_BYTES, math.ceil(own_bytes / (1 - _MARGIN)))  # margins grow with it
    return (
        f"{str(error).split(', and')[0]}: the task needs a device with at least {format_bytes(needed_bytes)}, and "
        f"this one has {format_bytes(memory_bytes)}; give it more (--memory), or use a smaller batch"
    )


def margin_bytes(memory_bytes: int) -> int:
    """What is left to allocators, beside all that is counted."""
    return max(LEAST_MARGIN_BYTES, int(_MARGIN * memory_bytes))
