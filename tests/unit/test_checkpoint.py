"""Checkpoints: what is written is read, two are kept, and neither a crash nor a full disk costs the older ones."""

from __future__ import annotations

import errno
import json
import math
import os
import stat

import pytest
import safetensors.torch
import torch
from torch import nn

from rota.errors import CheckpointError, CorruptCheckpointError, UnfitCheckpointError
from rota.state import checkpoint
from rota.testing.models import GPT, ResNet


def no_notice(text):
    raise AssertionError(f"unexpected notice: {text}")


def tree_of(step):
    return {"step": step, "weights": torch.full((3,), float(step)), "pair": (step, None)}


def steps_in(folder):
    return [checkpoint.read(path)["step"] for path in checkpoint.committed(folder)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


# ---- write and read ----


def test_what_is_written_is_read(folder):
    tree = {
        "model": {"w": torch.randn(3, 4), "half": torch.randn(2).bfloat16(), "empty": torch.zeros(0, 2)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"betas": (0.9, 0.999)}]},
        "best": math.inf,
        "nothing": None,
    }
    path = checkpoint.write(folder, tree)
    found = checkpoint.read_latest(folder, notice=no_notice)
    assert found.path == path
    assert found.tree["optimizer"]["groups"] == [{"betas": (0.9, 0.999)}]
    assert (found.tree["best"], found.tree["nothing"]) == (math.inf, None)
    for name, tensor in tree["model"].items():
        assert found.tree["model"][name].dtype == tensor.dtype
        assert torch.equal(found.tree["model"][name], tensor)
    assert torch.equal(found.tree["optimizer"]["state"][0]["step"], torch.tensor(3.0))


def test_a_tensor_in_two_places_is_one_tensor_after_reading(folder):
    tensor = torch.randn(4)
    tree = checkpoint.read(checkpoint.write(folder, {"a": tensor, "b": tensor}))
    assert tree["a"] is tree["b"]


def test_a_turned_tensor_is_read_with_its_values(folder):
    tensor = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(checkpoint.read(checkpoint.write(folder, [tensor]))[0], tensor)


def test_a_tree_without_tensors_can_be_written(folder):
    assert checkpoint.read(checkpoint.write(folder, {"step": 3})) == {"step": 3}


def test_views_of_one_memory_can_be_written(folder):
    base = torch.arange(4.0)
    tree = checkpoint.read(checkpoint.write(folder, {"base": base, "head": base[:2]}))
    assert torch.equal(tree["head"], base[:2])


def test_a_tensor_named_like_a_mark_of_safetensors_can_be_written(folder):
    tree = checkpoint.read(checkpoint.write(folder, {"__metadata__": torch.ones(2)}))
    assert torch.equal(tree["__metadata__"], torch.ones(2))


def test_a_type_that_safetensors_lacks_is_kept_or_refused_by_name(folder):
    tensor = torch.ones(2, dtype=torch.complex128)
    try:
        tree = checkpoint.read(checkpoint.write(folder, {"spectrum": tensor}))
    except CheckpointError as error:
        assert "complex128" in str(error)  # noqa: PT017
    else:
        assert torch.equal(tree["spectrum"], tensor)


def test_there_is_nothing_to_read_before_the_first_write(folder):
    assert checkpoint.read_latest(folder, notice=no_notice) is None
    folder.mkdir()
    assert checkpoint.read_latest(folder, notice=no_notice) is None
    assert checkpoint.committed(folder) == []


def test_a_value_that_cannot_be_kept_writes_nothing(folder):
    with pytest.raises(CheckpointError, match=r"model\.extra is a set"):
        checkpoint.write(folder, {"model": {"extra": {1}}})
    assert not folder.exists()


def test_checkpoints_are_for_this_user_alone(folder):
    path = checkpoint.write(folder, tree_of(1))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_everything_is_on_disk_before_the_rename_and_the_rename_before_the_end(folder, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noted_rename(source, target):
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    checkpoint.write(folder, tree_of(1))
    assert done == [
        folder.parent.name,  # the folder of checkpoints was made
        *["tensors.safetensors", "state.json", "commit.json", f".writing-{os.getpid()}"],
        *["rename", folder.name],
    ]


# ---- keeping ----


def test_the_newest_two_are_kept(folder):
    for step in range(1, 6):
        checkpoint.write(folder, tree_of(step))
    assert steps_in(folder) == [4, 5]
    assert checkpoint.read_latest(folder, notice=no_notice).tree["step"] == 5
    assert sorted(os.listdir(folder)) == ["checkpoint-00000004", "checkpoint-00000005"]


def test_numbers_are_compared_as_numbers(folder):
    folder.mkdir()
    os.rename(checkpoint.write(folder, tree_of(1)), folder / "checkpoint-99999999")
    checkpoint.write(folder, tree_of(2))
    assert [path.name for path in checkpoint.committed(folder)] == ["checkpoint-99999999", "checkpoint-100000000"]
    assert checkpoint.read_latest(folder, notice=no_notice).tree["step"] == 2


def test_other_files_in_the_folder_are_left_alone(folder):
    folder.mkdir()
    for name in ("notes.txt", "checkpoint-1", "checkpoint-00000007.bak"):
        (folder / name).mkdir()
    for step in range(1, 4):
        checkpoint.write(folder, tree_of(step))
    assert steps_in(folder) == [2, 3]
    assert {"notes.txt", "checkpoint-1", "checkpoint-00000007.bak"} < set(os.listdir(folder))


# ---- damage ----


def damage(path, name="tensors.safetensors"):
    raw = bytearray((path / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (path / name).write_bytes(raw)


def test_a_damaged_checkpoint_is_set_aside_and_said_and_the_one_before_is_used(folder):
    older = checkpoint.write(folder, tree_of(1))
    newer = checkpoint.write(folder, tree_of(2))
    damage(newer)
    notices = []
    found = checkpoint.read_latest(folder, notice=notices.append)
    assert found.path == older
    assert found.tree["step"] == 1
    (notice,) = notices
    assert newer.name in notice
    assert "tensors.safetensors" in notice
    assert "the one before it is used" in notice
    assert sorted(os.listdir(folder)) == [older.name, newer.name + ".damaged"]
    assert checkpoint.read_latest(folder, notice=no_notice).tree["step"] == 1


def test_where_every_checkpoint_is_damaged_there_is_none_and_each_is_said(folder):
    for step in (1, 2):
        damage(checkpoint.write(folder, tree_of(step)))
    notices = []
    assert checkpoint.read_latest(folder, notice=notices.append) is None
    assert len(notices) == 2


def test_the_notice_about_the_last_checkpoint_does_not_promise_one_before_it(folder):
    damage(checkpoint.write(folder, tree_of(1)))
    notices = []
    checkpoint.read_latest(folder, notice=notices.append)
    assert "the one before it is used" not in notices[0]


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "commit.json"])
def test_a_missing_file_is_damage(folder, name):
    path = checkpoint.write(folder, tree_of(1))
    (path / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=path.name):
        checkpoint.read(path)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(folder, monkeypatch, code):
    path = checkpoint.write(folder, tree_of(1))

    def failing(handle, how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("hashlib.file_digest", failing)
    with pytest.raises(CheckpointError, match=os.strerror(code)) as caught:
        checkpoint.read_latest(folder, notice=no_notice)
    assert not isinstance(caught.value, CorruptCheckpointError)
    monkeypatch.undo()
    assert checkpoint.read_latest(folder, notice=no_notice).path == path


def test_numbering_continues_past_damaged_checkpoints(folder):
    for step in (1, 2):
        checkpoint.write(folder, tree_of(step))
    damage(checkpoint.committed(folder)[-1])
    checkpoint.read_latest(folder, notice=lambda text: None)
    assert checkpoint.write(folder, tree_of(3)).name == "checkpoint-00000003"
    assert steps_in(folder) == [1, 3]


def test_a_checkpoint_of_another_format_is_refused_and_not_set_aside(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "_FORMAT", 99)
    path = checkpoint.write(folder, tree_of(1))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 99") as caught:
        checkpoint.read_latest(folder, notice=no_notice)
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert path.is_dir()


def test_checkpoints_hold_no_pickle(folder):
    path = checkpoint.write(folder, tree_of(1))
    assert sorted(os.listdir(path)) == ["commit.json", "state.json", "tensors.safetensors"]
    json.loads((path / "state.json").read_text())
    safetensors.torch.load_file(path / "tensors.safetensors")


# ---- interrupted writes ----


def test_leftovers_of_an_interrupted_write_are_ignored_and_removed(folder):
    checkpoint.write(folder, tree_of(1))
    for pid in (os.getpid(), 12345):
        (folder / f".writing-{pid}").mkdir()
        (folder / f".writing-{pid}" / "tensors.safetensors").write_bytes(b"half")
    assert steps_in(folder) == [1]
    assert checkpoint.read_latest(folder, notice=no_notice).tree["step"] == 1
    assert os.listdir(folder) == ["checkpoint-00000001"]


def test_a_leftover_of_this_process_does_not_hinder_the_next_write(folder):
    (folder / f".writing-{os.getpid()}").mkdir(parents=True)
    (folder / f".writing-{os.getpid()}" / "state.json").write_bytes(b"half")
    checkpoint.write(folder, tree_of(1))
    assert os.listdir(folder) == ["checkpoint-00000001"]


def full_disk(*arguments, **keywords):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullAfter:
    """The disk takes so many calls and is full from then on."""

    def __init__(self, function, calls):
        self.function, self.calls = function, calls

    def __call__(self, *arguments, **keywords):
        self.calls -= 1
        return self.function(*arguments, **keywords) if self.calls >= 0 else full_disk()


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (checkpoint, "save_file", 0),
        (os, "fsync", 0),  # of the tensors
        (os, "fsync", 1),  # of state.json
        (os, "fsync", 2),  # of commit.json
        (os, "fsync", 3),  # of the folder that holds them
        (os, "rename", 0),
        (os, "mkdir", 1),
    ],
)
def test_a_disk_that_fills_up_costs_the_new_checkpoint_only(folder, monkeypatch, refused, owner, name, calls):
    for step in (1, 2):
        checkpoint.write(folder, tree_of(step))
    monkeypatch.setattr(owner, name, FullAfter(getattr(owner, name), calls))
    sentence = refused(checkpoint.write, folder, tree_of(3), error=CheckpointError)
    monkeypatch.undo()
    assert "no space left on device" in sentence
    assert str(folder) in sentence
    assert sorted(os.listdir(folder)) == ["checkpoint-00000001", "checkpoint-00000002"]
    assert steps_in(folder) == [1, 2]
    checkpoint.write(folder, tree_of(4))
    assert steps_in(folder) == [2, 4]


def test_a_failure_after_the_rename_leaves_every_checkpoint_whole(folder, monkeypatch):
    for step in (1, 2):
        checkpoint.write(folder, tree_of(step))
    monkeypatch.setattr(os, "fsync", FullAfter(os.fsync, 4))  # of the names in the folder
    with pytest.raises(CheckpointError, match="no space left"):
        checkpoint.write(folder, tree_of(3))
    monkeypatch.undo()
    assert steps_in(folder) == [1, 2, 3]
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_an_error_of_safetensors_is_a_checkpoint_error(folder, monkeypatch):
    def broken(*arguments):
        raise checkpoint.SafetensorError("I/O error: File too large (os error 27)")

    monkeypatch.setattr(checkpoint, "save_file", broken)
    with pytest.raises(CheckpointError, match="File too large"):
        checkpoint.write(folder, tree_of(1))
    assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path, refused):
    (tmp_path / "file").touch()
    sentence = refused(checkpoint.write, tmp_path / "file" / "checkpoints", tree_of(1), error=CheckpointError)
    assert "could not be written" in sentence


@pytest.mark.parametrize(
    "tree", [{"a": 10**5000}, {"a\ud800": torch.ones(1)}], ids=["a number too long for JSON", "half a character"]
)
def test_a_tree_that_cannot_be_written_is_a_checkpoint_error_and_leaves_nothing(folder, tree):
    with pytest.raises(CheckpointError):
        checkpoint.write(folder, tree)
    assert os.listdir(folder) == []


# ---- the model ----


def load_strictly(path, model):
    model.load_state_dict(safetensors.torch.load_file(path), strict=True)
    return model


def assert_equal_models(a, b):
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, tensor in a.state_dict().items():
        assert b.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(b.state_dict()[name], tensor), name


@pytest.mark.parametrize("make", [GPT, ResNet, lambda: nn.LSTM(3, 4), lambda: nn.Linear(2, 2).bfloat16()])
def test_a_model_file_loads_strictly_into_a_fresh_module(tmp_path, make):
    model = make()
    checkpoint.write_model(tmp_path / "model.safetensors", model.state_dict())
    assert_equal_models(load_strictly(tmp_path / "model.safetensors", make()), model)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_tied_weights_are_written_under_each_of_their_names(tmp_path):
    model = GPT()
    assert model.head.weight is model.tokens.weight
    checkpoint.write_model(tmp_path / "model.safetensors", model.state_dict())
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["head.weight"], weights["tokens.weight"])
    fresh = load_strictly(tmp_path / "model.safetensors", GPT())
    assert fresh.head.weight is fresh.tokens.weight


class Views(nn.Module):
    """Parameters and buffers that are parts of one memory."""

    def __init__(self):
        super().__init__()
        base = torch.randn(4, 6)
        self.whole = nn.Parameter(base)
        self.register_buffer("head", base[:2])
        self.register_buffer("turned", base.t())
        self.register_buffer("column", base[:, 3])
        self.register_buffer("empty", base[:0])


def test_views_of_one_memory_are_written_with_their_own_values(tmp_path):
    model = Views()
    checkpoint.write_model(tmp_path / "model.safetensors", model.state_dict())
    assert_equal_models(load_strictly(tmp_path / "model.safetensors", Views()), model)


def test_a_model_that_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch, refused):
    old, path = nn.Linear(2, 2), tmp_path / "model.safetensors"
    checkpoint.write_model(path, old.state_dict())
    monkeypatch.setattr(os, "fsync", full_disk)
    sentence = refused(checkpoint.write_model, path, nn.Linear(2, 2).state_dict(), error=CheckpointError)
    monkeypatch.undo()
    assert "no space left on device" in sentence
    assert str(path) in sentence
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert_equal_models(load_strictly(path, nn.Linear(2, 2)), old)


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def test_a_model_with_extra_state_is_written_or_refused_with_a_sentence(tmp_path):
    try:
        checkpoint.write_model(tmp_path / "model.safetensors", WithExtraState(2, 2).state_dict())
    except CheckpointError as error:
        assert "_extra_state" in str(error)  # noqa: PT017
    else:
        weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert set(weights) == {"weight", "bias"}


# ---- what somebody else wrote ----


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_a_file_that_was_made_larger_is_damage_and_is_not_read(folder, monkeypatch, name):
    older = checkpoint.write(folder, tree_of(1))
    newer = checkpoint.write(folder, tree_of(2))
    os.truncate(newer / name, 2**40)
    digest = checkpoint.hashlib.file_digest

    def of_a_small_file(file, how):
        assert os.fstat(file.fileno()).st_size < 2**20
        return digest(file, how)

    monkeypatch.setattr("hashlib.file_digest", of_a_small_file)
    notices = []
    assert checkpoint.read_latest(folder, notice=notices.append).path == older
    assert name in notices[0]


def refusing(steps, kind):
    def use(tree):
        if tree["step"] in steps:
            raise kind(f"is refused at {tree['step']}")

    return use


def test_one_that_is_refused_is_set_aside_and_the_one_before_is_used(folder):
    for step in (1, 2):
        checkpoint.write(folder, tree_of(step))
    notices = []
    found = checkpoint.read_latest(folder, notice=notices.append, use=refusing({2}, CorruptCheckpointError))
    assert found.tree["step"] == 1
    assert "checkpoint-00000002 is refused at 2; it was set aside" in notices[0]


def test_one_that_does_not_fit_is_set_aside_if_the_one_before_does(folder):
    for step in (1, 2):
        checkpoint.write(folder, tree_of(step))
    notices = []
    found = checkpoint.read_latest(folder, notice=notices.append, use=refusing({2}, UnfitCheckpointError))
    assert found.tree["step"] == 1
    (notice,) = notices
    assert "is refused at 2" in notice
    assert sorted(os.listdir(folder)) == ["checkpoint-00000001", "checkpoint-00000002.damaged"]


def test_where_none_fits_all_stay_and_the_newest_is_told(folder):
    for step in (1, 2):
        checkpoint.write(folder, tree_of(step))
    with pytest.raises(UnfitCheckpointError, match="at 2"):
        checkpoint.read_latest(folder, notice=no_notice, use=refusing({1, 2}, UnfitCheckpointError))
    assert steps_in(folder) == [1, 2]


def test_numbers_that_could_not_be_read_back_are_not_written(folder, monkeypatch):
    monkeypatch.setattr("rota.state.inside.MOST_TEXT_BYTES", 100)
    with pytest.raises(CheckpointError, match="keep what is large as tensors"):
        checkpoint.write(folder, {"numbers": list(range(100))})
