"""One attempt at a task, from its last checkpoint to its end: what is reported, saved, and said when it fails."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil

import pytest
import safetensors.torch
import torch
from torch import nn

from rota.errors import DivergedError, TaskError, WayError
from rota.runtime.executor import Eager
from rota.runtime.gang import Gang
from rota.runtime.loop import Loop
from rota.runtime.messages import Began, Finished, Halted, Measured, Noticed, Saved
from rota.state import checkpoint
from rota.store.run_folder import CHECKPOINT_FOLDER, MODEL_FILE
from rota.task import Data, Task
from rota.techniques import Ready

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def quadratic(model, batch):
    return model(batch).pow(2).mean()


def task_of(**changes):
    fields = {
        "name": "a",
        "model": lambda: nn.Linear(4, 2),
        "data": lambda: Data(train=X, valid=X[:4], batch_size=3),
        "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
        "loss": quadratic,
        "steps": 8,
    }
    return Task(**(fields | changes))


class Surroundings:
    """Keeps what the loop says; tells it to halt at a step, as the controller would."""

    def __init__(self, *, halt_at=math.inf):
        self.reports = []
        self.watched = []
        self.halt_at = halt_at

    def report(self, report):
        self.reports.append(report)

    def watch(self, what, *, limit_s, retry, step):
        self.watched.append((what, limit_s, retry, step))

    def halt_requested(self):
        return bool(self.watched) and self.watched[-1][3] + 1 >= self.halt_at

    def confirmed_number(self):
        return 0

    def of(self, cls):
        return [report for report in self.reports if isinstance(report, cls)]

    def history(self):
        rows = {}
        for measured in self.of(Measured):
            for step, metrics in measured.rows:
                rows.setdefault(step, {}).update(metrics)
        return rows


def run(folder, *, attempt=1, halt_at=math.inf, **changes):
    """Run one attempt; what it returned, and what it said."""
    outside = Surroundings(halt_at=halt_at)
    task = task_of(**changes)
    loop = Loop(task, attempt=attempt, folder=folder, device=torch.device("cpu"), surroundings=outside)
    return loop.run(), outside


def fail(folder, **changes):
    outside = Surroundings()
    loop = Loop(task_of(**changes), attempt=1, folder=folder, device=torch.device("cpu"), surroundings=outside)
    with pytest.raises(TaskError) as caught:
        loop.run()
    assert "\n" not in str(caught.value)
    assert outside.watched[-1][0] == ""
    return caught.value, outside


def fill_the_disk(monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_file", full)


def latest_step(folder):
    found = checkpoint.read_latest(folder / CHECKPOINT_FOLDER, notice=pytest.fail)
    return found.tree["training"]["step"]


# ---- several processes ----


class Meeting(Gang):
    """A process of a gang whose others are not there."""

    def meet(self, *, timeout_s):
        pass


class Everywhere:
    """A technique that trains the whole model in each process and knows nothing of leaders."""

    name = "everywhere"

    def __init__(self, weights=Eager.weights):
        self.executor = type("Whole", (Eager,), {"weights": weights})

    def execute(self, task, devices, knobs):
        return self.executor(task)


def run_rank(folder, rank, *, outside=None, technique=None):
    task = task_of(valid_every=2, checkpoint_every=2, strategy=Ready(technique=technique or Everywhere(), knobs={}))
    loop = Loop(
        task,
        attempt=1,
        folder=folder,
        device=torch.device("cpu"),
        surroundings=outside or Surroundings(),
        gang=Meeting(rank=rank, size=1, store=folder),
    )
    return loop.run()


def test_a_process_that_does_not_lead_writes_nothing_while_it_trains_and_where_no_batch_is_left(tmp_path):
    assert run_rank(tmp_path, 1).step == 8
    assert list(tmp_path.iterdir()) == []
    run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert before
    assert run_rank(tmp_path, 1).step == 8
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_technique_without_state_in_the_process_that_leads_is_told(tmp_path):
    with pytest.raises(WayError, match="no state to save in the process that leads"):
        run_rank(tmp_path, 0, technique=Everywhere(weights=lambda self, between_steps: None))


# ---- what a killed process left ----


@pytest.mark.parametrize(
    "left",
    [
        ".tmpO3m2wQ",  # of safetensors, which writes beside the file that it is asked for
        ".model.safetensors.17.tmp",
        ".disk-995yggaa/item2.0",
        "checkpoints/.writing-17/.tmpO3m2wQ",
        "checkpoints/.writing-17/tensors.safetensors",
    ],
)
def test_nothing_is_left_of_what_a_killed_process_was_writing(tmp_path, left):
    path = tmp_path / left
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    run(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["checkpoints", "model.safetensors"]
    assert all(one.name.startswith("checkpoint-") for one in (tmp_path / "checkpoints").iterdir())
    assert not path.exists()


# ---- to the end ----


def test_a_task_trains_to_its_end_and_writes_its_model(tmp_path):
    outcome, outside = run(tmp_path, valid_every=4)
    assert isinstance(outcome, Finished)
    assert (outcome.task, outcome.attempt, outcome.step) == ("a", 1, 8)
    assert outcome.metrics.keys() == {"train/loss", "valid/loss", "best/loss", "best/step"}
    (began,) = outside.of(Began)
    assert (began.from_step, began.total_steps, began.parameters) == (0, 8, 10)
    history = outside.history()
    assert list(history) == list(range(1, 9))
    assert [step for step, row in history.items() if "valid/loss" in row] == [4, 8]
    assert outcome.metrics["valid/loss"] == history[8]["valid/loss"]
    nn.Linear(4, 2).load_state_dict(safetensors.torch.load_file(tmp_path / MODEL_FILE))


def test_the_last_checkpoint_holds_the_last_step(tmp_path):
    _, outside = run(tmp_path)
    assert [saved.step for saved in outside.of(Saved)] == [8]
    assert latest_step(tmp_path) == 8


def test_checkpoints_are_saved_as_often_as_asked(tmp_path):
    # A step that comes while the write before it still goes on is not saved, so that training never waits.
    _, outside = run(tmp_path, checkpoint_every=2)
    saved = [one.step for one in outside.of(Saved)]
    assert saved[0] == 2
    assert saved[-1] == 8
    assert saved == sorted(set(saved))


def test_a_finished_task_that_is_run_again_finishes_at_once_with_the_same_model(tmp_path):
    run(tmp_path)
    before = (tmp_path / MODEL_FILE).read_bytes()
    (tmp_path / MODEL_FILE).unlink()
    outcome, outside = run(tmp_path, attempt=2, loss=lambda model, batch: pytest.fail("trained again"))
    assert isinstance(outcome, Finished)
    assert outside.of(Began)[0].from_step == 8
    assert (tmp_path / MODEL_FILE).read_bytes() == before


# ---- halting and going on ----


@pytest.mark.parametrize("halt_at", range(1, 9))
def test_a_halted_task_goes_on_to_the_same_model_and_history(tmp_path, halt_at):
    changes = {"valid_every": 3, "accumulate": 2}
    whole, undisturbed = run(tmp_path / "whole", **changes)
    halted, first = run(tmp_path / "parts", halt_at=halt_at, **changes)
    assert isinstance(halted, Halted)
    assert not (tmp_path / "parts" / MODEL_FILE).exists()
    finished, second = run(tmp_path / "parts", attempt=2, **changes)
    assert second.of(Began)[0].from_step == halted.step
    assert finished.metrics == whole.metrics
    assert first.history() | second.history() == undisturbed.history()
    assert (tmp_path / "parts" / MODEL_FILE).read_bytes() == (tmp_path / "whole" / MODEL_FILE).read_bytes()


def test_metrics_that_the_journal_may_not_have_are_reported_again(tmp_path):
    _, first = run(tmp_path, halt_at=5)
    _, second = run(tmp_path, attempt=2)
    assert set(first.history()) <= set(second.history()) == set(range(1, 9))
    assert all(measured.attempt == 2 for measured in second.of(Measured))
    numbers = [measured.number for measured in second.of(Measured)]
    assert numbers == sorted(set(numbers))


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_is_used(tmp_path):
    run(tmp_path, halt_at=3)
    halted, _ = run(tmp_path, attempt=2, halt_at=6)
    newer = checkpoint.committed(tmp_path / CHECKPOINT_FOLDER)[-1]
    os.truncate(newer / "state.json", 10)
    outcome, outside = run(tmp_path, attempt=3)
    (notice,) = outside.of(Noticed)
    assert newer.name in notice.text
    assert "the one before it is used" in notice.text
    assert 0 < outside.of(Began)[0].from_step < halted.step
    assert isinstance(outcome, Finished)
    assert outcome.step == 8


def test_an_iterable_without_a_state_is_said_when_it_goes_on(tmp_path):
    class Stream:
        def __iter__(self):
            return iter(X)

    changes = {"data": lambda: Data(train=Stream(), batch_size=3)}
    run(tmp_path, halt_at=4, **changes)
    _, outside = run(tmp_path, attempt=2, **changes)
    assert "no state_dict" in outside.of(Noticed)[0].text


# ---- failing ----


def test_a_failure_reports_the_steps_before_it(tmp_path):
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) == 5:
            raise ValueError("bad sample")
        return quadratic(model, batch)

    error, outside = fail(tmp_path, loss=loss)
    assert "the loss function raised ValueError: bad sample (test_loop.py, line" in str(error)
    assert list(outside.history()) == [1, 2, 3, 4]


def test_a_diverged_task_reports_the_steps_before_it_and_keeps_its_step(tmp_path):
    calls = []

    def loss(model, batch):
        calls.append(1)
        return quadratic(model, batch) * (math.nan if len(calls) == 4 else 1)

    error, outside = fail(tmp_path, loss=loss)
    assert isinstance(error, DivergedError)
    assert error.step == 4
    assert list(outside.history()) == [1, 2, 3]


def test_a_checkpoint_that_does_not_fit_is_the_tasks_error(tmp_path):
    run(tmp_path, halt_at=3)
    error, _ = fail(tmp_path, model=lambda: nn.Linear(4, 3))
    assert "does not fit the model or optimizer" in str(error)


def test_state_that_cannot_be_kept_is_the_tasks_error_with_its_path(tmp_path):
    class Odd(torch.optim.SGD):
        def state_dict(self):
            return super().state_dict() | {"seen": {1, 2}}

    error, _ = fail(tmp_path, optimizer=lambda m: Odd(m.parameters(), lr=0.1), checkpoint_every=1)
    assert "training.optimizer.seen is a set" in str(error)


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path, monkeypatch):
    fill_the_disk(monkeypatch)
    error, outside = fail(tmp_path, checkpoint_every=1)
    (notice,) = outside.of(Noticed)
    assert "no space left on device" in notice.text
    assert "training goes on" in notice.text
    assert outside.of(Saved) == []
    assert list(outside.history()) == list(range(1, 9))
    assert "no space left on device" in str(error)
    assert "rota resume" in str(error)


def test_a_model_that_cannot_be_written_is_the_tasks_error(tmp_path, monkeypatch):
    (tmp_path / MODEL_FILE).mkdir()
    error, _ = fail(tmp_path)
    assert "the model could not be written" in str(error)
    assert latest_step(tmp_path) == 8


def test_a_task_that_could_not_save_itself_reports_the_step_that_its_checkpoint_holds(tmp_path, monkeypatch):
    first, _ = run(tmp_path, halt_at=3)
    fill_the_disk(monkeypatch)
    second, outside = run(tmp_path, attempt=2, halt_at=6)
    assert "no space left on device" in outside.of(Noticed)[0].text
    assert isinstance(second, Halted)
    assert second.step == first.step == latest_step(tmp_path)


# ---- being watched ----


def test_the_watcher_hears_of_every_factory_and_of_the_first_step_with_the_setups_limit(tmp_path):
    _, outside = run(tmp_path, setup_timeout_s=11.0, step_timeout_s=22.0, valid_every=4)
    heard = dict.fromkeys(what for what, *_ in outside.watched)
    assert list(heard) == [
        *["the model factory", "moving the model to its device", "the data factory", "the optimizer factory"],
        *["opening the training data", "restoring the checkpoint", "step 1", "reading the first batch"],
        *["choosing how it runs", "the first batch", "step 2", "step 3", "step 4", "validation after step 4"],
        *["step 5", "step 6", "step 7", "step 8", "validation after step 8"],
        *["writing the model", "the last checkpoint", "leaving", ""],
    ]
    limits = {what: (limit, retry) for what, limit, retry, _ in outside.watched}
    assert all(limit is not None for what, (limit, _) in limits.items() if what), "a phase without a deadline"
    assert limits["the model factory"] == (11.0, False)
    assert limits["the first batch"] == (11.0, False)
    assert limits["step 2"] == (22.0, True)
    assert limits["validation after step 4"] == (22.0, True)
    assert outside.watched[-1][:3] == ("", None, False)


# ---- checkpoints of others ----


def forge(path, change):
    """Alter a checkpoint as one who knows how its checksums are made."""
    state = json.loads((path / "state.json").read_text())
    tensors = safetensors.torch.load_file(path / "tensors.safetensors")
    change(state, tensors)
    (path / "state.json").write_text(json.dumps(state))
    safetensors.torch.save_file(tensors, path / "tensors.safetensors")
    names = ("tensors.safetensors", "state.json")
    (path / "commit.json").write_text(json.dumps({name: checkpoint._fingerprint(path / name) for name in names}))


def with_tree(**changes):
    return lambda state, tensors: state["tree"].update(changes)


def without(*path):
    def change(state, tensors):
        node = state["tree"]
        for name in path[:-1]:
            node = node[name]
        del node[path[-1]]

    return change


def cut_all(state, tensors):
    for name, tensor in tensors.items():
        tensors[name] = tensor.reshape(-1)[:1].clone()


FORGERIES = {
    "empty": lambda state, tensors: state.update(tree={}),
    "null": lambda state, tensors: state.update(tree=None),
    "a list": lambda state, tensors: state.update(tree=[1]),
    "no training": with_tree(training=None),
    "no metrics": with_tree(metrics={}),
    "odd metrics": with_tree(metrics={"number": 1, "latest": {}, "unconfirmed": [[1]]}),
    "no cursor": without("training", "cursor"),
    "an empty cursor": lambda state, tensors: state["tree"]["training"].update(cursor={}),
    "no generators": lambda state, tensors: state["tree"]["training"].update(rng={}),
    "an odd generator": lambda state, tensors: state["tree"]["training"]["rng"].update(python=[1, 2]),
    "an odd step": lambda state, tensors: state["tree"]["training"].update(step="many"),
    "a step below zero": lambda state, tensors: state["tree"]["training"].update(step=-3),
    "odd sums": lambda state, tensors: state["tree"]["training"].update(sums=7),
    "no optimizer": lambda state, tensors: state["tree"]["training"].update(optimizer=None),
    "shapes": cut_all,
    "another task": with_tree(task={"name": "b"}),
    "an odd name": with_tree(task=7),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_checkpoint_of_odd_content_is_set_aside_and_the_one_before_it_leads_to_the_same_model(tmp_path, what):
    run(tmp_path / "whole")
    run(tmp_path / "a", halt_at=3)
    run(tmp_path / "a", attempt=2, halt_at=6)
    _, newer = checkpoint.committed(tmp_path / "a" / CHECKPOINT_FOLDER)
    forge(newer, FORGERIES[what])
    outcome, outside = run(tmp_path / "a", attempt=3)
    (notice,) = outside.of(Noticed)
    assert newer.name in notice.text
    assert "set aside" in notice.text
    assert 0 < outside.of(Began)[0].from_step < 5
    assert isinstance(outcome, Finished)
    assert (tmp_path / "a" / MODEL_FILE).read_bytes() == (tmp_path / "whole" / MODEL_FILE).read_bytes()


def test_the_checkpoints_of_another_task_are_set_aside_and_it_trains_from_its_beginning(tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "b", name="b", seed=1, halt_at=4)
    shutil.copytree(tmp_path / "b" / CHECKPOINT_FOLDER, tmp_path / "c" / CHECKPOINT_FOLDER)
    _, outside = run(tmp_path / "c")
    (notice,) = outside.of(Noticed)
    assert "task 'b'" in notice.text
    assert (tmp_path / "c" / MODEL_FILE).read_bytes() == (tmp_path / "a" / MODEL_FILE).read_bytes()


def test_a_checkpoint_that_does_not_name_its_task_is_used(tmp_path):
    halted, _ = run(tmp_path, halt_at=4)
    (path,) = checkpoint.committed(tmp_path / CHECKPOINT_FOLDER)
    forge(path, without("task"))
    _, outside = run(tmp_path, attempt=2)
    assert outside.of(Noticed) == []
    assert outside.of(Began)[0].from_step == halted.step


def test_a_checkpoint_of_other_settings_is_told(tmp_path):
    run(tmp_path, halt_at=4, seed=1, settings={"lr": 0.1})
    _, outside = run(tmp_path, attempt=2, seed=2, settings={"lr": 0.2})
    (notice,) = outside.of(Noticed)
    assert "seed was 1 and is 2" in notice.text
    assert "lr was 0.1 and is 0.2" in notice.text


def test_a_model_that_was_changed_is_told_with_its_first_parameter_and_shapes(tmp_path):
    run(tmp_path, halt_at=3)
    run(tmp_path, attempt=2, halt_at=6)
    error, _ = fail(tmp_path, model=lambda: nn.Linear(4, 3))
    assert "size mismatch for weight" in str(error)
    assert "[2, 4]" in str(error)
    assert "[3, 4]" in str(error)
    assert len(checkpoint.committed(tmp_path / CHECKPOINT_FOLDER)) == 2
