"""A gang that begins after its last checkpoint and ends without a batch: whatever runs it, only its leader writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

RANK = r"""
import json, os, sys
from pathlib import Path

rank, size, root, strategies = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
written, watched = [], str(root)


def hear(event, arguments):
    paths = ()
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        paths = arguments[:1]
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"):
        paths = arguments[:2]
    for path in paths:
        known = event == "os.mkdir" and os.path.isdir(path)
        if isinstance(path, str | os.PathLike) and not known and os.path.abspath(path).startswith(watched):
            written.append(f"{event} {os.path.relpath(path, watched)}")


sys.addaudithook(hear)

import torch
import torch.nn.functional as F
from torch import nn

import rota
from rota.runtime.executor import Eager
from rota.runtime.gang import Gang
from rota.runtime.loop import Loop
from rota.techniques import Ready

torch.set_num_threads(1)
ROWS = torch.rand(24, 8, generator=torch.Generator().manual_seed(1))


class Everywhere(Eager):
    # A technique of a user that knows nothing of leaders: each process trains the whole.
    name = "everywhere"

    def __init__(self):
        pass

    def search(self, task, devices):
        return None

    def execute(self, task, devices, knobs):
        return Eager(task)


class Outside:
    def report(self, report): pass
    def watch(self, what, *, limit_s, retry, step): pass
    def halt_requested(self): return False
    def confirmed_number(self): return sys.maxsize if rank else 0


def model():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def strategy_of(text):
    from rota.techniques import arrived

    return Ready(technique=Everywhere(), knobs={}) if text == "everywhere" else arrived(text)


def attempt(folder, text, number):
    task = rota.Task(
        name="one",
        model=model,
        data=lambda: rota.Data(train=ROWS, valid=ROWS[:6], batch_size=8),
        loss=lambda model, rows: model(rows).pow(2).mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        steps=3,
        strategy=strategy_of(text),
    )
    gang = Gang(rank=rank, size=size, store=folder / f"gang-{number}", key=b"k")
    where = {"device": torch.device("cpu"), "memory_bytes": 2**30}
    loop = Loop(task, attempt=number, folder=folder, surroundings=Outside(), gang=gang, **where)
    try:
        return loop.run().step
    except rota.RotaError as error:
        return str(error)
    finally:
        gang.part()


found = {}
for text in strategies:
    folder = root / str(strategies.index(text))
    for number in (1, 2):
        if number == 2 and rank == 0:
            (folder / "model.safetensors").unlink()  # as if the last thing that happened was the checkpoint
        written.clear()
        step = attempt(folder, text, number)
        mine = [one for one in written if not any(own in one for own in (f".rank-{rank}", f"gang-{number}"))]
        found[f"{text}: {number}"] = [step, mine if rank else []]
print(json.dumps(found))
"""

STRATEGIES = ("data", "zero(stage=3)", "pipeline(microbatches=2)", "auto", "torch_ddp", "torch_fsdp2", "everywhere")
STRATEGIES = (*STRATEGIES, "data(2) * spill(shards=2)")
SIZE = 2


def run_ranks(root, strategies, *, timeout_s):
    """What each rank says it did."""
    for place in range(len(strategies)):
        (root / str(place)).mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(SIZE), str(root), json.dumps(strategies)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "ROTA_CACHE": str(root / "cache")},
        )
        for rank in range(SIZE)
    ]
    try:
        ends = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err
    return [json.loads(out) for out, _ in ends]


@pytest.mark.timeout(90)
def test_only_the_leader_writes_whatever_the_executor_and_also_where_no_batch_is_left(tmp_path):
    told = run_ranks(tmp_path, STRATEGIES, timeout_s=60)
    for place, text in enumerate(STRATEGIES):
        for number in (1, 2):
            for rank, found in enumerate(told):
                step, written = found[f"{text}: {number}"]
                assert step == 3
                assert written == [], f"{text}, attempt {number}: rank {rank} wrote"
        weights = load_file(tmp_path / str(place) / "model.safetensors")
        expected = load_file(tmp_path / "0" / "model.safetensors")
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=f"{text}: {name}")
