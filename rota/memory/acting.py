"""Does what the stages of a step are: forward and backward passes of a program's segments, and updates of groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rota.memory.holdings import Holdings
from rota.memory.spilled_run import SpilledRun
from rota.memory.steps import Act, Step
from rota.plan.program import Program


class Acting:
    """A program on one device, one stage at a time. What a stage needs is in memory when it is asked for."""

    def __init__(
        self,
        program: Program,
        step: Step,
        holdings: Holdings,
        buffers: Mapping[str, torch.Tensor],
        *,
        batches: int,
        seed: int,
        plain_random: bool,
    ) -> None:
        """`batches` are those of a step."""
        self.program = program
        self.step = step
        self.device = SpilledRun(
            program,
            0,
            seed=seed,
            plain_random=plain_random,
            shares=batches,
            stored={**buffers, **holdings.parameters},
        )
        self._holdings = holdings
        self._batches = batches

    def begin(self, batch: Any, *, number: int) -> None:
        """Take a batch; `number` counts them."""
        self.device.clear()
        self.device.begin(batch, step=number)

    def end(self) -> dict[str, torch.Tensor]:
        """All stages of the batch have run: its metrics."""
        self.device.end()
        program = self.program
        found = {}
        for metric, name in program.refined.graph.outputs.items():
            if name in program.results:
                found[metric] = self.device.values[program.results[name].value]
            else:
                found[metric] = self.device.free(name)
        return found

    def act(self, act: Act) -> None:
        """Run a stage."""
        if act.kind == "update":
            self._holdings.update(self.step.groups[act.group])
            return
        node = self.program.nodes[act.node]
        if act.kind == "forward":
            self.device.forward(node)
        else:
            self.device.backward(node)
            self.device.hand_over(act.completes)
            if act.batch == self._batches - 1:
                self._holdings.complete(act.completes)
        self.device.drop(act.drops)
