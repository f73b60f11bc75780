"""A finished task has a whole model: a lost or damaged one is written again from the last checkpoint, or it is said."""

from __future__ import annotations

import os

import pytest
import safetensors.torch
import torch

from rota.errors import RunFolderError
from rota.execute.mend import mend_model
from rota.state import checkpoint, model_file
from rota.store.run_folder import RunFolder
from tests.unit.test_loop import run


def lose(path):
    path.unlink()


def empty(path):
    os.truncate(path, 0)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def alter_header(path):
    path.write_bytes(b"\xff" * path.stat().st_size)


HARMS = [lose, empty, cut, alter_header]


@pytest.fixture
def finished(tmp_path):
    folder = RunFolder(tmp_path)
    folder.task("a").parent.mkdir()
    run(folder.task("a"))
    return folder


@pytest.mark.parametrize("harm", HARMS)
def test_a_model_that_is_not_whole_is_written_again_from_the_last_checkpoint(finished, harm):
    path = finished.model("a")
    before = path.read_bytes()
    assert model_file.is_whole(path)
    harm(path)
    assert not model_file.is_whole(path)
    mend_model(finished, "a", shards=())
    assert path.read_bytes() == before


@pytest.mark.parametrize("harm", HARMS)
def test_a_model_without_a_checkpoint_is_told(finished, refused, harm):
    harm(finished.model("a"))
    for path in checkpoint.committed(finished.task("a") / "checkpoints"):
        (path / "commit.json").unlink()
    sentence = refused(mend_model, finished, "a", shards=(), error=RunFolderError)
    assert str(finished.model("a")) in sentence


def test_another_tasks_checkpoint_does_not_become_the_model(finished, refused):
    run(finished.task("b"), name="b")
    os.rename(finished.task("b"), finished.task("c"))
    lose(finished.model("c"))
    refused(mend_model, finished, "c", shards=(), error=RunFolderError)
    assert not finished.model("c").exists()


def test_models_without_tensors_are_whole(tmp_path):
    safetensors.torch.save_file({}, tmp_path / "none")
    safetensors.torch.save_file({"a": torch.zeros(0)}, tmp_path / "empty", metadata={"made": "here"})
    assert model_file.is_whole(tmp_path / "none")
    assert model_file.is_whole(tmp_path / "empty")
