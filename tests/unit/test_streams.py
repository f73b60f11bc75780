"""Output that nobody takes costs no training, and no traceback."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys

import pytest

from rota.cli import commands
from rota.cli.run import finish
from rota.execute.states import RunState
from rota.report.live import profile_progress, progress_observer
from rota.runtime.messages import Noticed
from rota.streams import Droppable, open_standard
from tests.unit.test_live import running


class Broken(io.TextIOBase):
    """A pipe without a reader, a full disk, a terminal that is gone."""

    encoding = "utf-8"

    def __init__(self, error: Exception, *, terminal: bool = False) -> None:
        self.error, self.terminal, self.tries = error, terminal, 0

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.tries += 1
        raise self.error

    def flush(self) -> None:
        raise self.error


ERRORS = [
    BrokenPipeError(errno.EPIPE, "Broken pipe"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EIO, "Input/output error"),
    ValueError("I/O operation on closed file"),
]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__ + str(error)[:9])
def test_progress_that_cannot_be_printed_is_dropped(error, terminal, monkeypatch):
    stream = Broken(error, terminal=terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with profile_progress() as show:
        show("looking", 0, 3)
    with progress_observer() as observe:
        observe(running(), Noticed(task="a", attempt=1, text="look"))
        observe(running(step=4), None)
    assert stream.tries


def test_progress_without_a_stream_is_dropped(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress_observer() as observe:
        observe(running(), Noticed(task="a", attempt=1, text="look"))


def test_what_can_be_printed_again_is_printed():
    class Full(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "full")
            return super().write(text)

    stream = Full()
    progress = Droppable(stream)
    progress.write("a")
    stream.full = False
    progress.write("b")
    progress.flush()
    assert stream.getvalue() == "b"


class Ended:
    state = RunState.FINISHED


@pytest.fixture
def ended(monkeypatch):
    """Has `rota status` end like a run that has trained everything."""
    module = sys.modules["rota.cli.run"]  # the attribute of its name is the command
    monkeypatch.setattr(module, "summary_words", lambda result: "the table")
    monkeypatch.setattr(module, "run_summary", lambda result: {"run": "a"})

    def make(*, as_json: bool) -> None:
        monkeypatch.setattr(commands.commands["status"], "callback", lambda **options: finish(Ended, as_json=as_json))

    return make


@pytest.mark.parametrize("error", ERRORS[:3], ids=str)
def test_a_final_table_that_cannot_be_printed_leaves_the_code_of_the_training(error, ended, command, monkeypatch):
    ended(as_json=False)
    monkeypatch.setattr(sys, "stdout", Broken(error))
    assert command("status") == (0, "", "")


def test_json_that_cannot_be_written_is_a_sentence(ended, command, monkeypatch):
    ended(as_json=True)
    monkeypatch.setattr(sys, "stdout", Broken(ERRORS[1]))
    code, _, said = command("status")
    assert code == 2
    assert said.startswith("rota: the system refused: No space left")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_without_streams_ends_with_its_code(as_json, ended, command, monkeypatch):
    ended(as_json=as_json)
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    code = command("status")[0]
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    assert code == 0


@pytest.mark.parametrize("error", ERRORS[:3], ids=str)
def test_an_error_that_cannot_be_told_keeps_its_code(error, command, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stderr", Broken(error))
    assert command("status", tmp_path)[0] == 2
    assert command("status", "--no-such-option")[0] == 2


def test_closed_descriptors_are_not_taken_by_what_is_opened_next(tmp_path):
    """And nothing is printed into it, or tried again at the end."""
    code = (
        "import os, sys\n"
        "from rota.streams import open_standard\n"
        "open_standard()\n"
        "number = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "print('into nothing'); print('and this', file=sys.stderr); sys.stdin.read()\n"
        "os.write(number, str(number).encode())\n"
    )
    place = tmp_path / "file"
    done = subprocess.run(
        ["sh", "-c", '"$0" "$@" <&- >&- 2>&-', sys.executable, "-c", code, str(place)], timeout=60, cwd=os.getcwd()
    )
    assert done.returncode == 0
    assert int(place.read_text()) > 2


def test_open_descriptors_are_left_alone():
    before = [os.fstat(number) for number in range(3)], sys.stdin, sys.stdout, sys.stderr
    open_standard()
    assert before == ([os.fstat(number) for number in range(3)], sys.stdin, sys.stdout, sys.stderr)


def test_the_command_line_with_closed_streams(tmp_path):
    code = '"$0" -m rota --help <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", code, sys.executable], timeout=60).returncode == 0
