"""Runs a program with all of its devices in one process: real tensors, and collectives on lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rota.errors import InputError
from rota.graph.graph import Role
from rota.graph.part import Place
from rota.graph.positional import step_key
from rota.plan.box import Box
from rota.plan.layout import Piece
from rota.plan.ownership import owned
from rota.plan.program import ONCE, Node, NodeKind, Program, Segment, Source, Value
from rota.runtime.ledger import Ledger
from rota.runtime.pieces import assemble, cut, exchange
from rota.runtime.segment import SegmentRunner, Tape


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one step made, whole."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    """Of each parameter, summed over all parts and micro-batches."""
    buffers: dict[str, torch.Tensor]


class InProcess:
    """A program, and the pieces of parameters and buffers on its devices."""

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
        self._factors = program.refined.factors
        self._numbers = {box: number for number, box in enumerate(program.boxes)}
        self._seed = seed
        self._plain = plain_random
        self._ledger = ledger
        self._values: list[dict[Value, torch.Tensor]] = [{} for _ in range(program.devices)]
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._runners: dict[int, SegmentRunner] = {}
        self._owned: set[tuple[int, Value]] = set()
        """The gradients that were summed here, which may be added to in place."""
        self._optimizers: list[torch.optim.Optimizer] = []
        self._load(state)

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, layout in self.program.stored.items():
            whole = Box.whole(self.program.refined.shape(name))
            if name not in state:
                raise InputError(f"the state has no {name}, which the program keeps on device {layout[0].device}")
            given = state[name].detach()
            for piece in layout:
                self._watch(piece.device)
                part = cut(given, self._factors[name], whole, piece.box).clone(memory_format=torch.contiguous_format)
                if self._graph.tensors[name].requires_grad:
                    part = torch.nn.Parameter(part)
                self._values[piece.device][self._stored(name, piece.box)] = part
            self._watch(None)

    def _watch(self, device: int | None) -> None:
        """What is allocated from here on is on this device."""
        if self._ledger is not None:
            self._ledger.watch(device)

    def _stored(self, name: str, box: Box) -> Value:
        return Value(name, ONCE, self._numbers[box])

    # ---- one step ----

    def run(self, batch: Any, *, step: int = 0) -> Outcome:
        """One forward and backward pass over all micro-batches."""
        self.execute(batch, step=step)
        outcome = Outcome(
            outputs=self._outputs(),
            gradients={name: self._whole_gradient(name) for name in self.program.gradients},
            buffers={name: self.whole(name) for name in self._named(Role.BUFFER)},
        )
        self.clear()
        return outcome

    def train(self, batch: Any, *, step: int = 0, max_norm: float | None = None) -> dict[str, torch.Tensor]:
        """One step of training; `optimize` has said how."""
        self.execute(batch, step=step)
        outputs = self._outputs()
        for name, piece, parameter in self.parameters():
            parameter.grad = self._gradient(name, piece)
        if max_norm is not None:
            self._clip(max_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        for _, _, parameter in self.parameters():
            parameter.grad = None
        self.clear()
        return outputs

    def optimize(self, make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]) -> None:
        """Give each device an optimizer over its pieces."""
        by_device: dict[int, list[torch.Tensor]] = {}
        for _, piece, parameter in self.parameters():
            by_device.setdefault(piece.device, []).append(parameter)
        self._optimizers = [make(parameters) for parameters in by_device.values()]

    def execute(self, batch: Any, *, step: int = 0) -> None:
        """Run all nodes; gradients and results stay on their devices."""
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        free: dict[str, torch.Tensor] = dict(self._graph.constants)
        for name, leaf in zip(self._graph.inputs, leaves, strict=True):
            if tuple(leaf.shape) != self._graph.tensors[name].shape:
                raise InputError(
                    f"the program was compiled for a batch whose {name} has shape {self._graph.tensors[name].shape}, "
                    f"and this one has {tuple(leaf.shape)}; compile it for this shape"
                )
            free[name] = leaf.detach()
        key = step_key(self._seed, step)
        for node, frees in zip(self.program.nodes, self.program.frees, strict=True):
            match node.kind:
                case NodeKind.FORWARD:
                    self._forward(node, free, key)
                case NodeKind.BACKWARD:
                    self._backward(node, free, key)
                case NodeKind.EXCHANGE:
                    self._exchange(node)
            for device, value in frees:
                del self._values[device][value]
        with torch.no_grad():
            for buffer, pieces in self.program.updates.items():
                for (device, box), value in pieces.items():
                    self._values[device][self._stored(buffer, box)].copy_(self._values[device][value])

    def clear(self) -> None:
        """Forget what the last step left on the devices, but for parameters and buffers."""
        stored = {
            (piece.device, self._stored(name, piece.box))
            for name, layout in self.program.stored.items()
            for piece in layout
        }
        for device, values in enumerate(self._values):
            for value in [value for value in values if (device, value) not in stored]:
                del values[value]
        self._tapes.clear()
        self._owned.clear()

    # ---- nodes ----

    def _runner(self, index: int) -> SegmentRunner:
        if index not in self._runners:
            self._runners[index] = SegmentRunner(self.program.segments[index], self.program.refined)
        return self._runners[index]

    def _place(self, node: Node, key: int) -> Place:
        shift = 0 if node.microbatch == ONCE else self.program.microbatches.starts[node.microbatch]
        return Place(key=key, shift=shift, plain=self._plain)

    def _inputs(
        self, segment: Segment, node: Node, free: Mapping[str, torch.Tensor], *, everything: bool = True
    ) -> list[Any]:
        """The tensors of a segment's entries; None for one that the node does not need."""
        found: list[Any] = []
        for entry, value in zip(segment.entries, node.reads, strict=True):
            if value is None and not (everything and entry.source is Source.FREE):
                found.append(None)
            elif entry.source is Source.FREE:
                box = self._global(entry.box, entry.coordinate, node.microbatch)
                whole = Box.whole(self.program.refined.shape(entry.tensor))
                found.append(cut(free[entry.tensor], self._factors[entry.tensor], whole, box))
            else:
                assert value is not None
                found.append(self._values[segment.device][value])
        return found

    def _global(self, box: Box, coordinate: int | None, microbatch: int) -> Box:
        if microbatch == ONCE:
            return box
        return self.program.microbatches.shifted(box, coordinate, microbatch)

    def _forward(self, node: Node, free: Mapping[str, torch.Tensor], key: int) -> None:
        segment = self.program.segments[node.segment]
        self._watch(segment.device)
        outputs, tape = self._runner(node.segment).forward(self._inputs(segment, node, free), self._place(node, key))
        if tape is not None:
            self._tapes[(node.segment, node.microbatch)] = tape
        for value, output in zip(node.makes, outputs, strict=True):
            self._values[segment.device][value] = output
        self._watch(None)

    def _backward(self, node: Node, free: Mapping[str, torch.Tensor], key: int) -> None:
        segment = self.program.segments[node.segment]
        self._watch(segment.device)
        held = self._values[segment.device]
        tape = self._tapes.pop((node.segment, node.microbatch))
        gradients: list[torch.Tensor | None] = []
        for i, values in enumerate(node.gradients):
            parts = [held[value] for value in values]
            if i in node.seeds:
                exit = segment.exits[i]
                dtype = getattr(torch, self._graph.tensors[exit.tensor].dtype)
                parts.append(torch.ones(self._graph.tensors[exit.tensor].shape, dtype=dtype))
            gradients.append(_total(parts))
        again = self._inputs(segment, node, free, everything=segment.recompute)
        found = self._runner(node.segment).backward(tape, gradients, values=again, place=self._place(node, key))
        del tape, gradients, again
        for entry, value, gradient in zip(segment.entries, node.adds, found, strict=True):
            if value is not None and gradient is not None:
                crossing = value.microbatch == ONCE
                box = self._global(entry.box, entry.coordinate, node.microbatch) if crossing else entry.box
                self._add(segment.device, value, gradient, box, entry.tensor)
        self._watch(None)

    def _add(self, device: int, value: Value, gradient: torch.Tensor, box: Box, tensor: str) -> None:
        held = self._values[device]
        into = self.program.boxes[value.box]
        if into.ranges != box.ranges:  # it contributes to a part of the piece only
            gradient = assemble([(box, gradient)], self._factors[tensor], Box(ranges=into.ranges))
        if value not in held:
            held[value] = gradient
        elif (device, value) in self._owned:
            held[value] += gradient
        else:  # autograd may have given the same tensor to two entries
            held[value] = held[value] + gradient
            self._owned.add((device, value))

    def _exchange(self, node: Node) -> None:
        assert node.step is not None
        step = node.step
        tensor = self.program.flows[node.flow].tensor
        inputs = [
            self._values[piece.device][value].detach()
            for piece, value in zip(step.inputs, node.reads, strict=True)
            if value is not None
        ]
        made = exchange(step, inputs, self._factors[tensor])
        for piece, value, one in zip(step.outputs, node.makes, made, strict=True):
            self._values[piece.device][value] = one
            if self._ledger is not None:
                self._ledger.claim(one, piece.device)

    # ---- what comes out ----

    def parameters(self) -> Iterator[tuple[str, Piece, torch.Tensor]]:
        """Every piece of every parameter that is trained."""
        for name in self.program.gradients:
            for piece in self.program.stored[name]:
                yield name, piece, self._values[piece.device][self._stored(name, piece.box)]

    def whole(self, name: str) -> torch.Tensor:
        """A parameter or buffer, put together from its pieces."""
        return self._joined(name, lambda piece: self._values[piece.device][self._stored(name, piece.box)].detach())

    def _named(self, role: Role) -> Iterator[str]:
        return (name for name in self.program.stored if self._graph.tensors[name].role is role)

    def _outputs(self) -> dict[str, torch.Tensor]:
        found = {}
        for metric, name in self._graph.outputs.items():
            result = self.program.results.get(name)
            if result is not None:
                found[metric] = self._values[result.device][result.value]
        return found

    def _gradient(self, name: str, piece: Piece) -> torch.Tensor | None:
        values = self.program.gradients[name][(piece.device, piece.box)]
        return _total([self._values[piece.device][value] for value in values])

    def _whole_gradient(self, name: str) -> torch.Tensor:
        shape = self._graph.tensors[name].shape
        found = {piece: self._gradient(name, piece) for piece in self.program.stored[name]}
        if all(one is None for one in found.values()):
            return torch.zeros(shape, dtype=getattr(torch, self._graph.tensors[name].dtype))

        def of(piece: Piece) -> torch.Tensor:
            gradient = found[piece]
            assert gradient is not None, f"a part of the gradient of {name} is missing on device {piece.device}"
            return gradient

        return self._joined(name, of)

    def _joined(self, name: str, of: Callable[[Piece], torch.Tensor]) -> torch.Tensor:
        factors = self._factors[name]
        parts = [
            (box, cut(of(piece), factors, piece.box, box))
            for piece, boxes in owned(self.program.stored[name]).items()
            for box in boxes
        ]
        return assemble(parts, factors, Box.whole(self.program.refined.shape(name)))

    def _clip(self, max_norm: float) -> None:
        """Scale all gradients so that their norm over all parts, replicas counted once, is at most this."""
        held = {(name, piece): parameter for name, piece, parameter in self.parameters()}
        squares = []
        for name in self.program.gradients:
            for piece, boxes in owned(self.program.stored[name]).items():
                gradient = held[(name, piece)].grad
                if gradient is not None:
                    squares += [
                        cut(gradient, self._factors[name], piece.box, box).detach().double().square().sum()
                        for box in boxes
                    ]
        if not squares:
            return
        norm = torch.stack(squares).sum().sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in held.values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * scale.to(parameter.grad.dtype)


def _total(parts: list[torch.Tensor]) -> torch.Tensor | None:
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
