"""What the simulator predicts against what happens: step time and peak memory, on one rank and on two.

python -m bench.simulator [--quick] [--json]

Costs are measured anew, then every strategy trains real steps, in turns. Others who use the machine make both worse.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench import harness
from bench import strategies_model as peers
from rota.calibrate.calibrate import calibrate
from rota.errors import InputError
from rota.graph.capture import capture
from rota.graph.graph import Graph
from rota.plan.program import Program
from rota.plan.simulate import Simulation
from rota.runtime import comm
from rota.runtime.engine import Engine
from rota.runtime.in_process import InProcess
from rota.runtime.ledger import Ledger
from rota.strategies.base import find

RANKS = 2
ALONE = ("single", "single(microbatches=4)", "coshard(2)")
TOGETHER = (
    "data", "zero(stage=1)", "zero(stage=2)", "zero(stage=3)", "tensor", "tensor(sequence=True)",
    "pipeline(microbatches=4)", "pipeline(order='gpipe', microbatches=4)",
    "pipeline(order='interleaved', microbatches=4)",
)  # fmt: skip
QUICK = ("single", "data", "zero(stage=3)", "tensor", "pipeline(microbatches=4)")
WARM = 2
QUIET = 0.1
"""Of the machine."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with a batch."""

    model: torch.nn.Module
    batch: Any
    loss: Callable[[torch.nn.Module, Any], Any]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def graph(self) -> Graph:
        """Captured."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return capture(self.model, self.batch, self.loss)


def gpt() -> Subject:
    """Of the strategy benchmark."""
    model, rows = peers.make()
    return Subject(model=model, batch=rows, loss=peers.loss_of)


def bert() -> Subject:
    """The zoo's, larger; with dropout."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=768,
        max_position_embeddings=96,
    )
    tokens = torch.randint(3, 1000, (8, 96))
    return Subject(
        model=transformers.BertForMaskedLM(config).train(),
        batch={"input_ids": tokens, "labels": tokens.clone()},
        loss=lambda model, one: model(**one).loss,
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {"gpt": gpt, "bert": bert}


def main() -> None:
    """Calibrate, predict, measure, compare."""
    chosen = harness.options(__doc__)
    names = ["gpt"] if chosen.quick else list(SUBJECTS)
    wanted = QUICK if chosen.quick else (*ALONE, *TOGETHER)
    repeats = 5 if chosen.quick else 15
    torch.set_num_threads(1)
    predicted: dict[tuple[str, str], Simulation] = {}
    memory: dict[tuple[str, str], list[int]] = {}
    parts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            subject = SUBJECTS[name]()
            programs = compiled(subject.graph(), wanted)
            started_s = time.perf_counter()
            costs = calibrate(programs.values(), budget_s=60.0, cache=Path(folder) / "cache")
            assert costs.calibration is not None
            parts[f"{name}_calibration_s"] = round(time.perf_counter() - started_s)
            parts[f"{name}_measured"], parts[f"{name}_estimated"] = (
                costs.calibration.measured,
                costs.calibration.estimated,
            )
            for text, program in programs.items():
                predicted[(name, text)] = program.simulate(costs)
                memory[(name, text)] = measured_bytes(program, subject)
        result = str(Path(folder) / "result")
        mp.spawn(_rank, (str(Path(folder) / "store"), result, names, wanted, repeats), nprocs=RANKS)  # type: ignore[no-untyped-call]
        taken: dict[tuple[str, str], list[Taken]] = torch.load(result, weights_only=False)
    times = {key: _undisturbed(found) for key, found in taken.items()}
    others = [one.others for found in taken.values() for one in found]
    parts["steps_disturbed_by_others_percent"] = round(100 * sum(one >= QUIET for one in others) / len(others))
    report(predicted, memory, times, parts, chosen)


def report(predicted: Any, memory: Any, times: Any, parts: dict[str, int], chosen: Any) -> None:
    """The errors, and a table of all."""
    rows: dict[str, Any] = {}
    errors: dict[str, list[float]] = {"time": [], "least": [], "used": [], "memory": []}
    for key, taken in times.items():
        seconds = [one.seconds for one in taken]
        used_s, busy_s = statistics.median(one.used_s for one in taken), max(predicted[key].busy_s)
        simulation, bytes_of = predicted[key], memory[key]
        median_s, least_s = statistics.median(seconds), min(seconds)
        off = [abs(a - b) / b for a, b in zip(simulation.peak_bytes, bytes_of, strict=True) if b]
        errors["time"].append(abs(simulation.makespan_s - median_s) / median_s)
        errors["least"].append(abs(simulation.makespan_s - least_s) / least_s)
        errors["used"].append(abs(busy_s - used_s) / used_s)
        errors["memory"].append(max(off))
        rows[" ".join(key)] = {
            "predicted_s": round(simulation.makespan_s, 4),
            "measured_s": round(median_s, 4),
            "least_s": round(least_s, 4),
            "error": round(simulation.makespan_s / median_s - 1, 3),
            "predicted_busy_s": round(busy_s, 4),
            "used_s": round(used_s, 4),
            "memory_error": round(max(off), 3),
        }
    figures = {
        "time_error_median": statistics.median(errors["time"]),
        "time_error_max": max(errors["time"]),
        "memory_error_median": statistics.median(errors["memory"]),
        "memory_error_max": max(errors["memory"]),
        "predicted_best_vs_measured_best": max(_regret(predicted, times, name) for name in {n for n, _ in times}),
    }
    least = {f"time_error_median_of_{name}": statistics.median(errors[name]) for name in ("least", "used")}
    harness.finish("simulator", figures, {**parts, **least, **rows}, chosen)


def _regret(predicted: Any, times: Any, name: str) -> float:
    measured = {key: statistics.median(one.seconds for one in taken) for key, taken in times.items() if key[0] == name}
    best = min(measured, key=lambda key: predicted[key].makespan_s)
    return measured[best] / min(measured.values())


def compiled(graph: Graph, wanted: Sequence[str]) -> dict[str, Program]:
    """A program for each strategy that this model can have."""
    found = {}
    for text in wanted:
        try:
            found[text] = find(text)(graph, 1 if text in ALONE else RANKS).compile()
        except InputError as error:
            print(f"without {text}: {error}")
    return found


def measured_bytes(program: Program, subject: Subject) -> list[int]:
    """The peak of each device in one step, with all of them in this process."""
    ledger = Ledger()
    with ledger:
        InProcess(program, subject.state, ledger=ledger).execute(subject.batch)
    return [ledger.peak_bytes[device] for device in range(program.devices)]


def _rank(rank: int, store: str, result: str, names: list[str], wanted: tuple[str, ...], repeats: int) -> None:
    torch.set_num_threads(1)
    comm.connect(rank=rank, size=RANKS, store=dist.FileStore(store, RANKS))
    groups = comm.Groups()
    times: dict[tuple[str, str], list[Taken]] = {}
    for name in names:
        subject = SUBJECTS[name]()
        steps: dict[str, Callable[[], Any]] = {}
        for text, program in compiled(subject.graph(), wanted).items():
            steps[text] = _step(program, subject, rank, groups, alone=text in ALONE)
        for turn in range(WARM + repeats):
            for text, step in steps.items():
                taken = _timed(step if rank == 0 or text not in ALONE else None)
                if turn >= WARM:  # the first steps allocate
                    times.setdefault((name, text), []).append(taken)
    if rank == 0:
        torch.save(times, result)
    comm.disconnect()


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A real step."""

    seconds: float
    used_s: float
    """Of the processor, by the rank that used most: what others do on the machine hardly changes it."""
    others: float
    """How much of the machine others used meanwhile."""


def _timed(step: Callable[[], Any] | None) -> Taken:
    dist.barrier()
    busy_s, own_s, started_s = _machine_busy_s(), time.process_time(), time.perf_counter()
    if step is not None:
        step()
    dist.barrier()
    taken_s = time.perf_counter() - started_s
    used_s = torch.zeros(RANKS, dtype=torch.float64)
    used_s[dist.get_rank()] = time.process_time() - own_s
    busy_s = _machine_busy_s() - busy_s
    dist.all_reduce(used_s)
    others_s = max(0.0, busy_s - float(used_s.sum()))
    return Taken(seconds=taken_s, used_s=float(used_s.max()), others=others_s / (taken_s * (os.cpu_count() or 1)))


def _machine_busy_s() -> float:
    """Of all cores since the machine began; nothing where the kernel does not say."""
    try:
        user, nice, system, _, _, *others = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    return sum(map(int, (user, nice, system, *others[:3]))) / os.sysconf("SC_CLK_TCK")


def _undisturbed(taken: list[Taken]) -> list[Taken]:
    """The steps during which others used little of the machine, or the least disturbed third."""
    ordered = sorted(taken, key=lambda one: one.others)
    quiet = [one for one in ordered if one.others < QUIET]
    return quiet if len(quiet) >= 3 else ordered[: max(1, len(ordered) // 3)]


def _step(program: Program, subject: Subject, rank: int, groups: comm.Groups, *, alone: bool) -> Callable[[], Any]:
    engine: Any
    if alone:
        engine = InProcess(program, subject.state)
    else:
        engine = Engine(program, subject.state, rank=rank, groups=groups)
    engine.optimize(peers.optimizer)
    return lambda: engine.train(subject.batch)


if __name__ == "__main__":
    main()
