"""The background writer: training waits for the copy alone, and what becomes of the write is told."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest
import torch

from rota.errors import CheckpointError
from rota.state import checkpoint
from rota.state.writer import CheckpointWriter


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def gate(monkeypatch):
    """Writes to disk begin only once the gate is opened."""
    opened = threading.Event()
    real = checkpoint.save_file

    def slow(*arguments, **keywords):
        assert opened.wait(20)
        return real(*arguments, **keywords)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    yield opened
    opened.set()


def latest(folder):
    found = checkpoint.read_latest(folder, notice=pytest.fail)
    return None if found is None else found.tree


def test_submit_returns_before_the_write_ends(folder, gate):
    done = []
    writer = CheckpointWriter(folder, done=done.append)
    writer.submit({"step": 1, "w": torch.ones(2)}, step=1)
    assert writer.busy
    assert done == []
    assert checkpoint.committed(folder) == []
    gate.set()
    writer.wait()
    assert not writer.busy
    assert [(one.step, one.error) for one in done] == [(1, None)]
    assert writer.last is done[0]
    assert writer.last.write_s > 0
    assert writer.copy_s > 0
    assert latest(folder)["step"] == 1


def test_what_is_written_is_the_state_at_submit(folder, gate):
    writer = CheckpointWriter(folder, done=lambda written: None)
    weights, moments = torch.ones(3), torch.zeros(2, 2).t()
    groups = [{"lr": 0.1}]
    writer.submit({"w": weights, "m": moments, "groups": groups}, step=1)
    weights.mul_(7)
    moments.add_(5)
    groups[0]["lr"] = 9.0
    gate.set()
    writer.wait()
    tree = latest(folder)
    assert torch.equal(tree["w"], torch.ones(3))
    assert torch.equal(tree["m"], torch.zeros(2, 2))
    assert tree["groups"] == [{"lr": 0.1}]


def test_a_second_submit_waits_for_the_first_and_does_not_disturb_it(folder, gate):
    done = []
    writer = CheckpointWriter(folder, done=done.append)
    weights = torch.zeros(4)
    writer.submit({"step": 1, "w": weights}, step=1)
    weights.fill_(1)
    second = threading.Thread(target=lambda: writer.submit({"step": 2, "w": weights}, step=2))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    gate.set()
    second.join(20)
    writer.wait()
    assert [one.step for one in done] == [1, 2]
    trees = [checkpoint.read(path) for path in checkpoint.committed(folder)]
    assert [(tree["step"], tree["w"].tolist()) for tree in trees] == [(1, [0.0] * 4), (2, [1.0] * 4)]


def test_without_room_for_a_copy_training_waits_for_the_write(folder):
    asked, done = [], []
    writer = CheckpointWriter(folder, done=done.append, has_room=lambda size_bytes: asked.append(size_bytes) or False)
    weights = torch.ones(4)
    writer.submit({"step": 1, "w": weights}, step=1)
    assert not writer.busy
    weights.fill_(2)
    assert [one.error for one in done] == [None]
    assert latest(folder)["w"].tolist() == [1.0] * 4
    writer.submit({"step": 2, "w": weights}, step=2)
    assert latest(folder)["w"].tolist() == [2.0] * 4
    assert asked == [16, 16]


def test_state_that_changes_shape_type_and_names_between_submits_is_written_as_it_is(folder):
    writer = CheckpointWriter(folder, done=lambda written: None)
    for number, tree in enumerate(
        [
            {"w": torch.ones(2)},
            {"w": torch.ones(2, 3)},
            {"w": torch.ones(2, 3, dtype=torch.bfloat16)},
            {"v": torch.zeros(1), "w": torch.tensor(4)},
            {"w": torch.zeros(0)},
            {},
        ]
    ):
        writer.submit(tree, step=number)
        writer.wait()
        assert writer.last.error is None
        written = latest(folder)
        assert written.keys() == tree.keys()
        for name, tensor in tree.items():
            assert written[name].dtype == tensor.dtype
            assert torch.equal(written[name], tensor)


def test_tied_tensors_are_copied_once_and_stay_one(folder):
    writer = CheckpointWriter(folder, done=lambda written: None)
    tensor = torch.randn(3)
    writer.submit({"a": tensor, "b": tensor, "part": tensor[:2]}, step=1)
    writer.wait()
    tree = latest(folder)
    assert tree["a"] is tree["b"]
    assert torch.equal(tree["part"], tensor[:2])


def test_a_full_disk_is_told_through_done_and_the_next_write_may_succeed(folder, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    done = []
    writer = CheckpointWriter(folder, done=done.append)
    writer.submit({"step": 1}, step=1)
    writer.wait()
    monkeypatch.setattr(checkpoint, "save_file", full)
    writer.submit({"step": 2}, step=2)
    writer.wait()
    monkeypatch.undo()
    writer.submit({"step": 3}, step=3)
    writer.wait()
    assert [one.step for one in done] == [1, 2, 3]
    assert [one.error is None for one in done] == [True, False, True]
    assert "no space left on device" in done[1].error
    assert [checkpoint.read(path)["step"] for path in checkpoint.committed(folder)] == [1, 3]


def test_an_unexpected_error_is_told_too(folder, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("a bug")

    done = []
    monkeypatch.setattr(checkpoint, "save_file", broken)
    writer = CheckpointWriter(folder, done=done.append)
    writer.submit({"step": 1}, step=1)
    writer.wait()
    assert "a bug" in done[0].error


def test_state_that_cannot_be_kept_is_refused_at_submit(folder):
    writer = CheckpointWriter(folder, done=lambda written: pytest.fail("nothing was written"))
    with pytest.raises(CheckpointError, match=r"model\.extra is a set"):
        writer.submit({"model": {"extra": {1}}}, step=1)
    assert not writer.busy


def test_waiting_without_a_write_returns(folder):
    writer = CheckpointWriter(folder, done=lambda written: None)
    writer.wait()
    assert not writer.busy
    assert writer.last is None


def test_a_process_that_ends_waits_for_the_write(folder):
    code = """
import sys, time, torch
from pathlib import Path
from rota.state import checkpoint
from rota.state.writer import CheckpointWriter

real = checkpoint.save_file
checkpoint.save_file = lambda *arguments, **keywords: (time.sleep(0.5), real(*arguments, **keywords))
writer = CheckpointWriter(Path(sys.argv[1]), done=lambda written: None)
writer.submit({"step": 1, "w": torch.ones(2**20)}, step=1)
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
    assert latest(folder)["step"] == 1


def test_a_checkpoint_is_written_even_if_no_thread_can_be_started(folder, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer = CheckpointWriter(folder, done=lambda written: None)
    writer.submit({"step": 1, "w": torch.ones(2)}, step=1)
    writer.wait()
    writer.submit({"step": 2, "w": torch.ones(2)}, step=2)
    assert writer.last is not None
    assert writer.last.error is None
    assert latest(folder)["step"] == 2
