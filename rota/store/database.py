"""Opens the SQLite file of a run, and turns its failures into sentences."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from rota.errors import InputError, StoreError
from rota.state import files, inside

FILE = "journal.db"
HOLDERS = "CREATE TABLE IF NOT EXISTS holders (number INTEGER PRIMARY KEY, time_s REAL)"
"""Beside those of schema.sql; the oldest journals lack it."""
_FORMAT = 1
_BUSY_MS = 5000


def create(path: Path, *, durable: bool) -> sqlite3.Connection:
    """Open the file for writing, making it if it is not there.

    `durable` waits for the disk at each commit: what was committed survives a power cut, not just a killed process.
    """
    with translated(path):
        _check_files(path, written=True)
        if not path.exists():
            _make(path)
        connection = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_MS / 1000)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        _check(connection, path)
        return connection


def _make(path: Path) -> None:
    """Make an empty journal beside its place and move it there whole: a kill must not leave one without tables."""
    with files.replacing(path) as side:
        connection = sqlite3.connect(side, isolation_level=None)
        try:
            connection.executescript(_script())
            connection.execute(f"PRAGMA user_version={_FORMAT}")
        finally:
            connection.close()


def open_existing(path: Path, *, writable: bool = False) -> sqlite3.Connection:
    """Open the file of a run that exists, to read it while another process writes."""
    if not path.is_file():
        raise InputError(f"{path.parent} is not a run: it holds no {path.name}; see `rota status` for the runs here")
    with translated(path):
        _check_files(path, written=writable)
        mode = "rw" if writable else "ro"
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=_BUSY_MS / 1000
        )
        _check(connection, path)
        return connection


def _check_files(path: Path, *, written: bool) -> None:
    """SQLite follows links: it is not to open what is not the run's own."""
    for end in ("", "-wal", "-shm", "-journal"):
        inside.check_file(path.with_name(path.name + end), written=written)


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is done within is kept, or nothing; nobody else writes meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself rolls back after some errors
            connection.execute("ROLLBACK")
        raise


def may_be_full(error: sqlite3.OperationalError) -> bool:
    """Whether room on the disk may be missing; where its shared memory cannot grow, SQLite tells of an I/O error."""
    return (error.sqlite_errorcode & 0xFF) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the journal {path} cannot be made ({error.strerror}); see that its folder is there and can be written"
        ) from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        # A damaged name of a table makes a message that is not even text.
        reason = "malformed" if isinstance(error, UnicodeDecodeError) else str(error)
        if "full" in reason:
            advice = "make room on the disk, then `rota resume`"
        elif "malformed" in reason or "not a database" in reason:
            advice = (
                "the file is damaged; restore it from a backup, or move it away and start the run anew "
                "(models and checkpoints beside it are untouched)"
            )
        else:
            advice = "see that the folder can be read and written by you"
        raise StoreError(f"the journal {path} cannot be used ({reason}); {advice}") from error


def _check(connection: sqlite3.Connection, path: Path) -> None:
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if not found:
        raise StoreError(
            f"the journal {path} is empty or damaged; restore it from a backup, or move it away and start the run anew"
        )
    if found != _FORMAT:
        raise StoreError(
            f"the journal {path} has format {found}, and this rota reads format {_FORMAT}; "
            "use the version of rota that wrote it"
        )
    # A view or a trigger that is read may run for ever, and do what rota does not.
    known, made = _schema(), set(connection.execute(_MADE).fetchall())
    if strange := {row[1] for row in made - known}:
        raise StoreError(
            f"the journal {path} was altered: it has {min(map(str, strange))!r}, which rota does not make so; restore "
            "it from a backup, or move it away and start the run anew"
        )
    for table in {row[1] for row in made if row[0] == "table"}:
        last = connection.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0]  # the next one is behind it
        if last is not None and not 0 <= last < _MOST_ROWS:
            raise StoreError(f"the journal {path} was altered: its {table} have numbers that rota does not give")


_MADE = "SELECT type, name, tbl_name, sql FROM sqlite_master"
_MOST_ROWS = 2**62


@functools.cache
def _schema() -> set[tuple[str, str, str, str]]:
    """What there is in a journal that rota made."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(f"{_script()}; {HOLDERS}")
        return set(connection.execute(_MADE).fetchall())


def _script() -> str:
    return resources.files("rota.store").joinpath("schema.sql").read_text()
