"""The worker process of one device: started once, it trains task after task until its controller is gone.

Started by the backend; the main thread trains, one thread listens to the
controller, and one tells it every second that the process is alive and what it is doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rota.errors import DiskError, DivergedError, PeerError, RotaError, TaskError, WayError
from rota.refusals import refusal, sentence, told
from rota.runtime.link import ORPHAN_S, Link, clock_s
from rota.runtime.messages import (
    Beat,
    Failed,
    Finished,
    Halt,
    Halted,
    Here,
    Left,
    Look,
    Looked,
    Measured,
    Ready,
    Report,
    Shutdown,
    Stored,
    Train,
    Tried,
    Try,
)
from rota.state import files, inside
from rota.store.run_folder import LOCK_FILE, OUTPUT_FILE, again, output_file, try_lock
from rota.threads import OwnedThread, safe_point

if TYPE_CHECKING:
    import torch

    from rota.memory.pooled import Seat
    from rota.runtime.executor import Watch
    from rota.runtime.gang import Gang
    from rota.runtime.loop import Loop, Surroundings

BEAT_EVERY_S = 1.0
STARTING = "starting its worker"
START_S = 600.0
"""From a command until the worker has begun with it; the worker may have to import torch before."""
CODE_FOLDER = "ROTA_CODE"
"""Names the folder with the code that came from the controller's machine."""

# A worker on another machine that has lost its controller ends after a while; until then it holds its task's folder.
_LOCK_WAIT_S = ORPHAN_S + 10.0
_PR_SET_PDEATHSIG = 1
_OWN_THREADS = 2
"""Of rota's that begin while a task runs: one that writes a checkpoint, and one that prepares a move."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What the backend tells a worker when it starts it."""

    socket: int
    kind: str
    cores: tuple[int, ...]
    memory_bytes: int
    parent: int
    threads: int = 1
    """How many compute at the same time."""
    keeper: int = -1
    """Where a worker that outlives its controller gets a connection to the next one."""
    pool_socket: int = -1
    """Where the worker of one task in a pool takes its turns."""
    pool_cores: tuple[tuple[int, ...], ...] = ()
    """Of each of the pool's devices,"""
    pool_arenas: tuple[int, ...] = ()
    """and its memory, as an open file."""


class Worker:
    """The state that the three threads share."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        keeper = socket.socket(fileno=settings.keeper) if settings.keeper >= 0 else None
        self._link = Link(socket.socket(fileno=settings.socket), keeper=keeper)
        self._commands: queue.SimpleQueue[tuple[Train | Look | Try | Shutdown, bytes]] = queue.SimpleQueue()
        self._process = psutil.Process()
        self._halt = threading.Event()
        self._beat_now = threading.Event()
        self._confirmed = 0
        self._current: Train | Look | Try | None = None
        self._latest: Train | None = None
        self._seen_bytes = 0
        # (what, since, limit, retry, step): replaced as a whole, so that the beating thread never sees a half.
        self._watched: tuple[str, float, float | None, bool, int] = (STARTING, time.monotonic(), START_S, True, 0)

    def main(self) -> None:
        """Serve until told to shut down."""
        files.ask_before_commits(self._ensure_lease)
        with (
            OwnedThread(self._listen, name="listen", wake=self._link.close),
            OwnedThread(self._beat, name="beat", wake=self._beat_now.set),
        ):
            self._serve()

    def _serve(self) -> None:
        device = self._start_torch()
        self.report(Ready(pid=os.getpid()))
        # The first optimizer imports this, which takes as long as torch itself; do it while waiting for a task.
        import torch._dynamo  # noqa: F401

        # What is imported stays; without this, collecting the garbage of each task would look through all of it.
        gc.freeze()
        while True:
            if self._current is None:
                self.watch("", limit_s=None, retry=False, step=0)
            command, payload = self._commands.get()
            if isinstance(command, Shutdown):
                return
            if isinstance(command, Train):
                self._train(command, payload, device)
            else:
                self._probe(command, payload, device)

    def _start_torch(self) -> torch.device:
        import torch

        if self._settings.kind == "cuda":
            return torch.device("cuda", 0)  # CUDA_VISIBLE_DEVICES shows this worker its own GPU only
        torch.set_num_threads(self._settings.threads)
        torch.set_num_interop_threads(1)
        return torch.device("cpu")

    # ---- what the loop needs ----

    def report(self, report: Report) -> None:
        """Send a report; called from every thread."""
        self._link.report(report)

    def watch(self, what: str, *, limit_s: float | None, retry: bool, step: int) -> None:
        """Note what the main thread does from now on."""
        self._watched = (what, time.monotonic(), limit_s, retry, step)
        if what and not retry:  # the user's code, or a library: it may keep the interpreter from the thread that beats
            self._say_alive()

    def halt_requested(self) -> bool:
        """Whether the controller wants this task to leave."""
        return self._halt.is_set()

    def confirmed_number(self) -> int:
        """The last report of metrics that is in the journal."""
        return self._confirmed

    def _ensure_lease(self) -> None:
        if isinstance(self._current, Train):
            self._link.ensure_lease()

    # ---- the threads ----

    def _listen(self) -> None:
        self._link.listen(self._hear, busy=lambda: isinstance(self._current, Train), who=self._who)

    def _who(self) -> Ready:
        latest = self._latest
        if latest is None:
            return Ready(pid=os.getpid())
        return Ready(pid=os.getpid(), task=latest.task, attempt=latest.attempt)

    def _hear(self, message: Any, payload: bytes) -> None:
        if isinstance(message, Halt):
            if self._current is not None and self._current.task == message.task:
                self._halt.set()
        elif isinstance(message, Stored):
            for report in self._link.stored(message.count):
                if isinstance(report, Measured):
                    self._confirmed = report.number
        elif isinstance(message, Here):
            self._link.held(message)
        elif isinstance(message, Train | Look | Try):
            # Set here and not when training starts, so that a halt right behind it is not lost.
            self._halt.clear()
            self._confirmed = 0
            self._current = message
            self._watched = (STARTING, time.monotonic(), START_S, True, 0)
            self._latest = message if isinstance(message, Train) else None
            self._link.forget()
            self._beat_now.set()  # the answer begins the lease
            self._commands.put((message, payload))
        elif isinstance(message, Shutdown):
            self._commands.put((message, payload))

    def _beat(self) -> None:
        while True:
            safe_point()
            self._say_alive()
            self._beat_now.wait(BEAT_EVERY_S)
            self._beat_now.clear()

    def _say_alive(self) -> None:
        what, since_s, limit_s, retry, step = self._watched
        current = self._current
        beat = Beat(
            task=current.task if current is not None else "",
            phase=what,
            phase_s=time.monotonic() - since_s,
            limit_s=limit_s,
            retry=retry,
            memory_bytes=self._memory_bytes(),
            step=step,
            at_s=clock_s(),
        )
        self.report(beat)

    def _memory_bytes(self) -> int:
        """What was seen last where the user's code has left no file to look through: the process lives all the same."""
        with contextlib.suppress(OSError):
            self._seen_bytes = self._process.memory_info().rss
        return self._seen_bytes

    # ---- one task ----

    def _train(self, command: Train, payload: bytes, device: torch.device) -> None:
        from rota.runtime.limits import code_bytes
        from rota.runtime.loop import Loop
        from rota.runtime.process_state import preserved

        folder = Path(command.folder)
        outcome: Finished | Halted | Left | Failed
        loop: Loop | None = None
        gang: Gang | None = None
        follows = command.rank > 0
        surroundings: Surroundings = _Follower(self) if follows else self
        self._link.await_lease()
        try:
            self._enter(folder)
            shards = tuple(map(Path, command.shards))
            for place in shards:
                inside.check_task(place)
            owning = contextlib.nullcontext() if follows else _owning(folder)
            output = folder / output_file(command.rank)
            with owning, _output_to(output), preserved(), _memory_limit(self._settings):
                sys.path[:] = _import_path(command)
                code_before_bytes = code_bytes()
                self._watch_setup("importing what it needs", command)
                task = _arrived(_unpickle(payload, command.task))
                self._watch_setup("preparing the task", command)
                gang = _gang_of(command, task, self._settings.kind)
                loop = Loop(
                    task,
                    attempt=command.attempt,
                    folder=folder,
                    device=device,
                    surroundings=surroundings,
                    gang=gang,
                    memory_bytes=self._settings.memory_bytes,
                    seat=_seat_of(self._settings),
                    storage=command.storage,
                    shards=shards,
                    code_before_bytes=code_before_bytes,
                )
                outcome = loop.run()
                if follows:
                    outcome = Left(task=command.task, attempt=command.attempt)
        except TaskError as error:
            outcome = _failed(command, error, loop)
        except PeerError as error:
            outcome = Left(task=command.task, attempt=command.attempt, peer_gone=True, reason=str(error))
        except RotaError as error:
            outcome = _failed(command, TaskError(str(error)), None)
        except Exception as error:
            outcome = _unexpected(command, error)
        del loop
        self._current = None
        self.report(outcome)
        if gang is not None:  # only now may the others notice: what went wrong here is told before
            gang.part()

    def _enter(self, folder: Path) -> None:
        """Where a controller of this machine made the folder, it is not made again: the run may have been moved."""
        if self._settings.keeper >= 0:
            inside.enter(folder)
            return
        inside.check_task(folder)
        with told(f"the folder {folder} cannot be used"):
            folder.stat()

    def _probe(self, command: Look | Try, payload: bytes, device: torch.device) -> None:
        """Find out what a task costs; nothing is kept of it."""
        from rota.runtime.process_state import preserved

        folder = Path(command.folder)
        outcome: Looked | Tried | Left | Failed
        gang: Gang | None = None
        try:
            self._enter(folder)
            with _output_to(folder / OUTPUT_FILE), preserved(), _memory_limit(self._settings):
                sys.path[:] = _import_path(command)
                self._watch_setup("importing what it needs", command)
                if isinstance(command, Look):
                    task, strategies, techniques = _unpickle(payload, command.task)
                    outcome = self._look(command, task, strategies, techniques, device)
                else:
                    task = _arrived(_unpickle(payload, command.task))
                    gang = _gang_of(command, task, self._settings.kind)
                    outcome = self._try(command, task, device, gang)
        except TaskError as error:
            outcome = _failed(command, error, None)
        except PeerError as error:
            outcome = Left(task=command.task, attempt=command.attempt, peer_gone=True, reason=str(error))
        except RotaError as error:
            outcome = _failed(command, TaskError(str(error)), None)
        except Exception as error:
            outcome = _unexpected(command, error)
        self.watch("", limit_s=None, retry=False, step=0)
        self._current = None
        gc.collect()
        self.report(outcome)
        if gang is not None:
            gang.part()

    def _look(self, command: Look, task: Any, strategies: Any, techniques: Any, device: torch.device) -> Looked:
        from rota.profile.store import EstimateStore
        from rota.runtime.probe import look

        sight = look(
            task,
            device=device,
            counts=command.counts,
            memory_bytes=self._settings.memory_bytes,
            folder=Path(command.folder),
            known=EstimateStore(path=Path(command.known)).read,
            alike=command.alike,
            search=command.search,
            strategies=strategies,
            techniques=techniques,
            watch=self._watching(task),
        )
        return Looked(
            task=command.task,
            attempt=command.attempt,
            signature=sight.signature,
            total_steps=sight.total_steps,
            estimates=tuple(one.to_json() for one in sight.estimates),
            known=sight.known,
            counts=sight.counts,
            notices=sight.notices,
        )

    def _try(self, command: Try, task: Any, device: torch.device, gang: Gang | None) -> Tried | Left:
        from rota.runtime.probe import try_out

        steps = try_out(
            task,
            device=device,
            gang=gang,
            memory_bytes=self._settings.memory_bytes,
            folder=Path(command.folder),
            watch=self._watching(task),
        )
        if command.rank > 0:
            return Left(task=command.task, attempt=command.attempt)
        return Tried(
            task=command.task,
            attempt=command.attempt,
            step_s=steps.step_s,
            spread=steps.spread,
            start_s=steps.start_s,
        )

    def _watch_setup(self, what: str, command: Train | Look | Try) -> None:
        self.watch(what, limit_s=command.setup_timeout_s, retry=False, step=0)

    def _watching(self, task: Any) -> Watch:
        """As in training: what the user's code does may take as long as the task says."""

        from rota.runtime.executor import setup_limit_s

        def watch(what: str, *, ours: bool = False) -> None:
            limit_s = task.step_timeout_s if what.startswith("step") else setup_limit_s(task, ours=ours)
            self.watch(what, limit_s=limit_s, retry=False, step=0)

        return watch


class _Follower:
    """What the loop of a follower may do: it listens to its leader, not to the controller, and reports nothing."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def report(self, report: Report) -> None:
        """The leader says it."""

    def watch(self, what: str, *, limit_s: float | None, retry: bool, step: int) -> None:
        """As in every worker: a hang of a follower is a hang."""
        self._worker.watch(what, limit_s=limit_s, retry=retry, step=step)

    def halt_requested(self) -> bool:
        """The leader says when."""
        return False

    def confirmed_number(self) -> int:
        """No report is ever waited for: the leader reports the same."""
        return sys.maxsize


def _import_path(command: Train | Look | Try) -> list[str]:
    """The controller's, and where its code was put if this is another machine."""
    return [*command.import_path, *filter(None, [os.environ.get(CODE_FOLDER)])]


def _gang_of(command: Train | Try, task: Any, kind: str) -> Gang | None:
    """The gang of a task, or None where plain PyTorch on one device does."""
    from rota.runtime.one_device import spills

    if command.size == 1 and (task.strategy in ("auto", "single") or spills(task.strategy)):
        return None
    from rota.runtime.gang import Gang

    store = command.meeting or Path(command.folder) / f"gang-{command.attempt}"
    return Gang(rank=command.rank, size=command.size, store=store, kind=kind, key=bytes.fromhex(command.key))


def _failed(command: Train | Look | Try, error: TaskError, loop: Loop | None) -> Failed:
    from rota.runtime.user_code import is_out_of_memory

    step = error.step if isinstance(error, DivergedError) else (loop.step if loop else 0)
    return Failed(
        task=command.task,
        attempt=command.attempt,
        step=step,
        reason=str(error),
        diverged=isinstance(error, DivergedError),
        traceback=error.traceback,
        way=isinstance(error, WayError) or is_out_of_memory(error.__cause__ or error),
    )


def _unexpected(command: Train | Look | Try, error: Exception) -> Failed:
    """A failure outside of the user's code: memory that ran out, what the system refused, or a defect of rota."""
    from rota.runtime.user_code import is_out_of_memory

    if is_out_of_memory(error):
        reason = "training ran out of memory; use a smaller model or batch, or a device with more memory"
    elif (refused := refusal(error)) is not None:
        then = f", then run {again(Path(command.folder))}" if isinstance(command, Train) else ""
        reason = f"{error if isinstance(error, DiskError) else sentence(refused)}{then}"
        return Failed(task=command.task, attempt=command.attempt, step=0, reason=reason)
    else:
        reason = f"rota itself failed with {type(error).__name__}: {error}; please report it with the traceback"
    trace = "".join(traceback.format_exception(error))
    return Failed(task=command.task, attempt=command.attempt, step=0, reason=reason, traceback=trace, way=True)


@contextlib.contextmanager
def _owning(folder: Path) -> Iterator[None]:
    """Hold the task's folder: a worker of a killed controller may live a moment longer, and must not write with us."""
    path = folder / LOCK_FILE
    with told(f"the lock {path} cannot be taken"):
        handle = inside.opened(path, os.O_RDWR | os.O_CREAT)
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    try:
        with told(f"the lock {path} cannot be taken"):
            while not try_lock(handle):
                if time.monotonic() > deadline_s:
                    raise TaskError(f"another process is training in {folder}; end it, then run {again(folder)}")
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """What the user's code prints goes to a file of the task, which nobody has open any more when the task is over."""
    handle = inside.opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    before = [os.dup(1), os.dup(2)]
    try:
        _flush()
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        yield
    finally:
        _flush()
        os.dup2(before[0], 1)
        os.dup2(before[1], 2)
        for one in (handle, *before):
            os.close(one)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the disk may be full, and the user's code may have closed it
            stream.flush()


def _unpickle(payload: bytes, name: str) -> Any:
    import cloudpickle

    from rota.runtime.user_code import calling

    with calling(f"importing what task {name} needs"):
        return cloudpickle.loads(payload)


def _seat_of(settings: WorkerSettings) -> Seat | None:
    """Of a worker whose task shares devices with others; it has one task in its life."""
    if settings.pool_socket < 0:
        return None
    from rota.memory.arena import Arena
    from rota.memory.pooled import Seat
    from rota.memory.turns import Turns

    return Seat(
        turns=Turns(socket.socket(fileno=settings.pool_socket)),
        cores=settings.pool_cores,
        arenas=[Arena(handle) for handle in settings.pool_arenas],
    )


def _arrived(task: Any) -> Any:
    """The task with the strategy that its label names."""
    from rota.techniques import arrived

    return replace(task, strategy=arrived(task.strategy))


@contextlib.contextmanager
def _memory_limit(settings: WorkerSettings) -> Iterator[None]:
    """On a CPU device, allocations beyond the device's memory fail as they would on a GPU. Code is nobody's memory."""
    from rota.runtime.limits import limited, stacks_bytes
    from rota.runtime.loading import code_is_free

    if settings.kind != "cpu":
        yield
        return
    with code_is_free(), limited(settings.memory_bytes + stacks_bytes(settings.threads + _OWN_THREADS)):
        yield


def _die_with(parent: int) -> None:
    """End when the process that started this one ends, even if this process is stopped or busy inside C (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def main() -> None:
    """Start as the process of one device."""
    fields = json.loads(sys.argv[1])
    pool_cores = tuple(tuple(cores) for cores in fields["pool_cores"])
    rows = {key: tuple(fields[key]) for key in ("cores", "pool_arenas")}
    settings = WorkerSettings(**{**fields, **rows, "pool_cores": pool_cores})
    _die_with(settings.parent)
    # The terminal sends Ctrl-C to every process; only the controller acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    if settings.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings.cores)
    Worker(settings).main()
