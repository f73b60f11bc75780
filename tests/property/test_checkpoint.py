"""Whichever byte of the newest checkpoint is altered, it is noticed, and the one before it is used."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rota.state import checkpoint

FILES = ["tensors.safetensors", "state.json", "commit.json"]


def tree_of(step: int) -> dict:
    return {"step": step, "w": torch.full((2, 3), float(step)), "pair": (step, None), "groups": {0: {"lr": 0.1}}}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (1, 2):
        checkpoint.write(folder, tree_of(step))
    return folder


def assert_falls_back(pristine: Path, name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(shutil.copytree(pristine, Path(root) / "checkpoints"))
        newest = checkpoint.committed(folder)[-1]
        (newest / name).write_bytes(content)
        notices: list[str] = []
        found = checkpoint.read_latest(folder, notice=notices.append)
        assert found is not None
        assert found.tree["step"] == 1
        assert torch.equal(found.tree["w"], torch.full((2, 3), 1.0))
        assert len(notices) == 1
        assert newest.name in notices[0]
        assert not newest.exists()


@settings(max_examples=150)
@given(name=st.sampled_from(FILES), place=st.integers(0, 10_000), mask=st.integers(1, 255))
def test_an_altered_byte_anywhere_is_noticed(two_checkpoints, name, place, mask):
    raw = bytearray((checkpoint.committed(two_checkpoints)[-1] / name).read_bytes())
    original = bytes(raw)
    raw[place % len(raw)] ^= mask
    assume(not (name == "commit.json" and means_the_same(raw, original)))
    assert_falls_back(two_checkpoints, name, bytes(raw))


def means_the_same(one: bytes, other: bytes) -> bool:
    """Whether only white space differs; the commit file vouches for the others and nothing for it."""
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@settings(max_examples=60)
@given(name=st.sampled_from(FILES), length=st.integers(0, 10_000))
def test_a_file_cut_short_anywhere_is_noticed(two_checkpoints, name, length):
    raw = (checkpoint.committed(two_checkpoints)[-1] / name).read_bytes()
    assert_falls_back(two_checkpoints, name, raw[: length % len(raw)])


@settings(max_examples=40)
@given(name=st.sampled_from(FILES), extra=st.binary(min_size=1, max_size=20))
def test_a_file_that_grew_is_noticed(two_checkpoints, name, extra):
    assume(extra.strip(b" \t\r\n"))
    raw = (checkpoint.committed(two_checkpoints)[-1] / name).read_bytes()
    assert_falls_back(two_checkpoints, name, raw + extra)


@settings(max_examples=40)
@given(name=st.sampled_from(FILES), content=st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
def test_a_file_of_something_else_is_noticed(two_checkpoints, name, content):
    assert_falls_back(two_checkpoints, name, content)


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FILES, "bytes"]), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(content=JSON)
def test_a_commit_file_of_other_json_is_noticed(two_checkpoints, content):
    assert_falls_back(two_checkpoints, "commit.json", json.dumps(content).encode())


@settings(max_examples=25)
@given(damaged=st.lists(st.booleans(), min_size=1, max_size=6))
def test_after_any_sequence_of_writes_and_damage_the_newest_whole_checkpoint_is_read(damaged):
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "checkpoints"
        whole: list[int] = []
        for step, broken in enumerate(damaged, start=1):
            path = checkpoint.write(folder, {"step": step})
            whole = [*whole, step][-2:]
            if broken:
                os.truncate(path / "state.json", 3)
                whole.remove(step)
            found = checkpoint.read_latest(folder, notice=lambda text: None)
            assert (found.tree["step"] if found else None) == (whole[-1] if whole else None)
