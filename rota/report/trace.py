"""A predicted step as a Chrome trace, which https://ui.perfetto.dev opens: a track for each device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rota.plan.costs import received_bytes
from rota.plan.folding import fold
from rota.plan.layout import Kind
from rota.plan.program import ONCE, Node, NodeKind, Program, Segment
from rota.plan.simulate import Simulation

_PROCESS = 0
_US_PER_S = 1e6


def trace_events(program: Program, simulation: Simulation) -> dict[str, Any]:
    """The trace event format's JSON object: a slice for each node on each of its devices, an arrow for each send."""
    return {
        "traceEvents": [*_names(program), *_slices(program, simulation)],
        "displayTimeUnit": "ms",
        "otherData": {
            "step_s": simulation.makespan_s,
            "received_bytes": simulation.received_bytes,
            "peak_bytes": list(simulation.peak_bytes),
        },
    }


def _names(program: Program) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", 0, name="predicted step")
    for device in range(program.devices):
        yield _metadata("thread_name", device, name=f"device {device}")
        yield _metadata("thread_sort_index", device, sort_index=device)


def _metadata(what: str, device: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": device, "args": args}


def _slices(program: Program, simulation: Simulation) -> Iterator[dict[str, Any]]:
    ops = [[pattern for pattern, _ in fold(call.op for call in segment.calls)] for segment in program.segments]
    titles = [_title(program, segment) for segment in program.segments]
    for number, node in enumerate(program.nodes):
        start_us = simulation.start_s[number] * _US_PER_S
        duration_us = simulation.end_s[number] * _US_PER_S - start_us
        if node.kind is NodeKind.EXCHANGE:
            name, category, args = _exchange(program, node)
        else:
            name, category, args = f"{node.kind} {titles[node.segment]}", "compute", {"ops": ops[node.segment]}
        if node.microbatch != ONCE:
            name, args = f"{name} #{node.microbatch}", args | {"microbatch": node.microbatch}
        common = {"name": name, "cat": category, "pid": _PROCESS}
        for device in node.devices:
            yield {**common, "ph": "X", "tid": device, "ts": start_us, "dur": duration_us, "args": args}
        if node.step is not None and node.step.kind is Kind.SEND:
            # An arrow binds to the slice that is open at its time: its ends lie inside of the two slices.
            sender, receiver = node.step.group
            arrow = {**common, "cat": "send", "id": number}
            yield {**arrow, "ph": "s", "tid": sender, "ts": start_us + duration_us / 3}
            yield {**arrow, "ph": "f", "bp": "e", "tid": receiver, "ts": start_us + duration_us * 2 / 3}


def _exchange(program: Program, node: Node) -> tuple[str, str, dict[str, Any]]:
    assert node.step is not None
    flow = program.flows[node.flow]
    args = {
        "tensor": flow.tensor,
        "gradient": flow.backward,
        "bytes": received_bytes(program, node),
        "devices": list(node.step.group),
        "why": flow.why,
    }
    what = f"grad {flow.tensor}" if flow.backward else flow.tensor
    return f"{node.step.kind} {what}", "communication", args


def _title(program: Program, segment: Segment) -> str:
    """The module that holds all ops of a segment, or the first and the last of them."""
    modules = [program.refined.cases[call.op].op.module for call in segment.calls]
    paths = zip(*(module.split(".") for module in modules), strict=False)
    common = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, paths)]
    if any(common):
        return ".".join(common)
    named = _ends([module for module in modules if module]) or _ends([call.op for call in segment.calls])
    return " to ".join(named)


def _ends(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys((names[0], names[-1]))) if names else []
