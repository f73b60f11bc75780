"""What rota trains equals the plain PyTorch loop bit for bit, however often it is interrupted."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils.data import Dataset, TensorDataset

from rota.errors import TaskError
from rota.runtime.loop import Loop
from rota.runtime.messages import Finished, Halted, Measured, Noticed
from rota.task import Data, Task
from rota.testing import plain
from rota.testing.models import GPT, ResNet


class Surroundings:
    """A process that asks for a halt after some batches, or is killed after some checkpoints."""

    def __init__(self, *, halt_after=None):
        self.rows = {}
        self.polls = 0
        self.halt_after = halt_after

    def report(self, report):
        if isinstance(report, Measured):
            for step, metrics in report.rows:
                self.rows.setdefault(step, {"step": step}).update(metrics)

    def watch(self, what, *, limit_s, retry, step):
        pass

    def halt_requested(self):
        self.polls += 1
        return self.halt_after is not None and self.polls > self.halt_after

    def confirmed_number(self):
        return 0


def train(task, folder, surroundings, attempt=1):
    device = torch.device("cpu")
    return Loop(task, attempt=attempt, folder=Path(folder), device=device, surroundings=surroundings).run()


def assert_equals_plain(task, folder, rows):
    expected = plain.train(task)
    assert [rows[step] for step in sorted(rows)] == expected.history
    trained = load_file(Path(folder) / "model.safetensors")
    state = expected.model.state_dict()
    assert trained.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(trained[name], value), name


def text_rows():
    return torch.randint(0, 32, (41, 13), generator=torch.Generator().manual_seed(7))


def next_token_loss(model, rows):
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def gpt_task(**changes):
    fields = {
        "name": "gpt",
        "model": lambda: GPT(vocabulary=32, context=16, width=16, depth=2, heads=2, dropout=0.1),
        "data": lambda: Data(train=text_rows(), valid=text_rows()[:11], batch_size=8, valid_batch_size=4),
        "loss": next_token_loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        "lr_schedule": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5),
        "steps": 13,
        "valid_every": 4,
        "clip_norm": 0.5,
    }
    return Task(**(fields | changes))


def images():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.rand(30, 1, 8, 8, generator=generator), torch.randint(0, 10, (30,), generator=generator))


def image_loss(model, batch):
    logits = model(batch[0])
    accuracy = (logits.argmax(1) == batch[1]).float().mean()
    return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": accuracy, "constant": 2}


class Noisy(Dataset):
    """Draws from every global generator when it is read, as augmentations do."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return noise + index / 20, torch.tensor(index % 3)


def frozen_groups(model):
    model.tokens.weight.requires_grad_(False)
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-2}], lr=1e-3)


TASKS = {
    "dropout, AdamW, schedule, clipping, validation": gpt_task(),
    "accumulation": gpt_task(accumulate=3),
    "epochs, last batch smaller": gpt_task(steps=None, epochs=2),
    "epochs with accumulation": gpt_task(steps=None, epochs=2, accumulate=4),
    "drop_last, no shuffle": gpt_task(
        data=lambda: Data(train=text_rows(), batch_size=8, shuffle=False, drop_last=True), valid_every=None
    ),
    "groups and frozen parameters": gpt_task(optimizer=frozen_groups),
    "SGD with momentum, cosine schedule": gpt_task(
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=13),
    ),
    "a chain of schedules": gpt_task(
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            milestones=[3],
        )
    ),
    "fused AdamW": gpt_task(optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True)),
    "bfloat16": gpt_task(precision="bfloat16"),
    "float64": gpt_task(precision="float64"),
    "BatchNorm and a dict of metrics": Task(
        name="resnet",
        model=lambda: ResNet(width=4, depth=1),
        data=lambda: Data(train=images(), valid=images(), batch_size=7),
        loss=image_loss,
        optimizer=lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
        steps=9,
        valid_every=2,
        seed=5,
    ),
    "a dataset that draws random numbers": Task(
        name="noisy",
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)),
        data=lambda: Data(train=Noisy(), valid=Noisy(), batch_size=6),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        steps=8,
        valid_every=3,
    ),
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_uninterrupted_training_equals_the_plain_loop(task, tmp_path):
    surroundings = Surroundings()
    assert isinstance(train(task, tmp_path, surroundings), Finished)
    assert_equals_plain(task, tmp_path, surroundings.rows)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_halting_after_every_few_batches_changes_nothing(task, tmp_path):
    rows = {}
    for attempt in range(1, 100):
        # Sometimes too soon for a validation to end, so that one is broken off and done again.
        surroundings = Surroundings(halt_after=2 + attempt * 2 % 7)
        outcome = train(task, tmp_path, surroundings, attempt)
        for step, row in surroundings.rows.items():
            rows.setdefault(step, {"step": step}).update(row)
        if isinstance(outcome, Finished):
            break
        assert isinstance(outcome, Halted)
    else:
        pytest.fail("the task never finished")
    assert attempt >= 3
    assert_equals_plain(task, tmp_path, rows)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of rota catches it."""


class Mortal(Surroundings):
    """Dies at a given call, whichever it is; what was reported before is in the journal."""

    def __init__(self, *, dies_after):
        super().__init__()
        self.dies_after = dies_after
        self.calls = 0

    def watch(self, what, *, limit_s, retry, step):
        self.calls += 1
        if what and self.calls > self.dies_after:
            raise Killed


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lives=st.lists(st.integers(4, 14), min_size=1, max_size=4), every=st.integers(1, 3), accumulate=st.integers(1, 2)
)
def test_being_killed_anywhere_changes_nothing(tmp_path_factory, lives, every, accumulate):
    folder = tmp_path_factory.mktemp("task")
    task = gpt_task(checkpoint_every=every, accumulate=accumulate, steps=7)
    rows = {}
    for attempt, life in enumerate([*lives, 10_000], start=1):
        surroundings = Mortal(dies_after=life)
        try:
            train(task, folder, surroundings, attempt)
        except Killed:
            continue
        finally:
            for step, row in surroundings.rows.items():
                rows.setdefault(step, {"step": step}).update(row)
    assert_equals_plain(task, folder, rows)


def test_metrics_that_never_reached_the_journal_are_reported_again(tmp_path):
    class Deaf(Mortal):
        """The journal loses everything that this process reports."""

        def report(self, report):
            pass

    task = gpt_task(checkpoint_every=2, steps=9)
    with pytest.raises(Killed):
        train(task, tmp_path, Deaf(dies_after=16))
    surroundings = Surroundings()
    train(task, tmp_path, surroundings, attempt=2)
    assert_equals_plain(task, tmp_path, surroundings.rows)


def test_plateau_schedule_steps_on_the_validation_loss_and_survives_a_halt(tmp_path):
    def rates(folder, halt_after):
        seen = []

        def loss(model, rows):
            seen.append(optimizers[-1].param_groups[0]["lr"])
            return next_token_loss(model, rows)

        optimizers = []

        def optimizer(model):
            optimizers.append(torch.optim.SGD(model.parameters(), lr=10.0))
            return optimizers[-1]

        task = gpt_task(
            loss=loss,
            optimizer=optimizer,
            lr_schedule=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
            valid_every=1,
        )
        while not isinstance(train(task, folder, Surroundings(halt_after=halt_after)), Finished):
            pass
        return load_file(folder / "model.safetensors"), seen

    whole, seen = rates(tmp_path / "whole", None)
    parts, _ = rates(tmp_path / "parts", 9)
    assert min(seen) < 10.0
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_checkpoint_that_does_not_fit_is_a_clear_error(tmp_path):
    train(gpt_task(), tmp_path, Surroundings(halt_after=5))
    other = gpt_task(model=lambda: GPT(vocabulary=32, context=16, width=24, depth=2, heads=2))
    with pytest.raises(TaskError, match="checkpoint does not fit"):
        train(other, tmp_path, Surroundings())


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_gives_the_same_model(tmp_path):
    class Listening(Surroundings):
        notices = ()

        def report(self, report):
            super().report(report)
            if isinstance(report, Noticed):
                self.notices = (*self.notices, report.text)

    task = gpt_task(checkpoint_every=2)
    first = Surroundings(halt_after=9)
    assert isinstance(train(task, tmp_path, first), Halted)
    newest = max((tmp_path / "checkpoints").glob("checkpoint-*")) / "tensors.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    second = Listening()
    assert isinstance(train(task, tmp_path, second, attempt=2), Finished)
    assert len(second.notices) == 1
    assert "damaged" in second.notices[0]
    rows = first.rows
    for step, row in second.rows.items():
        rows.setdefault(step, {"step": step}).update(row)
    assert_equals_plain(task, tmp_path, rows)
