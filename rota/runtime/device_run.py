"""What one device does in a step: its values, its segments, its pieces of parameters. Moving values is for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from rota.errors import InputError
from rota.graph.batch import leaves_of, tensors_of
from rota.graph.part import Place
from rota.graph.positional import step_key
from rota.plan.box import Box
from rota.plan.layout import Piece
from rota.plan.ownership import owned
from rota.plan.program import ONCE, Node, Program, Segment, Source, Value
from rota.runtime.pieces import assemble, cut, dim_ranges
from rota.runtime.segment import SegmentRunner, Tape
from rota.threads import safe_point


class DeviceRun:
    """One device of a program."""

    def __init__(
        self, program: Program, device: int, *, seed: int = 0, plain_random: bool = False, compiled: bool = False
    ) -> None:
        self.program = program
        self.device = device
        self.values: dict[Value, torch.Tensor] = {}
        self._graph = program.refined.graph
        self._factors = program.refined.factors
        self._seed = seed
        self._plain = plain_random
        self._compiled = compiled
        self._numbers = {box: number for number, box in enumerate(program.boxes)}
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._runners: dict[int, SegmentRunner] = {}
        self._stored = {
            (name, piece.box): Value(name, ONCE, self._numbers[piece.box])
            for name, layout in program.stored.items()
            for piece in layout
            if piece.device == device
        }
        self._counted = {
            (name, piece.box): boxes
            for name in program.gradients
            for piece, boxes in owned(program.stored[name]).items()
            if piece.device == device
        }
        self.products: Callable[[str, list[Any]], Any] | None = None
        """Computes products with weights in another way, if it is there."""
        self._free: dict[str, torch.Tensor] = {}
        self._key = 0
        self._shares = 1
        """Of how many batches the loss of a step is the mean."""

    # ---- state ----

    def load(self, name: str, whole: torch.Tensor) -> None:
        """Take this device's pieces of a parameter or buffer."""
        everything = Box.whole(self.program.refined.shape(name))
        for (found, box), value in self._stored.items():
            if found == name:
                part = cut(whole, self._factors[name], everything, box).clone(memory_format=torch.contiguous_format)
                if self._graph.tensors[name].requires_grad:
                    part = torch.nn.Parameter(part)
                self.values[value] = part

    def adopt(self, other: DeviceRun) -> None:
        """Use the pieces that another program of the same model holds on this device, the very tensors."""
        # The same piece may be another box: each graph takes dims apart as its own views do.
        held = {(name, dim_ranges(other._factors[name], box)): box for name, box in other._stored}
        for (name, box), value in self._stored.items():
            there = held.get((name, dim_ranges(self._factors[name], box)))
            if (name, box) in other._stored and self._factors[name] == other._factors[name]:
                there = box
            if there is not None:
                self.values[value] = other.stored(name, there)

    def put(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Have this as a piece of a parameter or buffer."""
        self.values[self._stored[(name, box)]] = tensor

    def pieces(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Of all parameters and buffers."""
        for (name, box), value in self._stored.items():
            yield name, box, self.values[value]

    def release(self) -> None:
        """Forget everything, the pieces too."""
        self.clear()
        self.values.clear()

    def prepare(self) -> None:
        """Make the code of all segments now, and not when each first runs."""
        for segment in self.program.segments:
            if segment.device == self.device:
                safe_point()
                self._runner(segment.index)

    def parameters(self) -> Iterator[tuple[str, Piece, torch.Tensor]]:
        """The pieces of the parameters that are trained."""
        for (name, box), value in self._stored.items():
            if name in self.program.gradients:
                yield name, Piece(device=self.device, box=box), self.values[value]

    def stored(self, name: str, box: Box) -> torch.Tensor:
        """A piece of a parameter or buffer."""
        return self.values[self._stored[(name, box)]]

    def gradient(self, name: str, box: Box) -> torch.Tensor | None:
        """The gradient of a piece, after a step; None if the loss does not depend on it."""
        values = self.program.gradients[name][(self.device, box)]
        return total([self.values[value] for value in values])

    def squared_gradients(self) -> torch.Tensor:
        """The sum of squares of the gradients that this device counts, so that all devices' make up the whole once."""
        found = torch.zeros((), dtype=torch.float64)
        for (name, box), boxes in self._counted.items():
            gradient = self.stored(name, box).grad
            if gradient is not None:
                for one in boxes:
                    found += cut(gradient, self._factors[name], box, one).detach().double().square().sum()
        return found

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Scale this device's gradients, given the norm over all devices."""
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for _, _, parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * scale.to(parameter.grad.dtype)

    def hand_over_gradients(self, *, divisor: int = 1) -> None:
        """Add to the gradient of each piece, for an optimizer."""
        for name, piece, parameter in self.parameters():
            gradient = self.gradient(name, piece.box)
            if gradient is None:
                continue
            if divisor > 1:
                gradient = gradient / divisor
            gradient = laid_out(gradient, parameter)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    # ---- a step ----

    def begin(self, batch: Any, *, step: int) -> None:
        """Take the batch of a step."""
        here = torch.get_default_device()  # which is the GPU while one runs
        self._free = {name: one.to(here) for name, one in self._graph.constants.items()}
        for name, leaf in zip(self._graph.inputs, tensors_of(batch, self._graph.batch), strict=True):
            if tuple(leaf.shape) != self._graph.tensors[name].shape:
                raise InputError(
                    f"the program was compiled for a batch whose {name} has shape {self._graph.tensors[name].shape}, "
                    f"and this one has {tuple(leaf.shape)}; compile it for this shape"
                )
            self._free[name] = leaf.detach()
        self._key = step_key(self._seed, step)

    def forward(self, node: Node) -> None:
        """Run a segment."""
        segment = self.program.segments[node.segment]
        outputs, tape = self._runner(node.segment).forward(self._inputs(segment, node), self._place(node))
        if tape is not None:
            self._tapes[(node.segment, node.microbatch)] = tape
        for value, output in zip(node.makes, outputs, strict=True):
            self.values[value] = output

    def backward(self, node: Node) -> None:
        """Run the backward pass of a segment, and add what it gives to the gradients of what it read."""
        segment = self.program.segments[node.segment]
        tape = self._tapes.pop((node.segment, node.microbatch))
        gradients: list[torch.Tensor | None] = []
        for i, values in enumerate(node.gradients):
            parts = [self.values[value] for value in values]
            if i in node.seeds:
                loss = self._graph.tensors[segment.exits[i].tensor]
                parts.append(torch.ones(loss.shape, dtype=getattr(torch, loss.dtype)) / self._shares)
            gradients.append(total(parts))
        again, before = self._again(segment, node), self._before(segment, node)
        found = self._runner(node.segment).backward(
            tape, gradients, values=again, place=self._place(node), before=before
        )
        del tape, gradients, again
        for i, (entry, value) in enumerate(zip(segment.entries, node.adds, strict=True)):
            gradient, found[i] = found[i], None  # so that each is let go of when it was added
            if value is not None and before and before[i] is not None:
                assert gradient is not None
                self.values[value] = gradient
            elif value is not None and gradient is not None:
                crossing = value.microbatch == ONCE
                box = self._global(entry.box, entry.coordinate, node.microbatch) if crossing else entry.box
                self._add(value, gradient, box, entry.tensor)

    def free(self, name: str) -> torch.Tensor:
        """A constant, or a tensor of the batch, whole."""
        return self._free[name]

    def drop(self, values: Iterable[Value]) -> None:
        """Forget values that nobody needs any more."""
        for value in values:
            del self.values[value]

    def end(self) -> None:
        """Update the buffers that the step replaces."""
        with torch.no_grad():
            for buffer, pieces in self.program.updates.items():
                for (device, box), value in pieces.items():
                    if device == self.device:
                        self.stored(buffer, box).copy_(self.values[value])

    def clear(self) -> None:
        """Forget what the last step left, but for parameters and buffers."""
        kept = set(self._stored.values())
        self.values = {value: tensor for value, tensor in self.values.items() if value in kept}
        self._tapes.clear()
        self._free = {}

    # ---- helpers ----

    def _runner(self, index: int) -> SegmentRunner:
        if index not in self._runners:
            self._runners[index] = self._made_runner(self.program.segments[index])
        return self._runners[index]

    def _made_runner(self, segment: Segment) -> SegmentRunner:
        return SegmentRunner(segment, self.program.refined, compiled=self._compiled)

    def _place(self, node: Node) -> Place:
        shift = 0 if node.microbatch == ONCE else self.program.microbatches.starts[node.microbatch]
        return Place(key=self._key, shift=shift, plain=self._plain, products=self.products)

    def _again(self, segment: Segment, node: Node) -> list[Any]:
        """The entries that a backward pass needs."""
        return self._inputs(segment, node, everything=segment.recompute)

    def _before(self, segment: Segment, node: Node) -> list[torch.Tensor | None]:
        """For each entry what its gradient is added to within the backward pass; if nothing, it is added after it."""
        return []

    def _inputs(self, segment: Segment, node: Node, *, everything: bool = True) -> list[Any]:
        """The tensors of a segment's entries; None for one that the node does not need."""
        found: list[Any] = []
        for entry, value in zip(segment.entries, node.reads, strict=True):
            if value is not None:
                found.append(self.values[value])
            elif everything and entry.source is Source.FREE:
                box = self._global(entry.box, entry.coordinate, node.microbatch)
                whole = Box.whole(self.program.refined.shape(entry.tensor))
                found.append(cut(self._free[entry.tensor], self._factors[entry.tensor], whole, box))
            else:
                found.append(None)
        return found

    def _global(self, box: Box, coordinate: int | None, microbatch: int) -> Box:
        if microbatch == ONCE:
            return box
        return self.program.microbatches.shifted(box, coordinate, microbatch)

    def _add(self, value: Value, gradient: torch.Tensor, box: Box, tensor: str) -> None:
        into = self.program.boxes[value.box]
        if into.ranges != box.ranges:  # it contributes to a part of the piece only
            gradient = assemble([(box, gradient)], self._factors[tensor], Box(ranges=into.ranges))
        held = self.values.get(value)
        if held is None:
            self.values[value] = gradient.detach()  # a view would keep the tensor that it is a view of
        elif is_owned(held):
            held += gradient
        else:  # autograd gave the same memory to two entries, or a value on its way to others is in it
            self.values[value] = held + gradient


def check_state(
    program: Program, state: Mapping[str, torch.Tensor], *, held: frozenset[str] = frozenset()
) -> Mapping[str, torch.Tensor]:
    """The state under the names of the graph; InputError if something is missing, or not what was captured."""
    if isinstance(state, Mapping):  # tied parameters may come under any of their names
        others = {name: state[alias] for alias, name in program.refined.graph.aliases.items() if alias in state}
        state = {**others, **state}
    for name, layout in program.stored.items():
        if name in held:
            continue
        if not isinstance(state, Mapping) or name not in state:
            raise InputError(f"the state has no {name}, which the program keeps on device {layout[0].device}")
        tensor, given = program.refined.graph.tensors[name], state[name]
        if not isinstance(given, torch.Tensor):
            raise InputError(f"the state's {name} must be a tensor, not {type(given).__name__}")
        if tuple(given.shape) != tensor.shape or str(given.dtype) != f"torch.{tensor.dtype}":
            raise InputError(
                f"the state's {name} is {given.dtype} {list(given.shape)}, and the program was compiled for "
                f"torch.{tensor.dtype} {list(tensor.shape)}"
            )
    return state


def check_values(program: Program, state: Mapping[str, torch.Tensor], batch: Any) -> None:
    """InputError for a state or a batch without the numbers that a step computes with."""
    found = check_state(program, state)
    held = [(f"the state's {name}", found[name]) for name in program.stored]
    for where, one in [*held, *((where, leaf) for where, leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))]:
        if one.is_meta:
            raise InputError(f"{where} is on the meta device and has no numbers; give a tensor that has")
        if one.layout is not torch.strided:
            raise InputError(f"{where} is {one.layout}; give a dense tensor, as .to_dense() makes it")


def is_owned(tensor: torch.Tensor) -> bool:
    """Whether nothing but this tensor is in its memory, so that it may be written into."""
    storage = tensor.untyped_storage()
    alone = torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor, and the name above
    return alone and tensor.numel() * tensor.element_size() == storage.nbytes()


def laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In the order of its parameter's memory, as autograd does it: fused optimizers take both as they lie."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def total(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """The sum of tensors; None of none."""
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    found = parts[0] + parts[1]
    for part in parts[2:]:
        found += part
    return found
