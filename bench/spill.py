"""A model whose training state is eight times its memory, against the same training with all the memory it wants.

python -m bench.spill [--quick] [--json]

Every arm is a process of its own: the same model, batches, optimizer and threads. What it holds is measured by what
the system says of the process, above what it held before the model was made. The page cache is passed by.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from bench import harness
from rota.graph.capture import capture
from rota.memory.building import Building
from rota.memory.residency import Rates, plan_residency
from rota.memory.slab import Budget
from rota.memory.spilled import Spilled, Tiers
from rota.memory.steps import Training, groups_of, step_of
from rota.memory.store import Store
from rota.plan.costs import Costs, call_cost
from rota.runtime.footprint import Footprints
from rota.strategies.spill import Spill
from rota.testing.models import GPT

OVER = 8
VOCABULARY = 512


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained."""

    width: int
    depth: int
    rows: int
    length: int
    steps: int

    def model(self) -> GPT:
        """Made anew."""
        torch.manual_seed(0)
        return GPT(vocabulary=VOCABULARY, context=self.length, width=self.width, depth=self.depth, heads=8)

    def batch(self, number: int) -> torch.Tensor:
        """Of a step."""
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, VOCABULARY, (self.rows, self.length + 1), generator=generator)

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and two moments."""
        with torch.device("meta"):
            return 16 * sum(one.numel() for one in self.model().parameters())


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Of the next token."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def main() -> None:
    """Compare."""
    chosen = harness.options(__doc__)
    setting = Setting(width=768, depth=12, rows=8, length=128, steps=6)
    if chosen.quick:
        setting = Setting(width=256, depth=8, rows=8, length=128, steps=5)
    budget = setting.state_bytes // OVER
    arms = {name: _run(name, setting, budget) for name in ("memory", "spill", "recompute")}
    steps = {name: statistics.median(arm["steps_s"][1:]) for name, arm in arms.items()}
    figures = {
        "state_over_budget": setting.state_bytes / budget,
        "throughput_vs_memory": steps["memory"] / steps["spill"],
        "peak_over_budget": arms["spill"]["peak_bytes"] / budget,
        "bit_equal": arms["memory"]["losses"] == arms["spill"]["losses"] == arms["recompute"]["losses"],
        "recompute_only": steps["memory"] / steps["recompute"],
    }
    harness.finish("spill", figures, {"budget_bytes": budget, "arms": arms}, chosen)


def _run(name: str, setting: Setting, budget: int) -> dict[str, Any]:
    context = mp.get_context("spawn")
    queue: Any = context.Queue()
    process = context.Process(target=_arm, args=(name, setting, budget, queue))
    process.start()
    found: dict[str, Any] = queue.get(timeout=900)
    process.join()
    return found


def _arm(name: str, setting: Setting, budget: int, queue: Any) -> None:
    torch.set_num_threads(2)
    warm = replace(setting, width=64, depth=1, rows=1)
    torch.optim.AdamW(warm.model().parameters(), fused=True)
    capture(warm.model(), warm.batch(0), loss_of)  # what PyTorch imports for it is nobody's
    gc.collect()
    with _Watch() as watch, tempfile.TemporaryDirectory() as folder:
        train = _in_memory(setting) if name == "memory" else _spilled(name, setting, budget, Path(folder))
        found: dict[str, Any] = {"losses": [], "steps_s": []}
        for number in range(setting.steps):
            batch = setting.batch(number)
            began_s = time.perf_counter()
            found["losses"].append(train(batch, number))
            found["steps_s"].append(time.perf_counter() - began_s)
    queue.put({**found, "peak_bytes": watch.peak_bytes})


def _in_memory(setting: Setting) -> Any:
    model = setting.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def train(batch: torch.Tensor, number: int) -> float:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return train


def _spilled(name: str, setting: Setting, budget: int, folder: Path) -> Any:
    with Building(folder / "making", budget_bytes=budget // 4) as building:
        model = setting.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    graph = capture(model, setting.batch(0), loss_of)
    strategy = Spill(shards=4 * setting.depth, activations="recompute" if name == "recompute" else "spill")
    program = strategy(graph, 1).compile()
    training = Training(activations_move=name == "spill")
    costs = Costs()

    def seconds(segment: Any) -> tuple[float, float]:
        found = [call_cost(program.refined, segment, call, costs) for call in segment.calls]
        return sum(one.forward_s for one in found), sum(one.backward_s for one in found)

    step = step_of(program, groups_of(program), Footprints(program.refined), training, seconds)
    rates = Rates(read_byte_s=1 / 1.2e9, write_byte_s=1 / 1.0e9)
    residency, _ = plan_residency(step.stages, step.items, budget_bytes=budget, rates=rates)
    run = Spilled(
        program,
        dict(model.named_parameters()),
        dict(model.named_buffers()),
        optimizer,
        step=step,
        residency=residency,
        tiers=Tiers(Store(folder / "store"), Budget(budget)),
        training=training,
        release=building.release,
    )
    building.close()
    return lambda batch, number: run.train([batch], number=number)[0]["loss"].item()


class _Watch:
    """The most memory that this process held, above what it held at the start."""

    def __enter__(self) -> _Watch:
        self._process = psutil.Process()
        self._start_bytes = self.peak_bytes = self._process.memory_info().rss
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak_bytes -= self._start_bytes

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)


if __name__ == "__main__":
    main()
