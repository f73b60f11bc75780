"""Trains a model that does not fit: its shards are in memory when they are needed, and on disk when they are not.

What happens when was decided before (residency.py). Here it is carried out: before each stage what it needs has come,
and what may come for later ones begins to; after it, what leaves begins to leave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from rota.memory.mover import Mover
from rota.memory.residency import Load, Residency, Write
from rota.memory.slab import Budget, Shelf, Slab
from rota.memory.steps import FIXED, Act, Group, Step, Training, forward_reads, item_of
from rota.memory.store import Store
from rota.plan.program import Entry, Node, Program, Segment
from rota.runtime.device_run import DeviceRun, total
from rota.runtime.hollow import hollow_like
from rota.runtime.segment import Dropped, SegmentRunner, Tape


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """A note of a view of what a segment made and keeps."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SpilledSegment(SegmentRunner):
    """Keeps nothing of what other items hold, and what it does keep where it can be moved."""

    def comes_back(self, entry: Entry) -> bool:
        """All of them: weights, what other segments made, and the batch."""
        return True

    def _dropping(self, tape: Tape, values: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        entries = {value.untyped_storage()._cdata: i for i, value in enumerate(values)}
        kept: dict[tuple[int, torch.dtype], int] = {}

        def pack(tensor: torch.Tensor) -> Dropped | _Kept:
            storage = tensor.untyped_storage()
            size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            entry = entries.get(storage._cdata)
            if entry is not None:
                return Dropped(entry=entry, size=size, stride=stride, offset=offset)
            key = (storage._cdata, tensor.dtype)
            if key not in kept:
                # All of the memory, flat; while it is listed no other can be given its place.
                kept[key] = len(tape.kept)
                tape.kept.append(torch.empty(0, dtype=tensor.dtype).set_(storage))
            return _Kept(number=kept[key], size=size, stride=stride, offset=offset)

        def unpack(note: Dropped | _Kept) -> torch.Tensor:
            if isinstance(note, Dropped):
                value = tape.returned[note.entry]
                assert value is not None
                return value.detach().as_strided(note.size, note.stride, note.offset)
            return tape.kept[note.number].as_strided(note.size, note.stride, note.offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class SpilledRun(DeviceRun):
    """One device, on the model's own parameters."""

    def __init__(
        self,
        program: Program,
        device: int,
        *,
        seed: int,
        plain_random: bool,
        shares: int,
        stored: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(program, device, seed=seed, plain_random=plain_random)
        self._shares = shares
        for (name, _), value in self._stored.items():
            self.values[value] = stored[name]

    def kept(self, segment: int, microbatch: int) -> list[torch.Tensor]:
        """What a segment keeps for its backward pass."""
        return self._tapes[(segment, microbatch)].kept

    def hand_over(self, names: Iterable[str]) -> None:
        """Add complete gradients to those of the parameters, and forget them here."""
        for name in names:
            for (_, box), values in self.program.gradients[name].items():
                parameter = self.stored(name, box)
                gradient = total([self.values.pop(value) for value in values])
                assert gradient is not None
                if gradient.stride() != parameter.stride():
                    gradient = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype).copy_(
                        gradient
                    )
                if parameter.grad is None:
                    parameter.grad = gradient
                else:  # in place: it may lie in a slab
                    parameter.grad += gradient

    def _made_runner(self, segment: Segment) -> SegmentRunner:
        return SpilledSegment(segment, self.program.refined)

    def _again(self, segment: Segment, node: Node) -> list[Any]:
        reads = forward_reads(self.program, node)
        found = self._inputs(segment, node, everything=True)
        for i, value in enumerate(reads):
            if found[i] is None and value is not None:
                found[i] = self.values.get(value)
        return found


@dataclass(kw_only=True)
class Held:
    """Tensors that come and go together: those of a group's parameters, or of what the optimizer remembers of them."""

    size_bytes: int
    tensors: Callable[[], Sequence[torch.Tensor]]
    """The tensors themselves stay; only their memory changes."""
    lasting: bool = False
    slab: Slab | None = None
    shelf: Shelf | None = None
    """None before there are tensors: an optimizer remembers nothing before its first step."""

    def attach(self, slab: Slab) -> None:
        """Give the tensors what has come."""
        assert self.shelf is not None
        for tensor, view in zip(self.tensors(), slab.tensors(self.shelf), strict=True):
            tensor.data = view
        self.slab = slab

    def detach(self) -> Slab:
        """Take the tensors' memory: they keep their shapes and read as zeros."""
        assert self.slab is not None
        for tensor in self.tensors():
            tensor.data = hollow_like(tensor)
        slab, self.slab = self.slab, None
        return slab


class Tiers:
    """What is in memory, what is on disk, and what is on its way between them."""

    def __init__(self, store: Store, budget: Budget) -> None:
        self.budget = budget
        self.store = store
        self.held: dict[str, Held] = {}
        self.summed = False
        """Whether what is written now will be committed."""
        self._mover = Mover(store)
        self._coming: dict[str, tuple[Future[None], Slab]] = {}
        self._unborn: set[str] = set()
        """What is expected, and has room, and will be made by the one who needs it."""
        self._leaving: dict[str, Future[None]] = {}
        self._changed: set[str] = set()
        """What is in memory and not, or not as it is, on disk."""

    def begin_load(self, item: str) -> None:
        """Ask for an item."""
        held = self.held[item]
        if held.shelf is None:
            self.budget.take(held.size_bytes, item)
            self._unborn.add(item)
            return
        slab = Slab(held.shelf.size_bytes, budget=self.budget, what=item)
        self._coming[item] = (self._mover.load(item, slab), slab)

    def finish_load(self, item: str) -> None:
        """Wait until it is there."""
        if item not in self._unborn:
            future, slab = self._coming.pop(item)
            future.result()
            self.held[item].attach(slab)

    def admit(self, item: str) -> None:
        """Give tensors that have memory of their own, if there are any, room in a slab."""
        held = self.held[item]
        if held.slab is not None:
            return
        tensors = held.tensors()
        shelf = Shelf.of(tensors)
        assert shelf.size_bytes <= held.size_bytes, f"{item}: {shelf.size_bytes} bytes, expected {held.size_bytes}"
        if item in self._unborn:
            self._unborn.remove(item)
            self.budget.give(held.size_bytes)
        slab = Slab(shelf.size_bytes, budget=self.budget, what=item)
        for tensor, view in zip(tensors, slab.tensors(shelf), strict=True):
            view.copy_(tensor.detach())
            tensor.data = view
        held.shelf, held.slab = shelf, slab
        self._changed.add(item)

    def drop(self, item: str) -> None:
        """It has not changed."""
        assert item not in self._changed, item
        self.held[item].detach()

    def begin_write(self, item: str) -> None:
        """It leaves, and stays on disk."""
        slab = self.held[item].detach()
        self._leaving[item] = self._mover.write(item, slab, summed=self.summed)
        self._changed.discard(item)

    def finish_write(self, item: str) -> None:
        """Wait until its memory is free."""
        future = self._leaving.pop(item, None)
        if future is not None:
            future.result()

    def forget(self, item: str) -> None:
        """Nobody needs it any more."""
        self.held[item].slab = None
        self._changed.discard(item)

    def change(self, item: str) -> None:
        """What is on disk is not true any more."""
        self._changed.add(item)

    def is_near(self, item: str) -> bool:
        """Whether it is in memory, on its way there, or will be made there."""
        return self.held[item].slab is not None or item in self._coming or item in self._unborn

    def flush(self) -> None:
        """Everything is on disk; what is in memory stays there."""
        for item in list(self._leaving):
            self.finish_write(item)
        for item in sorted(self._changed):
            slab = self.held[item].slab
            assert slab is not None, item
            self._mover.write(item, slab, summed=self.summed).result()
        self._changed.clear()

    def empty(self) -> None:
        """Everything is on disk and nothing in memory."""
        for item in list(self._coming):
            self.finish_load(item)
        self.flush()
        for item, held in self.held.items():
            if held.slab is not None:
                self.drop(item)

    def bring_back(self) -> None:
        """Everything is in memory, as the model had it, whatever the budget."""
        self.empty()
        roomy = Budget(sum(held.size_bytes for held in self.held.values()))
        for item, held in self.held.items():
            if held.lasting and held.shelf is not None:
                slab = Slab(held.shelf.size_bytes, budget=roomy, what=item)
                self.store.read(item, slab.bytes)
                held.attach(slab)

    def close(self) -> None:
        """End the threads."""
        self._mover.close()
        self.store.close()


class StepRun:
    """Carries out the stages of a step, over and over."""

    def __init__(
        self,
        step: Step,
        residency: Residency,
        tiers: Tiers,
        run: Callable[[Act], None],
    ) -> None:
        self._step = step
        self._residency = residency
        self._tiers = tiers
        self._run = run
        self._position = 0
        count = len(step.stages)
        self._needed: list[list[Load]] = [[] for _ in range(count)]
        for load in residency.loads:
            self._needed[load.stage].append(load)
        self._written: list[list[Write]] = [[] for _ in range(count)]
        self._awaited: list[list[Write]] = [[] for _ in range(count)]
        for write in residency.writes:
            self._written[write.stage].append(write)
            self._awaited[write.by % count].append(write)
        self._taken: dict[str, int] = {}

    def begin(self) -> None:
        """Have in memory, or on its way, what is there when a step begins."""
        early = {load.item for load in self._residency.loads if load.begin < 0}
        for item in sorted(self._residency.at_start()):
            if item in self._tiers.held and not self._tiers.is_near(item):
                self._tiers.begin_load(item)
                if item not in early:
                    self._tiers.finish_load(item)

    def advance(self, batch: int) -> None:
        """All stages of a batch."""
        while self._position < len(self._step.stages) and self._step.acts[self._position].batch == batch:
            self._stage(self._position)
            self._position += 1
        if self._position == len(self._step.stages):
            self._position = 0

    def _stage(self, position: int) -> None:
        tiers, stage = self._tiers, self._step.stages[position]
        for write in self._awaited[position]:
            tiers.finish_write(write.item)
        for load in self._residency.beginning[position]:
            tiers.begin_load(load.item)
        for load in self._needed[position]:
            tiers.finish_load(load.item)
        for item in stage.makes:
            self._take(item)
        tiers.budget.take(stage.work_bytes, stage.name)
        try:
            self._run(self._step.acts[position])
        finally:
            tiers.budget.give(stage.work_bytes)
        for item in stage.ends:
            tiers.budget.give(self._taken.pop(item, 0))
            if item in tiers.held:
                tiers.forget(item)
        for item in stage.changes:
            if item in tiers.held and item not in self._taken:
                tiers.change(item)
        for item in self._residency.drops[position]:
            tiers.drop(item)
        for write in self._written[position]:
            if write.item in self._taken:  # it was made here, and has memory of its own
                tiers.budget.give(self._taken.pop(write.item))
                tiers.admit(write.item)
            tiers.begin_write(write.item)

    def _take(self, item: str) -> None:
        size = self._step.items[item].size_bytes
        self._tiers.budget.take(size, item)
        self._taken[item] = size


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
