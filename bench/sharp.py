"""Eight GPTs of unequal size and length on two devices, each too large for them, shard by shard, against other ways.

python -m bench.sharp [--quick] [--json]

A device is a core with a budget for weights, gradients, moments and the work of a shard. Arms, each in processes of its
own, all of them training the same models for the same steps (AdamW, 1,024 tokens a step):

- sharp: a pool of both devices runs shard units of all models, longest remaining time first; each model has a
  process of its own, as with `strategy="pool"`. It begins when all of them are ready.
- model parallel: two ranks, each with half of a model, one model after another; no budget: all the memory they want.
- gpipe: torch.distributed.pipelining's GPipe on two ranks, one model after another, with 4 and with 8 micro-batches,
  the better of the two counts; no budget either. Its last stage has a head of its own instead of a tied one.
- static: whole models are assigned to devices, longest first; each device trains its models one after another, and
  spills as `rota.strategies.spill` does.

The bound is max(work / devices, longest model), the work being what the models take in memory on one core, one after
another and all of their steps, while the other core does the same: the two share the machine's memory. On the virtual
clock, twelve models with the measured units share eight devices; model parallelism and GPipe (8 micro-batches)
are taken at their best there: stages of equal length, and communication for nothing.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench import harness
from rota.memory.arbiter import Arbiter
from rota.memory.arena import Arena, make_arena
from rota.memory.disk import measured_rates
from rota.memory.pooled import Pooled, Seat
from rota.memory.pooling import Pooling
from rota.memory.sharp import Work, lower_bound_s, play
from rota.memory.turns import Turns
from rota.runtime import comm
from rota.runtime.limits import anonymous_bytes, prepare, return_freed_memory
from rota.runtime.one_device import choose_alone, room_of
from rota.runtime.training import Training
from rota.strategies import pool, spill
from rota.task import Data, Task
from rota.testing.models import GPT

VOCABULARY = 512
LENGTH = 128
DEVICES = 2
_PATIENCE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and how long it is trained."""

    name: str
    width: int
    depth: int
    steps: int
    rows: int = 8

    def batch(self, number: int) -> torch.Tensor:
        """Of a step."""
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, VOCABULARY, (self.rows, LENGTH + 1), generator=generator)

    def model(self) -> GPT:
        """Made anew."""
        torch.manual_seed(0)
        return GPT(vocabulary=VOCABULARY, context=LENGTH, width=self.width, depth=self.depth, heads=8)

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and two moments."""
        with torch.device("meta"):
            return 16 * sum(one.numel() for one in self.model().parameters())

    def task(self) -> Task:
        """For rota."""
        return Task(
            name=self.name,
            model=self.model,
            data=lambda: Data(train=(self.batch(number) for number in range(self.steps))),
            loss=loss_of,
            optimizer=optimizer_of,
            steps=self.steps,
            strategy=spill(),
        )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The fastest that PyTorch has."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Of the next token."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


SHAPES = [(512, 6, 8), (640, 5, 10), (768, 4, 8), (512, 8, 6), (640, 8, 6), (768, 6, 4), (512, 10, 6), (640, 6, 12)]
"""Width, depth, steps."""


def main() -> None:
    """Compare."""
    chosen = harness.options(__doc__)
    shapes = [(512, 3, 1), (512, 4, 1), (512, 3, 2)] if chosen.quick else SHAPES
    models = [
        Setting(name=f"gpt{number}-{width}x{depth}", width=width, depth=depth, steps=steps)
        for number, (width, depth, steps) in enumerate(shapes)
    ]
    budget_bytes = (160 if not chosen.quick else 112) * 2**20
    lengths: dict[str, float] = run_arm("alone", models, budget_bytes)["took_s"]
    works = [Work(name=name, units_s=(took_s,), steps=1) for name, took_s in lengths.items()]
    bound_s = lower_bound_s(works, DEVICES)
    found: dict[str, list[dict[str, Any]]] = {}
    arms = ["sharp", "model_parallel", "static"] + (["gpipe_4"] if chosen.quick else ["gpipe_4", "gpipe_8"])
    for _ in range(1 if chosen.quick else 2):
        for arm in arms:
            found.setdefault(arm, []).append(run_arm(arm, models, budget_bytes, lengths=lengths))
    took = {arm: statistics.median(one["makespan_s"] for one in runs) for arm, runs in found.items()}
    gpipe_s = min(took_s for arm, took_s in took.items() if arm.startswith("gpipe"))
    figures: dict[str, Any] = {
        "vs_model_parallel": took["model_parallel"] / took["sharp"],
        "vs_gpipe": gpipe_s / took["sharp"],
        "vs_static": took["static"] / took["sharp"],
        "of_bound": bound_s / took["sharp"],
    }
    figures |= simulated(models, found["sharp"][-1])
    details = {
        "makespans_s": took,
        "bound_s": bound_s,
        "static_of_bound": bound_s / took["static"],
        "state_over_budget": [round(one.state_bytes / budget_bytes, 1) for one in models],
        "peak_over_budget": found["sharp"][-1]["peak_over_budget"],
        "same_losses": all(
            one["losses"][name] == found["sharp"][0]["losses"][name]
            for arm in ("sharp", "static")
            for one in found[arm]
            for name in one["losses"]
        ),
        "runs": found,
    }
    harness.finish("sharp", figures, details, chosen)


def simulated(models: list[Setting], sharp: dict[str, Any]) -> dict[str, float]:
    """Twelve models on eight devices, with the units that were measured."""
    units = {name: tuple(seconds) for name, seconds in sharp["units_s"].items()}
    names = [one.name for one in models]
    longest = max(sum(units[name]) for name in names)
    works = [
        # About as long as each other, so that none of them dominates.
        Work(name=f"{number}", units_s=units[name], steps=max(1, round(40 * longest / sum(units[name]) + number)))
        for number, name in ((number, names[number % len(names)]) for number in range(12))
    ]
    loads_s = {f"{number}": sharp["load_s"][names[number % len(names)]] for number in range(12)}
    ours_s = play(works, 8, loads_s=loads_s)
    whole_s = sum(work.total_s for work in works)
    stages, parts = 8, 8
    return {
        "sim8_vs_model_parallel": whole_s / ours_s,
        "sim8_vs_gpipe": whole_s * (parts + stages - 1) / (parts * stages) / ours_s,
    }


# ---- arms ----


def run_arm(
    arm: str, models: list[Setting], budget_bytes: int, *, lengths: dict[str, float] | None = None
) -> dict[str, Any]:
    """An arm in a process of its own."""
    environment = dict(os.environ)
    if arm in ("sharp", "static"):  # as workers are started
        prepare(environment)
    with tempfile.TemporaryDirectory(dir=os.getcwd(), prefix=".bench-sharp-") as folder:
        told = {
            "arm": arm,
            "models": [asdict(one) for one in models],
            "budget_bytes": budget_bytes,
            "folder": folder,
            "lengths": lengths or {},
        }
        if arm == "alone":
            both = [one["took_s"] for one in _ended([_started({**told, "core": core}, environment) for core in (0, 1)])]
            return {"took_s": {one.name: statistics.mean(part[one.name] for part in both) for one in models}}
        if arm == "sharp":
            return _pool(told, models, environment)
        if arm == "static":
            shares = longest_first(models, lengths or {})
            rows = [
                _started({**told, "models": [asdict(one) for one in share], "core": core}, environment)
                for core, share in enumerate(shares)
            ]
            parts = _ended(rows)
            losses = {name: values for part in parts for name, values in part["losses"].items()}
            return {"makespan_s": max(part["makespan_s"] for part in parts), "losses": losses}
        return _ended([_started({**told, "rank": rank}, environment) for rank in range(DEVICES)])[0]


def longest_first(models: list[Setting], lengths: dict[str, float]) -> list[list[Setting]]:
    """Each to the device that has the least, the longest ones first."""
    shares: list[list[Setting]] = [[] for _ in range(DEVICES)]
    for one in sorted(models, key=lambda one: -lengths[one.name]):
        min(shares, key=lambda share: sum(lengths[other.name] for other in share)).append(one)
    return shares


def _pool(told: dict[str, Any], models: list[Setting], environment: dict[str, str]) -> dict[str, Any]:
    """A process for each model, and a thread here that lets them take turns."""
    pairs = {one.name: socket.socketpair() for one in models}
    budget_bytes = told["budget_bytes"]
    arbiter = Arbiter(
        {name: ours for name, (ours, _) in pairs.items()}, devices=DEVICES, memory_bytes=budget_bytes, wait=True
    )
    arenas = [make_arena(budget_bytes) for _ in range(DEVICES)]
    rows = [
        _started({**told, "models": [asdict(one)], "turns": pairs[one.name][1].fileno(), "arenas": arenas}, environment)
        for one in models
    ]
    for _, theirs in pairs.values():
        theirs.close()
    for arena in arenas:
        os.close(arena)
    parts = _ended(rows)
    arbiter.close()
    makespan_s = max(one["ended_s"] for one in parts) - min(one["begun_s"] for one in parts)
    return {
        "makespan_s": makespan_s,
        "losses": {one["name"]: one["losses"] for one in parts},
        "units_s": {one["name"]: one["units_s"] for one in parts},
        "load_s": {one["name"]: one["load_s"] for one in parts},
        "busy_share": sum(one["busy_s"] for one in parts) / (DEVICES * makespan_s),
        "peak_over_budget": arbiter.peak_bytes / budget_bytes,
    }


def _started(told: dict[str, Any], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.sharp", "--arm", json.dumps(told)],
        env=environment,
        pass_fds=(told["turns"], *told["arenas"]) if "turns" in told else (),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    found = []
    for process in processes:
        out, err = process.communicate(timeout=_PATIENCE_S)
        if process.returncode:
            for other in processes:
                other.kill()
            raise SystemExit(f"an arm ended with {process.returncode}:\n{err[-3000:]}")
        found.append(json.loads(out.splitlines()[-1]))
    return found


def arm_main(told: dict[str, Any]) -> dict[str, Any]:
    """What an arm's process does."""
    torch.set_num_threads(1)
    models = [Setting(**one) for one in told["models"]]
    arm, folder = told["arm"], Path(told["folder"])
    if arm == "alone":
        os.sched_setaffinity(0, {told["core"]})
        return {"took_s": {one.name: _alone_s(one) for one in models}}
    if arm == "sharp":
        return _sharp(models[0], told["budget_bytes"], folder / models[0].name, told["turns"], told["arenas"])
    if arm == "static":
        os.sched_setaffinity(0, {told["core"]})
        return _static(models, told["budget_bytes"], folder / str(told["core"]))
    return _pipelined(models, told["rank"], 1 if arm == "model_parallel" else int(arm.removeprefix("gpipe_")), folder)


def _alone_s(setting: Setting) -> float:
    model = setting.model()
    optimizer = optimizer_of(model)
    begun_s = time.perf_counter()
    for number in range(setting.steps):
        optimizer.zero_grad()
        loss_of(model, setting.batch(number)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return time.perf_counter() - begun_s


class _Timed(Turns):
    """Notes when units ran."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.first_s = 0.0
        self.busy_s = 0.0

    def wait_for_turn(self) -> int | None:
        """The first one is when it all begins."""
        following = super().wait_for_turn()
        self.first_s = self.first_s or time.monotonic()
        return following

    def ran(self, took_s: float) -> None:
        """One more unit."""
        self.busy_s += took_s
        super().ran(took_s)


def _sharp(setting: Setting, budget_bytes: int, folder: Path, connection: int, arenas: Sequence[int]) -> dict[str, Any]:
    """One model of a pool."""
    folder.mkdir(parents=True)
    turns = _Timed(socket.socket(fileno=connection))
    made: list[Pooling] = []

    def chosen(parts: Any, batch: Any) -> Pooling:
        cores = [(core,) for core in range(DEVICES)]
        seat = Seat(turns=turns, cores=cores, arenas=[Arena(handle) for handle in arenas])
        made.append(Pooling(parts, batch, seat=seat, total_batches=setting.steps))
        return made[0]

    training = _prepared(replace(setting.task(), strategy=pool()), budget_bytes, folder, chosen)
    usual = measured_rates(folder)
    losses = _steps(training, setting, made[0])
    ended_s = time.monotonic()
    (way,) = made[0]._ways.values()
    assert isinstance(way, Pooled)
    moved = statistics.mean(unit.moved_bytes for unit in way.units)
    found = {
        "name": setting.name,
        "losses": losses,
        "begun_s": turns.first_s,
        "ended_s": ended_s,
        "busy_s": turns.busy_s,
        "units_s": way.units_s,
        # What a unit brings, on average, at the pace at which the disk gave it while all of this ran.
        "load_s": moved * made[0]._tiers.rates(usual).read_byte_s,
    }
    made[0].close()
    return found


def _prepared(task: Task, budget_bytes: int, folder: Path, chosen: Any) -> Training:
    """A task before its first step; what comes before is not counted, and the budget is for what moves."""
    return_freed_memory(budget_bytes)
    room = room_of(task, device=torch.device("cpu"), folder=folder, memory_bytes=2**34)
    assert room is not None
    training = Training(task, device=torch.device("cpu"), choose=chosen, room=room)
    batch, _ = training.cursor.next()
    room.memory_bytes = budget_bytes + max(0, anonymous_bytes() - room.before_bytes - room.building.here_bytes)
    training._begin(batch)
    return training


def _steps(training: Training, setting: Setting, executor: Any) -> list[float]:
    losses = []
    for number in range(setting.steps):
        executor.zero_grad()
        losses.append(executor.backward(setting.batch(number), number=number)["loss"])
        executor.update()
    return losses


def _static(models: list[Setting], budget_bytes: int, folder: Path) -> dict[str, Any]:
    losses: dict[str, list[float]] = {}
    took_s = 0.0
    for one in models:
        place = folder / one.name
        place.mkdir(parents=True)
        made: list[Any] = []

        def chosen(parts: Any, batch: Any, made: list[Any] = made) -> Any:
            made.append(choose_alone(parts, batch, notice=lambda text: None))
            return made[0]

        training = _prepared(one.task(), budget_bytes, place, chosen)
        begun_s = time.perf_counter()
        losses[one.name] = _steps(training, one, made[0])
        took_s += time.perf_counter() - begun_s
        made[0].close()
    return {"makespan_s": took_s, "losses": losses}


class _First(nn.Module):
    def __init__(self, model: GPT, blocks: int) -> None:
        super().__init__()
        self.tokens, self.positions, self.blocks = model.tokens, model.positions, model.blocks[:blocks]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class _Last(nn.Module):
    def __init__(self, model: GPT, blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm = model.blocks[blocks:], model.norm
        self.head = nn.Linear(model.head.in_features, model.head.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _pipelined(models: list[Setting], rank: int, parts: int, folder: Path) -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    os.sched_setaffinity(0, {rank})
    comm.connect(rank=rank, size=DEVICES, store=dist.FileStore(str(folder / "store"), DEVICES))  # type: ignore[attr-defined]

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    took_s = 0.0
    for one in models:
        model = one.model()
        half = (one.depth + 1) // 2  # the last stage has the head
        part: nn.Module = _First(model, half) if rank == 0 else _Last(model, half)
        stage = PipelineStage(part, rank, DEVICES, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, parts, loss_fn=loss)
        optimizer = optimizer_of(part)
        dist.barrier()
        begun_s = time.perf_counter()
        for number in range(one.steps):
            optimizer.zero_grad()
            rows = one.batch(number)
            if rank == 0:
                schedule.step(rows[:, :-1].contiguous())
            else:
                schedule.step(target=rows[:, 1:].contiguous(), losses=[])
            optimizer.step()
        dist.barrier()
        took_s += time.perf_counter() - begun_s
    comm.disconnect()
    return {"makespan_s": took_s}


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--arm":
        print(json.dumps(arm_main(json.loads(sys.argv[2]))))
    else:
        main()
