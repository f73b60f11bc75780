"""The cost of compiling: a 48-layer GPT on 32 devices (tensor 8 x pipeline 4) with 64 micro-batches, and how it grows.

python -m bench.compile [--quick] [--json]
"""

from __future__ import annotations

import gc
import time

import torch
import torch.nn.functional as F

from bench import harness
from rota.graph.capture import capture
from rota.graph.graph import Graph
from rota.plan.plan import Plan
from rota.plan.program import Program
from rota.testing.models import GPT

LAYERS, TENSOR, STAGES, MICROBATCHES = 48, 8, 4, 64
SIZES = (6, 12, 24, 48)
COUNTS = (8, 16, 32, 64)


def main() -> None:
    """Compile once at full size, and at four doubling sizes each way (only the smallest and the largest if quick)."""
    chosen = harness.options(__doc__)
    torch.set_num_threads(1)
    graphs: dict[int, Graph] = {}
    capture_s: dict[int, float] = {}
    sizes, counts = (SIZES, COUNTS) if not chosen.quick else ((SIZES[0], LAYERS), (COUNTS[0], MICROBATCHES))
    for layers in sizes:
        started_s = time.perf_counter()
        graphs[layers] = _capture(layers)
        capture_s[layers] = time.perf_counter() - started_s
    compile_s, program = _timed(graphs[LAYERS], MICROBATCHES)
    nodes = len(program.nodes)
    del program
    by_layers = {layers: _timed(graphs[layers], MICROBATCHES)[0] for layers in sizes[:-1]} | {LAYERS: compile_s}
    by_count = {count: _timed(graphs[LAYERS], count)[0] for count in counts[:-1]} | {MICROBATCHES: compile_s}
    figures = {
        "compile_s": compile_s,
        "growth_layers": _growth(by_layers),
        "growth_microbatches": _growth(by_count),
    }
    details = {
        "capture_s": capture_s[LAYERS],
        "nodes": nodes,
        "ops": len(graphs[LAYERS].ops),
        "compile_s_by_layers": by_layers,
        "compile_s_by_microbatches": by_count,
    }
    harness.finish("compile", figures, details, chosen)


def _growth(seconds: dict[int, float]) -> float:
    """The cost per unit at the largest size over that at the smallest."""
    least, most = min(seconds), max(seconds)
    return (seconds[most] / most) / (seconds[least] / least)


def _capture(layers: int) -> Graph:
    with torch.device("meta"):
        model = GPT(vocabulary=50304, context=1024, width=1024, depth=layers, heads=16)
        rows = torch.zeros((MICROBATCHES, 1025), dtype=torch.int64)
    return capture(
        model,
        rows,
        lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()),
    )


def _timed(graph: Graph, microbatches: int) -> tuple[float, Program]:
    gc.collect()
    started_s = time.perf_counter()
    program = megatron(graph, microbatches).compile()
    return time.perf_counter() - started_s, program


def megatron(graph: Graph, microbatches: int) -> Plan:
    """Attention heads and feed-forward columns cut over the devices of a stage; blocks in stages one after another."""
    plan = Plan(graph, devices=TENSOR * STAGES, microbatches=microbatches)
    families = {plan.dims(op)["h"].family for op in plan.ops(kind="scaled_dot_product_attention")}
    families |= {dim.family for op in plan.ops(kind="linear", name="*.fc1") for dim in [plan.dims(op)["n"]]}
    layers = 1 + max(int(op.module.split(".")[1]) for op in graph.ops if op.module.startswith("blocks."))
    stage = 0
    for op in graph.ops:
        if op.module.startswith("blocks."):
            stage = int(op.module.split(".")[1]) * STAGES // layers
        elif op.module in ("norm", "head") or op.name.startswith("cross_entropy"):
            stage = STAGES - 1
        devices = range(stage * TENSOR, (stage + 1) * TENSOR)
        cut = [dim.name for dim in plan.dims(op).values() if dim.family in families and not dim.fixed]
        parts = plan.split(op, cut[0], TENSOR) if cut else plan.replicate(op, TENSOR)
        for part, device in zip(parts, devices, strict=True):
            plan.assign(part, device)
    return plan


if __name__ == "__main__":
    main()
