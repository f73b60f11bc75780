"""`rota plan`: what it measures, decides and shows, and that the next call knows it."""

import json

import pytest

SWEEP = """
import torch
import torch.nn.functional as F
import rota
from rota.testing.models import GPT

ROWS = torch.randint(0, 64, (256, 33), generator=torch.Generator().manual_seed(1))


def task(lr, width, steps):
    return rota.Task(
        name=f"gpt-w{width}-lr{lr:g}",
        model=lambda: GPT(vocabulary=64, context=32, width=width, depth=2, heads=2),
        data=lambda: rota.Data(train=ROWS, batch_size=16),
        loss=lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        steps=steps,
    )


sweep = rota.Sweep(tasks=[task(1e-3, 64, 20000), task(1e-2, 64, 20000), task(1e-3, 16, 5)])
"""


@pytest.mark.timeout(240)
def test_a_plan_tells_options_schedule_and_bound_and_is_known_the_next_time(cli, sweep_file, tmp_path, monkeypatch):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path / "cache"))
    file = sweep_file(text=SWEEP)
    page = tmp_path / "plan.html"
    done = cli.run("plan", file, "--devices", "2", "--json", "--html", page, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    tasks = {task["name"]: task for task in found["tasks"]}
    long, short = tasks["gpt-w64-lr0.001"], tasks["gpt-w16-lr0.001"]
    assert {option["devices"] for option in long["options"]} == {1, 2}
    assert [option["strategy"] for option in short["options"]] == ["single"], "not worth a search"
    assert long["options"] == [
        option | {"chosen": mine["chosen"]}
        for option, mine in zip(tasks["gpt-w64-lr0.01"]["options"], long["options"], strict=True)
    ], "another learning rate costs the same"
    for task in tasks.values():
        assert sum(option["chosen"] for option in task["options"]) == 1
        assert next(option for option in task["options"] if option["devices"] == 1)["measured"]
    assert 0 < found["bound"] <= found["makespan_s"] * (1 + 1e-6)
    assert found["simple"].keys() == {"max", "min", "random", "optimus"}
    assert found["makespan_s"] <= min(found["simple"].values()) * (1 + 1e-6)
    assert sorted(name for one in found["schedule"] for name in one["tasks"]) == sorted(tasks)
    assert "<svg" in page.read_text()

    again = cli.run("plan", file, "--devices", "2", timeout=100)
    assert again.returncode == 0, again.stderr
    assert "all known from before" in again.stdout
    assert "gpt-w64-lr0.01" in again.stdout


@pytest.mark.timeout(60)
def test_a_plan_of_tasks_that_cannot_be_made_says_why(cli, sweep_file):
    file = sweep_file(text=SWEEP.replace("GPT(vocabulary", "GPT(vokabulary"))
    done = cli.run("plan", file, "--devices", "2")
    assert done.returncode == 2
    assert "no task has a way to run" in done.stderr
    assert "vokabulary" in done.stderr


@pytest.mark.timeout(100)
def test_a_task_that_fits_nowhere_is_refused_with_what_would_do(cli, sweep_file):
    file = sweep_file(text=SWEEP.replace("width=width, depth=2", "width=2048, depth=2"))
    done = cli.run("run", file, "--devices", "2", "--memory", "200MiB", timeout=90)
    assert done.returncode == 2, done.stdout
    assert "fits nowhere" in done.stderr
    assert "the task needs a device with at least " in done.stderr
    assert "GiB" in done.stderr or "MiB" in done.stderr
