"""A task that goes from strategy to strategy while it trains ends where one that never switches does."""

import time
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils import _pytree as pytree

import rota
from rota.execute.backends.local import LocalBackend
from rota.execute.events import Launched, Requeued
from rota.execute.policy import Launch, Switch
from rota.execute.states import RunState, TaskState
from rota.store.journal import read_events
from rota.store.run_folder import RunFolder
from rota.testing import plain, zoo
from rota.testing.models import GPT
from rota.testing.runs import controlling

SCRIPT = [
    ("single", 1),
    ("data", 2),
    ("tensor", 2),
    ("pipeline(microbatches=2)", 2),
    ("zero", 2),
    ("zero(stage=1)", 2),
    ("single", 1),
]
STEPS = 40


class Slow(torch.utils.data.Dataset):
    """Samples that take a moment to read, so that there is time to switch."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        time.sleep(0.01)
        return self.samples[index]


def gpt_task():
    rows = torch.randint(0, 32, (43, 17), generator=torch.Generator().manual_seed(1))
    return rota.Task(
        name="gpt",
        model=lambda: GPT(vocabulary=32, context=16, width=32, depth=2, heads=2, dropout=0.0),
        data=lambda: rota.Data(train=Slow(list(rows)), batch_size=8),
        loss=lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS),
        steps=STEPS,
        clip_norm=0.5,
        accumulate=2,
        precision="float64",
    )


def zoo_task(name):
    def data():
        batch = zoo.make(name, batch=26).batch
        leaves, spec = pytree.tree_flatten(batch)
        samples = [pytree.tree_unflatten([leaf[i] for leaf in leaves], spec) for i in range(26)]
        return rota.Data(train=Slow(samples), batch_size=8)

    return rota.Task(
        name=name,
        model=lambda: zoo.make(name).model,
        data=data,
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        steps=STEPS,
        precision="float64",
    )


class Scripted:
    """Runs a task in one way after another, some steps in each."""

    def __init__(self):
        self.place = {}

    def decide(self, view):
        decisions = []
        free = list(view.free)
        for one in view.waiting:
            strategy, width = SCRIPT[self.place.setdefault(one.name, 0) % len(SCRIPT)]
            if len(free) < 2:  # one task at a time
                break
            decisions.append(Launch(task=one.name, devices=tuple(free[:width]), strategy=strategy))
            free = []
        for task in view.record.tasks.values():
            trained = task.state is TaskState.RUNNING and task.step >= task.began_step + 2
            if trained and self.place[task.name] < len(SCRIPT) - 1 and getattr(task, "told", 0) != task.attempt:
                task.told = task.attempt
                self.place[task.name] += 1
                decisions.append(Switch(task=task.name, reason=f"as {SCRIPT[self.place[task.name]][0]}"))
        return decisions


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["gpt", *(pytest.param(name, marks=pytest.mark.deep) for name in ("llama", "vit"))])
def test_a_task_that_switches_trains_what_one_that_does_not_trains(name, tmp_path):
    task = gpt_task() if name == "gpt" else zoo_task(name)
    cluster = rota.local(devices=2, memory="2GiB")
    devices = [device.name for device in cluster.devices]
    path = tmp_path / "run"
    with (
        closing(LocalBackend(cluster)) as backend,
        controlling(rota.Sweep(tasks=(task,)), path, backend, devices, policy=Scripted()) as controller,
    ):
        assert controller.run() is RunState.FINISHED, controller.record.tasks[name].reason
    folder, record = RunFolder(path), controller.record
    events = [event for _, event in read_events(folder.journal)]
    launched = [event.strategy for event in events if isinstance(event, Launched)]
    assert launched == [strategy for strategy, _ in SCRIPT]
    assert sum(isinstance(event, Requeued) for event in events) == len(SCRIPT) - 1
    assert record.tasks[name].switches == len(SCRIPT) - 1
    assert 0 < record.tasks[name].switch_s < 60
    expected = plain.train(task).model.state_dict()
    found = load_file(folder.model(name))
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-10, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )
