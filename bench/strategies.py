"""rota's strategies against PyTorch's own on two ranks: same model, same batch, same optimizer, interleaved repeats.

python -m bench.strategies [--quick] [--json]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench import harness
from bench import strategies_model as peers
from rota.graph.capture import capture
from rota.runtime import comm
from rota.runtime.engine import Engine
from rota.runtime.in_process import InProcess
from rota.search.stages import op_seconds, wants_measured_stages, with_stages
from rota.strategies.base import with_microbatches
from rota.strategies.data import data
from rota.strategies.mesh import Recipe
from rota.strategies.pipeline import pipeline
from rota.strategies.tensor import tensor
from rota.strategies.zero import zero

RANKS = 2
PAIRS: dict[str, tuple[Callable[[int], peers.Step], Recipe, int]] = {
    "data_vs_ddp": (peers.ddp, data(), 1),
    "tensor_vs_dtensor": (peers.dtensor, tensor(), 1),
    "pipeline_vs_torch": (peers.pipelining, pipeline(), peers.MICROBATCHES),
    "zero3_vs_fsdp2": (peers.fsdp2, zero(stage=3), 1),
}


def main() -> None:
    """Spawn two ranks and compare."""
    chosen = harness.options(__doc__)
    repeats = 7 if chosen.quick else 25
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        mp.spawn(_rank, (str(place / "store"), str(place / "result"), repeats), nprocs=RANKS)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = torch.load(place / "result", weights_only=False)
    figures = {name: one["ratio"] for name, one in found.items()}
    details = {f"{name}_seconds": {"theirs_s": one["theirs_s"], "ours_s": one["ours_s"]} for name, one in found.items()}
    harness.finish("strategies", figures, details, chosen)


def _rank(rank: int, store: str, result: str, repeats: int) -> None:
    torch.set_num_threads(1)
    comm.connect(rank=rank, size=RANKS, store=dist.FileStore(store, RANKS))
    groups = comm.Groups()
    found = {}
    for name, (theirs, recipe, microbatches) in PAIRS.items():
        found[name] = _compare(theirs(rank), _ours(rank, recipe, microbatches, groups), repeats)
    if rank == 0:
        found["single_vs_eager"] = _compare(peers.eager(rank), _single(), repeats, together=False)
    dist.barrier()
    if rank == 0:
        torch.save(found, result)
    comm.disconnect()


def _ours(rank: int, recipe: Recipe, microbatches: int, groups: comm.Groups) -> peers.Step:
    model, rows = peers.make()
    graph = capture(model, rows, peers.loss_of)
    strategy: Any = with_microbatches(recipe, microbatches)
    if wants_measured_stages(strategy):  # as a worker does it: the first measures
        seconds = [op_seconds(graph, microbatches) if rank == 0 else None]
        dist.broadcast_object_list(seconds, src=0)
        strategy = with_stages(strategy, seconds[0])
    program = strategy(graph, RANKS).compile()
    engine = Engine(program, dict(model.named_parameters()), rank=rank, groups=groups)
    engine.optimize(peers.optimizer)

    def step() -> float | None:
        outputs = engine.train(rows)
        return float(outputs["loss"]) if "loss" in outputs else None

    return step


def _single() -> peers.Step:
    model, rows = peers.make()
    from rota.strategies.single import single

    program = single()(capture(model, rows, peers.loss_of), 1).compile()
    engine = InProcess(program, dict(model.named_parameters()))
    engine.optimize(peers.optimizer)
    return lambda: float(engine.train(rows)["loss"])


def _compare(theirs: peers.Step, ours: peers.Step, repeats: int, *, together: bool = True) -> dict[str, Any]:
    """Seconds per step of both, one after the other, medians."""
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    for turn in range(repeats + 2):
        order = (("theirs", theirs), ("ours", ours))
        for name, step in order if turn % 2 else order[::-1]:  # what comes second finds the caches of the first
            if together:
                dist.barrier()
            started_s = time.perf_counter()
            step()
            if together:
                dist.barrier()
            if turn >= 2:  # the first steps allocate and compile
                times[name].append(time.perf_counter() - started_s)
    theirs_s, ours_s = (statistics.median(times[name]) for name in ("theirs", "ours"))
    # Of each turn, since the machine is faster and slower by turns.
    ratio = statistics.median(a / b for a, b in zip(times["theirs"], times["ours"], strict=True))
    return {"ratio": ratio, "theirs_s": theirs_s, "ours_s": ours_s}


if __name__ == "__main__":
    main()
