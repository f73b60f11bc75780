"""Which ops micro-batches take in turns, and how they follow each other where no pipeline says it."""

from __future__ import annotations

from rota.graph.graph import differentiated, trained_ops
from rota.graph.rules import occurrences
from rota.plan.microbatches import Mode, is_aligned, microbatches_of
from rota.plan.plan import At, Plan


def one_after_another(plan: Plan) -> None:
    """Let no forward pass run ahead of the backward pass before it, so that one micro-batch's activations are kept."""
    first = next(iter(turning_ops(plan)), None)
    for part in [] if first is None else plan.parts(first):
        for m in range(plan.microbatches - 1):
            plan.prefer(At(part=part, microbatch=m, backward=True), before=At(part=part, microbatch=m + 1))


def turning_ops(plan: Plan) -> dict[str, None]:
    """The ops that have a backward pass for each micro-batch, in the order of the graph.

    There are none if the gradient of one micro-batch needs what all of them made, as behind a batch norm or with the
    square root of a loss: then no backward pass can run before all forward passes are done.
    """
    if plan.microbatches == 1 or not plan.backward:
        return {}
    refined, microbatches = plan.refined, microbatches_of(plan)
    wanted, trained = differentiated(plan.graph), trained_ops(plan.graph)
    turning: dict[str, None] = {}
    behind: set[str | None] = set()
    """What is made by ops that take turns, and of that."""
    late: set[str | None] = set()
    """What needs that of all micro-batches."""
    for op in plan.graph.ops:
        reads = occurrences(op)
        is_late = any(
            name in late or (name in behind and not is_aligned(refined, microbatches, op.name, i, name))
            for i, name in enumerate(reads)
        )
        if is_late and op.name in trained and any(name in wanted and name in behind for name in reads):
            return {}
        if is_late:
            late.update(op.outputs)
        takes_turns = op.name in trained and microbatches.running[op.name].mode is not Mode.ONCE
        if takes_turns:
            turning[op.name] = None
        if takes_turns or any(name in behind for name in reads):
            behind.update(op.outputs)
    return turning
