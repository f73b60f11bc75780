"""What the system refuses is one sentence: what, where, and something that helps."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import subprocess
import sys

import pytest
from safetensors import SafetensorError

import rota
from rota.cli import commands, main
from rota.errors import CheckpointError, DiskError, InputError, StoreError
from rota.execute.events import RunBegan
from rota.refusals import advice, is_damage, reason, refusal, sentence, told
from rota.store.journal import add


def os_error(code, *names):
    return OSError(code, os.strerror(code), *names)


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EROFS, "can be written"),
        (errno.EACCES, "right to read and write"),
        (errno.EIO, "check the disk"),
        (errno.ENAMETOOLONG, "shorter path"),
        (errno.ENOENT, "still there"),
        (errno.ENOLCK, "file locks"),
        (errno.ECONNREFUSED, "system's log"),
    ],
)
def test_each_error_has_its_reason_its_file_and_advice_of_its_own(code, helps, refused):
    def fail():
        with told("the thing cannot be kept"):
            raise os_error(code, "/some/file")

    said = refused(fail, error=DiskError)
    assert said == f"the thing cannot be kept ({os.strerror(code)}: /some/file); {advice(os_error(code))}"
    assert helps in said
    assert helps in sentence(os_error(code))


def test_two_files_of_a_rename_are_both_named():
    assert reason(OSError(errno.EXDEV, "no", "a", None, b"b")) == "no: a and b"


def test_what_the_system_refused_is_found_behind_other_errors():
    first = os_error(errno.EMFILE, "x")
    second = RuntimeError("something else")
    second.__cause__ = first
    third = ValueError("more")
    third.__cause__ = second
    assert refusal(third) is first
    assert refusal(ValueError("a defect")) is None
    assert refusal(OSError("made up without a number")) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SafetensorError("Error while serializing: I/O error: whatever (os error 28)"), errno.ENOSPC),
        (RuntimeError("unable to open shared memory object </t> in read-write mode: Too many open files (24)"), 24),
        (ImportError("libx.so: cannot open shared object file: Input/output error"), errno.EIO),
    ],
)
def test_libraries_tell_it_in_words(error, code):
    found = refusal(error)
    assert found is not None
    assert found.errno == code


def test_only_some_errors_say_that_a_file_is_damaged():
    assert [code for code in (errno.EIO, errno.ENOENT, errno.EMFILE, errno.EACCES) if is_damage(os_error(code))] == [
        errno.EIO,
        errno.ENOENT,
    ]


# ---- the command line ----


@pytest.fixture
def failing(monkeypatch):
    """Has `rota status` raise."""

    def make(error):
        def raise_it(*arguments, **options):
            raise error

        monkeypatch.setattr(commands.commands["status"], "callback", raise_it)

    return make


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOLCK])
def test_a_command_that_the_system_refuses_ends_with_a_sentence_and_code_two(failing, command, code):
    failing(os_error(code, "/some/file"))
    ended, out, said = command("status")
    assert (ended, out) == (2, "")
    assert said.count("\n") == 1
    assert said.startswith("rota: the system refused: ")
    assert f"{os.strerror(code)}: /some/file; {advice(os_error(code))}" in said


@pytest.mark.parametrize("kind", [InputError, StoreError, DiskError])
def test_what_cannot_be_read_is_code_two(failing, command, kind):
    failing(kind("it cannot be"))
    assert command("status") == (2, "", "rota: it cannot be\n")


def test_a_checkpoint_that_a_command_cannot_write_is_told_with_advice(failing, command):
    error = CheckpointError("it cannot be written (No space left on device)")
    error.__cause__ = os_error(errno.ENOSPC)
    failing(error)
    assert command("status") == (2, "", f"rota: {error}; make room on the disk\n")


def test_a_defect_of_rota_is_not_hidden(failing):
    failing(KeyError("a defect"))
    with pytest.raises(KeyError):
        main(["status"])


@pytest.mark.parametrize(
    ("source", "then"),
    [
        ("a b.py", "go on with: rota resume {quoted}"),
        ("", "go on with: the script or notebook that began it, with out={path!r}"),
        (None, "run it again"),
    ],
)
def test_a_run_that_the_system_refuses_says_how_it_goes_on(source, then, tmp_path, monkeypatch, make_task, refused):
    path = tmp_path / "my run"
    if source is not None:
        path.mkdir()
        tasks = ({"name": "a", "steps": 10},)
        began = RunBegan(name="n", source=source, source_digest="", sweep_digest="", tasks=tasks, devices=())
        add(path / "journal.db", began, time_s=1.0)

    def check_memory(cluster):
        raise os_error(errno.EMFILE, "/some/file")

    monkeypatch.setattr("rota.execute.preflight.check_memory", check_memory)
    said = refused(rota.run, rota.Sweep(tasks=(make_task(),)), out=path, progress=False, error=DiskError)
    then = then.format(quoted=shlex.quote(str(path)), path=str(path))
    assert said == f"{sentence(os_error(errno.EMFILE, '/some/file'))}, then {then}"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_a_sentence(tmp_path):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rota", "--help"], stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.decode() == f"rota: {sentence(os_error(errno.ENOSPC))}, then run it again\n"


@pytest.mark.parametrize("place", ["sweep.py", "runs"])
def test_places_that_cannot_be_looked_at(place, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.py").touch()
    (tmp_path / "runs").mkdir()
    original = os.stat

    def failing_stat(path, *arguments, **options):
        if place in str(path):
            raise os_error(errno.EIO, str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", failing_stat)
    with contextlib.suppress(KeyError):
        code, _, said = command("run", "sweep.py") if place == "sweep.py" else command("status")
    assert code == 2
    assert os.strerror(errno.EIO) in said
    assert "Traceback" not in said
