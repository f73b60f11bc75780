"""Does what the stages of a step are: forward and backward passes of a program's segments, and updates of groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rota.memory.holdings import Holdings
from rota.memory.spilled_run import SpilledRun
from rota.memory.steps import Act, Step
from rota.plan.program import Program
from rota.runtime import comm
from rota.runtime.exchanges import Exchanges, instructions_of


class Acting:
    """One device of a program, one stage at a time. What a stage needs is in memory when it is asked for."""

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
        at_once: int = 1,
        rank: int = 0,
        groups: comm.Groups | None = None,
    ) -> None:
        """`batches` are those of a step, of which some are under way at once; `groups` are those of all devices."""
        self.program = program
        self.step = step
        stored = {**buffers, **holdings.parameters}
        self._devices = [
            SpilledRun(program, rank, seed=seed, plain_random=plain_random, shares=batches, stored=stored)
            for _ in range(at_once)
        ]
        self._devices[0].prepare()
        for other in self._devices[1:]:
            other.share_code(self._devices[0])
        self._holdings = holdings
        self._batches = batches
        self._rank = rank
        self._instructions = {one.index: one for one in instructions_of(program, rank, {})}
        if groups:
            groups.prepare(program)
        self._exchanges = [
            Exchanges(device, groups, list(self._instructions.values())) for device in self._devices if groups
        ]

    def device_of(self, place: int) -> SpilledRun:
        """What has the values of a batch of the step."""
        return self._devices[place % len(self._devices)]

    def begin(self, batch: Any, *, place: int, number: int) -> None:
        """Take a batch of the step; `number` counts them over all steps."""
        device = self.device_of(place)
        device.clear()
        device.begin(batch, step=number)
        for exchanges in self._exchanges[place % len(self._devices) :][:1]:
            exchanges.begin()

    def end(self, place: int) -> dict[str, torch.Tensor]:
        """All stages of a batch have run: those of its metrics that ended up here."""
        device = self.device_of(place)
        device.end()
        program = self.program
        found = {}
        for metric, name in program.refined.graph.outputs.items():
            result = program.results.get(name)
            if result is not None and result.device == self._rank:
                found[metric] = device.values[result.value]
            elif result is None and self._rank == 0:
                found[metric] = device.free(name)
        return found

    def act(self, act: Act) -> None:
        """Run a stage."""
        if act.kind == "update":
            self._holdings.update(self.step.groups[act.group])
            return
        node, device = self.program.nodes[act.node], self.device_of(act.batch)
        if act.kind == "forward":
            device.forward(node)
        elif act.kind == "backward":
            device.backward(node)
        else:
            self._exchange(act)
        if act.completes:
            device.hand_over(act.completes)
            if act.batch == self._batches - 1:
                self._holdings.complete(act.completes)
        device.drop(act.drops)

    def _exchange(self, act: Act) -> None:
        """At once: what it makes is counted from here on, and what it sends is not any more."""
        exchanges = self._exchanges[act.batch % len(self._exchanges)]
        exchanges.exchange(self._instructions[act.node])
        exchanges.end()
