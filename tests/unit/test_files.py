"""Files are replaced as a whole or not at all, and nothing temporary stays behind."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from rota.state import files


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_replacement_takes_the_place_of_the_old_content(tmp_path):
    path = tmp_path / "model"
    path.write_text("old")
    with files.replacing(path) as side:
        side.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["model"]


def test_a_replacement_may_be_the_first(tmp_path):
    with files.replacing(tmp_path / "model") as side:
        side.write_text("new")
    assert (tmp_path / "model").read_text() == "new"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), ValueError("bug"), KeyboardInterrupt()])
def test_a_replacement_that_fails_leaves_the_old_content_and_nothing_else(tmp_path, error):
    path = tmp_path / "model"
    path.write_text("old")

    def write_half():
        with files.replacing(path) as side:
            side.write_text("ne")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["model"]


def test_a_replacement_that_cannot_be_synced_leaves_the_old_content(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "no space")

    path = tmp_path / "model"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"), files.replacing(path) as side:
        side.write_text("new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["model"]


def test_content_is_on_disk_before_its_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle):
        done.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{handle}'))}")
        fsync(handle)

    def noted_replace(source, target):
        done.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    with files.replacing(tmp_path / "model") as side:
        side.write_text("new")
        name = side.name
    assert done == [f"sync {name}", "replace", f"sync {tmp_path.name}"]


def test_the_side_file_is_in_the_same_folder_and_hidden(tmp_path):
    with files.replacing(tmp_path / "model") as side:
        side.touch()
        assert side.parent == tmp_path
        assert side.name.startswith(".")


def test_text_is_written_in_utf_8(tmp_path):
    files.write_text(tmp_path / "a", "größe ∑")
    assert (tmp_path / "a").read_bytes() == "größe ∑".encode()


def test_remove_takes_a_file_and_neither_a_folder_nor_what_is_not_there(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder", "nothing"):
        files.remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["folder"]


def test_remove_takes_a_link_and_not_what_it_points_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    files.remove(tmp_path / "link")
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(tmp_path / "kept") == ["file"]


def test_a_private_folder_is_this_users_alone_and_those_above_are_left(tmp_path):
    tmp_path.chmod(0o755)
    files.make_private_folder(tmp_path / "private")
    files.make_private_folder(tmp_path / "private")
    assert mode_of(tmp_path / "private") == 0o700
    assert mode_of(tmp_path) == 0o755


def test_missing_folders_above_a_private_one_are_private(tmp_path):
    tmp_path.chmod(0o755)
    files.make_private_folder(tmp_path / "a" / "b" / "c")
    assert [mode_of(tmp_path / one) for one in ("a", "a/b", "a/b/c")] == [0o700] * 3
    assert mode_of(tmp_path) == 0o755


def test_new_folders_are_on_disk_with_their_names_before_anything_is_put_into_them(tmp_path, monkeypatch):
    synced, real = [], files.sync_folder
    monkeypatch.setattr(files, "sync_folder", lambda path: (synced.append(path), real(path)))
    files.make_private_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    files.make_private_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_whoever_writes_them_files_are_this_users_alone(tmp_path):
    before = os.umask(0o022)
    try:
        files.write_text(tmp_path / "text", "a")
        with files.replacing(tmp_path / "replaced") as side:
            side.write_text("a")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "text") == mode_of(tmp_path / "replaced") == 0o600


def test_syncing_something_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.sync_file(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        files.sync_folder(tmp_path / "nothing")
