"""The number of threads is the user's to fix: it, and not the number of devices, decides the last digits."""

import json

import torch
from safetensors.torch import load_file

from rota.testing import plain

SWEEP = """
import torch, rota

ROWS = torch.randn(2000, 512, generator=torch.Generator().manual_seed(0))


def model():
    return torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 1))


task = rota.Task(
    name="sums",
    model=model,
    data=lambda: rota.Data(train=ROWS, batch_size=1000),
    loss=lambda model, rows: (model(rows) - rows.sum(1, keepdim=True)).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
    steps=4)
sweep = rota.Sweep(tasks=[task])
"""


def by_threads(count):
    found = {}
    exec(SWEEP, found)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return plain.train(found["task"]).model.state_dict()
    finally:
        torch.set_num_threads(before)


def test_devices_of_one_core_compute_with_as_many_threads_as_are_asked_for(cli, sweep_file, tmp_path):
    file = sweep_file(text=SWEEP)
    done = cli.run("run", file, "--out", "run", "--no-profile", "--devices", "2", "--threads", "2")
    assert done.returncode == 0, done.stderr
    trained = load_file(tmp_path / "run" / "tasks" / "sums" / "model.safetensors")
    assert all(torch.equal(trained[name], value) for name, value in by_threads(2).items())
    assert not all(torch.equal(trained[name], value) for name, value in by_threads(1).items()), "it shows nothing here"


def test_the_devices_are_shown_with_their_threads_and_wrong_numbers_are_refused(command):
    code, out, _ = command("devices", "--no-speed", "--devices", "1", "--threads", "3")
    assert code == 0
    assert "--threads N fixes it" in out
    code, out, _ = command("devices", "--no-speed", "--json", "--devices", "1", "--threads", "3")
    assert json.loads(out)["devices"][0]["threads"] == 3
    code, _, err = command("devices", "--threads", "0")
    assert code == 2
    assert err == "rota: rota.local: threads must be a whole number of at least 1, not 0\n"
