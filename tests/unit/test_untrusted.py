"""A run folder of somebody else: what its journal names is not run, fetched, written to or shown before it is known."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import py_compile
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import rota.cli
from rota.cli.sweep_file import load_source
from rota.cluster.device import Cluster
from rota.errors import InputError, RunFolderError, RunMismatchError, StoreError
from rota.execute import run as running
from rota.execute.asked import Asked
from rota.execute.events import Launched, Lost, Requeued, RunBegan, RunNoted
from rota.execute.record import RunRecord
from rota.execute.run import RunOptions, Source, run_source
from rota.report.live import progress_observer
from rota.report.table import ranking_table
from rota.runtime.messages import Beat, Began, Failed, Noticed
from rota.store import seal
from rota.store.journal import Journal, read_summary
from rota.store.run_folder import RunFolder
from tests.property.test_tampered_journal import DEVICE, EVENTS, SWEEP, Nothing

SMALL = """
import pathlib
import rota
pathlib.Path({ran!r}).touch()
sweep = rota.Sweep(tasks=[rota.Task(name="a", model=object, data=object, optimizer=object, loss=object, steps=9)])
"""


@pytest.fixture(autouse=True)
def _own_key(tmp_path, monkeypatch):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path / "cache"))


def begun(path, **changes):
    """A run of three tasks that nobody has begun to train."""
    folder = RunFolder(path)
    folder.prepare()
    journal = Journal(folder.journal, durable=False)
    journal.append(replace(EVENTS[0], asked={}, **changes), time_s=1.0)
    journal.commit()
    journal.close()
    return folder


@pytest.fixture
def resume(monkeypatch):
    """Resumes a run until tasks would be started; gives its record, and whether the sweep was loaded."""
    monkeypatch.setattr(running, "LocalBackend", Nothing)
    monkeypatch.setattr(running, "_carry_out", lambda *arguments: None)
    loaded = []

    def load():
        loaded.append(True)
        return Source(sweep=SWEEP)

    def call(folder, **options):
        options.setdefault("cluster", Cluster(devices=(DEVICE,)))
        run_source(load, RunOptions(out=folder.path, progress=False, **options))
        return RunRecord.replay(read_summary(folder.journal))

    call.loaded = loaded
    return call


# ---- links and names ----


@pytest.mark.parametrize("place", ["lock", "tasks", "tasks/b", "tasks/b/checkpoints", "tasks/b/shards", ".profile"])
def test_a_run_that_leads_out_of_its_folder_is_refused_before_its_sweep_is_run(tmp_path, resume, refused, place):
    folder = begun(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.tex").write_text("precious")
    (folder.path / place).parent.mkdir(parents=True, exist_ok=True)
    (folder.path / place).symlink_to(tmp_path / "elsewhere")
    assert place in refused(resume, folder, error=RunFolderError)
    assert not resume.loaded
    assert (tmp_path / "elsewhere" / "thesis.tex").read_text() == "precious"


def test_a_damaged_journal_is_told_before_its_sweep_is_run(tmp_path, resume, refused):
    folder = begun(tmp_path / "run", tasks=({"name": "../a", "steps": 9},))
    assert "'../a'" in refused(resume, folder, error=StoreError)
    assert not resume.loaded


# ---- the source ----


def test_a_file_that_has_changed_is_not_run_by_a_resume(tmp_path, command):
    ran = tmp_path / "ran"
    file = tmp_path / "sweep.py"
    file.write_text(SMALL.format(ran=str(ran)))
    for digest in ("", "0" * 64, hashlib.sha256(b"another").hexdigest()):
        folder = begun(tmp_path / f"run-{len(digest)}{digest[:2]}", source=str(file), source_digest=digest)
        code, _, told = command("resume", folder.path)
        assert code == 2
        assert "has changed since" in told
        assert not ran.exists()


def test_compiled_code_beside_a_file_is_not_run_in_its_place(tmp_path):
    file, ran = tmp_path / "sweep.py", tmp_path / "evil"
    file.write_text(SMALL.format(ran=str(ran)))
    py_compile.compile(str(file), doraise=True)
    was = file.stat()
    file.write_text(SMALL.format(ran=str(tmp_path / "good")))
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert file.stat().st_size == was.st_size  # what Python looks at is the same
    source = load_source(str(file))
    assert source.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (tmp_path / "good").exists()
    assert not ran.exists()


# ---- places elsewhere ----


def test_storage_that_only_the_journal_names_is_not_used(tmp_path, resume, refused):
    place = f"{tmp_path}/storage/run-0123abcd"
    folder = begun(tmp_path / "run", storage=place)
    sentence = refused(resume, folder)
    assert place in sentence
    assert f"--storage {tmp_path}/storage" in sentence
    assert not resume.loaded
    assert not (tmp_path / "storage").exists()
    assert resume(folder, storage=str(tmp_path / "storage")).storage == place  # as the sentence says
    assert resume(folder).storage == place  # known from now on
    (tmp_path / "cache" / "seal.key").unlink()  # as on another machine
    assert place in refused(resume, folder)


@pytest.mark.parametrize("last", ["../precious-0123abcd", "..", "a/../../precious-0123abcd", "precious", ""])
def test_storage_below_what_the_user_names_is_of_this_run(tmp_path, resume, last):
    folder = begun(tmp_path / "run", name="../evil", storage=f"{tmp_path}/storage/{last}")
    place = resume(folder, storage=str(tmp_path / "storage")).storage
    assert Path(place).parent == tmp_path / "storage"
    assert Path(place).name.startswith("run-")


def test_a_cluster_that_only_the_journal_names_is_not_spoken_to(tmp_path, resume, refused, monkeypatch):
    monkeypatch.setattr(running, "_as_before", lambda *arguments: pytest.fail("it was spoken to"))
    folder = begun(tmp_path / "run")
    journal = Journal(folder.journal, durable=False)
    journal.append(running.RunResumed(asked={"cluster": "ray=evil:6379"}), time_s=2.0)
    journal.commit()
    journal.close()
    assert "--cluster ray=evil:6379" in refused(resume, folder, cluster=None)


def test_shards_that_only_the_journal_places_are_not_looked_at(tmp_path, resume, refused):
    place = f"{tmp_path}/disk/run-0123abcd"
    folder = begun(tmp_path / "run", shards=(place, f"{tmp_path}/precious-0123abcd"))
    assert "--shards" in refused(resume, folder)
    (tmp_path / "disk").mkdir()
    record = resume(folder, asked=Asked(shards=str(tmp_path / "disk")))
    assert record.shards == (place,)
    assert resume(folder).shards == (place,)


def test_shards_go_where_the_user_says_and_those_of_before_are_still_found(tmp_path, resume):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    folder = begun(tmp_path / "run")
    assert resume(folder).shards == ()
    (first,) = resume(folder, asked=Asked(shards=str(tmp_path / "one"))).shards
    assert Path(first).parent == tmp_path / "one"
    assert resume(folder).shards == (first,)
    assert resume(folder, asked=Asked(shards=str(tmp_path / "two"))).shards == (
        str(tmp_path / "two" / Path(first).name),
        first,
    )


def test_a_folder_for_shards_is_made_for_its_user_alone(tmp_path, resume):
    place = tmp_path / "made" / "shards"
    resume(begun(tmp_path / "run"), asked=Asked(shards=str(place)))
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_folder_for_shards_that_a_run_had_and_that_is_gone_is_refused(tmp_path, resume, refused):
    place, folder = tmp_path / "disk", begun(tmp_path / "run")
    resume(folder, asked=Asked(shards=str(place)))
    place.rmdir()
    for asked in (Asked(), Asked(shards=str(place))):
        assert "mount its disk" in refused(resume, folder, asked=asked)
    assert not place.exists()


def test_a_file_in_place_of_the_folder_for_shards_is_refused(tmp_path, resume, refused):
    (tmp_path / "file").touch()
    assert "the folder" in refused(resume, begun(tmp_path / "run"), asked=Asked(shards=str(tmp_path / "file" / "a")))
    assert "the folder" in refused(resume, begun(tmp_path / "run2"), asked=Asked(shards=str(tmp_path / "file")))


def test_a_seal_is_of_its_places_and_its_user(tmp_path, monkeypatch):
    made = seal.seal_of(("s3://a", "", ""))
    assert seal.is_sealed(("s3://a", "", ""), made)
    for places, other in ((("s3://b", "", ""), made), (("", "s3://a", ""), made), (("s3://a", "", ""), "")):
        assert not seal.is_sealed(places, other)
    assert not seal.is_sealed(("s3://a", "", ""), "ü")
    assert (tmp_path / "cache" / "seal.key").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path / "another"))
    assert not seal.is_sealed(("s3://a", "", ""), made)
    monkeypatch.setenv("ROTA_CACHE", "/proc/nothing")  # where no key can be kept, nothing is known
    assert seal.seal_of(("s3://a", "", "")) == ""


# ---- the terminal ----

EVIL = "\x1b]0;owned\x07\x1b[31m\x9b2J\r\x08\u202e\ud800"


def evil_run(path):
    folder = RunFolder(path)
    folder.prepare()
    task = {"name": "a", "settings": {EVIL: EVIL}, "steps": 9}
    events = [
        RunBegan(
            name=EVIL,
            source=EVIL,
            source_digest=EVIL,
            sweep_digest="",
            tasks=(task, {"name": "b", "settings": {}}),
            devices=({"name": EVIL, "label": EVIL},),
        ),
        RunNoted(text=EVIL),
        Launched(task="a", attempt=1, devices=(EVIL,), strategy=EVIL),
        Began(task="a", attempt=1, from_step=1, total_steps=9, parameters=5),
        Noticed(task="a", attempt=1, text=EVIL),
        Requeued(task="a", attempt=1, reason=EVIL),
        Launched(task="a", attempt=2, devices=(EVIL, EVIL), strategy=EVIL),
        Lost(task="a", attempt=2, device=EVIL, reason=EVIL, retried=True),
        Launched(task="a", attempt=3, devices=(EVIL,)),
        Failed(task="a", attempt=3, step=1, reason=f"raised {EVIL}", traceback=f"Traceback\n\t{EVIL}"),
        Launched(task="b", attempt=1, devices=(EVIL,), strategy=EVIL),
    ]
    journal = Journal(folder.journal, durable=False)
    for time_s, event in enumerate(events):
        journal.append(event, time_s=float(time_s))
    journal.commit()
    journal.close()
    return folder, events


def assert_harmless(text):
    assert set(EVIL) & set(text) <= set("]0;owned[31m2J")


def test_escape_sequences_of_a_run_folder_are_shown_and_not_obeyed(tmp_path, command):
    folder, _ = evil_run(tmp_path / "run")
    for words in (
        ("status", folder.path),
        ("status", folder.path, "--json"),
        ("status", folder.path, "--task", "a"),
        ("status", folder.path, "--task", EVIL),
        ("report", folder.path),
        ("resume", folder.path),
        ("stop", folder.path, EVIL),
        ("status", tmp_path / "\x1b[31m"),
    ):
        _, out, err = command(*words)
        assert out + err
        assert_harmless(out + err)
    assert "raised \\x1b]0;owned" in command("status", folder.path, "--task", "a")[1]
    assert_harmless(folder.report.read_text())


def test_escape_sequences_of_errors_are_shown_and_not_obeyed(tmp_path, command, monkeypatch):
    def fail(run):
        raise InputError(f"something {EVIL}")

    monkeypatch.setattr(sys.modules["rota.cli.status"], "open_run", fail)
    code, out, err = command("status", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("rota: something \\x1b]0;owned\\x07")
    assert_harmless(err)


def test_the_live_table_and_its_lines_obey_nothing(tmp_path):
    _, events = evil_run(tmp_path / "run")
    for terminal in (False, True):
        # Of rich's own sequences there are none on a terminal that can do nothing but print.
        console = Console(
            file=io.StringIO(), force_terminal=terminal, color_system=None, width=200, legacy_windows=False
        )
        record = RunRecord()
        with progress_observer(console) as shown:
            for time_s, event in enumerate(events):
                record.apply(event, float(time_s))
                shown(record, event)
            shown(record, Beat(task="b", phase=EVIL, phase_s=1e6))
        text = console.file.getvalue()
        for piece in ("\x1b]0;", "\x1b[31m", "\x9b", "\x07", "\x08", "\u202e", "\ud800"):
            assert piece not in text
        assert "\\x1b]0;owned" in text
    assert_harmless(str(ranking_table(record)))


def test_commands_print_by_one_function():
    """Which is where escape sequences are made harmless."""
    for path in Path(rota.cli.__file__).parent.glob("*.py"):
        calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert "print" not in calls
        assert path.name in ("output.py", "options.py") or not {"click.echo", "click.secho"} & set(calls), path.name


def test_a_changed_sweep_is_told_by_the_same_sentence(tmp_path, refused):
    folder = RunFolder(tmp_path)
    sentence = refused(running.check_unchanged, folder, "sweep.py", before="a", now="b", error=RunMismatchError)
    assert "--allow-changes" in sentence
