"""What is written is read again; a commit survives everything after it; what is damaged is never taken for true."""

import errno
import gc
import json
import os
import stat
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import CheckpointError, CorruptCheckpointError, FitError, FullDiskError
from rota.memory import keeping
from rota.memory.mover import Mover
from rota.memory.slab import ALIGNMENT, Budget, Shelf, Slab
from rota.memory.store import Store, _header

PAGE = ALIGNMENT


def slab(fill=0, pages=2, budget=None):
    made = Slab(pages * PAGE, budget=budget or Budget(2**30), what="a test")
    made.bytes[:] = bytes([fill]) * (pages * PAGE)
    return made


def read(store, item, pages=2):
    found = slab(pages=pages)
    store.read(item, found.bytes)
    return set(bytes(found.bytes))


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "store")
    yield made
    made.close()


def reopened(tmp_path):
    made = Store(tmp_path / "store")
    return made, made.recover()


# ---- slabs ----


def test_tensors_lie_in_a_slab_as_they_were():
    given = [torch.randn(3, 5), torch.randn(4, 6).t(), torch.arange(7), torch.randn(()), torch.empty(0)]
    shelf = Shelf.of(given)
    assert shelf.size_bytes % PAGE == 0
    budget = Budget(shelf.size_bytes)
    made = Slab(shelf.size_bytes, budget=budget, what="x")
    views = made.tensors(shelf)
    for view, tensor in zip(views, given, strict=True):
        assert view.stride() == tensor.stride()
        view.copy_(tensor)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, given, strict=True))
    assert len({view.untyped_storage().data_ptr() for view in views[:4]}) == 4
    assert all(view.data_ptr() % 64 == 0 for view in views[:4])


def test_memory_is_counted_until_the_last_tensor_of_it_is_gone():
    budget = Budget(10 * PAGE)
    made = Slab(4 * PAGE, budget=budget, what="x")
    (view,) = made.tensors(Shelf.of([torch.zeros(100)]))
    del made
    gc.collect()
    assert budget.used_bytes == 4 * PAGE
    del view
    assert budget.used_bytes == 0
    assert budget.peak_bytes == 4 * PAGE


def test_beyond_the_budget_there_is_nothing():
    budget = Budget(3 * PAGE)
    held = Slab(2 * PAGE, budget=budget, what="x")
    with pytest.raises(FitError, match="y needs"):
        Slab(2 * PAGE, budget=budget, what="y")
    assert budget.used_bytes == 2 * PAGE
    del held
    Slab(3 * PAGE, budget=budget, what="y")


# ---- versions ----


def test_what_was_written_is_read(store):
    store.write("a", slab(1).bytes)
    store.write("b", slab(2, pages=5).bytes)
    assert read(store, "a") == {1}
    assert read(store, "b", pages=5) == {2}
    store.write("a", slab(3).bytes)
    assert read(store, "a") == {3}
    assert "a" in store
    assert "c" not in store


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.tuples(st.sampled_from("abc"), st.integers(1, 255)), st.just("commit"), st.just("die"))),
)
def test_a_new_start_finds_the_last_commit_whatever_came_after_it(tmp_path_factory, moves):
    folder = tmp_path_factory.mktemp("s")
    store, about = reopened(folder)
    assert about is None
    now, committed = {}, None
    for number, move in enumerate(moves):
        if move == "commit":
            store.commit({"number": number, "items": dict(now)})
            committed = {"number": number, "items": dict(now)}
        elif move == "die":
            store.close()
            store, about = reopened(folder)
            assert about == committed
            now = dict(committed["items"]) if committed else {}
        else:
            item, fill = move
            store.write(item, slab(fill, pages=1).bytes)
            now[item] = fill
        for item, fill in now.items():
            assert read(store, item, pages=1) == {fill}
    store.close()


def test_a_write_that_is_cut_short_leaves_the_commit_as_it_was(store, tmp_path, monkeypatch):
    store.write("a", slab(1).bytes)
    store.commit({"step": 1})
    real = os.pwrite

    def full(handle, data, offset):
        real(handle, data[:PAGE], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FullDiskError, match=r"a cannot be written to .*No space left on device"):
        store.write("a", slab(2).bytes)
    again, about = reopened(tmp_path)
    assert about == {"step": 1}
    found = slab()
    again.read("a", found.bytes)
    assert set(bytes(found.bytes)) == {1}
    again.close()


def test_after_a_write_that_failed_the_version_before_it_is_read(store, monkeypatch):
    store.write("a", slab(1).bytes)
    store.commit({})
    monkeypatch.setattr(os, "pwrite", lambda *given: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(CheckpointError, match="Input/output error"):
        store.write("a", slab(2).bytes)
    assert read(store, "a") == {1}


def test_what_was_never_committed_and_is_half_written_over_is_not_taken_for_what_it_was(store, monkeypatch):
    store.write("a", slab(1).bytes)
    store.commit({"step": 1})
    store.write("a", slab(2).bytes)
    real = os.pwrite

    def full(handle, data, offset):
        real(handle, data[:PAGE], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FullDiskError):
        store.write("a", slab(3).bytes)
    assert "a" not in store
    with pytest.raises(CheckpointError, match=r"a is not in .*, because it could not be written"):
        store.commit({"step": 2}, items={"a"})
    monkeypatch.undo()
    assert store.recover() == {"step": 1}
    assert read(store, "a") == {1}


def test_what_the_system_could_not_write_is_written_again_and_not_only_waited_for(store, monkeypatch):
    """It may have forgotten it: then the next wait succeeds, whatever is on disk."""
    store.write("a", slab(1, pages=5).bytes)
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda handle: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(CheckpointError, match="broken"):
        store.commit({"step": 1})
    written = []
    pwrite = os.pwrite
    monkeypatch.setattr(os, "fdatasync", real)
    monkeypatch.setattr(os, "pwrite", lambda *given: written.append(len(given[1])) or pwrite(*given))
    store.commit({"step": 2})
    assert written == [5 * PAGE]
    store.commit({"step": 3})
    assert written == [5 * PAGE]
    assert read(store, "a", pages=5) == {1}


def test_a_read_that_fails_in_a_commit_is_told_as_that(store, monkeypatch):
    store.write("a", slab(1).bytes)

    def failing(*args):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError, match=r"a cannot be read from \S+ \(broken\)"):
        store.commit({})


def test_a_short_file_is_an_error(store, tmp_path):
    store.write("a", slab(1).bytes)
    store.commit({})
    os.truncate(tmp_path / "store" / "a.0", PAGE)
    with pytest.raises(CorruptCheckpointError, match=r"ends after 4096 of 8192 bytes"):
        read(store, "a")


def test_a_flipped_bit_in_what_was_committed_is_an_error(store, tmp_path):
    store.write("a", slab(1).bytes)
    store.commit({})
    store.close()
    with open(tmp_path / "store" / "a.0", "r+b") as file:
        file.seek(PAGE + 17)
        file.write(b"\x03")
    again, _ = reopened(tmp_path)
    with pytest.raises(CorruptCheckpointError, match="was altered"):
        again.mapped("a", writable=True)
    again.close()


def altered(text):
    return text.replace(b'"step": 7', b'"step": 8')


def cut(text):
    return text[: len(text) // 2]


@pytest.mark.parametrize(
    "damage", [lambda text: b"", lambda text: b"{", lambda text: b"[]", lambda text: b"\xff\x00" * 40, altered, cut]
)
def test_a_damaged_record_is_an_error(store, tmp_path, damage):
    store.write("a", slab(1).bytes)
    store.commit({"step": 7})
    record = tmp_path / "store" / "commit.json"
    text = record.read_bytes()
    assert damage(text) != text
    record.write_bytes(damage(text))
    with pytest.raises(CorruptCheckpointError, match=r"commit.json was altered"):
        reopened(tmp_path)


def test_a_record_that_cannot_be_read_now_is_not_damaged(store, tmp_path, monkeypatch):
    store.write("a", slab(1).bytes)
    store.commit({"step": 1})

    def failing(path, **options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr("rota.state.inside.read_text", failing)
    with pytest.raises(CheckpointError, match="Too many open files") as caught:
        reopened(tmp_path)
    assert not isinstance(caught.value, CorruptCheckpointError)
    monkeypatch.undo()
    again, about = reopened(tmp_path)
    assert about == {"step": 1}
    again.close()


def test_a_record_of_another_format_is_for_another_version(store, tmp_path):
    (tmp_path / "store" / "commit.json").write_text('{"format": 2, "items": {}, "about": {}}')
    with pytest.raises(CheckpointError, match=r"another version of rota \(format 2\)"):
        reopened(tmp_path)


class Disk:
    """Fails where it is told to, and knows which names would still be there after the power has failed."""

    RECORDS = ("commit.json", "commit-before.json")

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.failing = ""
        self.synced = {}
        for name in ("fsync", "fdatasync", "replace"):
            monkeypatch.setattr(os, name, self.watched(name, getattr(os, name)))

    def watched(self, name, real):
        def call(*arguments):
            kind = {"fdatasync": "item", "replace": "rename"}.get(name, "record")
            if name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode):
                kind = "folder"
            # The second rename makes a record count; the first one moves the one before it away.
            if self.failing == kind and not (kind == "rename" and str(arguments[1]).endswith("before.json")):
                raise OSError(errno.EIO, "Input/output error")
            real(*arguments)
            if self.failing == "renamed" and kind == "rename" and not str(arguments[1]).endswith("before.json"):
                raise OSError(errno.EIO, "Input/output error")  # as some file systems do: it was, and they say that not
            if kind == "folder":
                self.synced = self.names()

        return call

    def names(self):
        return {name: (self.folder / name).read_bytes() for name in self.RECORDS if (self.folder / name).exists()}

    def lose_power(self):
        """Of the names that nobody waited for, none has come to the disk."""
        for name in self.RECORDS:
            (self.folder / name).unlink(missing_ok=True)
        for name, text in self.synced.items():
            (self.folder / name).write_bytes(text)


MOVES = st.one_of(
    st.tuples(st.sampled_from("ab"), st.integers(1, 255)),
    st.tuples(st.just("commit"), st.sampled_from(["", "folder", "record", "item", "rename", "renamed"])),
    st.tuples(st.just("end"), st.sampled_from(["die", "lose power"])),
)


@settings(max_examples=300)
@given(st.lists(MOVES, max_size=30))
def test_what_was_committed_is_found_whatever_fails_and_whoever_ends(tmp_path_factory, moves):
    """A failed commit may be found too, but then it is complete. A commit waits until its files are written."""
    folder = tmp_path_factory.mktemp("s")
    with pytest.MonkeyPatch.context() as monkeypatch:
        disk = Disk(folder / "store", monkeypatch)
        store, _ = reopened(folder)
        now, sure, possible = {}, {}, []
        for kind, what in [*moves, ("end", "die"), ("end", "lose power")]:
            if kind == "commit":
                disk.failing = what
                try:
                    store.commit({"items": dict(now)})
                except CheckpointError:
                    assert what
                    possible.append(dict(now))
                else:
                    sure, possible = dict(now), []
                disk.failing = ""
            elif kind == "end":
                store.close()
                if what == "lose power":
                    disk.lose_power()
                store, about = reopened(folder)
                now = {} if about is None else dict(about["items"])
                assert now in [sure, *possible]
                for item, fill in now.items():
                    assert set(store.mapped(item, writable=False)[:]) == {fill}
                sure, possible = dict(now), []
            else:
                store.write(kind, slab(what, pages=1).bytes)
                now[kind] = what
        store.close()


def test_after_a_commit_that_nobody_could_wait_for_twice_the_disk_has_what_it_says(store, tmp_path, monkeypatch):
    """The record was renamed, and then its folder could not be synced."""
    disk = Disk(tmp_path / "store", monkeypatch)
    store.write("a", slab(1).bytes)
    store.commit({"step": 1})
    for step in (2, 3):
        disk.failing = "folder"
        store.write("a", slab(step).bytes)
        with pytest.raises(CheckpointError, match="a commit cannot be written"):
            store.commit({"step": step})
    store.write("a", slab(4).bytes)
    disk.failing = ""
    again, about = reopened(tmp_path)
    assert about == {"step": 2}
    assert read(again, "a") == {2}
    assert again.fall_back() == ("commit.json.damaged", True)
    assert again.recover() == {"step": 1}
    assert read(again, "a") == {1}
    again.close()
    store.commit({"step": 4})
    again, about = reopened(tmp_path)
    assert read(again, "a") == {4}
    again.close()


# ---- the commit before the last one ----


def test_a_process_that_does_not_lead_changes_nothing_where_a_commit_is_damaged(store, tmp_path):
    for step in (1, 2):
        store.commit({"step": step})
    record = tmp_path / "store" / "commit.json"
    record.write_text("altered")
    before = {path: path.read_bytes() for path in record.parent.iterdir()}
    with pytest.raises(CorruptCheckpointError):
        keeping.read_latest(record.parent, notice=None)
    assert {path: path.read_bytes() for path in record.parent.iterdir()} == before
    notices = []
    keeping.read_latest(record.parent, than=2, notice=notices.append)
    assert (len(notices), record.exists()) == (1, True)


@settings(max_examples=60)
@given(st.lists(st.one_of(st.tuples(st.sampled_from("abc"), st.integers(1, 255)), st.just("commit"), st.just("die"))))
def test_the_commit_before_the_last_one_is_as_it_was_whatever_came_after_it(tmp_path_factory, moves):
    folder = tmp_path_factory.mktemp("s")
    store, _ = reopened(folder)
    now, commits = {}, []
    for move in moves:
        if move == "commit":
            store.commit({"items": dict(now)})
            commits.append(dict(now))
        elif move == "die":
            store.close()
            store, _ = reopened(folder)
            now = dict(commits[-1]) if commits else {}
        else:
            item, fill = move
            store.write(item, slab(fill, pages=1).bytes)
            now[item] = fill
    store.close()
    if not commits:
        return
    store, _ = reopened(folder)
    assert store.fall_back() == ("commit.json.damaged", len(commits) > 1)
    about = store.recover()
    assert about == ({"items": commits[-2]} if len(commits) > 1 else None)
    for item, fill in (commits[-2] if len(commits) > 1 else {}).items():
        assert set(store.mapped(item, writable=False)[:]) == {fill}
    store.close()


def test_after_falling_back_what_is_used_is_not_written_over(store, tmp_path):
    for fill in (1, 2):
        store.write("a", slab(fill).bytes)
        store.commit({"step": fill})
    store.fall_back()
    for fill in (3, 4):
        again, about = reopened(tmp_path)
        assert about == {"step": 1}
        again.start_over()
        again.write("a", slab(fill).bytes)
        again.close()
    again, about = reopened(tmp_path)
    assert read(again, "a") == {1}
    again.close()


def test_a_commit_that_is_cut_short_between_its_two_renames_leaves_the_last_one(store, tmp_path, monkeypatch):
    store.write("a", slab(1).bytes)
    store.commit({"step": 1})
    store.write("a", slab(2).bytes)
    real, calls = os.replace, []

    def dying(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(CheckpointError, match="a commit cannot be written"):
        store.commit({"step": 2})
    monkeypatch.undo()
    again, about = reopened(tmp_path)
    assert about == {"step": 1}
    assert read(again, "a") == {1}
    again.close()


def test_a_commit_of_some_items_leaves_the_others_to_be_written_over(store, tmp_path):
    for number in range(4):
        store.write("weights", slab(number + 1).bytes)
        store.write("tape", slab(100 + number).bytes)
        store.commit({"step": number}, items={"weights"})
        assert read(store, "tape") == {100 + number}
    assert sorted(path.name for path in (tmp_path / "store").glob("tape.*")) == ["tape.0"]
    assert len(list((tmp_path / "store").glob("weights.*"))) == 3
    again, _ = reopened(tmp_path)
    assert "tape" not in again
    assert read(again, "weights") == {4}
    again.close()


@pytest.mark.parametrize("name", ["commit.json", "commit-before.json"])
def test_what_is_unused_goes_and_commits_stay(store, tmp_path, name):
    for fill in (1, 2):
        store.write("a", slab(fill).bytes)
        store.write("b", slab(fill).bytes)
        store.commit({"step": fill}, items={"a"} if fill == 2 else None)
    store.close()
    again, _ = reopened(tmp_path)
    again.remove_unused()
    kept = {path.name for path in (tmp_path / "store").iterdir()}
    assert {name, "a.0", "a.1", "b.0"} <= kept
    again.close()


def test_where_the_page_cache_cannot_be_passed_it_is_said_once(tmp_path, monkeypatch):
    real = os.open

    def refusing(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    told = []
    store = Store(tmp_path / "store", notice=told.append)
    store.write("a", slab(1).bytes)
    store.write("b", slab(2).bytes)
    assert read(store, "a") == {1}
    assert len(told) == 1
    assert "page cache" in told[0]
    store.close()


def test_only_the_user_can_read_it(store, tmp_path):
    store.write("a", slab(1).bytes)
    store.commit({})
    for path in (tmp_path / "store").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


# ---- moving ----


def test_reads_and_writes_go_on_beside_the_computation_and_let_go_of_memory(store):
    before = threading.active_count()
    mover = Mover(store)
    budget = Budget(8 * PAGE)
    written = [mover.write(f"i{i}", slab(i + 1, budget=budget)) for i in range(3)]
    for one in written:
        one.result(timeout=10)
    del written, one
    gc.collect()
    assert budget.used_bytes == 0
    into = slab(budget=budget)
    mover.load("i2", into).result(timeout=10)
    assert set(bytes(into.bytes)) == {3}
    mover.close()
    assert threading.active_count() == before


def test_what_goes_wrong_in_a_thread_is_told_to_who_waits(store):
    mover = Mover(store)
    with pytest.raises(KeyError):
        mover.load("nothing", slab()).result(timeout=10)
    mover.close()


def test_a_record_that_was_made_larger_is_damage_and_the_one_before_it_is_used(store, tmp_path):
    for step in (1, 2):
        store.commit({"step": step})
    os.truncate(tmp_path / "store" / "commit.json", 2**40)
    with pytest.raises(CorruptCheckpointError):
        store.recover()
    store.fall_back()
    assert store.recover() == {"step": 1}


def test_a_record_that_is_nested_without_end_is_damage(store, tmp_path):
    text = "[" * 200_000
    (tmp_path / "store" / "commit.json").write_text(f"{json.dumps(_header(text))}\n{text}")
    with pytest.raises(CorruptCheckpointError):
        store.recover()
