"""The folder of a run: what lies where in it, and which process holds it.

::

    runs/NAME/
      journal.db                      everything that happened
      report.html                     made at the end, and by `rota report`
      lock                            held by the controller
      tasks/TASK/
        model.safetensors             the trained model
        output.log                    what the task's own code printed
        lock                          held by the worker that trains it
        shards/                       what left memory, and its commits; elsewhere with --shards
        checkpoints/checkpoint-N/     tensors.safetensors, state.json, commit.json
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from rota.errors import DiskError, InputError, RunFolderError, RunInUseError
from rota.refusals import advice, reason, told
from rota.state import inside
from rota.state.files import make_private_folder
from rota.store import database
from rota.store.database import FILE as JOURNAL_FILE

MODEL_FILE = "model.safetensors"
PROFILE_FOLDER = ".profile"
CHECKPOINT_FOLDER = "checkpoints"
STORE_FOLDER = "shards"
OUTPUT_FILE = "output.log"
LOCK_FILE = "lock"
REPORT_FILE = "report.html"

DEFAULT_ROOT = Path("runs")

_LOCK_WAIT_S = 2.0
_LEFT = r"\.(report\.html|journal\.db)\..+\.tmp(-journal)?"
"""What killed processes were writing."""


def output_file(rank: int) -> str:
    """What the code of a task printed in one of its processes."""
    return f"output-{rank}.log" if rank else OUTPUT_FILE


def again(task_folder: Path) -> str:
    """The command that tries a task again which has failed, by the folder of the task."""
    return f"`rota resume --failed {shlex.quote(str(task_folder.parent.parent))}`"


class RunFolder:
    """The paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / JOURNAL_FILE
        self.report = path / REPORT_FILE
        self._held: int | None = None
        """The open file of the lock, while this process holds the run."""

    def task(self, name: str) -> Path:
        """The folder of a task."""
        return self.path / "tasks" / name

    def model(self, name: str) -> Path:
        """The trained model of a task."""
        return self.task(name) / MODEL_FILE

    def exists(self) -> bool:
        """Whether a run has begun here."""
        try:
            return self.journal.is_file()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return False

    def active_s(self) -> float:
        """When the journal was last written. SQLite writes beside the file first."""
        beside = self.journal.with_name(self.journal.name + "-wal")
        return max(path.stat().st_mtime for path in (self.journal, beside) if path.exists())

    def check(self, tasks: Iterable[str]) -> None:
        """RunFolderError if something that a run of these tasks uses leads out of the folder."""
        inside.check(self.path, inside.RUN)
        for name in tasks:
            inside.check_task(self.task(name))

    def prepare(self) -> None:
        """Make the folder, for this user alone. InputError if it holds something else."""
        try:
            database.check_length(self.journal)
            if self.path.exists() and not self.path.is_dir():
                raise InputError(f"{self.path} is a file; give a folder for the run")
            if self.path.is_dir() and not self.exists() and any(map(_is_foreign, self.path.iterdir())):
                raise InputError(f"{self.path} is not empty and is not a run of rota; give an empty or a new folder")
            make_private_folder(self.path)
        except OSError as error:
            raise InputError(f"the run folder {self.path} cannot be made ({reason(error)}); {advice(error)}") from error

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run: no other controller can, until this one ends or dies."""
        with told(f"the lock {self.path / LOCK_FILE} cannot be taken"):
            handle = self._lock()
        try:
            self._held = handle
            inside.remove_each(self.path, _LEFT)
            yield
        finally:
            self._held = None
            os.close(handle)

    def check_there(self) -> None:
        """RunFolderError if the folder that is held is not at its path any more: it is made once, at the beginning."""
        if self._held is None:
            return
        mine = os.fstat(self._held)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = (self.path / LOCK_FILE).lstat()
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                return
        moved = _path_of(self._held)
        where = (
            f"go on where it is now, with: rota resume {shlex.quote(str(moved.parent))}" if moved else "run it again"
        )
        raise RunFolderError(f"the folder {self.path} was moved or removed while its run went on, which stops; {where}")

    def _lock(self) -> int:
        """The open file of the lock, which this process has. RunInUseError if another has it."""
        handle = inside.opened(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            # A killed controller's last breath may still be in the air.
            deadline_s = time.monotonic() + _LOCK_WAIT_S
            while not try_lock(handle):
                if time.monotonic() > deadline_s:
                    owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
                    raise RunInUseError(
                        f"the run in {self.path} is being run by process {owner or 'unknown'}; "
                        f"wait for it, or end it with `rota stop {shlex.quote(str(self.path))}`"
                    )
                time.sleep(0.05)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def is_held(self) -> bool:
        """Whether a controller is running this run now."""
        try:
            with told(f"the lock {self.path / LOCK_FILE} cannot be looked at"):
                handle = inside.opened(self.path / LOCK_FILE, os.O_RDONLY)
                try:
                    return not try_lock(handle, shared=True)
                finally:
                    os.close(handle)
        except DiskError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise


def find_run(name: str | Path | None, *, root: Path = DEFAULT_ROOT) -> RunFolder:
    """The run that a user means: a path, a name below `root`, or the latest one."""
    if name is None:
        runs = list_runs(root)
        if not runs:
            raise InputError(f"there is no run in {root}; start one with `rota run FILE`, or name its folder")
        return runs[-1]
    for path in (Path(name), root / name):
        if RunFolder(path).exists():
            return RunFolder(path)
    known = ", ".join(run.path.name for run in list_runs(root)[-5:])
    raise InputError(f"there is no run {str(name)!r}; {f'there are {known}' if known else f'{root} holds none'}")


def list_runs(root: Path = DEFAULT_ROOT) -> list[RunFolder]:
    """The runs below a folder, the one that was last active at the end."""
    if not root.is_dir():
        return []
    return sorted(filter(_is_ours, map(RunFolder, root.iterdir())), key=RunFolder.active_s)


def _is_ours(folder: RunFolder) -> bool:
    try:
        return folder.exists()
    except PermissionError:  # another user's, beside which this user's runs are still listed
        return False


def new_run_path(name: str, *, root: Path = DEFAULT_ROOT) -> Path:
    """A path below `root` that is not taken yet, with the name and the time in it."""
    base = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = root / base, 2
    while path.exists():
        path, number = root / f"{base}-{number}", number + 1
    return path


def _path_of(handle: int) -> Path | None:
    """Where an open file is now, if it has a name and the system tells."""
    try:
        path, mine = Path(os.readlink(f"/proc/self/fd/{handle}")), os.fstat(handle)
        found = path.lstat()
    except OSError:
        return None
    return path if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino) else None


def _is_foreign(path: Path) -> bool:
    """Whether something in a folder without a journal is not what a killed start of a run leaves."""
    return path.name != LOCK_FILE and not path.name.startswith(f".{JOURNAL_FILE}")


def try_lock(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file for this process and those that inherit it; False if another has it.

    OSError where the system cannot tell, which is not the same.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
