"""One arm of bench.spill, in a process of its own: trains a GPT in one way, some steps whenever it is asked to.

Each line of its input is a number of steps; it answers with what they took, as JSON, and at the end with all the rest.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rota.memory import arrange as arranging
from rota.memory.residency import Forecast, Residency, Write, plan_residency
from rota.memory.spilling import Spilling
from rota.runtime.executor import KeepsItself
from rota.runtime.limits import anonymous_bytes, return_freed_memory
from rota.runtime.one_device import choose_alone, room_of
from rota.runtime.training import Training
from rota.strategies import spill
from rota.task import Data, Task
from rota.testing.models import GPT
from rota.threads import OwnedThread, safe_point

VOCABULARY = 512
_GROUPS = Path("/sys/fs/cgroup/memory")
_SMALL = 2**14
_ROOM = 1.1
"""The system ends an arm that takes more than this of its memory."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how."""

    arm: str
    width: int
    depth: int
    rows: int
    length: int
    steps: int
    memory_bytes: int = 0
    folder: str = "."
    lr: float = 1e-3

    def model(self) -> GPT:
        """Made anew."""
        return GPT(vocabulary=VOCABULARY, context=self.length, width=self.width, depth=self.depth, heads=8)

    def batch(self, number: int) -> torch.Tensor:
        """Of a step: the same few rows over and over, so that the loss falls."""
        generator = torch.Generator().manual_seed(number % 4)
        return torch.randint(0, VOCABULARY, (self.rows, self.length + 1), generator=generator)

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and two moments."""
        with torch.device("meta"):
            return 16 * sum(one.numel() for one in self.model().parameters())

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Of all arms."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, fused=True)

    def task(self) -> Task:
        """For rota."""
        return Task(
            name="gpt",
            model=self.model,
            data=lambda: Data(train=(self.batch(number) for number in range(self.steps))),
            loss=loss_of,
            optimizer=self.optimizer,
            steps=self.steps,
            strategy=spill(activations="recompute") if self.arm == "recompute_only" else spill(),
        )


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Of the next token."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


# ---- the arms ----

Step = Callable[[torch.Tensor], float]


def in_memory(setting: Setting) -> Step:
    """Plain PyTorch with all the memory it wants."""
    torch.manual_seed(0)
    model = setting.model()
    optimizer = setting.optimizer(model)

    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def mapped(setting: Setting) -> Step:
    """Plain PyTorch on tensors that are files, activations and all, which the system moves as it sees fit."""
    torch.manual_seed(0)
    folder = Path(setting.folder)
    numbers = itertools.count()

    def empty(shape: torch.Size) -> torch.Tensor:
        path = str(folder / f"tensor-{next(numbers)}")
        return torch.from_file(path, shared=True, size=shape.numel(), dtype=torch.float32).view(shape)

    return_freed_memory(setting.memory_bytes)
    with torch.device("meta"):
        model = setting.model()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.device.type == "meta":
                setattr(module, name, torch.nn.Parameter(empty(parameter.shape)))
    model.head.weight = model.tokens.weight
    for parameter in model.parameters():  # values do not matter for how long it takes
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = setting.optimizer(model)
    for parameter in model.parameters():
        parameter.grad = empty(parameter.shape)
        moments = {"exp_avg": empty(parameter.shape), "exp_avg_sq": empty(parameter.shape)}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    lasting = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() < _SMALL or tensor.untyped_storage().data_ptr() in lasting:
            return tensor
        path = folder / "activation"
        made = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        path.unlink()  # it is gone when nobody has it any more
        return made.copy_(tensor.detach())

    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad(set_to_none=False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def spilled(setting: Setting) -> tuple[Step, Training, list[Spilling]]:
    """As rota runs it."""
    task = setting.task()
    device = torch.device("cpu")
    made: list[Any] = []

    def chosen(parts: Any, batch: Any) -> Any:
        made.append(choose_alone(parts, batch, notice=lambda text: None))
        return made[0]

    return_freed_memory(setting.memory_bytes)
    room = room_of(task, device=device, folder=Path(setting.folder), memory_bytes=setting.memory_bytes)
    training = Training(task, device=device, choose=chosen, room=room)

    def step(batch: torch.Tensor) -> float:
        means = training.train_batch()
        assert means is not None
        return means["train/loss"]

    return step, training, made


def without_prefetch(residency: Residency) -> Residency:
    """What is needed comes when it is needed."""
    return replace(residency, loads=tuple(replace(load, begin=load.stage) for load in residency.loads))


def without_clean_tracking(residency: Residency) -> Residency:
    """Whatever leaves is written."""
    dropped = tuple(
        Write(item=item, stage=position, by=position + 1)
        for position, items in enumerate(residency.drops)
        for item in sorted(items)
    )
    return replace(residency, writes=residency.writes + dropped, drops=tuple(frozenset() for _ in residency.drops))


def _changed(change: Callable[[Residency], Residency]) -> Callable[..., tuple[Residency, Forecast]]:
    def planned(*args: Any, **kwargs: Any) -> tuple[Residency, Forecast]:
        residency, forecast = plan_residency(*args, **kwargs)
        return change(residency), forecast

    return planned


CHANGES = {"no_prefetch": without_prefetch, "no_clean_tracking": without_clean_tracking}


# ---- memory ----


class Watch:
    """The most memory that this process took while it was looked at, above what it took at the start, without files."""

    def __init__(self) -> None:
        self._start_bytes = anonymous_bytes()
        self._most_bytes = self._start_bytes
        self._on = threading.Event()
        self._thread = OwnedThread(self._look, name="watch", wake=self._on.set)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._thread.end()

    @property
    def peak_bytes(self) -> int:
        """Above the start."""
        return self._most_bytes - self._start_bytes

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Only in one's turn: looking takes time, too."""
        self._on.set()
        try:
            yield
        finally:
            self._on.clear()

    def _look(self) -> None:
        while self._on.wait():
            safe_point()
            with open("/proc/self/status") as file:
                taken = next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))
            self._most_bytes = max(self._most_bytes, taken)
            time.sleep(0.01)


@contextlib.contextmanager
def confined(memory_bytes: int) -> Iterator[bool]:
    """A group of which the system takes care that it stays within its memory, page cache and all."""
    group = _GROUPS / f"rota-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(memory_bytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        (_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            group.rmdir()


def settle(executors: list[Spilling]) -> None:
    """Wait for what still moves: nothing of an arm goes on in the turn of another."""
    for executor in executors:
        tiers = executor._tiers
        for future in (*(future for future, _ in tiers._coming.values()), *tiers._leaving.values()):
            future.result()


def run(setting: Setting, asked: Iterator[int], answer: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train as many steps as is asked for, each time; what is known at the end."""
    torch.set_num_threads(int(os.environ.get("ROTA_BENCH_THREADS", "2")))
    warm = replace(setting, width=64, depth=1, rows=1, steps=1, memory_bytes=2**30, arm="spill")
    if setting.arm not in ("memory", "mapped"):  # what PyTorch imports is nobody's memory
        warm_step, _, made = spilled(warm)
        warm_step(warm.batch(0))
        made[0].close()
        if setting.arm in CHANGES:
            arranging.plan_residency = _changed(CHANGES[setting.arm])
    else:
        in_memory(warm)(warm.batch(0))
    gc.collect()
    limited = setting.arm != "memory"
    keeper: Any = confined(int(_ROOM * setting.memory_bytes)) if limited else contextlib.nullcontext(False)
    executors: list[Any] = []
    began_s = time.perf_counter()
    with keeper as kept, contextlib.closing(Watch()) as watch:
        with watch.looking():
            if setting.arm == "memory":
                step = in_memory(setting)
            elif setting.arm == "mapped":
                step = mapped(setting)
            else:
                step, _, executors = spilled(setting)
        start_s = time.perf_counter() - began_s
        numbers = itertools.count()
        for count in asked:
            batches = [setting.batch(next(numbers)) for _ in range(count)]
            with watch.looking():
                turn_began_s = time.perf_counter()
                losses = [step(batch) for batch in batches]
                settle(executors)
                answer({"losses": losses, "step_s": (time.perf_counter() - turn_began_s) / count})
        found: dict[str, Any] = {"start_s": start_s, "peak_bytes": watch.peak_bytes, "confined": kept}
    for executor in executors:
        way = executor._active or next(iter(executor._ways.values()))
        read, written = way.residency.moved_bytes
        found |= {"read_bytes": read, "written_bytes": written, "shards": len(way.program.segments)}
        found["recomputed"] = sum(one.recompute for one in way.program.segments)
        if isinstance(executor, KeepsItself):
            executor.close()
    return found


if __name__ == "__main__":
    given = Setting(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        tell = functools.partial(print, flush=True)
        counts = (int(line) for line in sys.stdin)
        tell(json.dumps(run(replace(given, folder=place), counts, lambda turn: tell(json.dumps(turn)))))
