"""What is said of a run that a kill ended: nothing of it runs."""

from __future__ import annotations

import json

import pytest

import rota
from rota.execute.events import Launched, RunBegan, RunEnded
from rota.execute.states import TaskState
from rota.runtime.messages import Began, Finished, Saved
from rota.store.journal import Journal, add
from rota.store.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """One of its tasks runs, another one waits, the third has ended."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    tasks = tuple({"name": name, "steps": 10} for name in "abc")
    began = RunBegan(name="n", source="s.py", source_digest="", sweep_digest="", tasks=tasks, devices=())
    add(folder.journal, began, time_s=1.0)
    for event in (
        Launched(task="c", attempt=1, devices=("cpu:0",)),
        Finished(task="c", attempt=1, step=10, metrics={}),
        Launched(task="a", attempt=1, devices=("cpu:0",)),
        Began(task="a", attempt=1, from_step=0, total_steps=10, parameters=1),
        Saved(task="a", attempt=1, step=4, write_s=0.1),
    ):
        add(folder.journal, event, time_s=2.0)
    return folder


def test_a_task_of_a_killed_run_is_interrupted_and_not_running(folder, command):
    _, out, _ = command("status", folder.path)
    assert "interrupted; 1 interrupted, 1 pending, 1 finished;" in out
    assert "running" not in out
    told = json.loads(command("status", folder.path, "--json")[1])
    assert told["state"] == "interrupted"
    assert {one["name"]: one["state"] for one in told["tasks"]} == {"a": "interrupted", "b": "pending", "c": "finished"}
    assert [one["devices"] for one in told["tasks"]] == [[], [], []]
    assert "state: interrupted" in command("status", folder.path, "--task", "a")[1]
    assert rota.open_run(folder.path).task("a").state is TaskState.INTERRUPTED
    assert not TaskState.INTERRUPTED.ended


def test_the_report_of_a_killed_run_says_so_too(folder, command):
    assert command("report", folder.path)[0] == 0
    page = folder.report.read_text()
    assert "interrupted" in page
    assert ">running<" not in page


def test_a_run_that_goes_says_running(folder, command):
    with folder.held():
        told = json.loads(command("status", folder.path, "--json")[1])
    assert told["state"] == "running"
    assert told["tasks"][0]["state"] == "running"
    assert told["tasks"][0]["devices"] == ["cpu:0"]


def test_a_run_that_ends_while_it_is_looked_at_has_ended(folder, monkeypatch):
    original = RunFolder.is_held

    def is_held(self):
        journal = Journal(self.journal)
        journal.append(Finished(task="a", attempt=1, step=10, metrics={}), time_s=3.0)
        journal.append(RunEnded(state="finished"), time_s=3.0)
        journal.commit()
        journal.close()
        return original(self)

    monkeypatch.setattr(RunFolder, "is_held", is_held)
    assert rota.open_run(folder.path).state == "finished"


def test_a_line_break_in_a_path_begins_no_other_line(tmp_path, folder, command):
    path = tmp_path / "a\nrota: all is well"
    folder.path.rename(path)
    assert command("status", path)[1].splitlines()[0].startswith(f"{tmp_path}/a\\nrota: all is well: interrupted;")
    assert command("report", path)[1].count("\n") == 1
    assert "\nrota:" not in command("status", path, "--task", "a")[1]
    _, _, said = command("status", tmp_path / "b\nrota: all is well")
    assert said.count("\n") == 1
    blocked = tmp_path / "c\nrota: all is well"
    blocked.touch()
    (tmp_path / "s.py").touch()
    _, _, said = command("run", tmp_path / "s.py", "--out", blocked)
    assert said.count("\n") == 1
