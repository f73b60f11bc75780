"""How micro-batches follow each other where no pipeline says it: one is done before the next begins."""

from __future__ import annotations

from rota.graph.graph import Op
from rota.plan.microbatches import Mode, microbatches_of
from rota.plan.plan import At, Plan


def one_after_another(plan: Plan) -> None:
    """Let no forward pass run ahead of the backward pass before it, so that one micro-batch's activations are kept."""
    if plan.microbatches == 1 or meets(plan):
        return
    for op in plan.graph.ops:
        if has_turns(plan, op):
            for part in plan.parts(op):
                for m in range(plan.microbatches - 1):
                    plan.order(At(part=part, microbatch=m, backward=True), before=At(part=part, microbatch=m + 1))
            return


def has_turns(plan: Plan, op: Op) -> bool:
    """Whether an op has a backward pass for each micro-batch: it makes something of samples that has a gradient."""
    tensors, samples = plan.graph.tensors, plan.refined.batch_families()
    made = [name for name in op.outputs if name is not None and tensors[name].requires_grad]
    return op.with_grad and any(not samples.isdisjoint(plan.refined.families[name]) for name in made)


def meets(plan: Plan) -> bool:
    """Whether something in the middle needs all micro-batches at once, as a batch norm does: none can run ahead."""
    running, samples = microbatches_of(plan).running, plan.refined.batch_families()
    apart: set[str | None] = set()
    """What each micro-batch makes for itself."""
    late: set[str | None] = set()
    """What is made of all of them: a statistic, or a sum over samples."""
    for op in plan.graph.ops:
        once = running[op.name].mode is Mode.ONCE
        if running[op.name].mode is Mode.ROWS and any(name in late for name in op.inputs):
            return True
        of_them = any(name in apart or name in late for name in op.inputs)
        summed = all(name is None or samples.isdisjoint(plan.refined.families[name]) for name in op.outputs)
        if of_them and (once or summed):
            late.update(op.outputs)
        elif not once:
            apart.update(op.outputs)
    return False
