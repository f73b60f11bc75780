"""Opens the SQLite file of a run, and turns its failures into sentences."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import sqlite3
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from rota.errors import DiskError, InputError, StoreError
from rota.refusals import advice, reason
from rota.state import files, inside

FILE = "journal.db"
HOLDERS = "CREATE TABLE IF NOT EXISTS holders (number INTEGER PRIMARY KEY, time_s REAL)"
"""Beside those of schema.sql; the oldest journals lack it."""
_FORMAT = 1
_BUSY_MS = 5000
_LONGEST_PATH = 504
"""SQLite's own paths have 512 bytes at most, and it adds up to 8 for the files beside this one."""
_DAMAGES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT)
_DAMAGED = (
    "the file is damaged; restore it from a backup, or move it away and start the run anew "
    "(models and checkpoints beside it are untouched)"
)

Row = tuple[float, str, str, str]
"""An event: its time, kind, task and JSON."""
_FORMAT_VERSIONS, _WAL = 18, 2
"""Where SQLite's header has the versions for writing and for reading, and which of them stands for WAL mode."""
INSERT_EVENT = "INSERT INTO events (time_s, kind, task, data) VALUES (?, ?, ?, ?)"


def make(path: Path, rows: Sequence[Row] = ()) -> None:
    """Make a journal that holds these events, whole or not at all: in memory, beside its place, and then there."""
    with translated(path), contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript(_script())
        connection.execute(f"PRAGMA user_version={_FORMAT}")
        connection.executemany(INSERT_EVENT, rows)
        check_length(path)
        with files.replacing(path) as side:
            side.write_bytes(_in_wal_mode(connection.serialize()))


def _in_wal_mode(database: bytes) -> bytes:
    """A database that is in WAL mode from the first moment: to switch later leaves, after a kill, a file beside it that
    only a writer can undo."""
    return database[:_FORMAT_VERSIONS] + bytes((_WAL, _WAL)) + database[_FORMAT_VERSIONS + 2 :]


def create(path: Path, *, durable: bool) -> sqlite3.Connection:
    """Open the file for writing, making it if it is not there.

    `durable` waits for the disk at each commit: what was committed survives a power cut, not just a killed process.
    """
    with translated(path):
        _check_files(path, written=True)
        if not path.exists():
            make(path)
        connection = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_MS / 1000)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        _check(connection, path)
        return connection


def check_length(path: Path) -> None:
    """InputError for a path that SQLite cannot open: it adds to it, and links count with what they lead to."""
    length = len(os.fsencode(os.path.realpath(path)))
    if length > _LONGEST_PATH:
        raise InputError(
            f"the path of the run folder {path.parent} is too long: with {path.name} it has {length} bytes, and SQLite "
            f"takes {_LONGEST_PATH}; use a shorter one"
        )


def open_existing(path: Path, *, writable: bool = False) -> sqlite3.Connection:
    """Open the file of a run that exists, to read it while another process writes."""
    if not path.is_file():
        raise InputError(f"{path.parent} is not a run: it holds no {path.name}; see `rota status` for the runs here")
    check_length(path)
    with translated(path):
        # What a killed writer of an earlier version began to change can only be undone by a writer.
        writable = writable or path.with_name(path.name + "-journal").exists()
        _check_files(path, written=writable)
        mode = "rw" if writable else "ro"
        # Readers make files, too. Where they cannot, and nothing is beside the journal, nobody writes to it either.
        still = not (writable or os.access(path.parent, os.W_OK) or path.with_name(path.name + "-wal").exists())
        address = f"{path.absolute().as_uri()}?mode={mode}{'&immutable=1' if still else ''}"
        connection = sqlite3.connect(address, uri=True, isolation_level=None, timeout=_BUSY_MS / 1000)
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
    """Turn SQLite's errors into a StoreError that says what to do: a DiskError where the system refused."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"the journal {path} cannot be made ({reason(error)}); {advice(error)}") from error
    except UnicodeDecodeError as error:  # a damaged name of a table makes a message that is not even text
        raise StoreError(f"the journal {path} cannot be used (malformed); {_DAMAGED}") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)  # that of a damaged text has none
        found = "malformed" if code is None and "decode" in str(error).lower() else str(error)
        if code is None or code & 0xFF in _DAMAGES or "malformed" in found:
            raise StoreError(f"the journal {path} cannot be used ({found}); {_DAMAGED}") from error
        if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            instead = "close the other program that has it open"
        elif (limited := _at_the_limit(path)) is not None and code & 0xFF in (
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_IOERR,
        ):
            found, instead = f"{found}: {reason(limited)}", advice(limited)
        elif code & 0xFF == sqlite3.SQLITE_FULL:
            instead = "make room on the disk"
        elif (refused := _refused(path)) is not None:
            found, instead = f"{found}: {reason(refused)}", advice(refused)
        elif code & 0xFF == sqlite3.SQLITE_IOERR:
            instead = "see that the disk has room and works"
        else:
            instead = "see that the folder can be read and written by you"
        raise DiskError(f"the journal {path} cannot be used ({found}); {instead}") from error


def _at_the_limit(path: Path) -> OSError | None:
    """What the system says to a file that is to become longer than a process may write (`ulimit -f`)."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit_bytes == resource.RLIM_INFINITY:
        return None
    for one in (path, *(path.with_name(path.name + ending) for ending in ("-wal", "-shm"))):
        with contextlib.suppress(OSError):
            if one.stat().st_size + _GROWS_BYTES > limit_bytes:
                return OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(one))
    return None


_GROWS_BYTES = 2**18
"""More than a commit adds to a file."""


def _refused(path: Path) -> OSError | None:
    """What the system says where SQLite does not tell: asked again, by opening what SQLite opens."""
    try:
        for one in (path, *(path.with_name(path.name + ending) for ending in ("-wal", "-shm"))):
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(one, os.O_RDWR))
        if not os.access(path.parent, os.W_OK):
            read_only = os.statvfs(path.parent).f_flag & os.ST_RDONLY
            code = errno.EROFS if read_only else errno.EACCES
            return OSError(code, os.strerror(code), str(path.parent))
    except OSError as error:
        return error
    return None


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
