"""Memory of large tensors that is used again instead of being made zero again, within a bound (reservoir.c).

Workers are started with the library before their allocator; it is compiled once for a machine and a user, with the C
compiler that is there. Where there is none, or the system is not Linux with glibc, everything works without, slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import grp
import hashlib
import logging
import os
import platform
import pwd
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from rota.scratch import scratch
from rota.store.cache import cache_folder

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("reservoir.c")
_OPTIONS = ("-O2", "-shared", "-fPIC", "-Wl,-Bsymbolic-functions")
"""-Bsymbolic-functions: the names that the library uses are its own, whatever stands before it."""
_COMPILE_S = 60
_TRIAL = "import ctypes, sys; sys.exit(not ctypes.CDLL(None).rota_reservoir_answers())"
_TRIAL_S = 20
_RESERVED = 16
"""Times as much address space as memory: what is not there takes none."""
_LEAST_RESERVED_BYTES, _MOST_RESERVED_BYTES = 2**32, 2**40


class UnavailableError(Exception):
    """Why there is none here."""


# ---- where processes are started ----

_made_here: set[Path] = set()
"""Libraries that this process has compiled."""
_left_out = ""
"""Why processes are started without it from now on."""


def preload(environment: MutableMapping[str, str]) -> None:
    """Have a process that is started with this environment stand ready to hold memory, if it can be done here."""
    with contextlib.suppress(UnavailableError):
        environment["LD_PRELOAD"] = preloaded(environment)


def preloaded(environment: Mapping[str, str]) -> str:
    """What LD_PRELOAD must be in an environment; UnavailableError says why processes cannot be started with it."""
    if _left_out:
        raise UnavailableError(_left_out)
    path = compiled()
    library = str(path)
    others = environment.get("LD_PRELOAD", "")
    wanted = f"{library}:{others}" if others else library
    fault = _fault(wanted, _stamp(path))
    if fault and path not in _made_here:  # it may be damaged: a new one shows whether it was that
        _compile(path)
        fault = _fault(wanted, _stamp(path))
    if fault:
        beside = f" beside {others}; start rota without that LD_PRELOAD" if others else ""
        raise UnavailableError(f"a process that is started with it {fault}{beside}")
    return wanted


def leave_out(why: str) -> None:
    """Start processes without it from now on, and say so: it may be what they died of."""
    global _left_out
    with contextlib.suppress(UnavailableError):
        preloaded(os.environ)
        _left_out = why
        _log.warning("workers are started without the library that holds their memory from now on: %s", why)


def compiled() -> Path:
    """The library; UnavailableError says why there is none.

    Looked at each time: it becomes a part of each worker, which runs for the user.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        raise UnavailableError("it is written for Linux with glibc")
    folder = (cache_folder() / "reservoir").absolute()
    library = folder / _library_name()
    if any(letter.isspace() or letter == ":" for letter in str(library)):
        raise UnavailableError(f"the path of {folder} has a blank or a colon; set ROTA_CACHE to a folder without")
    try:
        for path in (*reversed(folder.parents), folder):
            path.mkdir(exist_ok=True, mode=0o700)
        _check_ours(folder)
        if not _is_whole(library):
            _compile(library)
    except OSError as error:
        raise UnavailableError(f"{folder} cannot be used ({error.strerror or error})") from error
    return library


@functools.cache
def _library_name() -> str:
    made_of = _SOURCE.read_bytes() + " ".join((platform.machine(), *_OPTIONS)).encode()
    return f"{hashlib.sha256(made_of).hexdigest()[:16]}.so"


def _check_ours(folder: Path) -> None:
    """That nobody else can put a file of theirs in its place, here or anywhere above."""
    for path in (folder, *folder.resolve().parents):
        facts = path.stat()
        by_others = stat.S_IWOTH if _is_mine_alone(facts.st_gid) else stat.S_IWGRP | stat.S_IWOTH
        shared = bool(facts.st_mode & by_others) and not facts.st_mode & stat.S_ISVTX
        if shared or facts.st_uid not in (0, os.getuid()):
            raise UnavailableError(
                f"{path} can be written by others, who could put a library of theirs there; make it your own "
                "(chmod go-w), or set ROTA_CACHE to a folder that is"
            )


def _is_mine_alone(group: int) -> bool:
    """Whether a group is the user's private one, as many systems make it for each: they let it write by default."""
    try:
        me, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == me.pw_gid and found.gr_name == me.pw_name and not set(found.gr_mem) - {me.pw_name}


def _is_whole(library: Path) -> bool:
    """Whether it is there, and was written by this user for this user."""
    try:
        facts = library.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077


def _compile(library: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UnavailableError("there is no C compiler; install one (gcc or clang)")
    with scratch("reservoir", place=library.parent) as folder:
        made = folder / library.name
        options = [*_OPTIONS, "-o", str(made), str(_SOURCE), "-ldl", "-lpthread"]
        try:
            done = subprocess.run([compiler, *options], capture_output=True, errors="replace", timeout=_COMPILE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(f"{compiler} does not work ({error})") from error
        if done.returncode != 0 or not made.is_file():
            said = done.stderr.strip().splitlines()
            raise UnavailableError(f"{compiler} does not compile it ({said[-1] if said else done.returncode})")
        made.chmod(0o700)
        os.replace(made, library)
    _made_here.add(library)


def _stamp(library: Path) -> tuple[int, int, int]:
    """Another one for another content."""
    facts = os.stat(library)
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


@functools.cache
def _fault(wanted: str, stamp: tuple[int, int, int]) -> str:
    """What happens to a process that is started with this LD_PRELOAD; empty if nothing does.

    The disk may be mounted without execution, another library may not bear this one, or answer in its place.
    """
    command = [sys.executable, "-I", "-S", "-c", _TRIAL]
    try:
        environment = {**os.environ, "LD_PRELOAD": wanted}
        done = subprocess.run(command, env=environment, capture_output=True, errors="replace", timeout=_TRIAL_S)
    except subprocess.TimeoutExpired:
        return f"did not end within {_TRIAL_S} s"
    if done.returncode < 0:
        return f"was killed by {signal.Signals(-done.returncode).name}"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return f"does not use it ({said[0] if said else 'another allocator stands before it'})"


# ---- in the process itself ----


class Reservoir:
    """The library, as a process has it."""

    def __init__(self, library: Any) -> None:
        self._hold = library.rota_reservoir_hold
        self._hold.argtypes, self._hold.restype = [ctypes.c_size_t, ctypes.c_size_t], ctypes.c_bool
        self._take = library.rota_reservoir_take
        self._take.argtypes, self._take.restype = [ctypes.c_size_t], ctypes.c_void_p
        self._give = library.rota_reservoir_give
        self._give.argtypes, self._give.restype = [ctypes.c_void_p], None
        self._has = library.rota_reservoir_has
        self._has.argtypes, self._has.restype = [ctypes.c_void_p], ctypes.c_bool
        self._trim = library.rota_reservoir_trim
        self._trim.argtypes, self._trim.restype = [], None
        self._count = library.rota_reservoir_count

    def hold(self, limit_bytes: int) -> bool:
        """From now on hold what is freed, with so much in all; False if the address space is not to be had."""
        reserved_bytes = min(max(_LEAST_RESERVED_BYTES, _RESERVED * limit_bytes), _MOST_RESERVED_BYTES)
        return bool(self._hold(limit_bytes, reserved_bytes))

    def let_go(self) -> None:
        """Hold nothing any more."""
        self._hold(0, 0)

    def trim(self) -> None:
        """Give what is free back to the system."""
        self._trim()

    def take(self, size_bytes: int) -> memoryview | None:
        """Memory that begins with a page; None if nothing is held now, or there is no more."""
        place = self._take(size_bytes)
        return None if place is None else memoryview((ctypes.c_char * size_bytes).from_address(place)).cast("B")

    def give(self, memory: memoryview) -> None:
        """What was taken is not needed any more."""
        self._give(ctypes.addressof(ctypes.c_char.from_buffer(memory)))

    def has(self, place: int) -> bool:
        """Whether memory lies here: then it can be read to the end of its last page."""
        return bool(self._has(place))

    @property
    def counts_bytes(self) -> tuple[int, int, int]:
        """What is there, what of it is used, and what was made new since the process began."""
        counts = (ctypes.c_size_t * 3)()
        self._count(counts)
        return counts[0], counts[1], counts[2]


@functools.cache
def reservoir() -> Reservoir | None:
    """This process's, if it was started with one."""
    try:
        return Reservoir(ctypes.CDLL(None))
    except (AttributeError, OSError, TypeError):
        return None
