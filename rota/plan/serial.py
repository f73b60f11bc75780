"""Programs as JSON and back.

The file has the plan, and what it compiles to: boxes, steps and values in tables, so that micro-batches cost little.
Reading compiles the plan again. So nothing that is derived is taken from the file, and a file that says anything else
than what its plan compiles to is refused.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Literal

from rota.errors import InputError, RotaError
from rota.graph.graph import Graph
from rota.graph.refine import Refined, refine
from rota.graph.rewrite import repeated
from rota.plan.box import WHOLE_VALUE, Box, Share
from rota.plan.compile import compile_plan
from rota.plan.layout import Piece, Step
from rota.plan.plan import At, Part, Plan, check_graph
from rota.plan.program import FlowInfo, Node, Program, Segment, Value

_VERSION = 2
_SHARE = re.compile(r"[0-9]{1,400}(/[0-9]{1,400})?")
_MOST = 200
"""Characters of what is told of an error or of a value."""


def digest(graph: Graph) -> str:
    """What a program says about the graph that it belongs to."""
    text = repr((sorted(graph.tensors.items()), graph.ops, graph.inputs, sorted(graph.outputs.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_json(program: Program) -> str:
    """A program without its graph."""
    return json.dumps(_Writer().program(program), separators=(",", ":"))


def from_json(text: str, graph: Graph, refined: Refined | None = None) -> Program:
    """The program that `to_json` was given, for the same graph."""
    check_graph(graph)
    if not isinstance(text, str | bytes | bytearray):
        raise InputError(f"a program is read from the text that to_json made, not from {type(text).__name__}")
    try:
        data = json.loads(text)
        version, of_graph = data["version"], data["graph"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"this is not a program: {_short(error)}") from error
    if version != _VERSION:
        raise InputError(
            f"the program is in format {_cut(repr(version))} and this rota reads {_VERSION}; compile the plan again"
        )
    if of_graph != digest(graph):
        graph, refined = _rewritten(graph, data), None
    if of_graph != digest(graph):
        raise InputError("the program belongs to another graph; compile the plan again for this one")
    try:
        plan = _read_plan(data, graph, refined)
        program = compile_plan(plan, reference=data["reference"])
        derived = _Writer().program(program)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, RotaError) as error:
        raise InputError(f"the program was altered or damaged ({_short(error)}); compile the plan again") from error
    changed = [key for key in sorted({*data, *derived}) if _text(data.get(key)) != _text(derived.get(key))]
    if changed:
        raise InputError(
            f"the program was altered or damaged, or another version of rota wrote it (its {_cut(', '.join(changed))} "
            "should be what its plan compiles to); compile the plan again"
        )
    return program


def _text(value: Any) -> str:
    """JSON in one form: it tells 1 from 1.0 and from true."""
    return json.dumps(value, sort_keys=True)


def _short(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else _cut(" ".join(str(error).split()))


def _cut(words: str) -> str:
    return words if len(words) <= _MOST else f"{words[:_MOST]}..."


def _rewritten(graph: Graph, data: dict[str, Any]) -> Graph:
    """The graph as the strategy had it; as it is, if it cannot be brought there."""
    importlib.import_module("rota.strategies")  # some rewrites are theirs
    try:
        return repeated(graph, data["rewrites"])
    except (LookupError, TypeError, ValueError, AttributeError, RotaError):
        return graph


class _Writer:
    def __init__(self) -> None:
        self.boxes: dict[Box, int] = {}
        self.steps: dict[int, int] = {}
        self.step_list: list[Any] = []
        self.values: dict[Value, int] = {}

    def program(self, program: Program) -> dict[str, Any]:
        for box in program.boxes:
            self.box(box)
        found = {
            "version": _VERSION,
            "graph": digest(program.refined.graph),
            "rewrites": program.refined.graph.rewrites,
            "devices": program.devices,
            "notes": program.notes,
            "microbatches": program.microbatches.count,
            "plan": _plain_plan(program.plan),
            "reference": program.reference,
            "known_boxes": len(program.boxes),
            "segments": [self.segment(one) for one in program.segments],
            "flows": [self.flow(one) for one in program.flows],
            "nodes": [self.node(one) for one in program.nodes],
            "frees": [[[device, self.value(value)] for device, value in one] for one in program.frees],
            "stored": {name: self.layout(layout) for name, layout in program.stored.items()},
            "gradients": {
                name: [[d, self.box(box), [self.value(v) for v in values]] for (d, box), values in pieces.items()]
                for name, pieces in program.gradients.items()
            },
            "results": {name: [one.device, self.value(one.value)] for name, one in program.results.items()},
            "updates": {
                name: [[d, self.box(box), self.value(v)] for (d, box), v in pieces.items()]
                for name, pieces in program.updates.items()
            },
        }
        found["boxes"] = [_plain_box(box) for box in self.boxes]
        found["steps"] = self.step_list
        found["values"] = [list(value) for value in self.values]
        return found

    def box(self, box: Box) -> int:
        return self.boxes.setdefault(box, len(self.boxes))

    def value(self, value: Value | None) -> int | None:
        return None if value is None else self.values.setdefault(value, len(self.values))

    def layout(self, layout: Iterable[Piece]) -> list[list[int]]:
        return [[piece.device, self.box(piece.box)] for piece in layout]

    def step(self, step: Step | None) -> int | None:
        if step is None:
            return None
        if id(step) not in self.steps:
            self.steps[id(step)] = len(self.step_list)
            self.step_list.append([str(step.kind), self.layout(step.inputs), self.layout(step.outputs)])
        return self.steps[id(step)]

    def segment(self, segment: Segment) -> dict[str, Any]:
        return {
            "device": segment.device,
            "context": segment.context,
            "grad": segment.grad,
            "recompute": segment.recompute,
            "calls": [
                [one.op, {k: list(v) for k, v in one.ranges.items()}, one.reads, one.makes, one.shifted]
                for one in segment.calls
            ],
            "entries": [
                [one.slot, one.tensor, self.box(one.box), str(one.source), one.coordinate, one.grad, one.again]
                for one in segment.entries
            ],
            "exits": [[one.slot, one.tensor, self.box(one.box), one.grad] for one in segment.exits],
            "slots": segment.slots,
            "drops": segment.drops,
        }

    def flow(self, flow: FlowInfo) -> dict[str, Any]:
        return {
            "tensor": flow.tensor,
            "name": flow.name,
            "backward": flow.backward,
            "source": self.layout(flow.source),
            "target": self.layout(flow.target),
            "context": flow.context,
            "crossing": flow.crossing,
            "steps": [self.step(step) for step in flow.steps],
            "why": flow.why,
        }

    def node(self, node: Node) -> list[Any]:
        return [
            str(node.kind),
            node.microbatch,
            node.devices,
            node.segment,
            node.flow,
            self.step(node.step),
            [self.value(value) for value in node.reads],
            [self.value(value) for value in node.makes],
            [[self.value(value) for value in values] for values in node.gradients],
            [self.value(value) for value in node.adds],
            node.seeds,
        ]


def _plain_box(box: Box) -> list[Any]:
    return [list(map(list, box.ranges)), *(map(str, box.share) if box.is_partial else [])]


def _read_box(data: list[Any]) -> Box:
    ranges = tuple((start, stop) for start, stop in data[0])
    return Box(ranges=ranges, share=_read_share(*data[1:])) if len(data) > 1 else Box(ranges=ranges)


def _read_share(low: str, high: str) -> Share:
    if not _SHARE.fullmatch(low) or not _SHARE.fullmatch(high):  # Python would compute what 1e1000000000 is
        raise ValueError(f"{_cut(repr(low))} to {_cut(repr(high))} is no share")
    share = Fraction(low), Fraction(high)
    return WHOLE_VALUE if share == WHOLE_VALUE else share


# ---- plans ----


def _plain_plan(plan: Plan) -> dict[str, Any]:
    """What the plan decides."""
    number = {part: i for i, part in enumerate(_parts(plan))}

    def moments(edges: Iterable[tuple[At, At]]) -> list[Any]:
        return [[[number[at.part], at.microbatch, at.backward] for at in edge] for edge in edges]

    preferred = plan.preferred
    return {
        "devices": plan.devices,
        "microbatches": plan.microbatches,
        "backward": plan.backward,
        "parts": [
            [
                part.op,
                [[dim, list(one)] for dim, one in part.ranges],
                [str(edge) for edge in part.share],
                part.replica,
                plan.device_of(part),
                plan.groups_of(part),
            ]
            for part in _parts(plan)
        ],
        "recomputed": sorted(plan.recomputed),
        "stored": {
            name: [[piece.device, _plain_box(piece.box)] for piece in layout] for name, layout in plan.stored.items()
        },
        "gathered_for_use": sorted(plan.gathered_for_use),
        "orders": moments(plan.order_edges[: len(plan.order_edges) - len(preferred)]),
        "preferred": moments(preferred),
        "notes": plan.notes,
    }


def _parts(plan: Plan) -> list[Part]:
    return [part for op in plan.graph.ops for part in plan.parts(op)]


def _read_plan(data: dict[str, Any], graph: Graph, refined: Refined | None) -> Plan:
    of_plan = data["plan"]
    for name in ("devices", "microbatches"):  # before anything is made of so many
        if data[name] != of_plan[name]:
            raise ValueError(f"it has {data[name]!r} {name} and its plan {of_plan[name]!r}")
    plan = Plan(
        graph,
        devices=of_plan["devices"],
        microbatches=of_plan["microbatches"],
        backward=of_plan["backward"],
        refined=refine(graph) if refined is None else refined,
    )
    parts: dict[Part, tuple[int, tuple[int, ...]]] = {}
    for op, ranges, share, replica, device, groups in of_plan["parts"]:
        cuts = tuple((dim, (start, stop)) for dim, (start, stop) in ranges)
        part = Part(op=op, ranges=cuts, share=_read_share(*share), replica=replica)
        parts[part] = (device, tuple(groups))
    plan.restore(parts, of_plan["recomputed"])
    for name, layout in of_plan["stored"].items():
        gather: Literal["step", "use"] = "use" if name in of_plan["gathered_for_use"] else "step"
        plan.store(name, tuple(Piece(device=device, box=_read_box(box)) for device, box in layout), gather=gather)
    of_number = list(parts)

    def moment(number: int, microbatch: int | None, backward: bool) -> At:
        return At(part=of_number[number], microbatch=microbatch, backward=backward)

    for first, second in of_plan["orders"]:
        plan.order(moment(*first), before=moment(*second))
    for first, second in of_plan["preferred"]:
        plan.prefer(moment(*first), before=moment(*second))
    plan.notes += of_plan["notes"]
    return plan
