"""Phase 3, what must move: for every tensor the boxes that are made are set against the boxes that are needed.

Forward: parts make boxes (some of them partial sums), parts need boxes; where a device does not have what it needs, the
lowering from the one layout to the other is the communication. Backward needs no rules of its own: what a part
contributes to the gradient of an input has the input's box, and its value is one share among those of the different
parts that read that box (replicas count once). Whoever made a tensor needs the whole value of its box's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from rota.errors import CoverError, CutError, PlacementError
from rota.graph.graph import Op, Role, differentiated
from rota.graph.part import Ranges, makes_of, reads_of
from rota.graph.refine import Frame
from rota.graph.rules import occurrences
from rota.plan.box import Box, first_overlap, hull, missing
from rota.plan.layout import Layout, Piece, Step, canonical
from rota.plan.microbatches import Microbatches, Mode, coordinate_of, is_aligned, local_ranges, microbatches_of
from rota.plan.plan import Part, Plan
from rota.plan.program import ONCE
from rota.threads import safe_point

Lower = Callable[[Layout, Layout], tuple[Step, ...]]

_WEIGHTLESS = frozenset({"embedding"})
"""Ops whose gradient does not depend on the parameter that they read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Site:
    """A part at its device, in a context: for micro-batches of one width, or once in a step."""

    index: int
    part: Part
    op: Op
    device: int
    context: int
    ranges: Ranges
    reads: tuple[Box | None, ...]
    makes: tuple[Box | None, ...]
    grad: bool
    """Whether it takes part in the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A read of a tensor by a site."""

    site: Site
    read: int


@dataclass(kw_only=True, slots=True, eq=False)
class Flow:
    """A change of layout of a tensor or of a gradient, which happens once, or for each micro-batch of a context."""

    tensor: str
    number: int
    backward: bool
    context: int
    crossing: bool
    """Between values of micro-batches and of the whole step: boxes count in the whole tensor, and it happens once."""
    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    again: bool = False
    """It repeats a flow of the forward pass for the backward pass."""

    @property
    def name(self) -> str:
        """What its values are called."""
        layout = f" #{self.number}" if self.number else ""
        return f"{'grad ' if self.backward else ''}{self.tensor}{layout}{' again' if self.again else ''}"


@dataclass(kw_only=True, slots=True, eq=False)
class Tie:
    """How one use gets its value and returns its gradient."""

    forward: Flow | None
    """None for tensors that every device has: the batch and constants."""
    backward: Flow | None
    """None where no gradient is wanted."""
    again: Flow | None = None
    """Brings a parameter back for the backward pass, if it was dropped after the forward pass."""
    contribution: dict[int, Box] = field(default_factory=dict)
    """micro-batch -> the piece of the gradient's source layout that it adds to; only ONCE if it is always the same"""
    direct: bool = False
    """What the device itself made is what is read, in both passes: no value leaves the device's own computation."""

    def adds_to(self, microbatch: int) -> Box:
        """The piece of the gradient's source layout that a micro-batch adds to."""
        found = self.contribution.get(microbatch)
        return self.contribution[ONCE] if found is None else found


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """All sites of a plan, and how values flow between them."""

    plan: Plan
    microbatches: Microbatches
    sites: tuple[Site, ...]
    makers: Mapping[str, tuple[tuple[Site, int], ...]]
    """tensor -> the sites that make it, and as which output"""
    readers: Mapping[str, tuple[tuple[Site, int], ...]]
    """tensor -> the sites that read it, and as which read"""
    stored: Mapping[str, Layout]
    """parameter or buffer -> its pieces"""
    ties: Mapping[tuple[int, int], Tie]
    """(site, read) -> how it is tied"""
    forward: Mapping[str, tuple[Flow, ...]]
    backward: Mapping[str, tuple[Flow, ...]]
    """tensor -> the flows of its gradient"""
    again: tuple[Flow, ...]
    """The flows that bring parameters back for the backward pass."""
    differentiated: frozenset[str]
    """The tensors whose gradient is needed."""
    results: Mapping[str, Flow]
    """tensor that is returned or replaces a buffer -> the flow that brings it to where it is wanted"""

    def read_box(self, site: Site, read: int, microbatch: int) -> Box:
        """The box in the whole tensor of what a site reads at a micro-batch."""
        box = site.reads[read]
        assert box is not None
        if site.context == ONCE:
            return box
        return self.microbatches.shifted(box, self.coordinate(site, read), microbatch)

    def coordinate(self, site: Site, read: int) -> int | None:
        """Which factor of what is read counts the samples of the site's micro-batch."""
        op = site.op.name
        return coordinate_of(self.plan.refined, self.microbatches.running[op], op, read)


def wire(plan: Plan, lower: Lower) -> Wiring:
    """Derive all flows of a plan."""
    return _Wirer(plan, lower).run()


class _Wirer:
    def __init__(self, plan: Plan, lower: Lower) -> None:
        self.plan = plan
        self.lower = lower
        self.graph = plan.graph
        self.micro = microbatches_of(plan)
        self.differentiated = differentiated(plan.graph) if plan.backward else frozenset()
        self.sites: list[Site] = []
        self.makers: dict[str, list[tuple[Site, int]]] = {}
        self.uses: dict[str, list[Use]] = {}
        self.stored: dict[str, Layout] = {}
        self.ties: dict[tuple[int, int], Tie] = {}
        self.forward: dict[str, list[Flow]] = {}
        self.backward: dict[str, list[Flow]] = {}
        self.again: list[Flow] = []
        self.results: dict[str, Flow] = {}

    def run(self) -> Wiring:
        for op in self.graph.ops:
            safe_point()
            self._place(op)
        for name, tensor in self.graph.tensors.items():
            if tensor.role in (Role.PARAMETER, Role.BUFFER):
                self._store(name)
        for name in self.graph.tensors:
            safe_point()
            self._connect(name)
        for name in dict.fromkeys([*self.graph.outputs.values(), *self.graph.updates.values()]):
            self._deliver(name)
        return Wiring(
            plan=self.plan,
            microbatches=self.micro,
            sites=tuple(self.sites),
            makers={name: tuple(found) for name, found in self.makers.items()},
            readers={
                name: tuple((use.site, use.read) for use in self.uses.get(name, ())) for name in self.graph.tensors
            },
            stored=self.stored,
            ties=self.ties,
            forward={name: tuple(flows) for name, flows in self.forward.items()},
            backward={name: tuple(flows) for name, flows in self.backward.items()},
            again=tuple(self.again),
            differentiated=self.differentiated,
            results=self.results,
        )

    # ---- sites ----

    def _place(self, op: Op) -> None:
        frame = self.plan.refined.frames[op.name]
        running = self.micro.running[op.name]
        grad = any(name in self.differentiated for name in op.outputs)
        once = running.mode is Mode.ONCE
        contexts = [(ONCE, 0)] if once else list(enumerate(self.micro.distinct_widths))
        copies: set[tuple[object, int]] = set()
        self._check_copies(op, frame)
        for part in self.plan.parts(op):
            device = self.plan.device_of(part)
            if device is None:
                raise PlacementError(f"{part} has no device; assign it to one of 0 to {self.plan.devices - 1}")
            if (part.ranges, device) in copies:
                raise PlacementError(f"{part} is on device {device} twice; copies must be on different devices")
            copies.add((part.ranges, device))
            for context, width in contexts:
                ranges = local_ranges(part, frame, running, width=width)
                site = Site(
                    index=len(self.sites),
                    part=part,
                    op=op,
                    device=device,
                    context=context,
                    ranges=ranges,
                    reads=reads_of(frame, ranges),
                    makes=tuple(
                        None if box is None else Box(ranges=box.ranges, share=part.share)
                        for box in makes_of(frame, ranges)
                    ),
                    grad=grad,
                )
                self.sites.append(site)
                for i, name in enumerate(op.outputs):
                    if name is not None:
                        self.makers.setdefault(name, []).append((site, i))
                for i, name in enumerate(occurrences(op)):
                    if site.reads[i] is not None:
                        self.uses.setdefault(name, []).append(Use(site=site, read=i))

    def _check_copies(self, op: Op, frame: Frame) -> None:
        """Copies of an op are copies: none of them is cut unless all are, in the same way."""
        parts = self.plan.parts(op)
        cuts = {part.ranges for part in parts}
        if len(cuts) == 1 or not any(part.replica for part in parts):
            return
        boxes = [
            Box(ranges=tuple(dict(cut).get(name, (0, dim.size)) for name, dim in frame.dims.items())) for cut in cuts
        ]
        if first_overlap(boxes) is not None:
            raise CutError(f"the copies of {op.name} are cut in different ways; cut it first and copy its parts then")

    def _store(self, name: str) -> None:
        """Parameters and buffers are kept where they are used, unless the plan says where."""
        given = self.plan.stored.get(name)
        shape = self.plan.refined.shape(name)
        if given is not None:
            lost = missing(Box.whole(shape), (piece.box for piece in given))
            if lost:
                raise CoverError(f"the stored pieces of {name} leave out {lost[0]} of {list(shape)}")
            self.stored[name] = canonical(given)
            return
        boxes: dict[int, list[Box]] = {}
        for use in self.uses.get(name, ()):
            box = use.site.reads[use.read]
            assert box is not None
            boxes.setdefault(use.site.device, []).extend(moved for _, moved in self._everywhere(use, box, True))
        if not boxes:
            boxes[0] = [Box.whole(shape)]
        pieces = [Piece(device=device, box=box) for device, found in boxes.items() for box in _disjoint(found)]
        covered = missing(Box.whole(shape), (piece.box for piece in pieces))
        pieces += [Piece(device=min(boxes), box=box) for box in covered]
        self.stored[name] = canonical(pieces)

    def _of_context(self, context: int) -> list[int]:
        return [m for m, one in enumerate(self.micro.contexts) if one == context]

    # ---- flows ----

    def _connect(self, name: str) -> None:
        uses = self.uses.get(name, [])
        tensor = self.graph.tensors[name]
        if tensor.role in (Role.INPUT, Role.CONSTANT):
            for use in uses:
                self.ties[(use.site.index, use.read)] = Tie(forward=None, backward=None)
            return
        by_op: dict[tuple[str, int, int, bool], list[Use]] = {}
        for use in uses:
            aligned = is_aligned(self.plan.refined, self.micro, use.site.op.name, use.read, name)
            context = use.site.context if aligned else ONCE
            by_op.setdefault((use.site.op.name, use.read, context, not aligned), []).append(use)
        wanted = name in self.differentiated
        needs: list[tuple[frozenset[Piece], int, bool, list[Use]]] = []
        for (_, _, context, crossing), group in by_op.items():
            need = frozenset(self._needs(group, crossing))
            needs.append((need, context, crossing, group))
            for use in group:
                self.ties[(use.site.index, use.read)] = Tie(forward=None, backward=None)
            if wanted and group[0].site.grad:
                self._return(name, group, context, crossing)
        for need, context, crossing, group in sorted(needs, key=lambda one: -len(one[0])):
            # What has a row for each sample is another part of it at each micro-batch: it comes once, whole.
            if name in self.plan.gathered_for_use and all(self._sample_factor(use) is None for use in group):
                for one in {use.site.context for use in group}:
                    self._gather_for_use(name, [use for use in group if use.site.context == one])
                continue
            flow = self._forward_flow(name, need, context, crossing)
            for use in group:
                self.ties[(use.site.index, use.read)].forward = flow
        for use in uses:
            self._decide_direct(name, use)

    def _needs(self, group: list[Use], crossing: bool) -> Iterator[Piece]:
        for use in group:
            box = use.site.reads[use.read]
            assert box is not None
            for _, moved in self._everywhere(use, box, crossing):
                yield Piece(device=use.site.device, box=moved)

    def _everywhere(self, use: Use, box: Box, crossing: bool) -> Iterator[tuple[int, Box]]:
        """The box of a read in the whole tensor at each micro-batch; once if it is the same at all of them."""
        factor = self._sample_factor(use) if crossing else None
        if factor is None:
            yield ONCE, box
            return
        for microbatch in self._of_context(use.site.context):
            yield microbatch, self.micro.shifted(box, factor, microbatch)

    def _sample_factor(self, use: Use) -> int | None:
        """Which factor of what is read counts the samples of a micro-batch, if the site runs for each."""
        if use.site.context == ONCE:
            return None
        op = use.site.op.name
        return coordinate_of(self.plan.refined, self.micro.running[op], op, use.read)

    def _sources(self, name: str, context: int, crossing: bool) -> list[Piece]:
        """What is there of a tensor: what its makers made, or what is stored."""
        if name in self.stored:
            return list(self.stored[name])
        made = self.micro.made[name]
        found = []
        for site, output in self.makers[name]:
            box = site.makes[output]
            assert box is not None
            if not crossing:
                if site.context == context:
                    found.append(Piece(device=site.device, box=box))
            elif site.context == ONCE:
                found.append(Piece(device=site.device, box=box))
            else:
                for microbatch in self._of_context(site.context):
                    found.append(Piece(device=site.device, box=self.micro.everywhere(box, made, microbatch)))
        return found

    def _forward_flow(self, name: str, need: frozenset[Piece], context: int, crossing: bool) -> Flow:
        flows = self.forward.setdefault(name, [])
        for flow in flows:
            if flow.context == context and flow.crossing == crossing and need <= set(flow.target):
                return flow
        source = canonical(self._sources(name, context, crossing))
        return self._flow(flows, name, source, canonical(need), context=context, crossing=crossing, backward=False)

    def _flow(
        self,
        flows: list[Flow],
        name: str,
        source: Layout,
        target: Layout,
        *,
        context: int,
        crossing: bool,
        backward: bool,
    ) -> Flow:
        """One more among the flows of a tensor, or of its gradient."""
        flow = Flow(
            tensor=name,
            number=len(flows),
            backward=backward,
            context=context,
            crossing=crossing,
            source=source,
            target=target,
            steps=self._lowered(name, source, target),
        )
        flows.append(flow)
        return flow

    def _gather_for_use(self, name: str, group: list[Use]) -> None:
        """Bring a parameter together for each micro-batch of a context, and for each pass."""
        flow = self._forward_flow(name, frozenset(self._needs(group, False)), group[0].site.context, False)
        again = None
        if flow.steps and group[0].site.grad and any(use.site.op.kind not in _WEIGHTLESS for use in group):
            again = next((one for one in self.again if one.tensor == name and one.number == flow.number), None)
            if again is None:
                again = replace(flow, again=True)
                self.again.append(again)
        for use in group:
            tie = self.ties[(use.site.index, use.read)]
            tie.forward, tie.again = flow, again

    def _return(self, name: str, group: list[Use], context: int, crossing: bool) -> None:
        """The gradient that one op gives back, as a layout of shares, and its way to who made the tensor."""
        contributions: list[tuple[Use, int, tuple[Part, int], Box]] = []
        for use in group:
            box = use.site.reads[use.read]
            assert box is not None
            one = Part(op=use.site.op.name, ranges=use.site.part.ranges)
            for microbatch, moved in self._everywhere(use, box, crossing):
                contributions.append((use, microbatch, (one, microbatch), moved))
        shared = _shares([(who, use.site.device, box) for use, _, who, box in contributions])
        source = canonical(Piece(device=use.site.device, box=shared[(who, box)]) for use, _, who, box in contributions)
        target = canonical(
            Piece(device=piece.device, box=Box(ranges=piece.box.ranges))
            for piece in self._sources(name, context, crossing)
        )
        flows = self.backward.setdefault(name, [])
        for flow in flows:
            if flow.context == context and flow.crossing == crossing and flow.source == source:
                break
        else:
            flow = self._flow(flows, name, source, target, context=context, crossing=crossing, backward=True)
        for use, microbatch, who, box in contributions:
            tie = self.ties[(use.site.index, use.read)]
            tie.backward = flow
            tie.contribution[microbatch] = shared[(who, box)]

    def _lowered(self, name: str, source: Layout, target: Layout) -> tuple[Step, ...]:
        have = set(source)
        if all(piece in have for piece in target):
            return ()
        try:
            return self.lower(source, target)
        except CoverError as error:
            raise CoverError(f"the parts that make {name} do not make up what is needed: {error}") from error

    def _decide_direct(self, name: str, use: Use) -> None:
        tie = self.ties[(use.site.index, use.read)]
        flow = tie.forward
        if flow is None or flow.crossing or name in self.stored:
            return
        piece = Piece(device=use.site.device, box=use.site.reads[use.read] or Box(ranges=()))
        makers = [
            site
            for site, output in self.makers[name]
            if site.device == piece.device and site.context == use.site.context and site.makes[output] == piece.box
        ]
        if len(makers) != 1:
            return
        if tie.backward is not None:
            if piece not in tie.backward.source or piece not in tie.backward.target:
                return
            if any(piece in step.inputs or piece in step.outputs for step in tie.backward.steps):
                return
        tie.direct = True

    def _deliver(self, name: str) -> None:
        """What a step returns, whole, on the first device that makes a part of it; buffers where they are stored."""
        if name not in self.makers:
            return
        crossing = self.micro.made[name].mode is not Mode.ONCE
        source = canonical(self._sources(name, ONCE, crossing))
        whole = Box.whole(self.plan.refined.shape(name))
        need = [Piece(device=source[0].device, box=whole)]
        for buffer, new in self.graph.updates.items():
            if new == name:
                need += [Piece(device=piece.device, box=piece.box) for piece in self.stored[buffer]]
        self.results[name] = self._forward_flow(name, frozenset(need), ONCE, crossing)


def _disjoint(boxes: list[Box]) -> list[Box]:
    """Boxes that cover the given ones; those that overlap without being equal are replaced by their hull."""
    found: list[Box] = []
    for box in dict.fromkeys(boxes):
        merged = box
        while True:
            touching = [one for one in found if one != merged and one.intersect(merged) is not None]
            if not touching:
                break
            found = [one for one in found if one not in touching]
            merged = hull([merged, *touching])
        if merged not in found:
            found.append(merged)
    return found


def _shares(
    contributions: list[tuple[tuple[Part, int], int, Box]],
) -> dict[tuple[tuple[Part, int], Box], Box]:
    """The share of the gradient of a box that each contributor gives.

    Contributors on the same devices add up there, so they share one piece. Where boxes overlap without being equal,
    each contributor's piece is their hull, with zeros where it contributes nothing.
    """
    hulls = _disjoint([box for _, _, box in contributions])
    region = {box: next(one for one in hulls if one.contains(box)) for _, _, box in contributions}
    devices: dict[tuple[tuple[Part, int], Box], set[int]] = {}
    for who, device, box in contributions:
        devices.setdefault((who, box), set()).add(device)
    groups: dict[Box, list[frozenset[int]]] = {}
    for (_, box), found in devices.items():
        group = groups.setdefault(region[box], [])
        if frozenset(found) not in group:
            group.append(frozenset(found))
    shares: dict[tuple[tuple[Part, int], Box], Box] = {}
    for (who, box), found in devices.items():
        group = groups[region[box]]
        i = group.index(frozenset(found))
        shares[(who, box)] = Box(
            ranges=region[box].ranges, share=(Fraction(i, len(group)), Fraction(i + 1, len(group)))
        )
    return shares
