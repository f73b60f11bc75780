"""What a step of a program does to the memory of a device: stages, and the items that they read, change and make.

Parameters that the same segments read come and go together, as a group: its weights, its gradients, its moments. What
one segment hands to another is an item, and so is what a segment keeps for its backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rota.graph.graph import ELEMENT_BYTES, Role
from rota.graph.refine import local_shape
from rota.memory.residency import Item, Stage
from rota.memory.slab import paged_bytes, shelf_bytes
from rota.plan.box import Box
from rota.plan.program import Node, NodeKind, Program, Segment, Source, Value
from rota.runtime.footprint import Footprint, Footprints

_KINDS: Mapping[NodeKind, Literal["forward", "backward", "exchange"]] = {
    NodeKind.FORWARD: "forward",
    NodeKind.BACKWARD: "backward",
    NodeKind.EXCHANGE: "exchange",
}
_PADDING_BYTES = 2**16
"""What many tensors behind each other take more than one."""
FIXED = "fixed"
"""The item of what never leaves: buffers, and the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters that come and go together."""

    name: str
    parameters: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    trained: bool
    """Whether they have gradients and moments."""
    shared: bool
    """Whether several segments read them, so that a gradient has several parts."""

    @property
    def weights(self) -> str:
        """The item of its parameters."""
        return f"{self.name}-weights"

    @property
    def moments(self) -> str:
        """The item of what the optimizer remembers of them."""
        return f"{self.name}-moments"

    @property
    def gradients(self) -> str:
        """The item of their gradients."""
        return f"{self.name}-gradients"


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """What a stage does."""

    kind: Literal["forward", "backward", "exchange", "update"]
    batch: int
    node: int = -1
    group: str = ""
    drops: tuple[Value, ...] = ()
    """What nobody reads after it."""
    completes: tuple[str, ...] = ()
    """The parameters whose gradient of this batch is complete with it."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of one or more batches."""

    groups: Mapping[str, Group]
    items: Mapping[str, Item]
    stages: tuple[Stage, ...]
    acts: tuple[Act, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a step depends on, beside its program."""

    batches: int = 1
    """Whose gradients are added up."""
    at_once: int = 1
    """So many of them go through a shard before the next shard comes."""
    clipped: bool = False
    """No parameter changes before all gradients are there."""
    moments: int = 2
    """How many numbers the optimizer remembers of each element."""
    update_bytes: Callable[[tuple[int, ...]], int] = lambda sizes_bytes: 0
    """What the optimizer needs while it updates parameters of these sizes."""
    update_s: Callable[[tuple[int, ...]], float] = lambda sizes_bytes: 0.0
    """And how long it takes for them."""
    fixed_bytes: int = 0
    """Beside buffers, what is always there."""
    activations_move: bool = False
    """What segments keep for their backward passes may leave, where there is no room for it."""


SegmentSeconds = Callable[[Segment], tuple[float, float]]
"""Of its forward and of its backward pass."""


def groups_of(program: Program, device: int = 0) -> dict[str, Group]:
    """The parameters that a device of a program has, by who reads them there."""
    readers: dict[str, set[int]] = {}
    for segment in program.segments:
        if segment.device != device:
            continue
        for entry in segment.entries:
            if entry.source is Source.STORED and _role(program, entry.tensor) is Role.PARAMETER:
                readers.setdefault(entry.tensor, set()).add(segment.index)
    together: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name, by in readers.items():
        together.setdefault((tuple(sorted(by)), name in program.gradients), []).append(name)
    found = {}
    for number, ((segments, trained), names) in enumerate(together.items()):
        name = f"group{number}"
        sizes = tuple(program.refined.graph.tensors[one].size_bytes for one in names)
        shared = len(segments) > 1
        found[name] = Group(name=name, parameters=tuple(names), sizes_bytes=sizes, trained=trained, shared=shared)
    return found


def step_of(
    program: Program,
    groups: Mapping[str, Group],
    footprints: Footprints,
    training: Training,
    seconds: SegmentSeconds = lambda segment: (0.0, 0.0),
    *,
    device: int = 0,
) -> Step:
    """The stages of a device's step: all nodes for each batch, and updates as soon as gradients are complete."""
    return _Builder(program, groups, footprints, training, seconds, device).step()


class _Builder:
    def __init__(
        self,
        program: Program,
        groups: Mapping[str, Group],
        footprints: Footprints,
        training: Training,
        seconds: SegmentSeconds,
        device: int,
    ) -> None:
        self._program = program
        self._device = device
        self._training = training
        self._seconds = seconds
        self._groups = groups
        self._group_of = {name: group for group in groups.values() for name in group.parameters}
        self._prints = {
            segment.index: footprints.of(segment) for segment in program.segments if segment.device == device
        }
        self._items: dict[str, Item] = {}
        self._stages: list[Stage] = []
        self._acts: list[Act] = []
        self._made: set[str] = set()

    def step(self) -> Step:
        """All of it."""
        self._add_lasting()
        # What is read when, over the nodes of a batch; it tells when each value ends.
        program, device = self._program, self._device
        told = {one.value for one in program.results.values()}
        told |= {value for pieces in program.updates.values() for value in pieces.values()}
        reads = forward_reads(program)
        uses = [
            _Exchange(program, device, number, told)
            if program.nodes[number].kind is NodeKind.EXCHANGE
            else _Pass(program, self._prints, number, reads, told)
            for number in program.of(device)
        ]
        shared = _shared(program, self._prints)
        _extend(uses, shared)
        for use in uses:  # with it, what is a view of it would have to move
            use.movable -= {root for root, _ in shared.values()}
        last_backward = self._last_backward(uses)
        completed = _completed(uses)
        last = {key: place for place, use in enumerate(uses) for key in (*use.reads, *use.makes)}
        for batch, place in _in_order(uses, self._training):
            self._add_node(batch, place, uses[place], last, completed.get(place, ()))
            if batch == self._training.batches - 1 and not self._training.clipped:
                for group in last_backward.get(place, ()):
                    self._add_update(group)
        if self._training.clipped:
            for group in self._groups.values():
                self._add_update(group)
        return Step(groups=self._groups, items=self._items, stages=tuple(self._stages), acts=tuple(self._acts))

    def _add_lasting(self) -> None:
        graph = self._program.refined.graph
        buffers = sum(
            graph.tensors[name].size_bytes for name in self._program.stored if _role(self._program, name) is Role.BUFFER
        )
        self._items[FIXED] = Item(size_bytes=buffers + self._training.fixed_bytes, lasting=True, movable=False)
        for group in self._groups.values():
            self._items[group.weights] = Item(size_bytes=shelf_bytes(group.sizes_bytes), lasting=True)
            if group.trained:
                moments = shelf_bytes(group.sizes_bytes * self._training.moments)
                if moments:
                    self._items[group.moments] = Item(size_bytes=moments, lasting=True)
                gradients = shelf_bytes(group.sizes_bytes, paged=True)  # they leave from where they were made
                self._items[group.gradients] = Item(size_bytes=gradients, movable=not group.shared)

    def _last_backward(self, uses: Sequence[_Uses]) -> dict[int, list[Group]]:
        """the position of a node -> the groups whose gradients are complete with it"""
        last: dict[str, int] = {}
        for number, names in _completed(uses).items():
            for name in names:
                group = self._group_of[name].name
                last[group] = max(number, last.get(group, 0))
        found: dict[int, list[Group]] = {}
        for name, number in last.items():
            found.setdefault(number, []).append(self._groups[name])
        return found

    def _add_node(
        self, batch: int, place: int, use: _Uses, last: Mapping[Key, int], completes: tuple[str, ...]
    ) -> None:
        made = [key for key in use.makes if item_of(batch, key) not in self._items]
        for key in made:
            size = use.sizes[key]
            moves = self._training.activations_move and key in use.movable and size > 0
            if moves and isinstance(key, Value):
                size = shelf_bytes([size])
            self._items[item_of(batch, key)] = Item(size_bytes=size, movable=moves)
        weights = {self._group_of[name] for name in use.parameters}
        derived = {self._group_of[name].gradients for name in use.derived}
        new = derived - self._made
        self._made |= new
        ended = [key for key in (*use.reads, *use.makes) if last[key] == place]
        self._stages.append(
            Stage(
                name=use.told_name,
                reads=frozenset(
                    {FIXED}
                    | {group.weights for group in weights}
                    | {item_of(batch, key) for key in use.reads}
                    | (derived - new)
                ),
                changes=frozenset(derived - new),
                makes=frozenset({item_of(batch, key) for key in made} | new),
                ends=frozenset(item_of(batch, key) for key in ended),
                work_bytes=max(0, use.work_bytes - (use.derived_bytes if new == derived else 0)),
                seconds=use.seconds(self._seconds),
            )
        )
        self._acts.append(
            Act(
                kind=_KINDS[use.node.kind],
                batch=batch,
                node=use.number,
                drops=tuple(key for key in ended if isinstance(key, Value)),
                completes=completes,
            )
        )

    def _add_update(self, group: Group) -> None:
        if group.gradients not in self._made:
            return
        state = {group.weights} | ({group.moments} if group.moments in self._items else set())
        self._stages.append(
            Stage(
                name=f"the update of {', '.join(group.parameters[:2])}{', ...' if len(group.parameters) > 2 else ''}",
                reads=frozenset({FIXED, group.gradients} | state),
                changes=frozenset(state),
                ends=frozenset({group.gradients}),
                work_bytes=self._training.update_bytes(group.sizes_bytes),
                seconds=self._training.update_s(group.sizes_bytes),
            )
        )
        self._acts.append(Act(kind="update", batch=self._training.batches - 1, group=group.name))


def _in_order(uses: Sequence[_Uses], training: Training) -> Iterator[tuple[int, int]]:
    """(batch, the position of a node): batches one after another, or some of them shard by shard."""
    turn = next((place for place, use in enumerate(uses) if use.node.kind is NodeKind.BACKWARD), len(uses))
    for first in range(0, training.batches, training.at_once):
        together = range(first, min(first + training.at_once, training.batches))
        for places in (range(turn), range(turn, len(uses))):
            yield from ((batch, place) for place in places for batch in together)


class _Uses:
    """What a node reads and makes: values, and the tapes of segments as (segment, micro-batch)."""

    def __init__(self, program: Program, number: int, told: set[Value]) -> None:
        """`told` is there when all is done: metrics, and what buffers become."""
        self.number = number
        self.node: Node = program.nodes[number]
        self.told = told
        self.told_name = ""
        self.reads: list[Key] = []
        self.makes: list[Key] = []
        self.sizes: dict[Key, int] = {}
        self.movable: set[Key] = set()
        self.parameters: list[str] = []
        """Whose weights must be there."""
        self.derived: list[str] = []
        """Whose gradients it adds to."""
        self.derived_bytes = 0
        self.work_bytes = 0
        """What it needs beside what it reads and makes."""

    def seconds(self, of: SegmentSeconds) -> float:
        """What it takes, if one knows what segments take."""
        return 0.0

    def _make(self, key: Key, size: int) -> None:
        self.makes.append(key)
        self.sizes[key] = size


class _Pass(_Uses):
    """A forward or backward pass of a segment."""

    def __init__(
        self,
        program: Program,
        prints: Mapping[int, Footprint],
        number: int,
        forward: Mapping[tuple[int, int], Sequence[Value | None]],
        told: set[Value],
    ) -> None:
        super().__init__(program, number, told)
        node = self.node
        self.segment = program.segments[node.segment]
        self.told_name = f"the {node.kind} pass of {name_of(program, self.segment)}"
        found = prints[node.segment]
        tape = (node.segment, node.microbatch)
        reads = forward[tape]
        if node.kind is NodeKind.FORWARD:
            self._read(program, reads, [True] * len(reads))
            for made, size, moves in zip(node.makes, found.exits, found.moves_exit, strict=True):
                if made not in told:
                    self._make(made, size)
                    if moves:
                        self.movable.add(made)
            if self.segment.grad:
                self._make(tape, _tape_bytes(self.segment, found))
                self.movable.add(tape)
            self.work_bytes = max(0, found.forward_peak - sum(self.sizes.values()))
            return
        again = self.segment.recompute
        self._read(program, reads, [again or keeps for keeps in found.keeps_entry])
        self.reads.append(tape)
        for coming in (value for values in node.gradients for value in values):
            if coming not in self.reads:
                self.reads.append(coming)
        for entry, value, size in zip(self.segment.entries, node.adds, found.gradients, strict=True):
            if value is None:
                continue
            if is_gradient(program, entry.tensor, value, self.segment.device):
                self.derived.append(entry.tensor)
                self.derived_bytes += size
            else:
                self._make(value, size)
        self.work_bytes = max(0, found.backward_peak - sum(self.sizes.values()))

    def seconds(self, of: SegmentSeconds) -> float:
        forward_s, backward_s = of(self.segment)
        return forward_s if self.node.kind is NodeKind.FORWARD else backward_s

    def _read(self, program: Program, values: Sequence[Value | None], wanted: Iterable[bool]) -> None:
        for entry, value, needed in zip(self.segment.entries, values, wanted, strict=True):
            if value is None or not needed:
                continue
            if entry.source is not Source.STORED:
                if value not in self.told:
                    self.reads.append(value)
            elif _role(program, entry.tensor) is Role.PARAMETER:
                self.parameters.append(entry.tensor)


class _Exchange(_Uses):
    """What comes from other devices, and goes there."""

    def __init__(self, program: Program, device: int, number: int, told: set[Value]) -> None:
        super().__init__(program, number, told)
        step, flow = self.node.step, program.flows[self.node.flow]
        assert step is not None
        self.told_name = f"the exchange of {flow.name}"

        def size_bytes(box: Box) -> int:
            shape = local_shape(program.refined.factors[flow.tensor], box.shape)
            return math.prod(shape) * ELEMENT_BYTES[program.refined.graph.tensors[flow.tensor].dtype]

        for value, piece in zip(self.node.reads, step.inputs, strict=True):
            if piece.device != device or value is None or value in told:
                continue
            if is_gradient(program, flow.tensor, value, device):  # others get it, too, before it is used here
                self.derived.append(flow.tensor)
            else:
                self.reads.append(value)
            self.work_bytes += size_bytes(piece.box)  # it is copied to where many are sent from
        for value, piece in zip(self.node.makes, step.outputs, strict=True):
            if piece.device != device or value in told:
                continue
            size = size_bytes(piece.box)
            if is_gradient(program, flow.tensor, value, device):
                self.derived.append(flow.tensor)
                self.derived_bytes += size
            else:
                self._make(value, size)
        self.work_bytes += self.derived_bytes


def is_gradient(program: Program, tensor: str, value: Value, device: int) -> bool:
    """Whether a value is, or is a term of, the gradient of a parameter that a device updates."""
    pieces = program.gradients.get(tensor, {})
    return any(value in values for (where, _), values in pieces.items() if where == device)


Key = Value | tuple[int, int]
"""A value, or what a segment keeps of a micro-batch."""


def _completed(uses: Sequence[_Uses]) -> dict[int, tuple[str, ...]]:
    """the position of a node -> the parameters that no later one adds to the gradient of"""
    last = {name: place for place, use in enumerate(uses) for name in use.derived}
    found: dict[int, tuple[str, ...]] = {}
    for name, place in last.items():
        found[place] = (*found.get(place, ()), name)
    return found


def _shared(program: Program, prints: Mapping[int, Footprint]) -> dict[Value, tuple[Value, str | None]]:
    """value -> the value whose memory it is a view of, and the parameter if it is one"""
    found: dict[Value, tuple[Value, str | None]] = {}
    for node in program.nodes:
        if node.kind is not NodeKind.FORWARD or node.segment not in prints:
            continue
        segment = program.segments[node.segment]
        for value, entry in zip(node.makes, prints[node.segment].exit_of_entry, strict=True):
            read = None if entry is None else node.reads[entry]
            if entry is None or read is None:
                continue
            of = segment.entries[entry]
            parameter = of.source is Source.STORED and _role(program, of.tensor) is Role.PARAMETER
            if of.source is Source.STORED and not parameter:
                continue
            found[value] = found.get(read, (read, of.tensor if parameter else None))
    return found


def _extend(uses: Sequence[_Uses], shared: Mapping[Value, tuple[Value, str | None]]) -> None:
    """Who reads a view reads what it is a view of."""
    for use in uses:
        for key in list(use.reads):
            if isinstance(key, Value) and key in shared:
                root, parameter = shared[key]
                if parameter is not None:
                    use.parameters.append(parameter)
                elif not any(root == one for one in use.reads):
                    use.reads.append(root)


def item_of(batch: int, key: Key) -> str:
    """The name of the item that holds a value, or what a segment keeps."""
    if isinstance(key, Value):
        return f"{batch}:{key.name}:{key.microbatch}:{key.box}"
    return f"{batch}:tape:{key[0]}:{key[1]}"


def forward_reads(program: Program) -> dict[tuple[int, int], tuple[Value | None, ...]]:
    """(segment, micro-batch) -> what its forward pass reads"""
    return {(node.segment, node.microbatch): node.reads for node in program.nodes if node.kind is NodeKind.FORWARD}


def _tape_bytes(segment: Segment, found: Footprint) -> int:
    """What is kept beside the entries. An exit that is kept counts twice, which is more than there is, never less."""
    if segment.recompute:
        return 0
    size = found.kept + sum(size for size, kept in zip(found.exits, found.keeps_exit, strict=True) if kept)
    return paged_bytes(size) + _PADDING_BYTES if size else 0


def _role(program: Program, tensor: str) -> Role:
    return program.refined.graph.tensors[tensor].role


def name_of(program: Program, segment: Segment) -> str:
    """The modules that a segment is made of."""
    graph = program.refined.graph
    modules = {op.name: op.module or op.name for op in graph.ops}
    first, last = modules[segment.calls[0].op], modules[segment.calls[-1].op]
    return first if first == last else f"{first} to {last}"
