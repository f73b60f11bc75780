"""Checkpoints on storage: what is sent is fetched, the newest whole one counts, and failures are sentences."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path
from typing import Any

import pytest

from rota.errors import CheckpointError, InputError
from rota.state import checkpoint
from rota.state.mirror import Mirror, check, open_storage


def silent(text: str) -> None:
    raise AssertionError(text)


def written(folder: Path, step: int) -> Path:
    return checkpoint.write(folder, {"step": step})


@pytest.fixture(params=["folder", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place = tmp_path / "storage"
    return {"folder": str(place), "file": f"file://{place}", "memory": f"memory://{uuid.uuid4().hex}"}[request.param]


def test_what_is_sent_is_fetched_elsewhere(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url)
    for step in (1, 2, 3):
        mirror.send(written(tmp_path / "here", step))
    mirror.fetch(tmp_path / "there")
    assert [path.name for path in checkpoint.committed(tmp_path / "there")] == [
        "checkpoint-00000002",
        "checkpoint-00000003",
    ]
    found = checkpoint.read_latest(tmp_path / "there", notice=silent)
    assert found is not None
    assert found.tree == {"step": 3}


def test_only_two_are_kept(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url)
    for step in range(5):
        mirror.send(written(tmp_path / "here", step))
    system, root = open_storage(url)
    assert len(system.ls(root, detail=False)) == 2


def test_what_the_local_disk_has_is_not_fetched_again(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url)
    mirror.send(written(tmp_path / "here", 1))
    written(tmp_path / "there", 7)
    written(tmp_path / "there", 8)
    mirror.fetch(tmp_path / "there")
    found = checkpoint.read_latest(tmp_path / "there", notice=silent)
    assert found is not None
    assert found.tree == {"step": 8}


def test_nothing_stored_is_nothing_fetched(tmp_path: Path, url: str) -> None:
    Mirror(url).fetch(tmp_path / "there")
    assert checkpoint.read_latest(tmp_path / "there", notice=silent) is None


def test_what_was_not_committed_is_not_fetched(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url)
    mirror.send(written(tmp_path / "here", 1))
    mirror.send(written(tmp_path / "here", 2))
    system, root = open_storage(url)
    system.rm_file(f"{root}/checkpoint-00000002-0000/commit.json")
    mirror.fetch(tmp_path / "there")
    found = checkpoint.read_latest(tmp_path / "there", notice=silent)
    assert found is not None
    assert found.tree == {"step": 1}


def test_a_damaged_one_is_set_aside_and_the_one_before_it_is_used(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url)
    for step in (1, 2):
        mirror.send(written(tmp_path / "here", step))
    system, root = open_storage(url)
    system.pipe_file(f"{root}/checkpoint-00000002-0000/state.json", b"{}")
    mirror.fetch(tmp_path / "there")
    said: list[str] = []
    found = checkpoint.read_latest(tmp_path / "there", notice=said.append)
    assert found is not None
    assert found.tree == {"step": 1}
    assert len(said) == 1


@pytest.mark.parametrize("whole_in_storage", [True, False])
def test_where_all_of_the_disk_is_damaged_the_copy_in_the_storage_is_used(
    tmp_path: Path, url: str, whole_in_storage: bool
) -> None:
    mirror, folder = Mirror(url), tmp_path / "here"
    for step in (1, 2):
        mirror.send(written(folder, step))
    system, root = open_storage(url)
    if not whole_in_storage:
        system.pipe_file(f"{root}/checkpoint-00000002-0000/state.json", b"{}")
    for path in checkpoint.committed(folder):
        (path / "state.json").write_bytes(b"{}")
    said: list[str] = []
    found = checkpoint.read_latest(folder, notice=said.append, fetch=lambda: mirror.fetch(folder))
    assert found is not None
    assert found.tree == {"step": 2 if whole_in_storage else 1}
    assert said[0].endswith("its copy in the storage is used")
    assert whole_in_storage == (len(said) == 1)


def test_who_only_looks_leaves_what_is_damaged_and_what_another_process_writes(tmp_path: Path) -> None:
    for step in (1, 2):
        written(tmp_path, step)
    (tmp_path / "checkpoint-00000002" / "state.json").write_bytes(b"{}")
    (tmp_path / ".writing-1").mkdir()
    before = sorted(tmp_path.rglob("*"))
    found = checkpoint.read_latest(tmp_path, notice=None)
    assert found is not None
    assert found.tree == {"step": 1}
    assert sorted(tmp_path.rglob("*")) == before


def test_a_late_write_of_an_earlier_attempt_does_not_mix_with_a_later_one(tmp_path: Path, url: str) -> None:
    Mirror(url, attempt=1).send(written(tmp_path / "zombie", 5))
    Mirror(url, attempt=2).send(written(tmp_path / "here", 6))
    Mirror(url, attempt=1).send(tmp_path / "zombie" / "checkpoint-00000001")
    Mirror(url, attempt=3).fetch(tmp_path / "there")
    found = checkpoint.read_latest(tmp_path / "there", notice=silent)
    assert found is not None
    assert found.tree == {"step": 6}


def test_what_an_earlier_attempt_writes_late_neither_counts_nor_drops_what_the_later_one_wrote(
    tmp_path: Path, url: str
) -> None:
    """One that was given up may have written more checkpoints than the one that went on in its place, further on."""
    for step in (1, 2):
        Mirror(url, attempt=1).send(written(tmp_path / "zombie", step))
    Mirror(url, attempt=2).fetch(tmp_path / "here")
    for step in (3, 4):
        Mirror(url, attempt=1).send(written(tmp_path / "zombie", step))
    Mirror(url, attempt=2).send(written(tmp_path / "here", 60))
    Mirror(url, attempt=1).send(written(tmp_path / "zombie", 5))
    Mirror(url, attempt=3).fetch(tmp_path / "there")
    found = checkpoint.read_latest(tmp_path / "there", notice=silent)
    assert found is not None
    assert found.tree == {"step": 60}


def test_a_file_goes_and_comes_whole(tmp_path: Path, url: str) -> None:
    (tmp_path / "model").write_bytes(b"weights")
    Mirror(url).send_file(tmp_path / "model")
    Mirror(url).fetch_file(tmp_path / "elsewhere" / "model")
    assert (tmp_path / "elsewhere" / "model").read_bytes() == b"weights"


def test_storage_that_fails_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    mirror = Mirror(f"{tmp_path}/file/below")
    with pytest.raises(CheckpointError, match="could not be written to"):
        mirror.send(written(tmp_path / "here", 1))
    with pytest.raises(CheckpointError, match="could not be read from"):
        Mirror(str(tmp_path / "storage")).fetch_file(tmp_path / "model")


@pytest.mark.parametrize("url", ["nonsense://bucket", "s3://bucket/x"])
def test_an_unknown_kind_of_storage_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="storage"):
        check(url)


def test_storage_on_this_machine_is_for_this_user_alone(tmp_path: Path) -> None:
    check(str(tmp_path / "storage"))
    assert stat.S_IMODE((tmp_path / "storage").stat().st_mode) == 0o700
    assert list((tmp_path / "storage").iterdir()) == []
    mirror = Mirror(str(tmp_path / "storage" / "run" / "task"))
    before = os.umask(0o022)
    try:
        mirror.send(checkpoint.write(tmp_path / "there", {"step": 1}))
        mirror.fetch(tmp_path / "back")
        (tmp_path / "model").touch()
        mirror.send_file(tmp_path / "model")
        mirror.fetch_file(tmp_path / "back" / "again" / "model")
    finally:
        os.umask(before)
    for path in [*(tmp_path / "storage").rglob("*"), *(tmp_path / "back").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_two_processes_of_a_task_may_fetch_at_once(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror(url)
    mirror.send(written(tmp_path / "here", 1))
    adopt = checkpoint.adopt

    def late(side: Path, folder: Path, number: int) -> Any:
        monkeypatch.setattr(checkpoint, "adopt", adopt)
        side.rename(side.with_name("aside"))
        mirror.fetch(folder)
        side.with_name("aside").rename(side)
        return adopt(side, folder, number)

    monkeypatch.setattr(checkpoint, "adopt", late)
    mirror.fetch(tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["checkpoint-00000001"]


def test_storage_on_a_full_disk_is_refused_with_advice_and_nothing_stays(tmp_path, monkeypatch, refused):
    from fsspec.implementations.local import LocalFileSystem

    def pipe_file(self, path, value, **options):
        Path(path).touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LocalFileSystem, "pipe_file", pipe_file)
    told = refused(check, str(tmp_path / "st"), error=InputError)
    assert told == f"the storage {tmp_path}/st cannot be written: No space left on device; make room on the disk"
    assert list((tmp_path / "st").iterdir()) == []


def test_the_half_of_a_checkpoint_does_not_stay_on_a_full_disk(tmp_path, monkeypatch, refused):
    from fsspec.implementations.local import LocalFileSystem

    original = LocalFileSystem.put_file

    def put_file(self, path, place, **options):
        if place.endswith(checkpoint.FILES[-1]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, path, place, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)
    told = refused(Mirror(str(tmp_path / "st")).send, written(tmp_path / "here", 1), error=CheckpointError)
    assert told.endswith("No space left on device; make room on the disk")
    assert list((tmp_path / "st").iterdir()) == []
