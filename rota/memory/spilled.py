"""Trains a model that does not fit: its shards are in memory when they are needed, and on disk when they are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rota.memory.residency import Residency
from rota.memory.spilled_run import SpilledRun
from rota.memory.step_run import StepRun
from rota.memory.steps import FIXED, Act, Group, Step, Training, item_of
from rota.memory.tiers import Held, Tiers
from rota.plan.program import Program


class Spilled:
    """A program on one device, with parameters and moments that come and go."""

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, torch.nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        step: Step,
        residency: Residency,
        tiers: Tiers,
        training: Training,
        clip_norm: float | None = None,
        seed: int = 0,
        plain_random: bool = True,
        release: Callable[[torch.nn.Parameter], None] = lambda parameter: None,
    ) -> None:
        """`parameters` are the model's own, in its order, by the names of the graph; the optimizer has them.

        `release` brings one that is not in memory yet.
        """
        self.program = program
        self._parameters = parameters
        self._optimizer = optimizer
        self._step = step
        self._tiers = tiers
        self._training = training
        self._clip_norm = clip_norm
        self._release = release
        self._norms: dict[str, torch.Tensor] = {}
        """Of the gradients that are complete."""
        self._scale: torch.Tensor | None = None
        self._device = SpilledRun(
            program, 0, seed=seed, plain_random=plain_random, shares=training.batches, stored={**buffers, **parameters}
        )
        self._run = StepRun(step, residency, tiers, self._act)
        tiers.budget.take(step.items[FIXED].size_bytes, "what never leaves")
        for group in step.groups.values():
            self._settle(group)
        for act in step.acts:
            if act.kind == "forward":
                self._hold_tape(act)

    def _hold_tape(self, act: Act) -> None:
        node = self.program.nodes[act.node]
        item = item_of(act.batch, (node.segment, node.microbatch))
        if item in self._step.items and self._step.items[item].movable:
            self._tiers.held[item] = Held(
                size_bytes=self._step.items[item].size_bytes,
                tensors=lambda: self._device.kept(node.segment, node.microbatch),
            )

    def _settle(self, group: Group) -> None:
        """Bring what is in memory of a group under the budget, and out to disk."""
        tiers = self._tiers
        tiers.held[group.weights] = Held(
            size_bytes=self._step.items[group.weights].size_bytes,
            tensors=lambda: [self._parameters[name] for name in group.parameters],
            lasting=True,
        )
        for name in group.parameters:
            self._release(self._parameters[name])
        tiers.admit(group.weights)
        tiers.begin_write(group.weights)
        tiers.finish_write(group.weights)
        if group.gradients in self._step.items:
            tiers.held[group.gradients] = Held(
                size_bytes=self._step.items[group.gradients].size_bytes, tensors=lambda: self._gradients(group)
            )
        if group.moments in self._step.items:
            tiers.held[group.moments] = Held(
                size_bytes=self._step.items[group.moments].size_bytes,
                tensors=lambda: self._remembered(group),
                lasting=True,
            )
            if self._remembered(group):
                tiers.admit(group.moments)
                tiers.begin_write(group.moments)
                tiers.finish_write(group.moments)

    def _gradients(self, group: Group) -> list[torch.Tensor]:
        found = [self._parameters[name].grad for name in group.parameters]
        return [one for one in found if one is not None]

    def _remembered(self, group: Group) -> list[torch.Tensor]:
        """What the optimizer remembers of each element of a group's parameters."""
        found = []
        for name in group.parameters:
            parameter = self._parameters[name]
            for _, value in sorted(self._optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape:
                    found.append(value)
        return found

    # ---- a step ----

    def train(self, batches: Sequence[Any], *, number: int = 0) -> list[dict[str, torch.Tensor]]:
        """One step; the metrics of each batch."""
        assert len(batches) == self._training.batches
        self._run.begin()
        self._norms, self._scale = {}, None
        found = []
        for i, batch in enumerate(batches):
            self._device.clear()
            self._device.begin(batch, step=number * len(batches) + i)
            self._run.advance(i)
            self._device.end()
            found.append(self._outputs())
        return found

    def _outputs(self) -> dict[str, torch.Tensor]:
        results = self.program.results
        outputs = self.program.refined.graph.outputs
        return {metric: self._device.values[results[name].value] for metric, name in outputs.items() if name in results}

    def _act(self, act: Act) -> None:
        if act.kind == "update":
            self._update(self._step.groups[act.group])
            return
        node = self.program.nodes[act.node]
        if act.kind == "forward":
            self._device.forward(node)
        else:
            self._device.backward(node)
            self._device.hand_over(act.completes)
            if self._clip_norm is not None and act.batch == self._training.batches - 1:
                for name in act.completes:
                    gradient = self._parameters[name].grad
                    assert gradient is not None
                    self._norms[name] = torch.linalg.vector_norm(gradient)
        self._device.drop(act.drops)

    def _update(self, group: Group) -> None:
        mine = [self._parameters[name] for name in group.parameters]
        if self._clip_norm is not None:
            scale = self._clipping()
            for parameter in mine:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        with _only(self._optimizer, mine):
            self._optimizer.step()
        for parameter in mine:
            parameter.grad = None
        if group.moments in self._tiers.held:
            self._tiers.admit(group.moments)

    def _clipping(self) -> torch.Tensor:
        """By what gradients are scaled, as `clip_grad_norm_` does it; they themselves may be away."""
        if self._scale is None:
            norms = []
            for name, parameter in self._parameters.items():
                if name in self._norms:
                    norms.append(self._norms[name])
                elif parameter.grad is not None:
                    norms.append(torch.linalg.vector_norm(parameter.grad))
            whole = torch.linalg.vector_norm(torch.stack(norms))
            assert self._clip_norm is not None
            self._scale = torch.clamp(self._clip_norm / (whole + 1e-6), max=1.0)
        return self._scale


@contextlib.contextmanager
def _only(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """The optimizer with some of its parameters only."""
    wanted = set(map(id, parameters))
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
