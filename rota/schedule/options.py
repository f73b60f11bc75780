"""What the scheduler sees of a way to run a task."""

from __future__ import annotations

from rota.profile.estimate import Estimate
from rota.schedule.problem import Option


def option_of(task: str, estimate: Estimate, *, steps: float, more_s: float = 0.0) -> Option:
    """What the scheduler sees: the time until the task has ended. `more_s` is what switching to it takes."""
    return Option(
        tasks=(task,),
        kind=estimate.kind,
        devices=estimate.devices,
        seconds=estimate.start_s + more_s + max(steps, 0.0) * estimate.step_s,
        memory_bytes=estimate.memory_bytes,
        spans=estimate.spans,
        label=estimate.label,
    )
