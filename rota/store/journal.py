"""The append-only journal of a run: events in, events out."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rota import codec
from rota.errors import MessageError, RunInUseError, StoreError
from rota.store import database

_FULL_DISK_PATIENCE_S = 5.0
_FULL_DISK_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Request:
    """Something another process asked of the controller."""

    verb: str
    task: str


def add(path: Path, event: Any, *, time_s: float) -> None:
    """Keep one event. A journal comes into being with its first: whatever fails here, there is none without."""
    if not path.exists():
        database.make(path, [_row(event, time_s)])
        return
    journal = Journal(path)
    try:
        journal.append(event, time_s=time_s)
        journal.commit()
    finally:
        journal.close()


class Journal:
    """The controller's end: it alone appends events.

    Whoever opens a journal last holds it. The lock on the run folder keeps a second controller away; where a lock is
    lost without its holder noticing, this does: nothing that an earlier holder appends is kept.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self.path = path
        self._connection = database.create(path, durable=durable)
        self._appended: list[database.Row] = []
        with database.translated(path):
            self._connection.execute(database.HOLDERS)
            opened = self._connection.execute("INSERT INTO holders (time_s) VALUES (?)", (time.time(),))
            self._holder = opened.lastrowid
            self._seen = self._connection.execute("SELECT coalesce(max(seq), 0) FROM requests").fetchone()[0]

    def append(self, event: Any, *, time_s: float) -> None:
        """Add an event; it is kept from the next `commit` on."""
        self._appended.append(_row(event, time_s))

    def commit(self) -> None:
        """Keep what was appended.

        A checkpoint that does not fit fills the disk for a moment and gives the room back: that is waited for.
        """
        if not self._appended:
            return
        with database.translated(self.path):
            patience_ends_s = time.monotonic() + _FULL_DISK_PATIENCE_S
            while True:
                try:
                    with database.transaction(self._connection):
                        self._check_held()
                        self._connection.executemany(database.INSERT_EVENT, self._appended)
                    break
                except sqlite3.OperationalError as error:
                    if not database.may_be_full(error) or time.monotonic() > patience_ends_s:
                        raise
                    time.sleep(_FULL_DISK_PAUSE_S)
        self._appended.clear()

    def _check_held(self) -> None:
        latest = self._connection.execute("SELECT max(number) FROM holders").fetchone()[0]
        if latest != self._holder:
            raise RunInUseError(f"another process has taken over the run in {self.path.parent}; this one ends")

    def new_requests(self) -> list[Request]:
        """What was asked since the last call."""
        with database.translated(self.path):
            rows = self._connection.execute(
                "SELECT seq, verb, task FROM requests WHERE seq > ? ORDER BY seq", (self._seen,)
            ).fetchall()
        if rows:
            self._seen = rows[-1][0]
        return [Request(verb=verb, task=task) for _, verb, task in rows]

    def close(self) -> None:
        """Let go of the file; what was not committed is not kept."""
        self._connection.close()


def _row(event: Any, time_s: float) -> database.Row:
    kind, data = codec.encode(event)
    return time_s, kind, getattr(event, "task", ""), data


def read_events(path: Path) -> Iterator[tuple[float, Any]]:
    """Every event with its time, from the first on."""
    yield from _decoded(path, "SELECT time_s, kind, task, data FROM events ORDER BY seq", ())


def read_summary(path: Path) -> Iterator[tuple[float, Any]]:
    """The events without the bulk of the metrics: of those, the last report of each task.

    Enough for the state of a run, and as fast for a long one as for a short one.
    """
    query = (
        "SELECT time_s, kind, task, data FROM events WHERE kind != 'Measured' OR seq IN "
        "(SELECT max(seq) FROM events WHERE kind = 'Measured' GROUP BY task) ORDER BY seq"
    )
    yield from _decoded(path, query, ())


def read_metrics(path: Path, task: str) -> list[dict[str, float]]:
    """A task's metrics: a dict per step with "step" and each metric, in the order of steps."""
    rows: dict[int, dict[str, float]] = {}
    query = "SELECT time_s, kind, task, data FROM events WHERE task = ? AND kind = 'Measured' ORDER BY seq"
    for _, event in _decoded(path, query, (task,)):
        for step, metrics in event.rows:
            # A step that was taken again after a crash is reported again, with the same values.
            rows.setdefault(step, {"step": step}).update(metrics)
    return [rows[step] for step in sorted(rows)]


def ask(path: Path, *, verb: str, task: str = "") -> None:
    """Leave a request for the controller of a run."""
    connection = database.open_existing(path, writable=True)
    try:
        with database.translated(path):
            connection.execute("INSERT INTO requests (time_s, verb, task) VALUES (?, ?, ?)", (time.time(), verb, task))
    finally:
        connection.close()


def _checked(time_s: Any, kind: Any, task: Any, data: Any) -> tuple[float, Any]:
    """A row as what it tells; SQLite does not look at the types of what it reads."""
    if type(time_s) is not float or not all(isinstance(one, str) for one in (kind, task, data)):
        raise MessageError("a row has values of other types than rota writes")
    codec.TIME.check(time_s, "the time of an event")
    event = codec.decode(kind, data)
    if task != getattr(event, "task", ""):
        raise MessageError(f"a {kind} of one task is filed under another")
    return time_s, event


def _decoded(path: Path, query: str, arguments: tuple[Any, ...]) -> Iterator[tuple[float, Any]]:
    connection: sqlite3.Connection = database.open_existing(path)
    try:
        with database.translated(path):
            cursor = connection.execute(query, arguments)
            while chunk := cursor.fetchmany(1000):
                for row in chunk:
                    yield _checked(*row)
    except MessageError as error:
        raise StoreError(
            f"the journal {path} cannot be understood: {error}; use the version of rota that wrote it, or, if it was "
            "altered, restore it from a backup"
        ) from error
    finally:
        connection.close()
