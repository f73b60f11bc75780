"""What a program does, in the words of a plan: what repeats over layers is told once. Values without text."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rota.graph.graph import Op, Role
from rota.plan.box import Range
from rota.plan.costs import Costs, call_seconds, received_bytes
from rota.plan.folding import fold, fold_loosely, template
from rota.plan.layout import Kind, Layout
from rota.plan.microbatches import Mode
from rota.plan.program import ONCE, FlowInfo, Node, Program, Segment
from rota.plan.simulate import Simulation


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A dim that is cut."""

    dim: str
    """Of an op: the word of its rule. Of a tensor: its number, and that of the factor if it has several."""
    samples: bool
    """It counts the samples of the batch; its widths are those of one micro-batch."""
    sums: bool
    """It is summed over, so that the cut leaves partial sums."""
    ranges: tuple[Range, ...]
    """The different ranges that parts have of it."""

    @property
    def widths(self) -> tuple[int, ...]:
        """How much of it each range has."""
        return tuple(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, kw_only=True)
class PartPlace:
    """Where a part of an op runs."""

    device: int
    ranges: Mapping[str, Range]
    """Of each dim that is cut."""


@dataclass(frozen=True, kw_only=True)
class OpGroup:
    """Ops that repeat over layers and are cut and placed alike."""

    pattern: str
    names: tuple[str, ...]
    kind: str
    cuts: tuple[Cut, ...]
    parts: tuple[PartPlace, ...]
    devices: tuple[int, ...]
    copies: int
    """How often each part is computed, on different devices; 0 if not all parts equally often."""
    recomputed: bool
    compute_share: float
    """Of the seconds that all devices compute, forward and backward."""
    linked: tuple[int, ...]
    """The family of each dim that is cut, in the first op: the same numbers mean the same cut."""
    reads_parameter: bool


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A layout, described."""

    cuts: tuple[Cut, ...]
    partial_sums: int
    """How many shares of the value there are; 0 where each piece has the whole value."""
    copies: int
    """How many devices hold each piece; 0 if not all equally many."""
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What is moved of tensors that repeat over layers and are moved alike."""

    pattern: str
    tensors: tuple[str, ...]
    of_parameters: bool
    backward: bool
    """It moves gradients."""
    source: Arrangement
    target: Arrangement
    steps: Mapping[str, int]
    """kind of step -> how many of it, each time"""
    groups: tuple[tuple[int, ...], ...]
    """The devices that talk to each other; of a send, from and to. None where nothing leaves its device."""
    times: int
    """Over all tensors and micro-batches."""
    received_bytes: int
    """Over all devices, tensors and micro-batches."""
    times_of_each: tuple[int, ...]
    received_bytes_of_each: tuple[int, ...]
    """Of each tensor."""
    why: str


@dataclass(frozen=True, kw_only=True)
class DeviceLoad:
    """What one device does in a step."""

    device: int
    stored_bytes: int
    peak_bytes: int
    busy_s: float
    moving_s: float
    idle_s: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A program in the words of a plan."""

    devices: int
    microbatch_samples: tuple[int, ...]
    step_s: float
    received_bytes: int
    ops: tuple[OpGroup, ...]
    communications: tuple[Communication, ...]
    loads: tuple[DeviceLoad, ...]
    parameters: tuple[str, ...]
    activations: tuple[str, ...]
    notes: tuple[str, ...]
    """What is to be known about how the model was captured."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def summarise(program: Program, simulation: Simulation) -> Explanation:
    """What a program does, with repeated layers folded."""
    graph = program.refined.graph
    loads = tuple(
        DeviceLoad(
            device=device,
            stored_bytes=simulation.stored_bytes[device],
            peak_bytes=simulation.peak_bytes[device],
            busy_s=simulation.busy_s[device],
            moving_s=simulation.moving_s[device],
            idle_s=max(0.0, simulation.makespan_s - simulation.busy_s[device] - simulation.moving_s[device]),
        )
        for device in range(program.devices)
    )
    return Explanation(
        devices=program.devices,
        microbatch_samples=program.microbatches.widths,
        step_s=simulation.makespan_s,
        received_bytes=simulation.received_bytes,
        ops=tuple(_op_groups(program, simulation)),
        communications=tuple(_communications(program)),
        loads=loads,
        parameters=tuple(tensor.name for tensor in graph.parameters),
        activations=tuple(tensor.name for tensor in graph.tensors.values() if tensor.role is Role.ACTIVATION),
        notes=graph.notes + program.notes,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


# ---- ops ----


def _op_groups(program: Program, simulation: Simulation) -> Iterator[OpGroup]:
    seconds = _op_seconds(program, simulation)
    total_s = sum(seconds.values()) or 1.0
    placed = _placed(program)
    alike: dict[Hashable, list[OpGroup]] = {}
    for op in program.refined.graph.ops:
        if op.name not in placed:
            continue
        one = _op_group(program, op, placed[op.name], seconds.get(op.name, 0.0) / total_s)
        key = (template(op.name)[0], one.kind, one.cuts, _frozen(one.parts), one.recomputed)
        alike.setdefault(key, []).append(one)
    for ones in alike.values():
        by_name = {one.names[0]: one for one in ones}
        for pattern, names in fold(by_name):
            share = sum(by_name[name].compute_share for name in names)
            yield dataclasses.replace(by_name[names[0]], pattern=pattern, names=names, compute_share=share)


def _frozen(parts: Iterable[PartPlace]) -> Hashable:
    return tuple((part.device, tuple(part.ranges.items())) for part in parts)


def _placed(program: Program) -> dict[str, list[tuple[Segment, int]]]:
    """Where each op is computed: segments and the number of the call, of one kind of micro-batch."""
    found: dict[str, list[tuple[Segment, int]]] = {}
    for segment in program.segments:
        for i, call in enumerate(segment.calls):
            known = found.setdefault(call.op, [])
            # Micro-batches of other sizes are cut in the same way; the first kind stands for all.
            if not known or known[0][0].context == segment.context:
                known.append((segment, i))
    return found


def _op_group(program: Program, op: Op, places: Sequence[tuple[Segment, int]], share: float) -> OpGroup:
    refined = program.refined
    frame = refined.frames[op.name]
    families = refined.batch_families()
    size = {name: dim.size for name, dim in frame.dims.items()}
    shifted = places[0][0].calls[places[0][1]].shifted
    if shifted is not None and places[0][0].context != ONCE:
        size[shifted] = program.microbatches.distinct_widths[places[0][0].context]
    found = [(segment.device, segment.calls[i].ranges) for segment, i in places]
    cut = [name for name in frame.dims if any(part.get(name, (0, size[name])) != (0, size[name]) for _, part in found)]
    parts = sorted(
        ((device, {name: part.get(name, (0, size[name])) for name in cut}) for device, part in found),
        key=lambda one: (tuple(one[1].values()), one[0]),
    )
    distinct = {tuple(part.values()) for _, part in parts}
    return OpGroup(
        pattern=op.name,
        names=(op.name,),
        kind=op.kind,
        cuts=tuple(
            Cut(
                dim=name,
                samples=frame.dims[name].family in families,
                sums=frame.dims[name].reduced,
                ranges=tuple(sorted({part[name] for _, part in parts})),
            )
            for name in cut
        ),
        parts=tuple(PartPlace(device=device, ranges=part) for device, part in parts),
        devices=tuple(sorted({device for device, _ in parts})),
        copies=_copies(len(parts), len(distinct)),
        recomputed=any(segment.recompute for segment, _ in places),
        compute_share=share,
        linked=tuple(frame.dims[name].family for name in cut),
        reads_parameter=any(refined.graph.tensors[name].role is Role.PARAMETER for name in op.inputs),
    )


def _copies(pieces: int, distinct: int) -> int:
    return pieces // distinct if distinct and pieces % distinct == 0 else 0


def _op_seconds(program: Program, simulation: Simulation) -> dict[str, float]:
    """op -> seconds over all devices and passes: the time of its segments, divided by rough costs."""
    of_segment = [0.0] * len(program.segments)
    for node, start_s, end_s in zip(program.nodes, simulation.start_s, simulation.end_s, strict=True):
        if node.segment >= 0:
            of_segment[node.segment] += end_s - start_s
    costs = Costs()
    found: dict[str, float] = {}
    for segment in program.segments:
        rough = [call_seconds(program.refined, segment, i, costs) for i in range(len(segment.calls))]
        total = sum(rough) or 1.0
        for call, one in zip(segment.calls, rough, strict=True):
            found[call.op] = found.get(call.op, 0.0) + of_segment[segment.index] * one / total
    return found


# ---- communication ----


def _communications(program: Program) -> Iterator[Communication]:
    nodes: dict[int, list[Node]] = {}
    for node in program.nodes:
        if node.step is not None:
            nodes.setdefault(node.flow, []).append(node)
    alike: dict[Hashable, dict[str, list[Communication]]] = {}
    for number, flow in enumerate(program.flows):
        if not flow.steps:
            continue
        one = _communication(program, flow, nodes.get(number, []))
        key = (
            template(flow.tensor)[0], one.backward, one.source, one.target, tuple(one.steps.items()), one.groups,
            template(one.why)[0],
        )  # fmt: skip
        alike.setdefault(key, {}).setdefault(flow.tensor, []).append(one)
    for by_tensor in alike.values():
        for pattern, names in fold(by_tensor):
            ones = [one for name in names for one in by_tensor[name]]
            yield dataclasses.replace(
                ones[0],
                pattern=pattern,
                tensors=names,
                times=sum(one.times for one in ones),
                received_bytes=sum(one.received_bytes for one in ones),
                times_of_each=tuple(sum(one.times for one in by_tensor[name]) for name in names),
                received_bytes_of_each=tuple(sum(one.received_bytes for one in by_tensor[name]) for name in names),
                why=fold_loosely([one.why for one in ones]),
            )


def _communication(program: Program, flow: FlowInfo, nodes: Sequence[Node]) -> Communication:
    kinds = [step.kind for step in flow.steps]
    moving = [step for step in flow.steps if step.kind is not Kind.LOCAL]
    times = len({node.microbatch for node in nodes})
    received = sum(received_bytes(program, node) for node in nodes)
    return Communication(
        pattern=flow.tensor,
        tensors=(flow.tensor,),
        of_parameters=program.refined.graph.tensors[flow.tensor].role is Role.PARAMETER,
        backward=flow.backward,
        source=_arrangement(program, flow, flow.source),
        target=_arrangement(program, flow, flow.target),
        steps={kind.value: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        groups=tuple(sorted({step.group for step in moving})),
        times=times,
        received_bytes=received,
        times_of_each=(times,),
        received_bytes_of_each=(received,),
        why=flow.why,
    )


def _arrangement(program: Program, flow: FlowInfo, layout: Layout) -> Arrangement:
    refined = program.refined
    families = refined.batch_families()
    shape = list(refined.shape(flow.tensor))
    made = program.microbatches.made[flow.tensor]
    if not flow.crossing and flow.context != ONCE and made.mode is Mode.ROWS and made.coordinate is not None:
        shape[made.coordinate] = program.microbatches.distinct_widths[flow.context]
    names = [
        f"dim {i}" if len(factors) == 1 else f"dim {i}.{j}"
        for i, factors in enumerate(refined.factors[flow.tensor])
        for j in range(len(factors))
    ]
    boxes = {piece.box for piece in layout}
    cuts = []
    for i, name in enumerate(names):
        found = sorted({box.ranges[i] for box in boxes})
        if found != [(0, shape[i])]:
            samples = refined.families[flow.tensor][i] in families
            cuts.append(Cut(dim=name, samples=samples, sums=False, ranges=tuple(found)))
    partial = any(box.is_partial for box in boxes)
    return Arrangement(
        cuts=tuple(cuts),
        partial_sums=len({box.share for box in boxes}) if partial else 0,
        copies=_copies(len(set(layout)), len(boxes)),
        devices=tuple(sorted({piece.device for piece in layout})),
    )
