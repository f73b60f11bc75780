"""What the system refuses a run is told with its cause, and the run goes on when the advice is followed."""

from __future__ import annotations

import errno
import os
import re
import shlex

import rota

SWEEP = """
import os, resource
import torch
import rota


def loss(model, batch):
    if os.environ.get("ROTA_TEST_LEAK"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            while True:
                os.dup(0)
        except OSError:
            pass
    return model(batch).square().mean()


def task(name):
    return rota.Task(
        name=name,
        model=lambda: torch.nn.Linear(4, 1),
        data=lambda: rota.Data(train=torch.ones(8, 4), batch_size=4),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        steps=3,
    )


sweep = rota.Sweep(tasks=[task("a"), task("b")])
"""


def follow(command, sentence):
    """Do what a message says."""
    (advised,) = re.findall(r"rota (resume [^`]*)", sentence)
    return command(*shlex.split(advised), "--quiet")


def test_a_disk_that_is_full_when_a_run_begins_costs_nothing_but_to_begin_again(
    command, sweep_file, tmp_path, monkeypatch
):
    file, out = sweep_file(text=SWEEP), tmp_path / "out"

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rota.state.files.sync_file", full)
    arguments = ("run", file, "--out", out, "--devices", "1", "--no-profile", "--quiet")
    code, _, said = command(*arguments)
    assert code == 2
    assert said.endswith("make room on the disk, then run it again\n")
    monkeypatch.undo()
    assert command(*arguments)[0] == 0


def test_a_disk_that_is_full_right_after_the_first_event_costs_a_resume(command, sweep_file, tmp_path, monkeypatch):
    file, out = sweep_file(text=SWEEP), tmp_path / "out"
    monkeypatch.setattr("rota.execute.run.Journal", full_journal)
    code, _, said = command("run", file, "--out", out, "--devices", "1", "--no-profile", "--quiet")
    assert code == 2
    assert "make room on the disk, then go on with: rota resume" in said
    monkeypatch.undo()
    assert follow(command, said)[0] == 0


def full_journal(path):
    raise rota.errors.DiskError(f"the journal {path} cannot be used (database or disk is full); make room on the disk")


def test_a_worker_without_files_names_the_limit_and_its_task_goes_on_when_that_is_mended(
    command, sweep_file, tmp_path, monkeypatch
):
    file, out = sweep_file(text=SWEEP), tmp_path / "out"
    monkeypatch.setenv("ROTA_TEST_LEAK", "1")
    code, _, _ = command("run", file, "--out", out, "--devices", "1", "--no-profile", "--quiet")
    assert code == 1
    reasons = [task.reason for task in rota.open_run(out).tasks]
    for reason in reasons:
        assert os.strerror(errno.EMFILE).lower() in reason.lower()
        assert "raise the limit of open files (ulimit -n), then run `rota resume --failed" in reason
        assert "report it" not in reason
    monkeypatch.delenv("ROTA_TEST_LEAK")
    assert follow(command, reasons[0])[0] == 0
