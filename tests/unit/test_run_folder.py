"""The folder of a run: who may use it, who holds it, and which one a user means."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import rota.store
from rota.errors import CheckpointError, DiskError, InputError, RunFolderError, RunInUseError
from rota.state import checkpoint
from rota.store import run_folder
from rota.store.journal import Journal
from rota.store.run_folder import RunFolder, find_run, list_runs, new_run_path


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def make_run(path, *, active_s=None):
    folder = RunFolder(path)
    folder.prepare()
    Journal(folder.journal, durable=False).close()
    if active_s is not None:
        os.utime(folder.journal, (active_s, active_s))
    return folder


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(run_folder, "_LOCK_WAIT_S", 0.1)


# ---- preparing ----


def test_a_run_folder_is_made_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        RunFolder(tmp_path / "runs" / "a").prepare()
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "runs" / "a") == 0o700
    assert mode_of(tmp_path / "runs") == 0o700


def test_preparing_twice_and_preparing_an_empty_folder_is_fine(tmp_path):
    folder = RunFolder(tmp_path)
    folder.prepare()
    with folder.held():
        pass
    folder.prepare()
    assert not folder.exists()


def test_preparing_a_run_that_exists_is_fine(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder.path / "tasks").mkdir()
    folder.prepare()
    assert folder.exists()


def test_a_folder_with_something_else_in_it_is_refused(tmp_path, refused):
    (tmp_path / "thesis.tex").touch()
    sentence = refused(RunFolder(tmp_path).prepare)
    assert str(tmp_path) in sentence
    assert "not empty" in sentence
    assert "new folder" in sentence
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path, refused):
    (tmp_path / "a").touch()
    assert "is a file" in refused(RunFolder(tmp_path / "a").prepare)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, refused):
    (tmp_path / "a").touch()
    sentence = refused(RunFolder(tmp_path / "a" / "b").prepare)
    assert "cannot be made" in sentence
    assert str(tmp_path / "a" / "b") in sentence


def test_a_name_too_long_for_the_file_system_is_refused(tmp_path, refused):
    assert "cannot be made" in refused(RunFolder(tmp_path / ("a" * 300)).prepare)


def test_the_places_in_a_run_are_inside_it(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.journal == tmp_path / "journal.db"
    assert folder.report == tmp_path / "report.html"
    assert folder.task("a") == tmp_path / "tasks" / "a"
    assert folder.model("a") == tmp_path / "tasks" / "a" / "model.safetensors"


# ---- holding ----


def test_a_run_is_held_by_one_and_free_again_afterwards(tmp_path, impatient, refused):
    folder = RunFolder(tmp_path)
    assert not folder.is_held()
    with folder.held():
        assert folder.is_held()
        sentence = refused(RunFolder(tmp_path).held().__enter__, error=RunInUseError)
        assert str(tmp_path) in sentence
        assert f"process {os.getpid()}" in sentence
        assert f"`rota stop {tmp_path}`" in sentence
        assert folder.is_held()
    assert not folder.is_held()
    with folder.held():
        pass


def test_a_run_is_free_again_after_an_error(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="bug"), folder.held():
        raise ValueError("bug")
    assert not folder.is_held()


def test_asking_whether_it_is_held_does_not_hold_it(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.held():
        pass
    assert not folder.is_held()
    assert not folder.is_held()
    with folder.held():
        pass


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_a_lock_that_the_system_refuses_is_not_held_by_another(tmp_path, impatient, refused, monkeypatch, code):
    def flock(handle, operation):
        raise OSError(code, os.strerror(code))

    with RunFolder(tmp_path).held():
        pass
    monkeypatch.setattr(fcntl, "flock", flock)
    for use in (RunFolder(tmp_path).held().__enter__, RunFolder(tmp_path).is_held):
        sentence = refused(use, error=DiskError)
        assert f"{tmp_path / 'lock'} cannot be" in sentence
        assert os.strerror(code) in sentence


def test_a_lock_that_cannot_be_opened_is_not_free(tmp_path, refused, monkeypatch):
    with RunFolder(tmp_path).held():
        pass

    def failing(name, *arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(name))

    monkeypatch.setattr(os, "open", failing)
    for use in (RunFolder(tmp_path).held().__enter__, RunFolder(tmp_path).is_held):
        assert "ulimit -n" in refused(use, error=DiskError)


def test_no_file_is_left_open_where_the_lock_fails(tmp_path, monkeypatch, refused):
    def flock(handle, operation):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(fcntl, "flock", flock)
    before = os.listdir("/proc/self/fd")
    refused(RunFolder(tmp_path).held().__enter__, error=DiskError)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_whoever_holds_a_run_removes_what_killed_processes_were_writing(tmp_path):
    folder = make_run(tmp_path / "a")
    left = [folder.path / name for name in (".journal.db.123.tmp", ".report.html.99.tmp")]
    mine = folder.path / ".notes.tmp"
    for path in (*left, mine):
        path.touch()
    with folder.held():
        assert not any(path.exists() for path in left)
    assert mine.exists()


def test_runs_of_others_that_cannot_be_looked_at_do_not_hide_mine(tmp_path, monkeypatch):
    mine = make_run(tmp_path / "mine")
    (tmp_path / "theirs").mkdir()
    original = Path.is_file

    def is_file(path):
        if "theirs" in str(path):
            raise PermissionError(errno.EACCES, "no", str(path))
        return original(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert [run.path for run in list_runs(tmp_path)] == [mine.path]


def test_the_lock_is_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        with RunFolder(tmp_path).held():
            assert mode_of(tmp_path / "lock") == 0o600
    finally:
        os.umask(before)


HOLD = """
import sys, time
from pathlib import Path
from rota.store.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).held():
    print("held", flush=True)
    sys.stdin.read()
print("released", flush=True)
"""


@pytest.fixture
def other_process(tmp_path):
    """Another process that holds the run until its input ends."""
    # Not through rota/__init__.py, which would import torch: a bare package of the same path.
    root = Path(rota.store.__file__).parent.parent
    code = f"import sys, types; p = types.ModuleType('rota'); p.__path__ = [{str(root)!r}]; sys.modules['rota'] = p\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code + HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_run_that_another_process_holds_cannot_be_held(tmp_path, impatient, refused, other_process):
    folder = RunFolder(tmp_path)
    assert folder.is_held()
    assert f"process {other_process.pid}" in refused(folder.held().__enter__, error=RunInUseError)
    other_process.stdin.close()
    assert other_process.stdout.readline() == "released\n"
    assert not folder.is_held()
    with folder.held():
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_killed_process_holds_nothing(tmp_path, other_process):
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    with RunFolder(tmp_path).held():
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_holder_that_is_just_leaving_is_waited_for(tmp_path, other_process):
    other_process.stdin.close()
    with RunFolder(tmp_path).held():
        pass


# ---- finding ----


def test_a_run_is_found_by_path_and_by_name(tmp_path, monkeypatch):
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "elsewhere")
    assert find_run(tmp_path / "elsewhere").path == tmp_path / "elsewhere"
    assert find_run(str(tmp_path / "runs" / "a")).path == tmp_path / "runs" / "a"
    assert find_run("a", root=tmp_path / "runs").path == tmp_path / "runs" / "a"
    monkeypatch.chdir(tmp_path)
    assert find_run("a").path == Path("runs/a")
    assert find_run("elsewhere").path == Path("elsewhere")


def test_without_a_name_the_run_that_was_last_active_is_found(tmp_path):
    for name, active_s in (("b", 100), ("c", 300), ("a", 200)):
        make_run(tmp_path / name, active_s=active_s)
    assert find_run(None, root=tmp_path).path.name == "c"
    assert [run.path.name for run in list_runs(tmp_path)] == ["b", "a", "c"]


def test_a_run_that_is_active_right_now_is_the_last(tmp_path):
    resumed = make_run(tmp_path / "resumed", active_s=100)
    make_run(tmp_path / "finished", active_s=200)
    from rota.execute.events import RunResumed

    journal = Journal(resumed.journal, durable=False)
    journal.append(RunResumed(), time_s=300.0)
    journal.commit()
    try:
        assert find_run(None, root=tmp_path).path.name == "resumed"
    finally:
        journal.close()


def test_an_unknown_run_is_refused_and_the_latest_are_listed(tmp_path, refused):
    for number in range(7):
        make_run(tmp_path / f"r{number}", active_s=100 + number)
    sentence = refused(find_run, "ghost", root=tmp_path)
    assert "'ghost'" in sentence
    assert "r2, r3, r4, r5, r6" in sentence
    assert "r1" not in sentence


def test_where_there_is_no_run_that_is_said(tmp_path, refused):
    sentence = refused(find_run, None, root=tmp_path / "runs")
    assert "no run" in sentence
    assert "rota run FILE" in sentence
    assert "holds none" in refused(find_run, "ghost", root=tmp_path / "runs")


def test_folders_and_files_that_are_no_runs_are_not_listed(tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert [run.path.name for run in list_runs(tmp_path)] == ["run"]
    assert list_runs(tmp_path / "missing") == []


@pytest.mark.parametrize("name", ["", ".", "file", "folder"])
def test_a_path_that_is_no_run_is_refused(tmp_path, refused, name, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert repr(name) in refused(find_run, name)


def test_a_new_run_gets_a_path_that_is_not_taken(tmp_path):
    path = new_run_path("gpt", root=tmp_path)
    assert path.parent == tmp_path
    assert re.fullmatch(r"gpt-\d{8}-\d{6}", path.name)
    assert not path.exists()


def test_runs_that_begin_in_the_same_second_get_different_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.time, "strftime", lambda form: "20260101-000000")
    names = []
    for _ in range(4):
        path = new_run_path("gpt", root=tmp_path)
        path.mkdir()
        names.append(path.name)
    assert names == [f"gpt-20260101-000000{end}" for end in ("", "-2", "-3", "-4")]


def test_input_errors_can_be_caught_as_value_errors():
    assert issubclass(InputError, ValueError)


# ---- a folder that goes away ----


def renamed(folder):
    folder.path.rename(folder.path.with_name("moved"))


def renamed_and_made_again(folder):
    renamed(folder)
    make_run(folder.path)
    (folder.path / "lock").touch()


def removed(folder):
    shutil.rmtree(folder.path)


@pytest.mark.parametrize("vanish", [renamed, renamed_and_made_again, removed])
def test_a_held_folder_that_vanished_is_told(tmp_path, refused, vanish):
    folder = make_run(tmp_path / "a")
    folder.check_there()
    with folder.held():
        folder.check_there()
        vanish(folder)
        sentence = refused(folder.check_there, error=RunFolderError)
    assert f"{folder.path} was moved or removed" in sentence
    assert ("rota resume" in sentence) == (vanish is not removed)
    if vanish is not removed and sys.platform == "linux":
        assert str(tmp_path / "moved") in sentence


def test_a_checkpoint_does_not_make_the_folder_of_its_task_again(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        checkpoint.write(tmp_path / "a" / "checkpoints", {"step": 1})
    assert list(tmp_path.iterdir()) == []
