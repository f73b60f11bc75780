"""Programs as JSON and back: boxes, steps and values in tables, so that micro-batches cost little."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from rota.errors import InputError, RotaError
from rota.graph.graph import Graph
from rota.graph.refine import Refined, refine
from rota.graph.rewrite import repeated
from rota.plan.box import WHOLE_VALUE, Box
from rota.plan.check import check
from rota.plan.layout import Kind, Layout, Piece, Step
from rota.plan.microbatches import microbatches_of
from rota.plan.plan import Plan
from rota.plan.program import (
    ONCE,
    Call,
    Entry,
    Exit,
    FlowInfo,
    Node,
    NodeKind,
    Program,
    Result,
    Segment,
    Source,
    Value,
)

_VERSION = 1


def digest(graph: Graph) -> str:
    """What a program says about the graph that it belongs to."""
    text = repr((sorted(graph.tensors.items()), graph.ops, graph.inputs, sorted(graph.outputs.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_json(program: Program) -> str:
    """A program without its graph."""
    return json.dumps(_Writer().program(program), separators=(",", ":"))


def from_json(text: str, graph: Graph, refined: Refined | None = None) -> Program:
    """The program that `to_json` was given, for the same graph."""
    try:
        data = json.loads(text)
        version, of_graph = data["version"], data["graph"]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"this is not a program: {error}") from error
    if version != _VERSION:
        raise InputError(f"the program is in format {version} and this rota reads {_VERSION}; compile it again")
    if of_graph != digest(graph):
        graph, refined = _rewritten(graph, data), None
    if of_graph != digest(graph):
        raise InputError("the program belongs to another graph; compile the plan again for this one")
    try:
        program = _Reader(data).program(refine(graph) if refined is None else refined)
        check(program)
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RotaError) as error:
        raise InputError(f"the program was altered or damaged ({error}); compile the plan again") from error
    return program


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
        found["boxes"] = [
            [list(map(list, box.ranges)), *([] if box.share is WHOLE_VALUE else map(str, box.share))]
            for box in self.boxes
        ]
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


class _Reader:
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.boxes = [_box(one) for one in data["boxes"]]
        self.values = [Value(*one) for one in data["values"]]
        self.steps = [
            Step(kind=Kind(kind), inputs=self.layout(inputs), outputs=self.layout(outputs))
            for kind, inputs, outputs in data["steps"]
        ]

    def program(self, refined: Refined) -> Program:
        data = self.data
        plan = Plan(refined.graph, devices=data["devices"], microbatches=data["microbatches"], refined=refined)
        self.microbatches = microbatches_of(plan)
        return Program(
            refined=refined,
            devices=data["devices"],
            microbatches=self.microbatches,
            segments=tuple(self.segment(i, one) for i, one in enumerate(data["segments"])),
            nodes=tuple(self.node(one) for one in data["nodes"]),
            frees=tuple(tuple((device, self.values[value]) for device, value in one) for one in data["frees"]),
            boxes=tuple(self.boxes[: data["known_boxes"]]),
            flows=tuple(self.flow(one) for one in data["flows"]),
            stored={name: self.layout(layout) for name, layout in data["stored"].items()},
            gradients={
                name: {(d, self.boxes[box]): tuple(self.values[v] for v in values) for d, box, values in pieces}
                for name, pieces in data["gradients"].items()
            },
            results={
                name: Result(device=device, value=self.values[value])
                for name, (device, value) in data["results"].items()
            },
            updates={
                name: {(d, self.boxes[box]): self.values[value] for d, box, value in pieces}
                for name, pieces in data["updates"].items()
            },
            notes=tuple(map(str, data["notes"])),
        )

    def layout(self, pieces: list[list[int]]) -> Layout:
        return tuple(Piece(device=device, box=self.boxes[box]) for device, box in pieces)

    def _value(self, number: int | None) -> Value | None:
        return None if number is None else self.values[number]

    def segment(self, index: int, data: dict[str, Any]) -> Segment:
        return Segment(
            index=index,
            device=data["device"],
            context=data["context"],
            grad=data["grad"],
            recompute=data["recompute"],
            calls=tuple(
                Call(
                    op=op,
                    ranges={k: (v[0], v[1]) for k, v in ranges.items()},
                    reads=tuple(reads),
                    makes=tuple(makes),
                    shifted=shifted,
                    offsets=None if data["context"] == ONCE else self.microbatches.offsets_of(op),
                )
                for op, ranges, reads, makes, shifted in data["calls"]
            ),
            entries=tuple(
                Entry(
                    slot=slot,
                    tensor=tensor,
                    box=self.boxes[box],
                    source=Source(source),
                    coordinate=coordinate,
                    grad=grad,
                    again=again,
                )
                for slot, tensor, box, source, coordinate, grad, again in data["entries"]
            ),
            exits=tuple(
                Exit(slot=slot, tensor=tensor, box=self.boxes[box], grad=grad)
                for slot, tensor, box, grad in data["exits"]
            ),
            slots=data["slots"],
            drops=tuple(tuple(one) for one in data["drops"]),
        )

    def flow(self, data: dict[str, Any]) -> FlowInfo:
        return FlowInfo(
            tensor=data["tensor"],
            name=data["name"],
            backward=data["backward"],
            source=self.layout(data["source"]),
            target=self.layout(data["target"]),
            context=data["context"],
            crossing=data["crossing"],
            steps=tuple(self.steps[step] for step in data["steps"]),
            why=data["why"],
        )

    def node(self, data: list[Any]) -> Node:
        kind, microbatch, devices, segment, flow, step, reads, makes, gradients, adds, seeds = data
        return Node(
            kind=NodeKind(kind),
            microbatch=microbatch,
            devices=tuple(devices),
            segment=segment,
            flow=flow,
            step=None if step is None else self.steps[step],
            reads=tuple(self._value(value) for value in reads),
            makes=tuple(self.values[value] for value in makes),
            gradients=tuple(tuple(self.values[value] for value in values) for values in gradients),
            adds=tuple(self._value(value) for value in adds),
            seeds=tuple(seeds),
        )


def _box(data: list[Any]) -> Box:
    ranges = tuple((start, stop) for start, stop in data[0])
    if len(data) == 1:
        return Box(ranges=ranges)
    return Box(ranges=ranges, share=(Fraction(data[1]), Fraction(data[2])))
