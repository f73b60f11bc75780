"""Phase 3: turns a plan into a program: what must move, segments, nodes, one order, what is freed when; a check."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rota.errors import CycleError
from rota.graph.graph import Role
from rota.plan.box import Box
from rota.plan.collectives import lower
from rota.plan.dependency import Flow, Wiring, wire
from rota.plan.layout import Piece
from rota.plan.microbatches import Mode
from rota.plan.ordering import order_nodes, read, written
from rota.plan.plan import Plan
from rota.plan.program import ONCE, FlowInfo, Node, NodeKind, Program, Result, Value
from rota.plan.reference import lower_reference
from rota.plan.segments import Draft, draft_segments
from rota.threads import safe_point


def compile_plan(
    plan: Plan, *, memory_bytes: int | None = None, reference: bool = False, checked: bool = True
) -> Program:
    """Derive, order and check. `reference` uses only slices, sends and sums instead of collectives.

    Without `checked` the program may be predicted but not run: a search looks at hundreds and runs one.
    """
    from rota.plan.check import check, check_fits

    collecting = gc.isenabled()
    gc.disable()  # millions of small values are made and none of them is garbage
    try:
        program = _compiled(plan, reference=reference)
        if checked:
            check(program)
    finally:
        if collecting:
            gc.enable()
    if memory_bytes is not None:
        check_fits(program, memory_bytes)
    return program


def _compiled(plan: Plan, *, reference: bool) -> Program:
    plan.settle_order()
    try:
        return _compile(plan, reference=reference)
    except CycleError:
        if not plan.drop_preferences():
            raise
    return _compile(plan, reference=reference)


def _compile(plan: Plan, *, reference: bool) -> Program:
    wiring = wire(plan, lower_reference if reference else lower)
    safe_point()
    drafts = draft_segments(wiring)
    safe_point()
    builder = _Builder(wiring, drafts)
    nodes = builder.nodes()
    safe_point()
    nodes = order_nodes(plan, drafts, nodes)
    safe_point()
    return builder.program(nodes, reference=reference)


@dataclass
class _Boxes:
    """The table of boxes."""

    numbers: dict[Box, int] = field(default_factory=dict)

    def number(self, box: Box) -> int:
        return self.numbers.setdefault(box, len(self.numbers))


@dataclass(kw_only=True, slots=True)
class _Pattern:
    """A value of a node, for any micro-batch."""

    own: bool
    """It belongs to the node's micro-batch."""
    value: Value | None = None
    each: Callable[[int], Value] | None = None
    """Where every micro-batch has another box."""

    def at(self, microbatch: int) -> Value:
        if self.each is not None:
            return self.each(microbatch)
        assert self.value is not None
        return Value(self.value.name, microbatch, self.value.box) if self.own else self.value


class _Builder:
    """Makes the nodes of a step out of segments and flows."""

    def __init__(self, wiring: Wiring, drafts: list[Draft]) -> None:
        self.wiring = wiring
        self.plan = wiring.plan
        self.drafts = drafts
        self.boxes = _Boxes()
        self.micro = wiring.microbatches
        self.flows: list[Flow] = [
            *(flow for flows in wiring.forward.values() for flow in flows),
            *(flow for flows in wiring.backward.values() for flow in flows),
            *wiring.again,
        ]
        self.flow_number = {id(flow): i for i, flow in enumerate(self.flows)}
        self._sources: dict[int, dict[Piece, Value]] = {}
        self._returned: dict[int, set[Piece]] = {}

    # ---- values ----

    def _source_values(self, flow: Flow) -> dict[Piece, Value]:
        """The values of a forward flow's source pieces. Of a flow within micro-batches, those of micro-batch 0."""
        found = self._sources.get(id(flow))
        if found is not None:
            return found
        found = {}
        if flow.tensor in self.wiring.stored:
            found = {piece: Value(flow.tensor, ONCE, self.boxes.number(piece.box)) for piece in flow.source}
        else:
            made = self.micro.made[flow.tensor]
            for site, output in self.wiring.makers[flow.tensor]:
                box = site.makes[output]
                assert box is not None
                if not flow.crossing:
                    if site.context == flow.context:
                        number = self.boxes.number(box)
                        found[Piece(device=site.device, box=box)] = Value(flow.tensor, ONCE, number)
                    continue
                for m in self._microbatches(site.context):
                    everywhere = box if m == ONCE else self.micro.everywhere(box, made, m)
                    piece = Piece(device=site.device, box=everywhere)
                    found.setdefault(piece, Value(flow.tensor, m, self.boxes.number(box)))
        self._sources[id(flow)] = found
        return found

    def _microbatches(self, context: int) -> list[int]:
        if context == ONCE:
            return [ONCE]
        return [m for m, one in enumerate(self.micro.contexts) if one == context]

    def _value(self, flow: Flow, piece: Piece, microbatch: int) -> Value:
        """The value of a piece on its way; a source piece is the value that its maker made."""
        if not flow.backward:
            source = self._source_values(flow).get(piece)
            if source is not None:
                whole_step = flow.crossing or flow.context == ONCE or flow.tensor in self.wiring.stored
                return source if whole_step else source._replace(microbatch=microbatch)
        return Value(flow.name, ONCE if flow.crossing else microbatch, self.boxes.number(piece.box))

    # ---- nodes ----

    def nodes(self) -> list[Node]:
        """All nodes of a step, in no particular order."""
        self._note_returns()
        found = [node for draft in self.drafts for node in self._runs(draft)]
        found += [node for flow in self.flows for node in self._exchanges(flow)]
        return found

    def _exchanges(self, flow: Flow) -> Iterator[Node]:
        number = self.flow_number[id(flow)]
        for m in [ONCE] if flow.crossing else self._microbatches(flow.context):
            for step in flow.steps:
                yield Node(
                    kind=NodeKind.EXCHANGE,
                    microbatch=m,
                    devices=tuple(dict.fromkeys(piece.device for piece in (*step.inputs, *step.outputs))),
                    flow=number,
                    step=step,
                    reads=tuple(self._value(flow, piece, m) for piece in step.inputs),
                    makes=tuple(self._value(flow, piece, m) for piece in step.outputs),
                )

    def _note_returns(self) -> None:
        """Which pieces of each gradient's layout come about: by a contribution of another segment, or by a step."""
        for draft in self.drafts:
            for site, _, tie in draft.entries:
                if tie.backward is not None:
                    found = self._returned.setdefault(id(tie.backward), set())
                    found |= {Piece(device=site.device, box=box) for box in tie.contribution.values()}
        for flow in self.flows:
            if flow.backward:
                found = self._returned.setdefault(id(flow), set())
                for step in flow.steps:
                    found |= set(step.outputs)

    def _comes(self, flow: Flow, device: int, box: Box) -> bool:
        return Piece(device=device, box=box) in self._returned.get(id(flow), ())

    def _runs(self, draft: Draft) -> Iterator[Node]:
        segment = draft.segment
        loss = self.plan.graph.outputs["loss"]
        microbatches = self._microbatches(segment.context)
        first = microbatches[0]
        # All micro-batches of a context look alike: what differs is the number in the names of values.
        reads = [self._read_pattern(draft, i, first) for i in range(len(segment.entries))]
        needed = [self._read_pattern(draft, i, first, again=True) for i in range(len(segment.entries))]
        if segment.recompute:
            needed = [one or other for one, other in zip(needed, reads, strict=True)]
        adds = [self._add_pattern(draft, i) for i in range(len(segment.entries))]
        makes = [_Pattern(own=True, value=self._named(exit.tensor, exit.box)) for exit in segment.exits]
        gradients = [self._gradient_patterns(draft, i) for i in range(len(segment.exits))]
        seeds = tuple(i for i, exit in enumerate(segment.exits) if exit.tensor == loss)
        devices = (segment.device,)
        for m in microbatches:
            values = tuple(None if one is None else one.at(m) for one in reads)
            yield Node(
                kind=NodeKind.FORWARD,
                microbatch=m,
                devices=devices,
                segment=segment.index,
                reads=values,
                makes=tuple(one.at(m) for one in makes),
            )
            if segment.grad:
                yield Node(
                    kind=NodeKind.BACKWARD,
                    microbatch=m,
                    devices=devices,
                    segment=segment.index,
                    reads=tuple(None if one is None else one.at(m) for one in needed),
                    gradients=tuple(tuple(one.at(m) for one in ones) for ones in gradients),
                    adds=tuple(None if one is None else one.at(m) for one in adds),
                    seeds=seeds,
                )

    def _named(self, name: str, box: Box) -> Value:
        return Value(name, ONCE, self.boxes.number(box))

    def _read_pattern(self, draft: Draft, entry: int, first: int, *, again: bool = False) -> _Pattern | None:
        site, read, tie = draft.entries[entry]
        flow = tie.again if again else tie.forward
        if flow is None:
            return None
        device, box = site.device, draft.segment.entries[entry].box
        if not flow.crossing:
            piece = Piece(device=device, box=box)
            stored = flow.tensor in self.wiring.stored and piece in self._source_values(flow)
            return _Pattern(own=first != ONCE and not stored, value=self._value(flow, piece, ONCE))
        if first == ONCE or draft.segment.entries[entry].coordinate is None:
            return _Pattern(own=False, value=self._value(flow, Piece(device=device, box=box), ONCE))
        return _Pattern(
            own=False,
            each=lambda m: self._value(flow, Piece(device=device, box=self.wiring.read_box(site, read, m)), m),
        )

    def _add_pattern(self, draft: Draft, entry: int) -> _Pattern | None:
        _, _, tie = draft.entries[entry]
        flow = tie.backward
        if flow is None:
            return None
        if set(tie.contribution) == {ONCE}:
            return _Pattern(own=not flow.crossing, value=self._named(flow.name, tie.adds_to(ONCE)))
        return _Pattern(own=False, each=lambda m: self._named(flow.name, tie.adds_to(m)))

    def _gradient_patterns(self, draft: Draft, exit: int) -> list[_Pattern]:
        site, output = draft.exits[exit]
        name, box = site.op.outputs[output], site.makes[output]
        assert name is not None
        assert box is not None
        found: list[_Pattern] = []
        if not draft.segment.exits[exit].grad:
            return found
        made = self.micro.made[name]
        ranges = Box(ranges=box.ranges)
        for flow in self.wiring.backward.get(name, ()):
            if not flow.crossing:
                if flow.context == site.context and self._comes(flow, site.device, ranges):
                    found.append(_Pattern(own=True, value=self._named(flow.name, ranges)))
            elif site.context == ONCE or made.coordinate is None:
                if self._comes(flow, site.device, ranges):
                    found.append(_Pattern(own=False, value=self._named(flow.name, ranges)))
            elif self._comes(flow, site.device, self._ranges_at(ranges, name, self._microbatches(site.context)[0])):
                found.append(
                    _Pattern(
                        own=False,
                        each=lambda m, flow=flow: self._named(flow.name, self._ranges_at(ranges, name, m)),  # type: ignore[misc]
                    )
                )
        return found

    def _ranges_at(self, box: Box, name: str, microbatch: int) -> Box:
        return self.micro.shifted(box, self.micro.made[name].coordinate, microbatch)

    # ---- the program ----

    def program(self, nodes: list[Node], *, reference: bool) -> Program:
        """With what is freed when, and where everything ends up."""
        gradients = self._parameter_gradients()
        results, updates = self._results()
        kept = {
            (device, value) for found in gradients.values() for (device, _), values in found.items() for value in values
        }
        kept |= {(one.device, one.value) for one in results.values()}
        kept |= {(device, value) for pieces in updates.values() for (device, _), value in pieces.items()}
        stored = {
            (piece.device, Value(name, ONCE, self.boxes.number(piece.box)))
            for name, layout in self.wiring.stored.items()
            for piece in layout
        }
        return Program(
            refined=self.plan.refined,
            plan=self.plan.copied(),
            reference=reference,
            devices=self.plan.devices,
            microbatches=self.micro,
            segments=tuple(draft.segment for draft in self.drafts),
            nodes=tuple(nodes),
            frees=_frees(nodes, kept | stored),
            boxes=tuple(self.boxes.numbers),
            flows=tuple(
                FlowInfo(
                    tensor=flow.tensor,
                    name=flow.name,
                    backward=flow.backward,
                    source=flow.source,
                    target=flow.target,
                    context=flow.context,
                    crossing=flow.crossing,
                    steps=flow.steps,
                    why=self._why(flow),
                )
                for flow in self.flows
            ),
            stored=self.wiring.stored,
            gradients=gradients,
            results=results,
            updates=updates,
            notes=tuple(self.plan.notes),
        )

    def _parameter_gradients(self) -> dict[str, dict[tuple[int, Box], tuple[Value, ...]]]:
        found: dict[str, dict[tuple[int, Box], tuple[Value, ...]]] = {}
        for name, layout in self.wiring.stored.items() if self.plan.backward else ():
            tensor = self.plan.graph.tensors[name]
            if tensor.role is not Role.PARAMETER or not tensor.requires_grad:
                continue
            found[name] = {
                (piece.device, piece.box): tuple(
                    Value(flow.name, ONCE, self.boxes.number(piece.box))
                    for flow in self.wiring.backward.get(name, ())
                    if self._comes(flow, piece.device, piece.box)
                )
                for piece in layout
            }
        return found

    def _results(self) -> tuple[dict[str, Result], dict[str, dict[tuple[int, Box], Value]]]:
        results: dict[str, Result] = {}
        for name in self.plan.graph.outputs.values():
            flow = self.wiring.results.get(name)
            if flow is not None:
                whole = Box.whole(self.plan.refined.shape(name))
                device = next(piece.device for piece in flow.target if piece.box == whole)
                results[name] = Result(device=device, value=self._value(flow, Piece(device=device, box=whole), ONCE))
        updates: dict[str, dict[tuple[int, Box], Value]] = {}
        for buffer, name in self.plan.graph.updates.items():
            flow = self.wiring.results.get(name)
            if flow is not None:
                updates[buffer] = {
                    (piece.device, piece.box): self._value(flow, piece, ONCE) for piece in self.wiring.stored[buffer]
                }
        return results, updates

    def _why(self, flow: Flow) -> str:
        if not flow.steps:
            return ""
        if flow.again:
            return "it was dropped after the forward pass, and the backward pass needs it"
        tensor = self.plan.graph.tensors[flow.tensor]
        if flow.backward:
            readers = sorted(
                {
                    site.op.name
                    for site, read in self.wiring.readers[flow.tensor]
                    if self.wiring.ties[(site.index, read)].backward is flow
                }
            )
            partial = any(piece.box.is_partial for piece in flow.source)
            what = "each part that read it has a share of its gradient" if partial else "its gradient is elsewhere"
            return f"{what}; read by {_some(readers)}"
        readers = sorted(
            {
                site.op.name
                for site, read in self.wiring.readers[flow.tensor]
                if self.wiring.ties[(site.index, read)].forward is flow
            }
        )
        if any(piece.box.is_partial for piece in flow.source):
            return f"its makers leave partial sums; {_some(readers) or 'the result'} needs the sum"
        if tensor.role is Role.PARAMETER:
            return f"it is stored elsewhere than used; {_some(readers)} needs it"
        if self.micro.made[flow.tensor].mode is not Mode.ONCE and flow.crossing:
            return f"{_some(readers) or 'the result'} needs it of all micro-batches"
        return f"{_some(readers) or 'the result'} needs other parts of it than the device made"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _frees(nodes: list[Node], kept: set[tuple[int, Value]]) -> tuple[tuple[tuple[int, Value], ...], ...]:
    """After which node each value is not needed any more."""
    last: dict[tuple[int, Value], int] = {}
    for i, node in enumerate(nodes):
        for key in (*read(node), *written(node)):
            last[key] = i
    frees: list[list[tuple[int, Value]]] = [[] for _ in nodes]
    for key, i in last.items():
        if key not in kept:
            frees[i].append(key)
    return tuple(tuple(one) for one in frees)
