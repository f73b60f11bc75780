"""Nothing that a link in a run folder leads to is ever touched, and only what rota made is removed."""

from __future__ import annotations

import os

import pytest
import torch

from rota.errors import RotaError, RunFolderError
from rota.memory.slab import Budget, Slab
from rota.memory.store import Store
from rota.runtime import worker
from rota.runtime.loop import Loop
from rota.state import checkpoint, inside
from rota.state.mirror import Mirror
from rota.store.journal import Journal
from rota.store.run_folder import RunFolder
from tests.unit.test_loop import Surroundings, task_of

PAGE = 4096


def page(value):
    made = Slab(PAGE, budget=Budget(PAGE), what="x")
    made.bytes[:] = bytes([value]) * PAGE
    return made.bytes


def whole_run(path):
    """A run folder with everything that rota makes in one."""
    folder = RunFolder(path)
    folder.prepare()
    Journal(folder.journal, durable=False).close()
    folder.report.write_text("report")
    task = folder.task("a")
    inside.enter(task)
    for name in ("lock", "output.log", "output-1.log", "model.safetensors", "gang-1", ".model.safetensors.7.tmp"):
        (task / name).write_text("old")
    (path / "lock").write_text("old")
    for step in (1, 2, 3):
        checkpoint.write(task / "checkpoints", {"training": {"step": step}})
    (task / "checkpoints" / ".writing-7").mkdir()
    (task / "checkpoints" / ".writing-7" / "state.json").write_text("half")
    for place in ("shards", ".building", ".rank-1/shards", ".disk-abcdefg8"):
        store = Store(task / place)
        store.write("group0-weights", page(1))
        store.commit({"step": 1})
        store.commit({"step": 2})
        store.close()
    (path / ".profile" / "1").mkdir(parents=True)
    (path / ".profile" / "1" / "output.log").write_text("old")
    return folder


def content(root):
    """Every name below a folder, with what is in it."""
    return {path.relative_to(root): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))}


PLACES = [
    *("lock", "tasks", "tasks/a", ".profile", "journal.db", "report.html"),
    *("tasks/a/lock", "tasks/a/output.log", "tasks/a/gang-1", "tasks/a/model.safetensors"),
    *("tasks/a/checkpoints", "tasks/a/checkpoints/checkpoint-00000003", "tasks/a/checkpoints/.writing-7"),
    *(f"tasks/a/checkpoints/checkpoint-00000003/{name}" for name in checkpoint.FILES),
    *("tasks/a/shards", "tasks/a/shards/group0-weights.0", "tasks/a/shards/commit.json"),
    *("tasks/a/shards/commit-before.json", "tasks/a/.building", "tasks/a/.rank-1", "tasks/a/.rank-1/shards"),
]


@pytest.fixture(params=PLACES)
def linked(request, tmp_path):
    """A run folder in which something leads out of it, and what it leads to."""
    folder = whole_run(tmp_path / "run")
    place, elsewhere = folder.path / request.param, tmp_path / "elsewhere" / "precious"
    elsewhere.parent.mkdir()
    place.rename(elsewhere)
    (elsewhere.parent / "thesis.tex").write_text("precious")
    if elsewhere.is_dir():
        (elsewhere / "thesis.tex").write_text("precious")
    place.symlink_to(elsewhere)
    return folder, place, elsewhere


def test_what_leads_out_of_a_run_folder_is_refused_with_its_name(linked, refused):
    folder, place, _ = linked
    sentence = refused(folder.check, ["a"], error=RunFolderError)
    assert f"{place} is a link" in sentence
    assert ("--shards DIR" in sentence) == (place.name == "shards")


def attempts(folder):
    """Whatever rota does in a run folder."""
    task = folder.task("a")

    def hold():
        with folder.held():
            pass

    def own():
        with worker._owning(task), worker._output_to(task / "output.log"):
            pass

    def shards(place):
        store = Store(place)
        try:
            store.recover()
            store.start_over()
            for _ in range(4):
                store.write("group0-weights", page(2))
                store.write("group1-weights", page(2))
                store.commit({"step": 3})
                store.remove_unused()
        finally:
            store.close()

    def train(**changes):
        where = {"attempt": 1, "folder": task, "device": torch.device("cpu"), "surroundings": Surroundings()}
        Loop(task_of(**changes), memory_bytes=2**30, **where).run()

    yield hold
    yield folder.is_held
    yield own
    yield lambda: inside.enter(task)
    yield lambda: checkpoint.write(task / "checkpoints", {"step": 4})
    yield lambda: checkpoint.read_latest(task / "checkpoints", notice=lambda text: None)
    yield lambda: checkpoint.write_model(folder.model("a"), {"w": torch.zeros(1)}) if task.is_dir() else None
    yield lambda: Mirror(str(folder.path.parent / "storage")).fetch(task / "checkpoints")
    for place in ("shards", ".building", ".rank-1/shards"):
        yield lambda place=place: shards(task / place)
        yield lambda place=place: inside.remove(task / place, inside.SHARDS)
    yield lambda: inside.remove(task / "checkpoints", inside.CHECKPOINTS)
    yield lambda: inside.remove(folder.path / ".profile", inside.PROFILE)
    yield lambda: inside.remove_each(task, r"\.rank-\d+", inside.ROOM)
    yield lambda: inside.remove_each(task, r"gang-\d+")
    yield train
    yield lambda: Journal(folder.journal, durable=False).close()


def test_what_a_link_leads_to_is_not_touched(linked):
    """By none of rota's ways to it, also where the first look did not see the link."""
    folder, place, elsewhere = linked
    if place.name in ("tasks", "a", ".rank-1"):  # all further ways begin at a folder that was looked at
        with pytest.raises(RunFolderError):
            inside.enter(folder.task("a"))
        return
    before = content(elsewhere.parent)
    for attempt in attempts(folder):
        try:
            attempt()
        except RotaError as error:
            assert "\n" not in str(error)  # noqa: PT017
        assert content(elsewhere.parent) == before


def test_a_link_to_nowhere_makes_nothing_there(tmp_path, refused):
    for name in ("lock", "output.log"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    refused(RunFolder(tmp_path).held().__enter__, error=RunFolderError)
    refused(worker._owning(tmp_path).__enter__, error=RunFolderError)
    refused(worker._output_to(tmp_path / "output.log").__enter__, error=RunFolderError)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_with_a_second_name_is_not_written_to(tmp_path, refused):
    (tmp_path / "precious").write_text("precious")
    os.link(tmp_path / "precious", tmp_path / "lock")
    sentence = refused(RunFolder(tmp_path).held().__enter__, error=RunFolderError)
    assert "hard link" in sentence
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path, refused):
    for name in ("lock", "output.log", "state.json"):
        os.mkfifo(tmp_path / name)
    assert "not a plain file" in refused(RunFolder(tmp_path).held().__enter__, error=RunFolderError)
    refused(worker._output_to(tmp_path / "output.log").__enter__, error=RunFolderError)
    refused(inside.read_text, tmp_path / "state.json", error=RunFolderError)
    refused(inside.check, tmp_path, inside.RUN, error=RunFolderError)


def test_links_that_rota_does_not_use_are_left_alone(tmp_path):
    folder = whole_run(tmp_path / "run")
    for place in (folder.path, folder.path / "tasks", folder.task("a"), folder.task("a") / "shards"):
        (place / "mine").symlink_to(tmp_path)
    folder.check(["a"])
    (tmp_path / "link").symlink_to(folder.path)  # the user names the folder as they like
    RunFolder(tmp_path / "link").check(["a"])
    with RunFolder(tmp_path / "link").held():
        pass


def test_only_what_rota_made_is_removed(tmp_path):
    folder = whole_run(tmp_path / "run")
    task = folder.task("a")
    places = ["checkpoints", "checkpoints/checkpoint-00000003", "shards", ".building", ".rank-1", "../../.profile/1"]
    mine = [task / place / name for place in places for name in ("thesis.tex", "notes.0", "checkpoint-1")]
    for path in mine:
        path.write_text("precious")
    inside.remove(task / "checkpoints", inside.CHECKPOINTS)
    inside.remove_each(task, r"\.rank-\d+", inside.ROOM)
    for place in ("shards", ".building"):
        inside.remove(task / place, inside.SHARDS)
    inside.remove(folder.path / ".profile", inside.PROFILE)
    left = {path for place in places for path in (task / place).rglob("*") if path.is_file()}
    assert {path.resolve() for path in left} == {path.resolve() for path in mine}


def test_a_folder_of_rotas_is_removed_with_all_that_is_in_it(tmp_path):
    folder = whole_run(tmp_path / "run")
    task = folder.task("a")
    inside.remove(task / "checkpoints", inside.CHECKPOINTS)
    inside.remove_each(task, r"\.rank-\d+", inside.ROOM)
    for place in ("shards", ".building"):
        inside.remove(task / place, inside.SHARDS)
    inside.remove(folder.path / ".profile", inside.PROFILE)
    inside.remove(folder.path / ".profile", inside.PROFILE)
    assert not (folder.path / ".profile").exists()
    assert {path.name for path in task.iterdir()} == {
        *("lock", "output.log", "output-1.log", "model.safetensors", "gang-1", ".disk-abcdefg8"),
        ".model.safetensors.7.tmp",
    }


def test_a_task_that_trains_leaves_what_it_did_not_make(tmp_path):
    task = tmp_path / "tasks" / "a"
    for place in ("checkpoints", "shards", ".building", ".rank-1"):
        (task / place).mkdir(parents=True)
        (task / place / "thesis.tex").write_text("precious")
    where = {"attempt": 1, "folder": task, "device": torch.device("cpu"), "surroundings": Surroundings()}
    Loop(task_of(), memory_bytes=2**30, **where).run()
    for place in ("checkpoints", "shards", ".building", ".rank-1"):
        assert (task / place / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("item", ["../precious", "/tmp/precious", ".hidden", "a/b"])
def test_a_commit_of_shards_names_no_file_elsewhere(tmp_path, item):
    import json

    from rota.memory.store import _header

    text = json.dumps({"items": {item: [0, PAGE, 0]}, "about": {}})
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "commit.json").write_text(f"{json.dumps(_header(text))}\n{text}")
    store = Store(tmp_path / "shards")
    with pytest.raises(RotaError, match="altered"):
        store.recover()
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]
