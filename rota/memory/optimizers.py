"""What an optimizer takes, found by letting one like it take a step on small parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rota.runtime.ledger import Ledger

_SIDE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateWork:
    """The memory of an update, for each byte of what is updated."""

    moments: int
    """How many numbers it remembers of each element."""
    work: float
    """What it needs for a while, for each byte of the largest parameter,"""
    work_of_all: float
    """and for each byte of all parameters that are updated together."""

    def work_bytes(self, sizes_bytes: tuple[int, ...]) -> int:
        """For the update of a group of parameters of these sizes."""
        return int(self.work * max(sizes_bytes, default=0) + self.work_of_all * sum(sizes_bytes))


def update_work(optimizer: torch.optim.Optimizer) -> UpdateWork:
    """The most that any of its groups of settings takes."""
    found = [_measured(optimizer, group) for group in optimizer.param_groups]
    return UpdateWork(
        moments=max(one.moments for one in found),
        work=max(one.work for one in found),
        work_of_all=max(one.work_of_all for one in found),
    )


def _measured(optimizer: torch.optim.Optimizer, settings: dict[str, object]) -> UpdateWork:
    plain = {name: value for name, value in settings.items() if name not in ("params", "param_names")}
    one, moments = _peak(type(optimizer), plain, 1)
    two, _ = _peak(type(optimizer), plain, 2)
    size = _SIDE * _SIDE * 4
    together = max(0, two - one) / size
    # Some optimizers work on all parameters of a group at once, others on one at a time.
    return UpdateWork(moments=moments, work=max(0.0, one / size - together), work_of_all=together)


def _peak(kind: type[torch.optim.Optimizer], settings: dict[str, object], count: int) -> tuple[int, int]:
    parameters = [torch.nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(count)]
    made = kind([{**settings, "params": parameters}])  # type: ignore[call-arg]
    ledger = Ledger()
    for _ in range(2):  # the first step makes what it remembers
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        ledger = Ledger()
        with ledger:
            made.step()
    state = made.state[parameters[0]].values()
    remembered = sum(isinstance(one, torch.Tensor) and one.shape == parameters[0].shape for one in state)
    return ledger.peak_bytes.get(None, 0), remembered
