"""The interlaced pipeline against 1F1B and tensor parallelism on two ranks, on a T5 whose vocabulary dominates.

python -m bench.plans_interlaced [--quick] [--json]
"""

from __future__ import annotations

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

from bench import harness
from rota.graph.capture import capture
from rota.runtime import comm
from rota.runtime.engine import Engine
from rota.search.stages import microbatches_of, op_seconds, wants_measured_stages, with_stages
from rota.strategies.interlaced import interlaced
from rota.strategies.mesh import Recipe
from rota.strategies.pipeline import pipeline
from rota.strategies.tensor import tensor

RANKS = 2
VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH = 32_768, 256, 2, 32, 8
QUICK_VOCABULARY = 8192
# Both pipelines are faster with two micro-batches than with four: each one makes a gradient of the whole vocabulary.
# The stages of 1F1B are balanced by measured costs, and tensor parallelism may cut the vocabulary, as Megatron does.
RECIPES: Mapping[str, Recipe] = {
    "1f1b": pipeline(microbatches=2),
    "tensor": tensor(),
    "tensor_vocabulary": tensor(vocabulary=True),
    "interlaced": interlaced(microbatches=2),
}

Step = Callable[[], None]


def main() -> None:
    """Compare, and say what came out."""
    chosen = harness.options(__doc__)
    found = compare(chosen.quick)
    harness.finish("plans_interlaced", {"interlaced_vs_best": found["interlaced_vs_best"]}, found["seconds"], chosen)


def compare(quick: bool) -> dict[str, Any]:
    """Median seconds of a step of each plan, and the best of 1F1B and tensor against the interlaced one."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        given = (str(place / "store"), str(place / "result"), *((3, QUICK_VOCABULARY) if quick else (15, VOCABULARY)))
        mp.spawn(_rank, given, nprocs=RANKS)  # type: ignore[no-untyped-call]
        seconds: dict[str, float] = torch.load(place / "result")
    best = min(one for name, one in seconds.items() if name != "interlaced")
    return {"interlaced_vs_best": best / seconds["interlaced"], "seconds": seconds}


def _rank(rank: int, store: str, result: str, repeats: int, vocabulary: int) -> None:
    torch.set_num_threads(1)
    comm.connect(rank=rank, size=RANKS, store=dist.FileStore(store, RANKS))
    groups = comm.Groups()
    steps = {name: _step(rank, recipe, groups, vocabulary) for name, recipe in RECIPES.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 2):
        for name, step in steps.items():
            dist.barrier()
            started_s = time.perf_counter()
            step()
            dist.barrier()
            if turn >= 2:  # the first steps allocate and compile
                times[name].append(time.perf_counter() - started_s)
    if rank == 0:
        torch.save({name: statistics.median(found) for name, found in times.items()}, result)
    comm.disconnect()


def _step(rank: int, recipe: Recipe, groups: comm.Groups, vocabulary: int) -> Step:
    model, batch = _make(vocabulary)
    graph = capture(model, batch, lambda model, one: model(**one).loss)
    strategy: Any = recipe
    if wants_measured_stages(strategy):
        seconds = [op_seconds(graph, microbatches_of(strategy, graph, RANKS)) if rank == 0 else None]
        dist.broadcast_object_list(seconds, src=0)
        strategy = with_stages(strategy, seconds[0])
    program = strategy(graph, RANKS).compile()
    engine = Engine(program, dict(model.named_parameters()), rank=rank, groups=groups)
    engine.optimize(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))

    def step() -> None:
        engine.train(batch)

    return step


def _make(vocabulary: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The same on every rank."""
    import transformers

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.T5Config(
            vocab_size=vocabulary,
            d_model=WIDTH,
            d_kv=WIDTH // 4,
            d_ff=4 * WIDTH,
            num_layers=LAYERS,
            num_heads=4,
            dropout_rate=0.0,  # the same numbers for each plan, and no time for drawing them
            decoder_start_token_id=0,
            use_cache=False,
        )
        model = transformers.T5ForConditionalGeneration(config)
    tokens = torch.randint(3, vocabulary, (BATCH, LENGTH))
    return model.train(), {"input_ids": tokens, "labels": tokens.clone()}


if __name__ == "__main__":
    main()
