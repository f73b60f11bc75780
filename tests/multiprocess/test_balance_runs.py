"""Work that moves between devices while a task trains changes nothing of what is trained, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rota
from rota.cli.sweep_file import load_source
from rota.execute.record import RunRecord
from rota.store.journal import read_events
from rota.testing import plain

SWEEP = """
import dataclasses, random
import torch
import torch.nn.functional as F
import rota
from rota.balance.decide import Migrate
from rota.testing.models import GPT

ROWS = torch.randint(0, 32, (64, 17), generator=torch.Generator().manual_seed(1))


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def restless(every, seed):
    def policy(standing, seen, facts):
        draw = random.Random(seed * 1000 + seen.step)
        if standing.under_way is None and seen.step % every == every // 2:
            raw = [draw.uniform(0.1, 1) for _ in range(facts.ranks)]
            shares = tuple(one / sum(raw) for one in raw)
            return dataclasses.replace(standing, under_way=shares), Migrate(shares=shares, why="a test")
        return standing, None

    return policy


def task(name, strategy, *, steps, every, precision="float64", balance=None, **other):
    return rota.Task(
        name=name,
        model=lambda: GPT(vocabulary=32, context=16, width=48, depth=2, heads=6, dropout=0.0),
        data=lambda: rota.Data(train=ROWS[:57], valid=ROWS[57:], batch_size=8),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=30),
        steps=steps, valid_every=steps // 3, clip_norm=0.5, precision=precision, strategy=strategy,
        balance=balance or restless(every, len(name)), **other,
    )


sweep = rota.Sweep(tasks=[TASKS])
"""


def _text(tasks: str) -> str:
    return SWEEP.replace("TASKS", tasks)


def _moves(run: Path, task: str) -> Any:
    return RunRecord.replay(read_events(run / "journal.db")).tasks[task].balance


def _assert_plain(file: Path, run: Path, *, within: float = 1e-10) -> None:
    result = rota.open_run(run)
    assert {task.state for task in result.tasks} == {"finished"}, [task.reason for task in result.tasks]
    expected = {task.name: plain.train(task) for task in load_source(str(file)).sweep}
    for task in result.tasks:
        found = load_file(task.model_path)
        for name, value in expected[task.name].model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=within, atol=within, msg=f"{task.name}: {name}")
        for ours, theirs in zip(result.history(task), expected[task.name].history, strict=True):
            for key, value in theirs.items():
                assert abs(ours[key] - value) < within * max(1.0, abs(value)), (task.name, key, ours, theirs)


@pytest.mark.timeout(300)
def test_moves_at_random_moments_train_what_plain_pytorch_trains(cli: Any, sweep_file: Any, tmp_path: Path) -> None:
    file = sweep_file(
        text=_text(
            """
    task("tensor", "tensor", steps=300, every=30),
    task("data", "data", steps=45, every=10, accumulate=2),
    task("pipeline", "pipeline(2, microbatches=4)", steps=45, every=15),
    task("zero", "zero", steps=45, every=10),
    """
        )
    )
    run = tmp_path / "run"
    done = cli.run("run", file, "--devices", "2", "--out", run, timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout[-3000:]
    _assert_plain(file, run)
    for task, least in (("tensor", 3), ("data", 2), ("pipeline", 1), ("zero", 2)):
        assert len({move.shares for move in _moves(run, task)}) >= least, task
    assert "of the work" in done.stderr + done.stdout
