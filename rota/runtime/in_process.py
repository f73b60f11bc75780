"""Runs a program with all of its devices in one process: real tensors, and collectives on lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rota.graph.graph import Role
from rota.plan.box import Box
from rota.plan.layout import Piece
from rota.plan.ownership import owned
from rota.plan.program import Node, NodeKind, Program
from rota.runtime.device_run import DeviceRun, check_state
from rota.runtime.fused import fuse
from rota.runtime.ledger import Ledger
from rota.runtime.pieces import assemble, cut, exchange


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one step made, whole."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    """Of each parameter, summed over all parts and micro-batches."""
    buffers: dict[str, torch.Tensor]


class InProcess:
    """A program, and all of its devices."""

    def __init__(
        self,
        program: Program,
        state: Mapping[str, torch.Tensor],
        *,
        seed: int = 0,
        plain_random: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self.program = program
        self._graph = program.refined.graph
        self._ledger = ledger
        self.optimizers: list[torch.optim.Optimizer] = []
        self._devices = [
            DeviceRun(program, device, seed=seed, plain_random=plain_random) for device in range(program.devices)
        ]
        state = check_state(program, state)
        for name in program.stored:
            whole = state[name].detach()
            for run in self._devices:
                self._watch(run.device)
                run.load(name, whole)
            self._watch(None)

    def device(self, number: int) -> DeviceRun:
        """One of the devices."""
        return self._devices[number]

    def _watch(self, device: int | None) -> None:
        """What is allocated from here on is on this device."""
        if self._ledger is not None:
            self._ledger.watch(device)

    # ---- one step ----

    def run(self, batch: Any, *, step: int = 0) -> Outcome:
        """One forward and backward pass over all micro-batches."""
        self.execute(batch, step=step)
        outcome = Outcome(
            outputs=self._outputs(),
            gradients={name: self._whole_gradient(name) for name in self.program.gradients},
            buffers={
                name: self.whole(name) for name in self.program.stored if self._graph.tensors[name].role is Role.BUFFER
            },
        )
        self.clear()
        return outcome

    def train(self, batch: Any, *, step: int = 0, max_norm: float | None = None) -> dict[str, torch.Tensor]:
        """One step of training; `optimize` has said how."""
        # Gradients are dropped now and not after the last step: memory that goes back to the system comes back slowly.
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.clear()
        self.execute(batch, step=step)
        outputs = self._outputs()
        for run in self._devices:
            run.hand_over_gradients()
        if max_norm is not None:
            norm = torch.stack([run.squared_gradients() for run in self._devices]).sum().sqrt()
            for run in self._devices:
                run.clip(norm, max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        return outputs

    def optimize(self, make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]) -> None:
        """Give each device an optimizer over its pieces."""
        pieces = [[parameter for _, _, parameter in run.parameters()] for run in self._devices]
        self.optimizers = [fuse(make(parameters)) for parameters in pieces if parameters]

    def execute(self, batch: Any, *, step: int = 0) -> None:
        """Run all nodes; gradients and results stay on their devices."""
        for run in self._devices:
            run.begin(batch, step=step)
        for node, frees in zip(self.program.nodes, self.program.frees, strict=True):
            if node.kind is NodeKind.EXCHANGE:
                self._exchange(node)
            else:
                run = self._devices[node.devices[0]]
                self._watch(run.device)
                (run.forward if node.kind is NodeKind.FORWARD else run.backward)(node)
                self._watch(None)
            for device, value in frees:
                self._devices[device].drop([value])
        for run in self._devices:
            run.end()

    def clear(self) -> None:
        """Forget what the last step left on the devices, but for parameters and buffers."""
        for run in self._devices:
            run.clear()

    def _exchange(self, node: Node) -> None:
        assert node.step is not None
        step = node.step
        inputs = [
            self._devices[piece.device].values[value].detach()
            for piece, value in zip(step.inputs, node.reads, strict=True)
            if value is not None
        ]
        made = exchange(step, inputs, self.program.refined.factors[self.program.flows[node.flow].tensor])
        for piece, value, one in zip(step.outputs, node.makes, made, strict=True):
            self._devices[piece.device].values[value] = one
            if self._ledger is not None:
                self._ledger.claim(one, piece.device)

    # ---- what comes out ----

    def parameters(self) -> Iterator[tuple[str, Piece, torch.Tensor]]:
        """Every piece of every parameter that is trained."""
        for run in self._devices:
            yield from run.parameters()

    def whole(self, name: str) -> torch.Tensor:
        """A parameter or buffer, put together from its pieces."""
        return self._joined(name, lambda piece: self._devices[piece.device].stored(name, piece.box).detach())

    def _outputs(self) -> dict[str, torch.Tensor]:
        found = {}
        for metric, name in self._graph.outputs.items():
            result = self.program.results.get(name)
            if result is not None:
                found[metric] = self._devices[result.device].values[result.value]
            elif name in self.program.stored:
                found[metric] = self.whole(name)
            else:  # a constant, or a tensor of the batch
                found[metric] = self._devices[0].free(name)
        return found

    def _whole_gradient(self, name: str) -> torch.Tensor:
        tensor = self._graph.tensors[name]
        layout = self.program.stored[name]
        found = {piece: self._devices[piece.device].gradient(name, piece.box) for piece in layout}
        if all(one is None for one in found.values()):
            return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))

        def of(piece: Piece) -> torch.Tensor:
            gradient = found[piece]
            assert gradient is not None, f"a part of the gradient of {name} is missing on device {piece.device}"
            return gradient

        return self._joined(name, of)

    def _joined(self, name: str, of: Callable[[Piece], torch.Tensor]) -> torch.Tensor:
        factors = self.program.refined.factors[name]
        parts = [
            (box, cut(of(piece), factors, piece.box, box))
            for piece, boxes in owned(self.program.stored[name]).items()
            for box in boxes
        ]
        return assemble(parts, factors, Box.whole(self.program.refined.shape(name)))
