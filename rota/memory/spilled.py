"""Runs batches of one shape by a program whose parameters, moments and activations come and go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rota.memory.acting import Acting
from rota.memory.holdings import Holdings
from rota.memory.residency import Residency
from rota.memory.step_run import StepRun
from rota.memory.steps import FIXED, Step, item_of
from rota.memory.tiers import Held
from rota.plan.program import Program
from rota.runtime import comm


class Spilled:
    """One device of a program. Several programs may share what they hold; one at a time is entered."""

    def __init__(
        self,
        program: Program,
        holdings: Holdings,
        buffers: Mapping[str, torch.Tensor],
        *,
        step: Step,
        residency: Residency,
        batches: int = 1,
        at_once: int = 1,
        seed: int = 0,
        plain_random: bool = True,
        rank: int = 0,
        groups: comm.Groups | None = None,
    ) -> None:
        """`batches` are those of a step; `groups` those of the devices that the program is for."""
        self.program = program
        self.step = step
        self.at_once = at_once
        self.residency = residency
        self._holdings = holdings
        self._acting = Acting(
            program,
            step,
            holdings,
            buffers,
            batches=batches,
            at_once=at_once,
            seed=seed,
            plain_random=plain_random,
            rank=rank,
            groups=groups,
        )
        self.run = StepRun(step, residency, holdings.tiers, self._acting.act)
        self._activations = dict(self._movable_activations())

    def _movable_activations(self) -> Iterator[tuple[str, Held]]:
        """What segments keep for their backward passes, and what they hand to each other."""
        for act in self.step.acts:
            if act.kind != "forward":
                continue
            node, device = self.program.nodes[act.node], self._acting.device_of(act.batch)
            kept = functools.partial(device.kept, node.segment, node.microbatch)
            yield from self._held(item_of(act.batch, (node.segment, node.microbatch)), kept)
            for value in node.makes:
                yield from self._held(item_of(act.batch, value), functools.partial(device.made, value))

    def _held(self, item: str, tensors: Callable[[], list[torch.Tensor]]) -> Iterator[tuple[str, Held]]:
        known = self.step.items.get(item)
        if known is not None and known.movable:
            yield item, Held(size_bytes=known.size_bytes, tensors=tensors)

    def enter(self, batch: int = 0) -> None:
        """Begin to run batches, from this one of a step on. All that can leave has left."""
        tiers = self._holdings.tiers
        tiers.budget.take(self.step.items[FIXED].size_bytes, "what never leaves")
        tiers.held.update(self._activations)
        self.run.begin(batch)

    def leave(self) -> None:
        """Leave the memory to others."""
        tiers = self._holdings.tiers
        self.run.leave()
        for item in self._activations:
            del tiers.held[item]
        tiers.budget.give(self.step.items[FIXED].size_bytes)

    def take(self, batches: Sequence[Any], *, place: int, number: int) -> list[dict[str, torch.Tensor]]:
        """The batches of a step from a place on, and with its last one the update; their metrics.

        `number` counts batches. They are one, or as many as go through the shards at once.
        """
        for i, batch in enumerate(batches):
            self._acting.begin(batch, place=place + i, number=number + i)
        self.run.advance(place + len(batches))
        return [self._acting.end(place + i) for i in range(len(batches))]
