"""What is written counts only if its writer may still write at the last moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rota.memory.store import Store
from rota.state import checkpoint, files
from rota.state.mirror import Mirror
from rota.state.writer import CheckpointWriter, Written


class GivenUp(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def fence() -> Iterator[list[bool]]:
    """Once it has an element, nothing may be made to count."""
    closed: list[bool] = []

    def ask() -> None:
        if closed:
            raise GivenUp

    before = files._ask
    files.ask_before_commits(ask)
    yield closed
    files.ask_before_commits(before)


def test_a_checkpoint(tmp_path: Path, fence: list[bool]) -> None:
    checkpoint.write(tmp_path, {"step": 1})
    fence.append(True)
    with pytest.raises(GivenUp):
        checkpoint.write(tmp_path, {"step": 2})
    assert [path.name for path in checkpoint.committed(tmp_path)] == ["checkpoint-00000001"]


def test_a_checkpoint_whose_lease_ends_while_it_is_written(
    tmp_path: Path, fence: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.save_file

    def slow(*arguments: object, **keywords: object) -> None:
        real(*arguments, **keywords)  # type: ignore[arg-type]
        fence.append(True)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    told: list[Written] = []
    writer = CheckpointWriter(tmp_path, done=told.append)
    with pytest.raises(GivenUp):
        writer._write({"step": 1}, 1)
    assert checkpoint.committed(tmp_path) == []
    assert told == []


def test_a_model(tmp_path: Path, fence: list[bool]) -> None:
    checkpoint.write_model(tmp_path / "model", {"w": torch.zeros(1)})
    before = (tmp_path / "model").read_bytes()
    fence.append(True)
    with pytest.raises(GivenUp):
        checkpoint.write_model(tmp_path / "model", {"w": torch.ones(1)})
    assert (tmp_path / "model").read_bytes() == before


def test_a_commit_of_shards(tmp_path: Path, fence: list[bool]) -> None:
    store = Store(tmp_path)
    store.commit({"step": 1})
    fence.append(True)
    with pytest.raises(GivenUp):
        store.commit({"step": 2})
    assert store.recover() == {"step": 1}
    store.close()


def test_what_goes_to_the_storage(tmp_path: Path, fence: list[bool]) -> None:
    mirror = Mirror(str(tmp_path / "storage"))
    written = checkpoint.write(tmp_path / "here", {"step": 1})
    fence.append(True)
    with pytest.raises(GivenUp):
        mirror.send(written)
    with pytest.raises(GivenUp):
        mirror.send_file(written / "state.json")
    fence.clear()
    mirror.fetch(tmp_path / "there")
    assert checkpoint.committed(tmp_path / "there") == []
