"""Whatever a run writes, on the disk or on storage in a folder, is for its user alone."""

import os
import stat

import pytest

SWEEP = """
import torch
import torch.nn.functional as F
from torch import nn
import rota

ROWS = [(torch.rand(8, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 4)) for i in range(32)]


def task(name, strategy, devices):
    return rota.Task(
        name=name,
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        data=lambda: rota.Data(train=ROWS, valid=ROWS[:8], batch_size=8),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        steps=8, valid_every=4, checkpoint_every=2, strategy=strategy, devices=devices,
    )


sweep = rota.Sweep(tasks=[task("one", "single", 1), task("both", "data", 2), task("spilled", "spill", 1)])
"""


@pytest.mark.timeout(150)
def test_everything_that_a_run_leaves_is_this_users_alone(cli, sweep_file, tmp_path):
    before = os.umask(0o022)
    try:
        where = ("--devices", "2", "--out", tmp_path / "runs" / "run", "--storage", tmp_path / "storage")
        done = cli.run("run", sweep_file(text=SWEEP), "--no-profile", *where, timeout=120)
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr + done.stdout
    found = [path for folder in ("runs", "storage") for path in (tmp_path / folder, *(tmp_path / folder).rglob("*"))]
    names = {path.name for path in found}
    assert {"report.html", "state.json", "commit.json", "model.safetensors", "journal.db", "tasks"} <= names
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in found}
    wrong = {
        path: oct(mode) for path, mode in modes.items() if mode != (0o700 if (tmp_path / path).is_dir() else 0o600)
    }
    assert not wrong
