"""Bad input gets one clear sentence, and the other tasks go on."""

import json
import os
import sqlite3
import subprocess

import pytest

import rota

TASKS = """
import sys, time
import torch
import rota


def good(**changes):
    fields = dict(
        model=lambda: torch.nn.Linear(4, 1),
        data=lambda: rota.Data(train=torch.ones(8, 4), batch_size=4),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        steps=3)
    return rota.Task(**(fields | changes))


def broken_model():
    raise ValueError("no such architecture")


def exiting_model():
    sys.exit("the model gives up")


def hungry_loss(model, batch):
    return torch.ones(3_000_000_000).sum() * model(batch).mean()


def nan_at_three():
    calls = []

    def loss(model, batch):
        calls.append(1)
        return model(batch).mean() * (float("nan") if len(calls) == 3 else 1.0)

    return loss


def endless():
    while True:
        time.sleep(0.1)


class Empty(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])


sweep = rota.Sweep(tasks=[
    good(name="good"),
    good(name="model-raises", model=broken_model),
    good(name="model-exits", model=exiting_model),
    good(name="model-hangs", model=endless, setup_timeout_s=2),
    good(name="model-wrong-type", model=lambda: "a model"),
    good(name="data-wrong-type", data=lambda: [1, 2]),
    good(name="optimizer-wrong-type", optimizer=lambda model: None),
    good(name="schedule-raises", lr_schedule=lambda optimizer: 1 / 0),
    good(name="data-empty", data=lambda: rota.Data(train=[], batch_size=4)),
    good(name="iterable-empty", data=lambda: rota.Data(train=Empty(), batch_size=4)),
    good(name="batch-too-large", data=lambda: rota.Data(train=torch.ones(8, 4), batch_size=9)),
    good(name="loss-not-scalar", loss=lambda model, batch: model(batch)),
    good(name="loss-not-tensor", loss=lambda model, batch: 3.0),
    good(name="loss-no-gradient", loss=lambda model, batch: batch.mean()),
    good(name="loss-raises", loss=lambda model, batch: model(batch[:, :3]).mean()),
    good(name="loss-hangs", loss=lambda model, batch: endless(), setup_timeout_s=2),
    good(name="nan", steps=9, loss=nan_at_three()),
    good(name="infinite", loss=lambda model, batch: model(batch).mean() + float("inf")),
    good(name="out-of-memory", loss=hungry_loss),
    good(name="good-again", model=lambda: (print("hello from the task"), torch.nn.Linear(4, 1))[1]),
])
"""

REASONS = {
    "model-raises": ["the model factory raised ValueError: no such architecture", "sweep.py, line"],
    "model-exits": ["the model factory raised SystemExit: the model gives up"],
    "model-hangs": ["the model factory did not end within 2 s"],
    "model-wrong-type": ["the model factory returned str; it must return a Module"],
    "data-wrong-type": ["the data factory returned list; it must return a Data"],
    "optimizer-wrong-type": ["the optimizer factory returned NoneType; it must return a Optimizer"],
    "schedule-raises": ["the lr_schedule factory raised ZeroDivisionError"],
    "data-empty": ["the train dataset is empty"],
    "iterable-empty": ["the training iterable is empty"],
    "batch-too-large": ["batch_size (9) is larger than the training dataset (8 samples)"],
    "loss-not-scalar": ["the loss must be a scalar, and has shape (4, 1)"],
    "loss-not-tensor": ["must return a scalar tensor", "not a float"],
    "loss-no-gradient": ["the loss has no gradient"],
    "loss-raises": ["the loss function raised RuntimeError", "sweep.py, line"],
    "loss-hangs": ["the first batch did not end within 2 s"],
    "nan": ["the training loss became nan at step 3"],
    "infinite": ["the training loss became inf at step 1"],
    "out-of-memory": ["the loss function ran out of memory"],
}


def test_every_kind_of_broken_task_ends_with_one_sentence_and_the_others_go_on(cli, sweep_file, tmp_path):
    done = cli.run("run", sweep_file(text=TASKS), "--out", "run", "--memory", "2GiB")
    assert done.returncode == 1
    result = rota.open_run(tmp_path / "run")
    ended = {task.name: task for task in result.tasks}
    assert ended["good"].state == ended["good-again"].state == "finished"
    for name, parts in REASONS.items():
        task = ended[name]
        assert task.state == ("diverged" if name in ("nan", "infinite") else "failed"), task
        assert "\n" not in task.reason
        for part in parts:
            assert part in task.reason
        assert "runtime/training.py" not in result.record.tasks[name].traceback
        assert task.reason in done.stdout
    assert "broken_model" in result.record.tasks["model-raises"].traceback
    log = tmp_path / "run" / "tasks" / "good-again" / "output.log"
    assert log.read_text() == "hello from the task\n"
    status = cli.run("status", "run", "--json")
    assert json.loads(status.stdout)["counts"] == {"finished": 2, "failed": 16, "diverged": 2}
    one = cli.run("status", "run", "--task", "model-raises")
    assert "broken_model" in one.stdout


SMALL = """
import torch, rota

def task(lr):
    return rota.Task(name=f"task-{lr}", model=lambda: torch.nn.Linear(2, 1),
                     data=lambda: rota.Data(train=torch.ones(4, 2), batch_size=2),
                     loss=lambda model, batch: model(batch).mean(),
                     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr), steps=3)

sweep = rota.grid(task, lr=[0.1])
"""


def test_folders_files_and_journals_that_do_not_fit_are_refused(cli, command, sweep_file, tmp_path, monkeypatch):
    file = sweep_file(text=SMALL)
    assert cli.run("run", file, "--out", "run", "--devices", "1").returncode == 0

    monkeypatch.chdir(tmp_path)

    def refused(*arguments):
        ended, _, told = command(*arguments)
        assert ended == 2, told
        assert told.startswith("rota: ")
        assert len(told.strip().splitlines()) == 1
        return told

    (tmp_path / "other.py").write_text(SMALL.replace("lr=[0.1]", "lr=[0.1, 0.2]"))
    assert "another sweep" in refused("run", "other.py", "--out", "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    assert "not empty" in refused("run", file, "--out", "full")
    assert (tmp_path / "full" / "thesis.tex").read_text() == "precious"
    assert "is a file" in refused("run", file, "--out", "sweep.py")
    file.write_text(SMALL + "# a comment\n")
    assert "has changed since" in refused("resume", "run")
    assert cli.run("resume", "run", "--allow-changes").returncode == 0
    file.write_text("import os\n" + SMALL.replace("steps=3)", "steps=int(os.environ.get('STEPS', 3)))"))
    assert cli.run("run", file, "--out", "by-environment", "--devices", "1", "--no-profile").returncode == 0
    monkeypatch.setenv("STEPS", "5")
    assert "makes another task-0.1 (steps was 3 and is 5)" in refused("resume", "by-environment")
    monkeypatch.delenv("STEPS")
    assert "no run 'nothing'" in refused("status", "nothing")
    assert "no task 'nobody'" in refused("status", "run", "--task", "nobody")
    file.unlink()
    assert "there is no file" in refused("resume", "run")

    journal = tmp_path / "run" / "journal.db"
    journal.write_bytes(b"this is not a database" * 100)
    for words in (("status", "run"), ("report", "run"), ("run", "other.py", "--out", "run")):
        assert "the file is damaged" in refused(*words)
    assert (tmp_path / "run" / "tasks" / "task-0.1" / "model.safetensors").exists()


def test_nothing_in_a_run_folder_is_run_as_code(cli, command, sweep_file, tmp_path):
    file = sweep_file(text=SMALL)
    assert cli.run("run", file, "--out", tmp_path / "run", "--devices", "1", "--no-profile").returncode == 0
    evil = tmp_path / "run" / "tasks" / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{SMALL}")
    with sqlite3.connect(tmp_path / "run" / "journal.db") as journal:
        journal.execute("update events set data = replace(data, ?, ?)", (json.dumps(str(file))[1:-1], str(evil)))
    ended, _, told = command("resume", str(tmp_path / "run"))
    assert ended == 2
    assert "in the run folder itself" in told
    assert not (tmp_path / "ran").exists()


BIG = """
import torch, rota

def task(size):
    return rota.Task(name=f"size-{size}", model=lambda: torch.nn.Linear(size, size),
                     data=lambda: rota.Data(train=torch.ones(8, size), batch_size=4),
                     loss=lambda model, batch: model(batch).square().mean(),
                     optimizer=lambda model: torch.optim.Adam(model.parameters()),
                     steps=60, checkpoint_every=5)

sweep = rota.grid(task, size=[1024, 2])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk to fill")
def test_a_disk_that_fills_up_fails_the_task_clearly_and_resume_finishes_it(cli, sweep_file, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "rota-test", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a small disk")
    try:
        file = sweep_file(text=BIG)
        done = cli.run("run", file, "--out", disk / "run", "--no-profile")
        assert done.returncode == 1
        result = rota.open_run(disk / "run")
        assert result.task("size-2").state == "finished"
        assert result.task("size-1024").state == "failed", done.stderr
        assert "no space left" in result.task("size-1024").reason.lower()
        assert any("training goes on" in text for text in result.record.tasks["size-1024"].notices)
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        assert cli.run("resume", disk / "run", "--failed").returncode == 0
        again = rota.open_run(disk / "run")
        assert again.task("size-1024").state == "finished"
        assert [row["step"] for row in again.history("size-1024")] == list(range(1, 61))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
