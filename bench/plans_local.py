"""Plans that rule-based systems cannot express, against what they would do: coshard and 3F1B, on this machine.

python -m bench.plans_local [--quick] [--json]
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from bench import harness
from rota.graph.capture import capture
from rota.graph.graph import Graph
from rota.runtime import comm
from rota.runtime.engine import Engine
from rota.runtime.in_process import InProcess
from rota.runtime.ledger import Ledger
from rota.strategies.base import find
from rota.testing.models import Evoformer

RANKS = 2
WARM_UP = 2
"""Steps that are not counted: the first ones allocate."""
ARMS = {"single": "single", "recompute": "coshard(1)", "coshard": "coshard(4)"}
ORDERS = {"recycled": "3f1b", "sequential": "sequential"}
MICROBATCHES = (2, 4)
"""The first is the figure; the others are told beside it."""


def main() -> None:
    """Both."""
    chosen = harness.options(__doc__)
    found = coshard(chosen.quick) | recycled(chosen.quick)
    figures = {name: value for name, value in found.items() if isinstance(value, float)}
    harness.finish("plans_local", figures, {name: found[name] for name in found if name not in figures}, chosen)


def coshard(quick: bool) -> dict[str, Any]:
    """Peak memory of coshard(4) against no cuts at all, and its time against recompute alone, on a Swin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, batch, graph = _swin(image=128 if quick else 256)
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        programs = {name: find(text)(graph, 1).compile() for name, text in ARMS.items()}
        peaks = {}
        for name, program in programs.items():
            ledger = Ledger()
            with ledger:
                InProcess(program, state, ledger=ledger).execute(batch)
            peaks[name] = ledger.peak_bytes[0]
        runs = {name: InProcess(program, state) for name, program in programs.items()}
        for run in runs.values():
            run.optimize(_optimizer)
        steps: dict[str, Callable[[], Any]] = {name: functools.partial(run.train, batch) for name, run in runs.items()}
        seconds = _interleaved(steps, 3 if quick else 15)
    finally:
        torch.set_num_threads(threads)
    return {
        "coshard_memory": peaks["coshard"] / peaks["single"],
        "coshard_time": seconds["coshard"]["median"] / seconds["recompute"]["median"],
        "coshard_cpu_time": seconds["coshard"]["cpu"] / seconds["recompute"]["cpu"],
        "coshard_peak_bytes": peaks,
        "coshard_step_s": seconds,
    }


def recycled(quick: bool) -> dict[str, Any]:
    """Seconds per step of one pass after another against 3F1B, on two ranks, of an Evoformer of three passes."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        mp.spawn(_rank, (str(place / "store"), str(place / "result"), quick), nprocs=RANKS)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = torch.load(place / "result", weights_only=False)
    ratios = {
        count: found[f"sequential_{count}"]["median"] / found[f"recycled_{count}"]["median"] for count in _counts(quick)
    }
    return {
        "recycled_vs_sequential": ratios[MICROBATCHES[0]],
        "recycled_vs_sequential_by_microbatches": {str(count): ratio for count, ratio in ratios.items()},
        "recycled_step_s": found,
    }


def _counts(quick: bool) -> tuple[int, ...]:
    return MICROBATCHES[:1] if quick else MICROBATCHES


def _rank(rank: int, store: str, result: str, quick: bool) -> None:
    torch.set_num_threads(1)
    comm.connect(rank=rank, size=RANKS, store=dist.FileStore(store, RANKS))
    groups = comm.Groups()
    model, batch, graph = _evoformer(depth=2 if quick else 4)
    steps: dict[str, Callable[[], Any]] = {}
    for name, order in ORDERS.items():
        for count in _counts(quick):
            program = find(f"recycled(microbatches={count}, order={order!r})")(graph, RANKS).compile()
            engine = Engine(program, dict(model.named_parameters()), rank=rank, groups=groups)
            engine.optimize(_optimizer)
            steps[f"{name}_{count}"] = functools.partial(engine.train, batch)
    seconds = _interleaved(steps, 5 if quick else 25, wait=dist.barrier)
    if rank == 0:
        torch.save(seconds, result)
    dist.barrier()
    comm.disconnect()


def _interleaved(
    steps: Mapping[str, Callable[[], Any]], repeats: int, *, wait: Callable[[], Any] = lambda: None
) -> dict[str, dict[str, float]]:
    """Seconds per step of each, one after the other in every turn; CPU time depends less on other processes."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + WARM_UP):
        for name, step in steps.items():
            wait()
            started_s, cpu_s = time.perf_counter(), time.process_time()
            step()
            cpu_s = time.process_time() - cpu_s
            wait()
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - started_s)
                cpu[name].append(cpu_s)
    return {name: {**harness.spread(times[name]), "cpu": statistics.median(cpu[name])} for name in steps}


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _swin(*, image: int) -> tuple[nn.Module, Any, Graph]:
    """Large images and few features, so that activations outweigh parameters; one sample: none to cut."""
    import transformers

    made: Any = transformers
    made.logging.set_verbosity_error()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = made.SwinConfig(
            image_size=image,
            patch_size=2,
            embed_dim=32,
            depths=[2, 2],
            num_heads=[4, 8],
            window_size=8,
            num_labels=5,
        )
        model = made.SwinForImageClassification(config).train()
        batch = {"pixel_values": torch.rand(1, 3, image, image), "labels": torch.randint(0, 5, (1,))}
        return model, batch, capture(model, batch, lambda model, one: model(**one).loss)


def _evoformer(*, depth: int) -> tuple[nn.Module, Any, Graph]:
    """The same on every rank."""
    torch.manual_seed(0)
    model = Evoformer(width=32, depth=depth, heads=4, recycles=3)
    samples, rows, columns = 2 * RANKS, 8, 24
    batch = (
        torch.randn(samples, rows, columns, 32),
        torch.randn(samples, columns, columns, 32),
        torch.randint(0, 5, (samples, rows, columns)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, batch, capture(model, batch, _loss)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    msa, pair, classes = batch
    return F.cross_entropy(model(msa, pair).flatten(0, 2), classes.flatten())


if __name__ == "__main__":
    main()
