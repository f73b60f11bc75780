"""Temporary folders of killed processes are removed by the next rota of the same user, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

from rota import scratch as module
from rota.scratch import remove_left, same_disk, scratch

HOLDS = (
    "import pathlib, sys; from rota.scratch import scratch\n"
    "with scratch('plan', place=pathlib.Path(sys.argv[1])) as folder:\n"
    "    (folder / 'file').write_text('x'); print(folder, flush=True); sys.stdin.read()\n"
)


def test_a_folder_is_the_users_alone_and_gone_at_the_end(tmp_path):
    with scratch("plan", place=tmp_path) as folder:
        (folder / "a").mkdir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_it_lies_among_the_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch("links") as folder:
        assert folder.parent == tmp_path


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path):
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        left = process.stdout.readline().strip()
        with scratch("explain", place=tmp_path):
            assert os.path.exists(left)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        assert os.path.exists(left)
        with scratch("explain", place=tmp_path) as folder:
            assert list(tmp_path.iterdir()) == [folder]


def test_what_is_not_of_rota_stays(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / ".rota-plan-abcdefgh").symlink_to(tmp_path / "precious")
    (tmp_path / ".rota-plan-file1234").touch()
    for name in (".rota-plan", ".rota-plan-abc", "rota-plan-abcdefgh", ".rota-plan-abcdefghi"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    remove_left(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_folders_of_other_users_stay(tmp_path, monkeypatch):
    (tmp_path / ".rota-plan-abcdefgh").mkdir()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    remove_left(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(os, "getuid", lambda: own)
    remove_left(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_removed_before_it_is_held_is_made_again(tmp_path, monkeypatch):
    original, made = tempfile.mkdtemp, []

    def mkdtemp(**where):
        made.append(original(**where))
        if len(made) == 1:
            remove_left(tmp_path)
        return made[-1]

    monkeypatch.setattr(module.tempfile, "mkdtemp", mkdtemp)
    with scratch("plan", place=tmp_path) as folder:
        assert folder.is_dir()
    assert len(made) == 2


def test_another_place_on_the_same_disk_is_taken_before_the_users_folder(tmp_path, monkeypatch):
    other, own = tmp_path / "other", tmp_path / "own"
    other.mkdir()
    own.mkdir()
    assert same_disk(own, (tmp_path / "nothing", other)) == other
    assert same_disk(own, (tmp_path / "nothing",)) == own
    if os.path.isdir("/proc/self"):
        assert same_disk(own, (type(own)("/proc/self"),)) == own
