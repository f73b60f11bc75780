"""`rota stop` never stops a run that the user may not mean."""

from __future__ import annotations

import contextlib
import shlex
import sys

import pytest

from rota.errors import RunInUseError
from rota.execute.events import RunBegan
from rota.store.journal import add
from rota.store.run_folder import RunFolder


def begun(path):
    path.mkdir(parents=True)
    tasks = ({"name": "a", "steps": 10},)
    began = RunBegan(name="n", source="s.py", source_digest="", sweep_digest="", tasks=tasks, devices=())
    add(path / "journal.db", began, time_s=1.0)
    return RunFolder(path)


@pytest.fixture
def asked(monkeypatch):
    """Which runs are asked to stop; each ends at once."""
    found = []
    module = sys.modules["rota.cli.stop"]  # the attribute of its name is the command
    monkeypatch.setattr(module, "ask", lambda journal, **what: found.append(journal.parent))
    monkeypatch.setattr(module, "_wait", lambda folder, task: None)
    return found


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_name_the_only_run_that_goes_is_stopped_and_not_the_latest(here, command, asked):
    first, latest = begun(here / "runs" / "first"), begun(here / "runs" / "latest")
    with first.held():
        code, out, _ = command("stop")
    assert code == 0
    assert [path.resolve() for path in asked] == [first.path]
    assert "runs/first" in out
    assert RunFolder(latest.path).exists()


def test_of_several_runs_that_go_one_must_be_named(here, command, asked):
    runs = [begun(here / "runs" / name) for name in ("one", "two two", "idle")]
    with contextlib.ExitStack() as stack:
        for one in runs[:2]:
            stack.enter_context(one.held())
        code, _, said = command("stop")
        assert code == 2
        assert "`rota stop runs/one`" in said
        assert f"`rota stop {shlex.quote('runs/two two')}`" in said
        assert "idle" not in said
        assert not asked
        assert command("stop", "one")[0] == 0
    assert len(asked) == 1


def test_without_a_run_that_goes_nothing_is_stopped(here, command, asked):
    begun(here / "runs" / "idle")
    code, _, said = command("stop")
    assert (code, asked) == (2, [])
    assert "no run in runs is running" in said


def test_a_run_that_is_in_use_is_code_two_and_names_what_stops_it(here, command, monkeypatch, refused):
    monkeypatch.setattr("rota.store.run_folder._LOCK_WAIT_S", 0.0)
    folder = begun(here / "my run")
    with folder.held():
        told = refused(RunFolder(folder.path).held().__enter__, error=RunInUseError)
        assert f"`rota stop {shlex.quote(str(folder.path))}`" in told
        (here / "s.py").write_text("")
        code, _, said = command("run", "s.py", "--out", folder.path)
    assert code == 2
    assert told in said
