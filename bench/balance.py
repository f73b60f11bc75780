"""Tensor, data and pipeline parallelism on two ranks of which one turns slow: what moving work wins back.

python -m bench.balance [--quick] [--json] [--keep]

Stragglers are real: busy processes on one rank's core, started and stopped while the task trains. What counts is the
measured slowdown of that rank's own computation. Reach is the time saved per step over the time that could be saved
at best: the static step x (1 - N / (chi_max x sum(1 / chi_i))).
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

import rota
from bench import harness
from rota.balance.decide import Decision, Facts, Policy, Seen, Standing, after_step
from rota.balance.virtual import World, play
from rota.graph.graph import Graph
from rota.plan.box import weighted_widths
from rota.plan.plan import Plan
from rota.runtime.choose import balanced
from rota.runtime.gang import Gang
from rota.runtime.planned import Planned
from rota.runtime.training import Training
from rota.strategies.base import find
from rota.strategies.mesh import with_shares
from rota.testing.models import GPT

RANKS = 2
SLOW = 1
"""The rank whose core has others on it."""
CHIS = {"2": 1, "4": 3}
"""About how slow -> busy processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How long things are measured."""

    static: int = 10
    active: int = 30
    after: int = 25
    quiet: int = 300
    spike: int = 6
    stays: int = 50


QUICK = Size(static=4, active=16, after=8, quiet=40, spike=4, stays=12)


@dataclasses.dataclass
class Switched:
    """The policy of tasks, which can be turned on and off; it sees every step."""

    active: bool = False
    mode: str = "migrate"
    """As tasks say it."""
    rows: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    decided: list[tuple[int, Decision]] = dataclasses.field(default_factory=list)
    standing: Standing | None = None

    def __call__(self, standing: Standing, seen: Seen, facts: Facts) -> tuple[Standing, Decision]:
        """As `after_step`, or nothing."""
        self.rows.append(seen.times)
        self.standing = standing
        if not self.active:
            return dataclasses.replace(standing, since=100, rows=(), slow_steps=0), None
        standing, decision = after_step(standing, seen, facts)
        if decision is not None:
            self.decided.append((seen.step, decision))
        self.standing = standing
        return standing, decision


class PerStep:
    """The paper's migration, done exactly: devices own even shares, and lend what the slow one has at each step."""

    def __init__(self, shares: tuple[float, ...]) -> None:
        self._shares = shares

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """Computed in uneven shares, stored in even ones; what travels is derived."""
        home = find("tensor")(graph, devices).compile()
        plan = with_shares(find("tensor"), self._shares)(graph, devices)  # type: ignore[arg-type]
        for name, layout in home.stored.items():
            plan.store(name, layout)
        return plan


def task(
    strategy: Any, policy: Policy, *, width: int, depth: int, batch: int, context: int, steps: int, lr: float
) -> rota.Task:
    """A GPT on sequences of which each number follows from the one before, but for one bit."""
    rows = sequences(batch * 64, context + 1)
    return rota.Task(
        name="balance",
        model=lambda: GPT(vocabulary=256, context=context, width=width, depth=depth, heads=16, dropout=0.0),
        data=lambda: rota.Data(train=rows[batch * 4 :], valid=rows[: batch * 4], batch_size=batch),
        loss=lambda model, one: F.cross_entropy(model(one[:, :-1]).flatten(0, 1), one[:, 1:].flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        steps=steps,
        strategy=strategy,
        balance=policy,
    )


BUSY = """
import os
os.sched_setaffinity(0, {{{core}}})
while os.getppid() == {parent}:
    sum(range(9999))
"""


def sequences(count: int, length: int) -> torch.Tensor:
    """Rows of numbers below 256."""
    draw = torch.Generator().manual_seed(1)
    columns = [torch.randint(0, 256, (count,), generator=draw)]
    for _ in range(length - 1):
        columns.append((5 * columns[-1] + 17 + torch.randint(0, 2, (count,), generator=draw)) % 256)
    return torch.stack(columns, 1)


class Straggler:
    """Busy processes on this rank's core."""

    def __init__(self) -> None:
        self._busy: list[subprocess.Popen[bytes]] = []

    def start(self, count: int) -> None:
        """So many."""
        core = next(iter(os.sched_getaffinity(0)))
        code = (
            f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}:\n  sum(range(9999))"
        )
        self._busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]

    def stop(self) -> None:
        """All of them."""
        for one in self._busy:
            one.kill()
        for one in self._busy:
            one.wait()
        self._busy = []


class Run:
    """One task on this rank."""

    def __init__(
        self, gang: Gang, strategy: Any, *, shape: dict[str, int], mode: str = "migrate", lr: float = 1e-4
    ) -> None:
        self.gang = gang
        self.policy = Switched(mode=mode)
        self.straggler = Straggler()
        self.told: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._made: list[Planned] = []
        wanted = task(strategy, self.policy, steps=100_000, lr=lr, **shape)

        def choose(parts: Any, batch: Any) -> Planned:
            found = find(strategy) if isinstance(strategy, str) else strategy
            made = Planned(
                parts,
                batch,
                gang=gang,
                strategy=_measured(found, parts, batch, gang),
                total_steps=100_000,
                tell=lambda **what: self.told.append(what),
            )
            self._made.append(made)
            return made

        self.training = Training(wanted, device=torch.device("cpu"), choose=choose)

    def close(self) -> None:
        """Prepare no move any more."""
        for one in self._made:
            one.close()

    def steps(self, count: int) -> list[float]:
        """Take so many; the seconds of each."""
        found = []
        for _ in range(count):
            began_s = time.perf_counter()
            means = self.training.train_batch()
            assert means is not None
            self.losses.append(means["train/loss"])
            found.append(time.perf_counter() - began_s)
        self.seconds += found
        return found

    @contextmanager
    def slow(self, busy: int) -> Iterator[None]:
        """With busy processes on the slow rank's core."""
        self.gang.agree(True)
        if self.gang.rank == SLOW:
            self.straggler.start(busy)
        try:
            yield
        finally:
            if self.gang.rank == SLOW:
                self.straggler.stop()
            self.gang.agree(True)


def _measured(strategy: Any, parts: Any, batch: Any, gang: Gang) -> Any:
    from rota.runtime.choose import graph_of

    return balanced(strategy, graph_of(parts, batch), gang, lambda text: None)


def compute(rows: list[tuple[float, ...]]) -> list[float]:
    """What each rank computes in a step."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def scenario(gang: Gang, strategy: Any, busy: int, *, size: Size, shape: dict[str, int], mode: str) -> dict[str, Any]:
    """Even and fast; slow and static; fast; slow and balanced; fast again."""
    with closing(Run(gang, strategy, shape=shape, mode=mode)) as run:
        run.steps(4)
        even_s = run.steps(size.static)
        before = compute(run.policy.rows[-size.static :])
        with run.slow(busy):
            run.steps(2)
            static_s = run.steps(size.static)
            during = compute(run.policy.rows[-size.static :])
        run.steps(3)
        run.policy.active = True
        run.steps(3)
        first = len(run.losses)
        with run.slow(busy):
            active_s = run.steps(size.active)
            late_s = statistics.median(active_s[-size.static :])
            reached = run.policy.standing
        changes = [one for one in run.told if one["step"] >= first]
        end = first + size.active
        after_s = run.steps(size.after)
        chi = [slow / fast for slow, fast in zip(during, before, strict=True)]
        static = statistics.median(static_s)
        best = static * RANKS / (max(chi) * sum(1 / one for one in chi))
        even_again = run.policy.standing
        assert reached is not None
        assert even_again is not None
        return {
            "chi": max(chi),
            "even_s": statistics.median(even_s),
            "static_s": static,
            "best_s": best,
            "balanced_s": late_s,
            "reach": (static - late_s) / (static - best),
            "reaction_steps": changes[0]["step"] - first if changes else None,
            "pause_s": max((one["pause_s"] for one in changes), default=0.0),
            "pause_over_step": max((one["pause_s"] for one in changes), default=0.0) / static,
            "shares": reached.shares,
            "left_out": reached.left_out,
            "shares_after": even_again.shares,
            "back_after_steps": next((one["step"] - end for one in run.told if one["step"] > end), None),
            "after_s": statistics.median(after_s[-8:]),
            "losses": run.losses,
            "moves": len(run.told),
        }


def per_step(gang: Gang, shares: tuple[float, ...], busy: int, *, size: Size, shape: dict[str, int]) -> float:
    """What a step takes if the slow rank's work is lent out anew at each."""
    with closing(Run(gang, PerStep(shares), shape=shape)) as run:
        run.steps(3)
        with run.slow(busy):
            run.steps(2)
            return statistics.median(run.steps(size.static))


def mixed(gang: Gang, *, size: Size, shape: dict[str, int], mode: str) -> dict[str, Any]:
    """Three short spikes and one straggler that stays: what all steps take, and the loss at the end."""
    with closing(Run(gang, "tensor", shape=shape, mode=mode, lr=1e-3)) as run:
        run.steps(12)
        run.policy.active = True
        began_s = time.perf_counter()
        for _ in range(3):
            run.steps(8)
            with run.slow(2):
                run.steps(size.spike)
        run.steps(8)
        with run.slow(2):
            run.steps(size.stays)
        run.steps(10)
        spent_s = time.perf_counter() - began_s
        found = run.training.validate()
        assert found is not None
        told = [(one["step"], one["why"]) for one in run.told]
        return {"spent_s": spent_s, "loss": found["valid/loss"], "told": told}


def quiet(gang: Gang, *, steps: int, shape: dict[str, int]) -> dict[str, Any]:
    """Nothing is slow: moves are false."""
    with closing(Run(gang, "tensor", shape=shape)) as run:
        run.steps(3)
        run.policy.active = True
        run.steps(steps)
        times = compute(run.policy.rows[3:])
        return {"moves": len(run.policy.decided), "chi": max(times) / min(times), "decided": str(run.policy.decided)}


def undisturbed(gang: Gang, *, steps: int, shape: dict[str, int]) -> list[float]:
    """The losses of the same task without anything."""
    with closing(Run(gang, "tensor", shape=shape)) as run:
        run.steps(steps)
        return run.losses


def eight_ranks() -> float:
    """The paper's 8/6/4/2/1/1/1/1 on the virtual clock: ViT of width 2048 with 32 heads, 24 layers."""
    chi = (8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    fixed = 0.05 / 8

    def rounded(shares: tuple[float, ...]) -> tuple[float, ...]:
        heads = weighted_widths(32, shares)
        columns = weighted_widths(8192, shares, grain=16)
        return tuple(h / 32 / 3 + c / 8192 * 2 / 3 for h, c in zip(heads, columns, strict=True))

    world = World(slowness=lambda step: chi if step >= 10 else (1.0,) * 8, fixed=fixed, noise=0.02, rounded=rounded)
    steps = play(world, Facts(mode="migrate", ranks=8, least=1 / 512), steps=200)
    static = 8 * (fixed + 1 / 8)
    best = static * 8 / (8 * sum(1 / one for one in chi))
    return (static - statistics.median(step.step_s for step in steps[100:])) / (static - best)


def _rank(rank: int, store: str, result: str, quick: bool) -> None:
    os.sched_setaffinity(0, {rank})
    torch.set_num_threads(1)
    gang = Gang(rank=rank, size=RANKS, store=Path(store))
    gang.meet(timeout_s=600)
    size = QUICK if quick else Size()
    shape = QUICK_SHAPE if quick else SHAPE
    found: dict[str, Any] = {}
    for name, busy in CHIS.items():
        found[f"tensor_{name}"] = one = scenario(gang, "tensor", busy, size=size, shape=shape, mode="migrate")
        found[f"per_step_{name}_s"] = per_step(gang, one["shares"], busy, size=size, shape=shape)
    calm = undisturbed(gang, steps=len(found["tensor_2"]["losses"]), shape=shape)
    found["loss_deviation"] = max(
        abs(a - b) / max(1.0, abs(b)) for a, b in zip(found["tensor_2"]["losses"], calm, strict=True)
    )
    found["resize"] = scenario(gang, "tensor", 1, size=size, shape=shape, mode="resize")
    found["semi"] = scenario(gang, "tensor", 1, size=size, shape=shape, mode="semi")
    found["data"] = scenario(gang, "data", 1, size=size, shape=shape, mode="migrate")
    # Layers are what moves: there must be some, and micro-batches enough that stages do not wait for each other.
    deep = {**shape, "width": 128 if quick else 384, "depth": 4 if quick else 6}
    found["pipeline"] = scenario(gang, "pipeline(2, microbatches=8)", 1, size=size, shape=deep, mode="migrate")
    middle = {**shape, "width": 128 if quick else 384, "depth": 1 if quick else 2}
    for mode in ("migrate", "resize", "semi"):
        found[f"mixed_{mode}"] = mixed(gang, size=size, shape=middle, mode=mode)
    found["quiet"] = quiet(gang, steps=size.quiet, shape={**shape, "depth": 1, "batch": 8})
    if gang.leads:
        Path(result).write_text(json.dumps(found))
    gang.part()


SHAPE = {"width": 512, "depth": 3, "batch": 8, "context": 128}
QUICK_SHAPE = {"width": 256, "depth": 1, "batch": 8, "context": 64}


def main() -> None:
    """Both ranks, all arms."""
    chosen = harness.options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        mp.spawn(_rank, (str(place / "store"), str(place / "result"), chosen.quick), nprocs=RANKS)  # type: ignore[no-untyped-call]
        found = json.loads((place / "result").read_text())
    arms = [(name, found[f"tensor_{name}"]) for name in CHIS]

    def lent(name: str, one: dict[str, Any]) -> float:
        return float((one["static_s"] - found[f"per_step_{name}_s"]) / (one["static_s"] - one["best_s"]))

    alone_s = min(found["mixed_migrate"]["spent_s"], found["mixed_resize"]["spent_s"])
    exact = found["mixed_migrate"]["loss"]
    reactions = [one["reaction_steps"] for _, one in arms]
    figures = {
        "chi": [one["chi"] for _, one in arms],
        "static_slowdown": [one["static_s"] / one["even_s"] for _, one in arms],
        "migrate_reach": [one["reach"] for _, one in arms],
        "per_step_reach": [lent(*arm) for arm in arms],
        "resize_reach": found["resize"]["reach"],
        "semi_reach": found["semi"]["reach"],
        "data_reach": found["data"]["reach"],
        "pipeline_reach": found["pipeline"]["reach"],
        "sim8_reach": eight_ranks(),
        "reaction_steps": "not each straggler was answered" if None in reactions else max(reactions),
        "pause_over_step": max(one["pause_over_step"] for _, one in arms),
        "loss_deviation": found["loss_deviation"],
        "false_moves": found["quiet"]["moves"],
        "mixed_semi_over_best_alone": found["mixed_semi"]["spent_s"] / alone_s,
        "mixed_loss_added": {mode: found[f"mixed_{mode}"]["loss"] - exact for mode in ("resize", "semi")},
    }
    details = {
        name: {key: value for key, value in one.items() if key != "losses"} if isinstance(one, dict) else one
        for name, one in found.items()
    }
    harness.finish("balance", figures, details, chosen)


if __name__ == "__main__":
    main()
