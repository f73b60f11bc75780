"""Sweeps in which models cannot be captured: each task trains what plain PyTorch trains, and it is said how."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rota.cli.sweep_file import load_source
from rota.execute.events import Launched, RunNoted
from rota.store.journal import read_events
from rota.testing import plain

SWEEP = """
import torch
import rota

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class Stubborn(torch.nn.Linear):
    \"\"\"Asks for a number in the middle, which no graph has.\"\"\"

    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.abs().sum().item() > 0 else y


def task(name, kind, width):
    return rota.Task(
        name=name, model=lambda: torch.nn.Sequential(kind(4, width), torch.nn.Linear(width, 4)), steps=3,
        data=lambda: rota.Data(train=X, valid=X[:6], batch_size=8), precision="float64",
        loss=lambda model, rows: (model(rows) - rows).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


KINDS = {"odd": Stubborn, "twin": Stubborn, "even": torch.nn.Linear}
sweep = rota.Sweep(tasks=[task(name, kind, 4 + len(name)) for name, kind in KINDS.items()])
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("strategy", "widths", "more"),
    [("data", {"odd": 1, "twin": 1, "even": 2}, ["--no-profile"]), ("torch_ddp", {"odd": 2, "twin": 2}, [])],
)
def test_each_task_runs_as_asked_or_on_one_device(cli, sweep_file, tmp_path, strategy, widths, more):
    file = sweep_file(text=SWEEP.replace("KINDS.items()", f"KINDS.items() if name in {list(widths)}"))
    done = cli.run("run", file, "--devices", "2", "--strategy", strategy, "--out", tmp_path / "run", "--json", *more)
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    events = [event for _, event in read_events(tmp_path / "run" / "journal.db")]
    assert {event.task: len(event.devices) for event in events if isinstance(event, Launched)} == widths
    for task, wanted in zip(told["tasks"], load_source(str(file)).sweep, strict=True):
        found, expected = load_file(task["model"]), plain.train(wanted).model.state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    said = [event.text for event in events if isinstance(event, RunNoted) and "on one device instead" in event.text]
    assert [text.split(":")[0] for text in said] == (["odd", "twin"] if strategy == "data" else [])


@pytest.mark.timeout(100)
def test_strict_refuses_the_sweep_before_anything_runs(command, sweep_file, tmp_path):
    file = sweep_file(text=SWEEP)
    code, _, err = command("run", file, "--devices", "2", "--strategy", "data", "--strict", "--out", tmp_path / "run")
    assert code == 2
    assert "task 'odd' cannot run as data: the model cannot be captured" in err
    assert not (tmp_path / "run").exists()
