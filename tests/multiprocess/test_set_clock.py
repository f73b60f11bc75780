"""Somebody sets the machine's clock while a run goes."""

from __future__ import annotations

import time

import rota
from rota.store.journal import read_events

SWEEP = """
import torch
import rota

sweep = rota.Sweep(tasks=[rota.Task(
    name="a",
    model=lambda: torch.nn.Linear(4, 1),
    data=lambda: rota.Data(train=torch.ones(8, 4), batch_size=4),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    steps=3,
)])
"""


def test_a_clock_that_is_set_back_again_and_again_changes_nothing(command, sweep_file, tmp_path, monkeypatch):
    file, out = sweep_file(text=SWEEP), tmp_path / "out"
    began_s, calls = time.time(), 0

    def wall_s():
        nonlocal calls
        calls += 1
        return began_s - 100.0 * calls

    monkeypatch.setattr(time, "time", wall_s)
    code, _, said = command("run", file, "--out", out, "--devices", "1", "--no-profile", "--quiet")
    assert (code, said) == (0, "")
    times = [time_s for time_s, _ in read_events(out / "journal.db")]
    assert times == sorted(times)
    assert times[-1] - times[0] < 90
    assert all(task.state == "finished" for task in rota.open_run(out).tasks)
