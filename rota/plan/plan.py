"""A plan under construction: how each op of a graph is cut, where each part runs, and what comes before what."""

from __future__ import annotations

import copy
import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from rota.errors import CutError, InputError, PlacementError
from rota.given import flag, one_of, quoted, text
from rota.graph.graph import Graph, Op, Role
from rota.graph.refine import Dim, Frame, Refined, refine
from rota.plan.box import WHOLE_VALUE, Box, Range, Share, even_widths
from rota.plan.layout import Layout, Piece
from rota.whole import positive, whole

if TYPE_CHECKING:
    from rota.plan.program import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of an op: a range of each dim that is cut, and its share of the sums that the cuts leave."""

    op: str
    ranges: tuple[tuple[str, Range], ...] = ()
    """The dims that are cut, in the order of their names, and this part's range of each."""
    share: Share = WHOLE_VALUE
    replica: int = 0
    """Which of several equal copies it is."""

    def __str__(self) -> str:
        """As people write it: fc1.linear[n 0:4]."""
        cuts = ", ".join(f"{name} {start}:{stop}" for name, (start, stop) in self.ranges)
        return self.op + (f"[{cuts}]" if cuts else "") + (f" copy {self.replica}" if self.replica else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class At:
    """A moment in a step: a part at a micro-batch, in the forward or the backward pass."""

    part: Part
    microbatch: int | None = None
    """None for each micro-batch."""
    backward: bool = False


Target = Op | Part | str
"""What a plan's methods take: an op or its name, if it is not cut yet, or a part."""


Gather = Literal["step", "use"]

MOST_DEVICES = 2**16
"""Of a plan: a program has something for each of its devices, also for those that stay idle."""


class Plan:
    """Phase 1 and 2: transform and place. `compile` is phase 3: it derives communication and checks the result."""

    def __init__(
        self,
        graph: Graph,
        *,
        devices: int = 1,
        microbatches: int = 1,
        backward: bool = True,
        refined: Refined | None = None,
    ) -> None:
        """`backward=False` plans the forward pass alone, for validation; `refined` saves refining a graph twice."""
        check_graph(graph)
        self.graph = graph
        self.devices = positive(devices, "the number of devices")
        if self.devices > MOST_DEVICES:
            raise InputError(f"a plan is for at most {MOST_DEVICES} devices, not for {quoted(self.devices)}; use fewer")
        self.microbatches = positive(microbatches, "the number of micro-batches")
        self.backward = flag(backward, "backward")
        self.refined = refine(graph) if refined is None else refined
        self.stored: dict[str, Layout] = {}
        """Parameters whose pieces are stored elsewhere than where they are used."""
        self.gathered_for_use: set[str] = set()
        """Those of them that are brought together for each use and dropped after it."""
        self._ordered: list[tuple[At, At]] = []
        self._preferred: list[tuple[At, At]] = []
        """Orders that are left out where the data flow contradicts them."""
        self.in_order = False
        """Whether all runs as the model does it."""
        self.notes: list[str] = []
        """What the user should know about how it was compiled."""
        self._parts: dict[str, list[Part]] = {op.name: [Part(op=op.name)] for op in graph.ops}
        self._device: dict[Part, int] = {}
        self._groups: dict[Part, tuple[int, ...]] = {}
        """part -> the groups that it is in"""
        self._group_numbers = itertools.count(1)
        self._recomputed: set[int] = set()
        """The groups that are computed again for the backward pass."""
        self._replaced: dict[Part, list[Part]] = {}
        """part that was cut or copied -> what it became"""
        self._op = {op.name: op for op in graph.ops}
        self._checkpoints: frozenset[int] = frozenset()
        """The groups that the model itself has inside of torch.utils.checkpoint."""
        self._follow_checkpoints()
        self._check_microbatches()

    # ---- what there is ----

    def ops(self, *, kind: str | None = None, name: str | None = None) -> Iterator[Op]:
        """The ops of a kind, whose own name or module's name fits a pattern such as ``*.fc1``."""
        kind = None if kind is None else text(kind, "the kind of ops")
        pattern = "*" if name is None else text(name, "the name of ops")
        return (
            op
            for op in self.graph.ops
            if kind in (None, op.kind)
            and (fnmatch.fnmatchcase(op.name, pattern) or fnmatch.fnmatchcase(op.module, pattern))
        )

    def parts(self, op: Op | str) -> tuple[Part, ...]:
        """The parts of an op as it is cut so far."""
        return tuple(self._parts[self._known(op)])

    def device_of(self, part: Part) -> int | None:
        """Where a part runs, if that is decided."""
        return self._device.get(part)

    def dims(self, op: Target) -> Mapping[str, Dim]:
        """The dims of an op by name, those that cannot be cut included."""
        return self.refined.frames[op.op if isinstance(op, Part) else self._known(op)].dims

    # ---- phase 1: transform ----

    def split(
        self, target: Target, dim: str, parts: int | None = None, *, widths: Sequence[int] | None = None
    ) -> list[Part]:
        """Cut an op, or a part of one, along a dim: evenly into `parts`, or into these widths."""
        part = self._part(target)
        frame = self.refined.frames[part.op]
        asked = text(dim, f"the dim to split {part} along")
        dim, scale = self._cuttable(part, frame, dim)
        if (parts is None) == (widths is None):
            raise InputError(f"give either parts or widths to split {part}, not both or neither")
        if widths is None:
            parts = _whole(parts, f"the number of parts of {part}")
        else:
            widths = _wholes(widths, f"the widths of {part}")
        start, stop = dict(part.ranges).get(dim, (0, frame.dims[dim].size))
        size = stop - start
        if widths is None:
            assert parts is not None
            if not 1 <= parts <= size:
                raise CutError(f"{part} cannot be cut into {parts} along {dim}, which has {size} left")
            if scale > 1 and size % parts:
                raise CutError(f"{part} cannot be cut evenly into {parts} along {asked}: {_factors(frame, asked)}")
            widths = even_widths(size, parts)
        else:
            widths = [width // scale if width % scale == 0 else -1 for width in widths]
            if any(width < 1 for width in widths) or sum(widths) != size:
                inside = f", each a multiple of {scale}: {_factors(frame, asked)}" if scale > 1 else ""
                raise CutError(
                    f"the widths along {asked} of {part} must be at least 1 and add up to {size * scale}{inside}"
                )
        return self._replace(part, self._cut(part, frame.dims[dim], start, widths))

    def replicate(self, target: Target, copies: int) -> list[Part]:
        """Run a part several times, on as many devices; its gradient counts once."""
        part = self._part(target)
        copies = positive(copies, f"the number of copies of {part}")
        taken = {one.replica for one in self._parts[part.op] if one.ranges == part.ranges and one is not part}
        numbers = itertools.islice((i for i in itertools.count() if i not in taken), copies)
        return self._replace(part, [replace(part, replica=number) for number in numbers])

    def group(self, targets: Target | Iterable[Target]) -> int:
        """Compute these apart from all else: a layer whose gradients are ready before those of earlier layers.

        Groups may overlap: what is in the same ones is computed together.
        """
        number = next(self._group_numbers)
        for target in _several(targets):
            for part in [self._part(target)] if isinstance(target, Part) else self.parts(target):
                self._groups[part] = (*self._groups.get(part, ()), number)
        return number

    def recompute(self, targets: Target | Iterable[Target]) -> None:
        """Do not keep what these make for the backward pass; compute it again from what they read."""
        self._recomputed.add(self.group(targets))

    def groups_of(self, part: Part) -> tuple[int, ...]:
        """The groups that a part is in."""
        return self._groups.get(part, ())

    def _follow_checkpoints(self) -> None:
        regions: dict[int, list[Op]] = {}
        for op in self.graph.ops:
            if op.checkpoint:
                regions.setdefault(op.checkpoint, []).append(op)
        for ops in regions.values():
            self.recompute(ops)
        self._checkpoints = frozenset(self._recomputed)

    def forget_checkpoints(self) -> None:
        """Do not compute again what the model has inside of torch.utils.checkpoint."""
        kept = {
            part: tuple(one for one in groups if one not in self._checkpoints) for part, groups in self._groups.items()
        }
        self._groups = {part: groups for part, groups in kept.items() if groups}
        self._recomputed -= self._checkpoints

    @property
    def recomputed(self) -> frozenset[int]:
        """The groups that are computed again for the backward pass."""
        return frozenset(self._recomputed)

    @property
    def preferred(self) -> tuple[tuple[At, At], ...]:
        """The orders that are left out where the data flow contradicts them."""
        return tuple(self._preferred)

    def is_recomputed(self, part: Part) -> bool:
        """Whether a part is computed again for the backward pass."""
        return not self._recomputed.isdisjoint(self.groups_of(part))

    # ---- phase 2: place and order ----

    def assign(self, target: Target | Iterable[Target], device: int) -> None:
        """Run a part, all parts of an op, or all of a list of them, on a device."""
        number = whole(device)
        if number is None or not 0 <= number < self.devices:
            raise PlacementError(f"there is no device {quoted(device)}; the plan has 0 to {self.devices - 1}")
        for one in _several(target):
            if isinstance(one, Part):
                if one not in self._parts.get(one.op, ()):
                    raise PlacementError(f"{one} is not a part of the plan (any more); it was cut or never there")
                self._device[one] = number
            else:
                for part in self._parts[self._known(one)]:
                    self._device[part] = number

    def restore(self, parts: Mapping[Part, tuple[int, tuple[int, ...]]], recomputed: Iterable[int]) -> None:
        """Have these parts, each on its device and in its groups, and these groups computed again."""
        for part in parts:
            frame = self.refined.frames[self._known(part.op)]
            for dim, (start, stop) in part.ranges:
                self._cuttable(part, frame, dim)
                if not 0 <= start < stop <= frame.dims[dim].size:
                    raise CutError(f"{part} cannot be, because {dim} has {frame.dims[dim].size}")
        self._parts, self._device = {op: [] for op in self._op}, {}
        for part, (device, _) in parts.items():
            self._parts[part.op].append(part)
            self.assign(part, device)
        self._groups = {part: tuple(groups) for part, (_, groups) in parts.items() if groups}
        self._recomputed = set(recomputed)

    def order(self, first: Target | At, *, before: Target | At) -> None:
        """Run one before the other, at every micro-batch unless `At` names one."""
        self._ordered += self._edges(first, before)

    def prefer(self, first: Target | At, *, before: Target | At) -> None:
        """The same, but the program does without all such orders if they contradict the model's data flow."""
        self._preferred += self._edges(first, before)

    @property
    def order_edges(self) -> list[tuple[At, At]]:
        """What runs before what."""
        return self._ordered + self._preferred

    def settle_order(self) -> None:
        """Say of parts that were cut since they got their order that all their parts have it."""
        for edges in (self._ordered, self._preferred):
            edges[:] = [edge for first, second in edges for edge in self._of_parts(first, second)]

    def drop_preferences(self) -> bool:
        """Leave out the orders that need not be; whether there were any."""
        if not self._preferred:
            return False
        self._preferred.clear()
        self.notes.append(_NO_PREFERENCE)
        return True

    def keep_order(self) -> None:
        """Run all that is differentiated or draws random numbers in the graph's order, and back in its reverse.

        On one device, numbers come out as those of the model only so: random numbers are drawn, and the gradients of
        what several ops read are added up, in the order in which plain PyTorch does it.
        """
        if self.devices > 1 or self.microbatches > 1:
            raise InputError("the order of the model can be kept on one device, without micro-batches")
        self.in_order = True

    def store(self, parameter: str, layout: Layout | Mapping[int, Box], *, gather: Gather = "step") -> None:
        """Keep a parameter (or buffer), its gradient and its moments in these pieces between steps.

        It is brought to where it is used once in a step (`gather="step"`, ZeRO stage 1 and 2), or for each use in the
        forward and the backward pass, and dropped after it (`gather="use"`, ZeRO stage 3 and FSDP).
        """
        text(parameter, "the name of a parameter")
        tensor = self.graph.tensors.get(self.graph.aliases.get(parameter, parameter))
        if tensor is None or tensor.role not in (Role.PARAMETER, Role.BUFFER):
            raise InputError(f"{quoted(parameter)} is not a parameter or buffer of the model")
        one_of(gather, get_args(Gather), f"gather of {parameter}")
        if isinstance(layout, Mapping):
            layout = tuple(Piece(device=device, box=box) for device, box in layout.items())
        if (
            not isinstance(layout, tuple | list)
            or not layout
            or not all(
                isinstance(piece, Piece) and isinstance(piece.box, Box) and whole(piece.device) is not None
                for piece in layout
            )
        ):
            raise InputError(
                f"say where {parameter} is stored as {{device: Box}}, or as pieces, not as {quoted(layout)}"
            )
        layout = tuple(layout)
        shape = self.refined.shape(tensor.name)
        for piece in layout:
            if not Box.whole(shape).contains(piece.box):
                raise InputError(f"{piece.box} is not a part of {parameter}, whose dims have the factors {list(shape)}")
            if not 0 <= piece.device < self.devices:
                raise PlacementError(f"{parameter} cannot be stored on device {piece.device}; there is none")
        self.stored[tensor.name] = layout
        (self.gathered_for_use.add if gather == "use" else self.gathered_for_use.discard)(tensor.name)

    def forward_only(self) -> None:
        """Leave the backward pass out, and what was said about its order: for validation."""
        self.backward = False
        for edges in (self._ordered, self._preferred):
            edges[:] = [edge for edge in edges if not any(moment.backward for moment in edge)]

    def compile(self, *, memory_bytes: int | None = None, reference: bool = False) -> Program:
        """Phase 3: derive all communication, order everything, and check the result by replaying it."""
        from rota.plan.compile import compile_plan

        flag(reference, "reference")
        if memory_bytes is not None:
            memory_bytes = positive(memory_bytes, "memory_bytes")
        return compile_plan(self, memory_bytes=memory_bytes, reference=reference)

    def copied(self) -> Plan:
        """The same plan, which does not change when this one does."""
        made = copy.copy(self)
        made.stored, made.gathered_for_use = dict(self.stored), set(self.gathered_for_use)
        made._ordered, made._preferred, made.notes = [*self._ordered], [*self._preferred], [*self.notes]
        made._groups, made._recomputed = dict(self._groups), set(self._recomputed)
        made._parts = {op: [*parts] for op, parts in self._parts.items()}
        made._device = dict(self._device)
        return made

    # ---- helpers ----

    def _known(self, op: Op | str) -> str:
        name = op.name if isinstance(op, Op) else op
        if not isinstance(name, str) or name not in self._parts:
            raise InputError(f"the graph has no op named {quoted(name)}; plan.ops() has them all")
        return name

    def _part(self, target: Target) -> Part:
        if isinstance(target, Part):
            if target not in self._parts.get(target.op, ()):
                raise CutError(f"{target} is not a part of the plan (any more); it was cut before")
            return target
        parts = self._parts[self._known(target)]
        if len(parts) > 1:
            raise CutError(f"{parts[0].op} is cut into {len(parts)} already; cut its parts")
        return parts[0]

    def _edges(self, first: Target | At, second: Target | At) -> Iterator[tuple[At, At]]:
        for one, other in itertools.product(self._moments(first), self._moments(second)):
            for moment in (one, other):
                flag(moment.backward, "the backward of a moment")
                number = 0 if moment.microbatch is None else whole(moment.microbatch)
                if number is None or not 0 <= number < self.microbatches:
                    given, last = quoted(moment.microbatch), self.microbatches - 1
                    raise InputError(f"there is no micro-batch {given}; the plan has 0 to {last}")
            yield one, other

    def _of_parts(self, first: At, second: At) -> Iterator[tuple[At, At]]:
        """An order of parts that were cut since then, as one of their parts."""
        for one, other in itertools.product(self._present(first.part), self._present(second.part)):
            yield replace(first, part=one), replace(second, part=other)

    def _present(self, part: Part) -> Iterator[Part]:
        if part in self._parts.get(part.op, ()):
            yield part
        elif part in self._replaced:
            for one in self._replaced[part]:
                yield from self._present(one)
        else:
            raise InputError(f"{part}, which has an order, is not a part of the plan")

    def _moments(self, target: Target | At) -> list[At]:
        if isinstance(target, At):
            if not isinstance(target.part, Part):
                raise InputError(
                    f"a moment has a part of the plan (plan.parts(op) has them), not {quoted(target.part)}"
                )
            return [target]
        if isinstance(target, Part):
            return [At(part=target)]
        return [At(part=part) for part in self._parts[self._known(target)]]

    def _cuttable(self, part: Part, frame: Frame, name: str) -> tuple[str, int]:
        """The dim to cut, and how many indices of what the user named one index of it is."""
        if name not in frame.dims:
            factors = [one for one in frame.dims if one.startswith(f"{name}.")]
            if not factors:
                free = [one for one, dim in frame.dims.items() if not dim.fixed]
                can = f"it can be cut along {', '.join(free)}" if free else "it cannot be cut, only replicated"
                raise CutError(f"{part} has no dim {quoted(name)}; {can}")
            inner = 1
            for one in factors[1:]:
                inner *= frame.dims[one].size
            name = factors[0]
            return self._cuttable(part, frame, name)[0], inner
        dim = frame.dims[name]
        if dim.fixed:
            kind = self._op[part.op].kind
            raise CutError(f"{part} cannot be cut along {name}: the rule of {kind} needs all of it at once")
        if not frame.can_cut(dim):
            raise CutError(f"{part} cannot be cut along {name}: not all of its outputs have it")
        return name, 1

    def _cut(self, part: Part, dim: Dim, start: int, widths: Sequence[int]) -> list[Part]:
        made = []
        low, high = part.share
        step = (high - low) / len(widths)
        for i, width in enumerate(widths):
            ranges = {**dict(part.ranges), dim.name: (start, start + width)}
            share = (low + i * step, low + (i + 1) * step) if dim.reduced else part.share
            made.append(replace(part, ranges=tuple(sorted(ranges.items())), share=share))
            start += width
        return made

    def _replace(self, part: Part, new: list[Part]) -> list[Part]:
        parts = self._parts[part.op]
        at = parts.index(part)
        parts[at : at + 1] = new
        self._replaced[part] = new
        if part in self._device:
            self._device |= dict.fromkeys(new, self._device.pop(part))
        if part in self._groups:
            self._groups |= dict.fromkeys(new, self._groups.pop(part))
        return new

    def _check_microbatches(self) -> None:
        if self.microbatches == 1:
            return
        size = self.batch_size
        if size is None or size < self.microbatches:
            shape = self.graph.tensors[self.graph.inputs[0]].shape if self.graph.inputs else ()
            rows = shape[0] if shape else 0
            taken = f" (a view of the model takes its {rows} apart)" if size and rows != size else ""
            count = "1 sample" if (size or rows) == 1 else f"{size or rows} samples"
            raise InputError(
                f"a batch of {count}{taken} cannot be cut into {self.microbatches} micro-batches; use fewer"
            )

    @property
    def batch_size(self) -> int | None:
        """How many samples the batch has, as far as they can be told apart; None without any."""
        return self.refined.samples

    def __repr__(self) -> str:
        """Short."""
        cut = sum(1 for parts in self._parts.values() if len(parts) > 1)
        return f"<Plan of {len(self._parts)} ops ({cut} cut) on {self.devices} devices>"


_NO_PREFERENCE = (
    "the order of micro-batches that the strategy prefers contradicts the data flow of this model: "
    "they run as the data flow allows, and may need more memory"
)


def _factors(frame: Frame, name: str) -> str:
    """What a dim that views take apart is made of."""
    factors = [f"{one} ({dim.size})" for one, dim in frame.dims.items() if one.startswith(f"{name}.")]
    return f"the model's views take it apart into {' x '.join(factors)}; cut one of these"


def check_graph(graph: object) -> None:
    """Refuse a model: what is planned is its graph, with its loss."""
    if not isinstance(graph, Graph):
        raise InputError(
            f"a plan is made of a graph, not of {type(graph).__name__}; capture the model first: "
            "graph = rota.capture(model, batch, loss)"
        )


def _several(targets: Target | Iterable[Target]) -> Iterator[Op | Part | str]:
    """The ops and parts that somebody names, one by one."""
    if isinstance(targets, Op | Part | str):
        yield targets
    elif isinstance(targets, Iterable):
        for one in targets:
            yield from _several(one)
    else:
        raise InputError(f"name an op, a part, or a list of them, not {quoted(targets)}")


def _whole(value: object, what: str) -> int:
    found = whole(value)
    if found is None:
        raise InputError(f"{what} must be a whole number, not {quoted(value)}")
    return found


def _wholes(values: object, what: str) -> list[int]:
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise InputError(f"{what} must be a list of whole numbers, one for each part, not {quoted(values)}")
    return [_whole(value, f"each of {what}") for value in values]
