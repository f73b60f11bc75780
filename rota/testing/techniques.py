"""Checks that a technique does what rota expects of one: its author runs this, in a process with two CPU cores."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from rota.cluster import local
from rota.errors import InputError, TaskError
from rota.execute.run import run
from rota.execute.states import RunState
from rota.sweep import Sweep
from rota.task import Data, Task
from rota.techniques import Found, Ready, Technique, checked
from rota.testing import plain
from rota.testing.models import GPT


def check_technique(technique: Technique, *, devices: int = 2, within: float = 1e-8) -> list[Found]:
    """TaskError or InputError says what is wrong; otherwise what it found for each number of devices.

    A small language model is trained for some steps in real processes, saved in the midst, and compared with the plain
    PyTorch loop.
    """
    task = _task("auto")
    found = []
    for count in range(1, devices + 1):
        one = checked(technique.search(task, count), technique.name)
        if one is not None:
            found.append(one)
            _train(technique, one, count, within)
    if not found:
        raise InputError(f"{technique.name} fits a small model on none of 1 to {devices} devices; it cannot be checked")
    return found


def _task(strategy: Any, devices: int | None = None) -> Task:
    rows = torch.randint(0, 32, (20, 17), generator=torch.Generator().manual_seed(1))
    return Task(
        name="small",
        model=lambda: GPT(vocabulary=32, context=16, width=32, depth=2, heads=2),
        data=lambda: Data(train=rows, valid=rows[:5], batch_size=8),
        loss=lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        steps=6,
        valid_every=3,
        checkpoint_every=2,
        clip_norm=1.0,
        accumulate=2,
        precision="float64",
        strategy=strategy,
        devices=devices,
    )


def _train(technique: Technique, found: Found, devices: int, within: float) -> None:
    where = f"{technique.name} on {devices} devices"
    task = _task(Ready(technique=technique, knobs=found.knobs), devices)
    with tempfile.TemporaryDirectory() as folder:
        result = run(
            Sweep(tasks=(task,)),
            cluster=local(devices=devices, memory="1GiB", kind="cpu"),
            out=Path(folder) / "run",
            progress=False,
            profile=False,
        )
        if result.state is not RunState.FINISHED:
            raise TaskError(f"{where} does not train: {result.tasks[0].reason}")
        path = result.tasks[0].model_path
        assert path is not None
        weights = load_file(path)
    for name, value in plain.train(task).model.state_dict().items():
        if name not in weights:
            raise TaskError(f"{where} loses {name}: what it saves must be the whole model")
        wrong = (weights[name] - value).abs().max().item()
        if not wrong <= within * max(1.0, value.abs().max().item()):
            raise TaskError(f"{where} trains another model: {name} differs by {wrong:.3g} from plain PyTorch's")
