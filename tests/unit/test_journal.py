"""The journal: events in, the same events out, in order; and what is said of a file that is not one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rota import codec
from rota.errors import DiskError, InputError, RunInUseError, StoreError
from rota.execute.events import Launched, Lost, RunBegan, RunEnded, RunNoted
from rota.execute.record import RunRecord
from rota.refusals import advice
from rota.runtime.messages import Began, Finished, Measured, Noticed, Saved, Shutdown
from rota.state import files
from rota.store import database
from rota.store.journal import Journal, Request, add, ask, read_events, read_metrics, read_summary
from rota.store.run_folder import RunFolder

BEGAN = RunBegan(
    name="n",
    source="",
    source_digest="",
    sweep_digest="",
    tasks=({"name": "a", "steps": 9, "settings": {"lr": 0.1}}, {"name": "b", "steps": 9}),
    devices=({"name": "cpu:0"},),
)


def measured(*rows, task="a", attempt=1, number=1, latest=None, step_s=1.0):
    if latest is None:
        latest = {name: value for _, metrics in rows for name, value in metrics.items()}
    return Measured(task=task, attempt=attempt, number=number, rows=rows, latest=latest, step_s=step_s)


EVENTS = [
    (1.0, BEGAN),
    (2.0, Launched(task="a", attempt=1, devices=("cpu:0",))),
    (3.0, Began(task="a", attempt=1, from_step=0, total_steps=9, parameters=5)),
    (4.0, measured((1, {"train/loss": 0.5}), (2, {"train/loss": 0.25}))),
    (5.5, Noticed(task="a", attempt=1, text="größe\n∑ '\"")),
    (6.0, Finished(task="a", attempt=1, step=9, metrics={"train/loss": 0.125})),
    (6.0, RunEnded(state="incomplete")),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.db"


def write(path, events):
    journal = Journal(path, durable=False)
    for time_s, event in events:
        journal.append(event, time_s=time_s)
    journal.commit()
    journal.close()


# ---- events ----


def test_events_are_read_as_they_were_appended(path):
    write(path, EVENTS)
    assert list(read_events(path)) == EVENTS


@pytest.mark.parametrize("durable", [True, False])
def test_events_of_several_sessions_follow_each_other(path, durable):
    for event in EVENTS:
        journal = Journal(path, durable=durable)
        journal.append(event[1], time_s=event[0])
        journal.commit()
        journal.close()
    assert list(read_events(path)) == EVENTS


def test_a_clock_that_goes_back_does_not_change_the_order(path):
    events = [(5.0, BEGAN), (1.0, EVENTS[1][1]), (3.0, EVENTS[2][1])]
    write(path, events)
    assert list(read_events(path)) == events


def test_more_events_than_are_fetched_at_once_are_all_read(path):
    events = [(float(i), Noticed(task="a", attempt=1, text=str(i))) for i in range(2500)]
    write(path, events)
    assert list(read_events(path)) == events


def test_events_are_seen_from_the_commit_on_while_the_writer_is_open(path):
    journal = Journal(path, durable=False)
    assert list(read_events(path)) == []
    for count, (time_s, event) in enumerate(EVENTS):
        journal.append(event, time_s=time_s)
        assert list(read_events(path)) == EVENTS[:count]
        journal.commit()
        assert list(read_events(path)) == EVENTS[: count + 1]
    journal.close()


def test_a_reader_keeps_its_view_while_the_writer_goes_on(path):
    journal = Journal(path, durable=False)
    journal.append(BEGAN, time_s=1.0)
    journal.commit()
    reading = read_events(path)
    assert next(reading) == (1.0, BEGAN)
    journal.append(EVENTS[1][1], time_s=2.0)
    journal.commit()
    assert list(reading) == []
    assert len(list(read_events(path))) == 2
    journal.close()


def test_what_was_not_committed_is_not_kept(path):
    journal = Journal(path, durable=False)
    journal.append(BEGAN, time_s=1.0)
    journal.commit()
    journal.append(EVENTS[1][1], time_s=2.0)
    journal.close()
    assert list(read_events(path)) == [(1.0, BEGAN)]
    write(path, [EVENTS[2]])
    assert list(read_events(path)) == [(1.0, BEGAN), EVENTS[2]]


def fill_up(writer):
    """Let the journal grow no further: SQLite then says what it says of a full disk."""
    pages = writer._connection.execute("PRAGMA page_count").fetchone()[0]
    writer._connection.execute(f"PRAGMA max_page_count={pages}")


def test_a_disk_that_is_full_for_a_moment_costs_no_event(path, monkeypatch):
    writer = Journal(path)
    fill_up(writer)
    waits = []

    def make_room(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            writer._connection.execute("PRAGMA max_page_count=100000")

    monkeypatch.setattr("rota.store.journal.time.sleep", make_room)
    events = [Noticed(task="a", attempt=1, text="x" * 3000 + str(number)) for number in range(20)]
    for event in events:
        writer.append(event, time_s=1.0)
    writer.commit()
    writer.close()
    assert [event for _, event in read_events(path)] == events
    assert len(waits) == 3


def test_a_disk_that_stays_full_is_told_and_what_was_there_is_kept(path, monkeypatch, refused):
    monkeypatch.setattr("rota.store.journal._FULL_DISK_PATIENCE_S", 0.3)
    writer = Journal(path)
    kept = Noticed(task="a", attempt=1, text="kept")
    writer.append(kept, time_s=1.0)
    writer.commit()
    fill_up(writer)
    for _ in range(20):
        writer.append(Noticed(task="a", attempt=1, text="x" * 3000), time_s=2.0)
    sentence = refused(writer.commit, error=StoreError)
    assert "full" in sentence
    assert "make room" in sentence
    writer.close()
    assert [event for _, event in read_events(path)] == [kept]


def test_a_journal_comes_into_being_with_its_first_event_or_not_at_all(path, monkeypatch, refused):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    sentence = refused(add, path, BEGAN, time_s=1.0, error=DiskError)
    assert f"the journal {path} cannot be made (No space left on device); make room on the disk" in sentence
    assert list(path.parent.iterdir()) == []
    monkeypatch.undo()
    add(path, BEGAN, time_s=1.0)
    add(path, EVENTS[1][1], time_s=2.0)
    assert list(read_events(path)) == [(1.0, BEGAN), EVENTS[1]]


def test_the_first_event_may_follow_into_an_empty_journal_of_an_earlier_version(path):
    Journal(path).close()
    add(path, BEGAN, time_s=1.0)
    assert list(read_events(path)) == [(1.0, BEGAN)]


def path_of_length(folder, length):
    while (left := length - len(os.fsencode(folder)) - len("/journal.db")) > 0:
        folder = folder / ("x" * min(200, max(1, left - 1 if left - 201 != 1 else 150)))
    folder.mkdir(parents=True)
    found = folder / "journal.db"
    assert len(os.fsencode(found)) == length
    return found


def test_the_longest_path_is_the_one_that_sqlite_can_open(tmp_path):
    longest = path_of_length(tmp_path.resolve(), 504)
    write(longest, EVENTS)
    assert list(read_events(longest)) == EVENTS
    longer = path_of_length(tmp_path.resolve(), 505)
    with pytest.raises(sqlite3.OperationalError):
        sqlite3.connect(longer).execute("CREATE TABLE a (b)")


def test_a_longer_path_is_refused_with_both_lengths_before_anything_is_made(tmp_path, refused):
    path = path_of_length(tmp_path.resolve(), 505)
    path.parent.rmdir()
    for use in (lambda: RunFolder(path.parent).prepare(), lambda: Journal(path)):
        sentence = refused(use)
        assert "505" in sentence
        assert "504" in sentence
        assert "shorter" in sentence
    assert not path.parent.exists()


def test_a_run_that_was_moved_to_a_longer_path_is_refused_with_the_reason(tmp_path, refused):
    write(tmp_path / "journal.db", EVENTS)
    path = path_of_length(tmp_path.resolve(), 505)
    os.rename(tmp_path / "journal.db", path)
    assert "shorter" in refused(lambda: list(read_events(path)))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EROFS, errno.EIO])
def test_where_sqlite_cannot_open_the_journal_the_systems_own_reason_is_told(path, monkeypatch, refused, code):
    write(path, EVENTS)

    def failing(*arguments, **options):
        raise sqlite3_error("unable to open database file", sqlite3.SQLITE_CANTOPEN)

    def failing_open(name, *arguments):
        raise OSError(code, os.strerror(code), str(name))

    monkeypatch.setattr(sqlite3, "connect", failing)
    monkeypatch.setattr(os, "open", failing_open)
    sentence = refused(lambda: list(read_events(path)), error=DiskError)
    assert f"{os.strerror(code)}: {path}" in sentence
    assert advice(OSError(code, "")) in sentence


def sqlite3_error(words, code):
    error = sqlite3.OperationalError(words)
    error.sqlite_errorcode = code
    return error


def without_rights(work):
    """What some work gives in a process that may write no more than the modes of files say."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            os.write(writing, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as told:
        found = told.read()
    os.waitpid(child, 0)
    return found


def test_a_run_in_a_folder_that_cannot_be_written_can_be_read():
    with tempfile.TemporaryDirectory() as folder:  # its parents can be entered by all, unlike those of tmp_path
        path = Path(folder) / "journal.db"
        write(path, EVENTS)
        path.chmod(0o444)
        Path(folder).chmod(0o555)
        assert without_rights(lambda: list(read_events(path)) == EVENTS) == "True"


def test_committing_nothing_is_nothing(path):
    journal = Journal(path, durable=False)
    journal.commit()
    journal.commit()
    journal.close()
    assert list(read_events(path)) == []


@pytest.mark.parametrize("folder", ["a b", "a?b#c", "100%20", "größe", "a'b\"c", "a;b&mode=memory"])
def test_a_journal_may_lie_in_a_folder_with_any_name(tmp_path, folder):
    path = tmp_path / folder / "journal.db"
    path.parent.mkdir()
    write(path, EVENTS)
    assert list(read_events(path)) == EVENTS
    ask(path, verb="stop")
    assert os.listdir(path.parent) == ["journal.db"]


def test_the_journal_is_for_this_user_alone_also_while_it_is_open(path):
    before = os.umask(0)
    try:
        journal = Journal(path, durable=False)
        journal.append(BEGAN, time_s=1.0)
        journal.commit()
        modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()}
        journal.close()
    finally:
        os.umask(before)
    assert set(modes) >= {"journal.db", "journal.db-wal"}
    assert set(modes.values()) == {0o600}


def test_the_journal_is_in_wal_mode_and_waits_for_the_disk_where_asked(path):
    connection = database.create(path, durable=True)
    assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2
    connection.close()
    connection = database.create(path, durable=False)
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 1
    connection.close()


# ---- summary ----


def state_of(record):
    return {
        name: (task.state, task.step, task.saved_step, task.metrics, task.step_s, task.spans, task.notices)
        for name, task in record.tasks.items()
    } | {"run": (record.state, record.last_s, record.notices)}


def both(path, events):
    write(path, events)
    return state_of(RunRecord.replay(read_summary(path))), state_of(RunRecord.replay(read_events(path)))


LAUNCHED = [EVENTS[0], EVENTS[1], EVENTS[2], (2.0, Launched(task="b", attempt=1, devices=("cpu:1",)))]


def test_the_summary_leaves_out_all_but_the_last_metrics_of_each_task(path):
    reports = [
        (4.0 + i, measured((i + 1, {"train/loss": 1.0 / (i + 1)}), task=task, number=i + 1))
        for i in range(5)
        for task in ("a", "b")
    ]
    write(path, [*LAUNCHED, *reports, (20.0, Saved(task="a", attempt=1, step=5, write_s=0.1))])
    summary = list(read_summary(path))
    assert [event.task for _, event in summary if isinstance(event, Measured)] == ["a", "b"]
    assert len(summary) == len(LAUNCHED) + 3


def test_the_summary_amounts_to_the_same_state(path):
    summary, whole = both(
        path,
        [
            *LAUNCHED,
            (4.0, measured((1, {"train/loss": 1.0}))),
            (5.0, measured((2, {"train/loss": 0.5}), (2, {"valid/loss": 0.7}), number=2)),
            (6.0, Saved(task="a", attempt=1, step=2, write_s=0.1)),
            (
                7.0,
                measured((3, {"train/loss": 0.4}), number=3, latest={"train/loss": 0.4, "valid/loss": 0.7}, step_s=2.0),
            ),
            (8.0, Lost(task="a", attempt=1, device="cpu:0", reason="killed", retried=True)),
            (9.0, measured((1, {"train/loss": 3.0}), task="b")),
        ],
    )
    assert summary == whole


def test_the_summary_keeps_the_speed_after_a_validation(path):
    summary, whole = both(
        path,
        [
            *LAUNCHED,
            (4.0, measured((1, {"train/loss": 1.0}), step_s=3.0)),
            (
                5.0,
                measured((1, {"valid/loss": 0.7}), number=2, latest={"train/loss": 1.0, "valid/loss": 0.7}, step_s=3.0),
            ),
        ],
    )
    assert summary == whole


def test_the_summary_keeps_metrics_that_were_measured_before_a_loss(path):
    summary, whole = both(
        path,
        [
            *LAUNCHED,
            (4.0, measured((1, {"train/loss": 1.0, "valid/loss": 0.7}))),
            (5.0, Lost(task="a", attempt=1, device="cpu:0", reason="killed", retried=True)),
            (6.0, Launched(task="a", attempt=2, devices=("cpu:0",))),
            (7.0, measured((1, {"train/loss": 1.0}), attempt=2)),
        ],
    )
    assert summary == whole


# ---- metrics ----


def test_metrics_are_one_row_per_step_in_the_order_of_steps(path):
    write(
        path,
        [
            EVENTS[0],
            (1.0, measured((1, {"train/loss": 1.0}), (2, {"train/loss": 0.5}), (2, {"valid/loss": 0.6}))),
            (2.0, measured((3, {"train/loss": 0.4}), number=2)),
            (2.5, measured((1, {"train/loss": 9.0}), task="b")),
        ],
    )
    assert read_metrics(path, "a") == [
        {"step": 1, "train/loss": 1.0},
        {"step": 2, "train/loss": 0.5, "valid/loss": 0.6},
        {"step": 3, "train/loss": 0.4},
    ]
    assert read_metrics(path, "b") == [{"step": 1, "train/loss": 9.0}]
    assert read_metrics(path, "ghost") == []


def test_steps_that_were_taken_again_appear_once_with_all_their_metrics(path):
    write(
        path,
        [
            (1.0, measured((1, {"train/loss": 1.0}), (2, {"train/loss": 0.5}), (2, {"valid/loss": 0.6}))),
            (2.0, measured((3, {"train/loss": 0.4}), number=2)),
            (3.0, measured((2, {"train/loss": 0.5}), (3, {"train/loss": 0.4}), number=2, attempt=2)),
            (4.0, measured((4, {"train/loss": 0.3}), number=3, attempt=2)),
        ],
    )
    assert read_metrics(path, "a") == [
        {"step": 1, "train/loss": 1.0},
        {"step": 2, "train/loss": 0.5, "valid/loss": 0.6},
        {"step": 3, "train/loss": 0.4},
        {"step": 4, "train/loss": 0.3},
    ]


# ---- requests ----


def test_requests_arrive_once_and_in_order(path):
    journal = Journal(path, durable=False)
    assert journal.new_requests() == []
    ask(path, verb="stop", task="b")
    ask(path, verb="stop", task="a")
    assert journal.new_requests() == [Request(verb="stop", task="b"), Request(verb="stop", task="a")]
    assert journal.new_requests() == []
    ask(path, verb="stop")
    assert journal.new_requests() == [Request(verb="stop", task="")]
    journal.close()


def test_what_was_asked_of_an_earlier_controller_is_not_asked_of_the_next(path):
    Journal(path, durable=False).close()
    ask(path, verb="stop")
    journal = Journal(path, durable=False)
    assert journal.new_requests() == []
    ask(path, verb="stop", task="a")
    assert journal.new_requests() == [Request(verb="stop", task="a")]
    journal.close()


def test_requests_are_not_events(path):
    write(path, EVENTS)
    ask(path, verb="stop")
    assert list(read_events(path)) == EVENTS


# ---- files that are not a journal ----


def uses(path):
    """Everything that may be done with a run that exists."""
    return [
        lambda: list(read_events(path)),
        lambda: list(read_summary(path)),
        lambda: read_metrics(path, "a"),
        lambda: ask(path, verb="stop"),
        lambda: Journal(path, durable=False).close(),
    ]


def test_a_run_that_is_not_there_is_an_input_error_that_names_the_folder(path, refused):
    for use in uses(path)[:-1]:
        sentence = refused(use)
        assert f"{path.parent} is not a run" in sentence
        assert "rota status" in sentence
    assert not path.exists()


def test_a_folder_in_place_of_the_journal_is_no_run(path, refused):
    path.mkdir()
    for use in uses(path)[:-1]:
        refused(use)
    refused(uses(path)[-1], error=StoreError)


@pytest.mark.parametrize(
    "content", [b"\x00" * 5000, b"not a database at all" * 300, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_file_of_something_else_is_a_store_error_with_advice(path, refused, content):
    path.write_bytes(content)
    for use in uses(path):
        sentence = refused(use, error=StoreError)
        assert str(path) in sentence
        assert "damaged" in sentence
        assert "backup" in sentence
    assert path.read_bytes() == content


def test_a_file_cut_short_is_a_store_error_with_advice(path, refused):
    write(path, EVENTS * 200)
    os.truncate(path, path.stat().st_size // 2)
    sentence = refused(uses(path)[0], error=StoreError)
    assert "damaged" in sentence


@pytest.mark.parametrize("content", [b"", b"x"])
def test_an_empty_file_is_not_said_to_be_of_another_version(path, refused, content):
    path.write_bytes(content)
    assert "version" not in refused(uses(path)[0], error=StoreError)


@pytest.mark.parametrize("found", [2, 99])
def test_a_journal_of_another_format_is_refused_with_both_numbers(path, refused, found):
    write(path, EVENTS)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={found}")
    connection.close()
    for use in uses(path):
        sentence = refused(use, error=StoreError)
        assert f"format {found}" in sentence
        assert "format 1" in sentence
        assert "version of rota" in sentence


@pytest.mark.parametrize(
    ("kind", "data"),
    [("Nonsense", "{}"), ("Launched", "{}"), ("Launched", "not json"), ("Launched", '{"task":1}')],
)
def test_an_event_that_cannot_be_understood_is_a_store_error(path, refused, kind, data):
    write(path, EVENTS)
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO events (time_s, kind, data) VALUES (1.0, ?, ?)", (kind, data))
    connection.commit()
    connection.close()
    sentence = refused(uses(path)[0], error=StoreError)
    assert str(path) in sentence
    assert kind in sentence


def replace_byte(path, place, value):
    raw = bytearray(path.read_bytes())
    raw[place] = value
    path.write_bytes(raw)


def test_a_damaged_table_name_that_is_no_text_is_a_store_error(path, refused):
    write(path, EVENTS)
    replace_byte(path, path.read_bytes().index(b"CREATE TABLE requests") + 3, 0xFF)
    refused(uses(path)[0], error=StoreError)


def test_a_damaged_row_whose_data_is_no_text_is_a_store_error(path, refused):
    write(path, [(1.5, Noticed(task="a", attempt=1, text="x" * 60))])
    # A row's header: its size, then the types of seq (0), time_s (7), kind, task and data; n bytes of text are 13 + 2n.
    kind, task = 13 + 2 * len("Noticed"), 13 + 2 * len("a")
    place = path.read_bytes().index(bytes([0, 7, kind, task])) + 4
    replace_byte(path, place, 1)  # a whole number of one byte; the type's second byte is left over
    refused(uses(path)[0], error=StoreError)


@pytest.mark.parametrize("place", ["missing/journal.db", "file/journal.db"])
def test_a_journal_that_cannot_be_made_is_a_store_error(tmp_path, refused, place):
    (tmp_path / "file").touch()
    refused(Journal, tmp_path / place, error=StoreError)


def test_an_input_error_is_not_a_store_error(path):
    with pytest.raises(InputError) as caught:
        list(read_events(path))
    assert not isinstance(caught.value, StoreError)


def test_a_kill_while_the_journal_is_made_leaves_none_and_the_run_can_begin(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*arguments):
        raise Killed

    folder = RunFolder(tmp_path / "run")
    folder.prepare()
    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(files, "remove", lambda path: None)
    with pytest.raises(Killed):
        Journal(folder.journal)
    monkeypatch.undo()
    assert list(folder.path.iterdir())
    assert not folder.exists()
    folder.prepare()
    Journal(folder.journal).close()
    assert folder.exists()


# ---- one holder ----


def test_whoever_opened_it_last_holds_it(path):
    first, second = Journal(path), Journal(path)
    first.append(RunNoted(text="of the first"), time_s=1.0)
    with pytest.raises(RunInUseError, match="another process has taken over"):
        first.commit()
    second.append(RunNoted(text="of the second"), time_s=2.0)
    second.commit()
    assert [event.text for _, event in read_events(path)] == ["of the second"]


def test_a_journal_of_before_holders_were_noted_can_be_held(path):
    Journal(path).close()
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE holders")
    connection.commit()
    connection.close()
    journal = Journal(path)
    journal.append(RunNoted(text="goes on"), time_s=1.0)
    journal.commit()
    assert [event.text for _, event in read_events(path)] == ["goes on"]


# ---- journals of others ----


@pytest.mark.parametrize(
    "script",
    [
        "ALTER TABLE events RENAME TO e; CREATE VIEW events AS SELECT * FROM e",
        "DROP TABLE events; CREATE VIEW events AS WITH RECURSIVE n(seq) AS (SELECT 1 UNION ALL SELECT seq + 1 FROM n) "
        "SELECT seq, 0.0 AS time_s, 'RunNoted' AS kind, '' AS task, '{\"text\":\"\"}' AS data FROM n",
        "DROP TABLE requests; CREATE TABLE requests (seq INTEGER PRIMARY KEY, time_s REAL, verb TEXT, task TEXT)",
        "CREATE TRIGGER mine AFTER INSERT ON events BEGIN DELETE FROM requests; END",
        "CREATE TABLE mine (x)",
        "ALTER TABLE events ADD COLUMN mine INTEGER GENERATED ALWAYS AS (length(data)) VIRTUAL",
        "DROP TABLE holders; CREATE VIEW holders AS SELECT 1 AS number",
        "INSERT INTO requests VALUES (9223372036854775807, 0.0, 'stop', '')",
        "INSERT INTO events VALUES (9223372036854775807, 0.0, 'RunNoted', '', '{}')",
        "INSERT INTO holders VALUES (9223372036854775807, 0.0)",
    ],
)
def test_what_rota_does_not_make_in_a_journal_is_refused_before_it_is_used(path, refused, script):
    write(path, EVENTS)
    with contextlib.closing(sqlite3.connect(path)) as journal, journal:
        journal.executescript(script)
    for use in uses(path):
        assert "altered" in refused(use, error=StoreError)


@pytest.mark.parametrize("time_s", [math.inf, -math.inf, 1e300, 253_402_300_800.0])
def test_a_time_that_no_clock_shows_is_refused(path, refused, time_s):
    write(path, EVENTS)
    with contextlib.closing(sqlite3.connect(path)) as journal, journal:
        journal.execute("UPDATE events SET time_s = ? WHERE seq = 2", (time_s,))
    assert "the time of an event" in refused(list, read_events(path), error=StoreError)


@pytest.mark.parametrize("name", ["../a", "..", "a/b", "/tmp/a", ".a", "", "a\x1b[31m", "a" * 129, None, 1])
def test_a_task_whose_name_is_no_folder_is_refused(path, refused, name):
    write(path, EVENTS)
    kind, data = codec.encode(dataclasses.replace(BEGAN, tasks=({"name": name, "steps": 9},)))
    with contextlib.closing(sqlite3.connect(path)) as journal, journal:
        journal.execute("UPDATE events SET data = ? WHERE kind = ?", (data, kind))
    assert "RunBegan.tasks.name" in refused(list, read_summary(path), error=StoreError)


def test_a_task_without_a_name_or_with_settings_that_are_a_list_is_refused(path, refused):
    write(path, EVENTS)
    for task, says in (({"steps": 9}, "has no name"), ({"name": "a", "settings": [1]}, "settings is list")):
        kind, data = codec.encode(dataclasses.replace(BEGAN, tasks=(task,)))
        with contextlib.closing(sqlite3.connect(path)) as journal, journal:
            journal.execute("UPDATE events SET data = ? WHERE kind = ?", (data, kind))
        assert says in refused(list, read_summary(path), error=StoreError)


def test_a_message_that_is_no_event_and_a_task_under_another_name_are_refused(path, refused):
    write(path, [*EVENTS, (7.0, Shutdown())])
    assert "Shutdown, which is no event" in refused(RunRecord.replay, read_events(path), error=StoreError)
    with contextlib.closing(sqlite3.connect(path)) as journal, journal:
        journal.execute("UPDATE events SET task = 'b' WHERE kind = 'Noticed'")
    assert "filed under another" in refused(list, read_events(path), error=StoreError)


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
def test_a_journal_that_leads_elsewhere_is_refused(path, tmp_path, refused, end):
    write(path, EVENTS)
    beside = path.with_name(path.name + end)
    elsewhere = tmp_path / "elsewhere"
    if end:
        elsewhere.write_bytes(b"precious")
    else:
        beside.rename(elsewhere)
    beside.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    for use in uses(path):
        assert str(beside) in refused(use, error=StoreError)
    assert elsewhere.read_bytes() == before


def test_a_journal_is_in_wal_mode_from_the_first_moment(path):
    add(path, BEGAN, time_s=1.0)
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_what_a_killed_writer_began_is_undone_by_a_reader(path):
    add(path, BEGAN, time_s=1.0)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    code = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('PRAGMA cache_size=1'); c.execute('BEGIN');"
        "c.execute('UPDATE events SET data = printf(\"%.*c\", 2000000, 120)');"
        "os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert path.with_name("journal.db-journal").exists()
    assert list(read_events(path)) == [(1.0, BEGAN)]


def test_a_limit_of_the_size_of_files_is_named(path, refused):
    """In another process, since what is limited once stays so."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from rota.errors import DiskError; from rota.execute.events import RunNoted\n"
        "from rota.store import journal as module; module._FULL_DISK_PATIENCE_S = 0.0\n"
        "journal = module.Journal(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
        "try:\n"
        "    for number in range(100):\n"
        "        journal.append(RunNoted(text='a' * 2**14), time_s=float(number)); journal.commit()\n"
        "except DiskError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert "File too large" in done.stdout, done.stderr
    assert done.stdout.strip().endswith("raise the limit of the size of files (ulimit -f)")
