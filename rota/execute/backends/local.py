"""Runs tasks on this machine: one worker process for each device, started once and used for task after task."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from rota.cluster.device import Cluster, Device
from rota.errors import MessageError, TaskError
from rota.execute.backends.base import Sign, WorkerLost
from rota.execute.clock import RunClock
from rota.pickling import pickle_task
from rota.runtime import channel, limits, reservoir
from rota.runtime.messages import Beat, Halt, Look, Ready, Shutdown, Stored, Train, Try
from rota.runtime.worker import START_S, STARTING, WorkerSettings
from rota.state import inside
from rota.task import Task
from rota.techniques import registered

if TYPE_CHECKING:
    from rota.memory.arbiter import Arbiter

# A worker tells every second that it lives. One that says nothing for this long, and does not compute either (a call
# into C may keep the interpreter busy for minutes), is hung.
_SILENT_S = 6.0
_IDLE_S = 2.0
_IDLE_CPU_S = 0.05
_GOODBYE_S = 1.0
_CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGABRT}
"""By which a process ends itself; by other signals others end it."""
_OUTPUT_TAIL_BYTES = 2000
_START = "from rota.runtime.worker import main; main()"


class LocalBackend:
    """The worker processes of a cluster that is this machine."""

    session = ""
    """By which workers that outlive their controller are found again; here they end with it."""
    shards: tuple[str, ...] = ()
    """Of the run (`RunRecord.shards`)."""

    def __init__(self, cluster: Cluster, *, clock: RunClock | None = None) -> None:
        self.clock = clock or RunClock()
        self._devices = {device.name: device for device in cluster.devices}
        self._workers: dict[str, Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._signs: list[Sign] = []
        self._pools: dict[str, _Pool] = {}
        """place -> the pool that it is in"""

    def taken_over(self) -> dict[str, tuple[str, int]]:
        """Devices whose workers outlived the controller before, and what they train: a task, and which attempt."""
        return {}

    def keep(self, kept: Mapping[str, tuple[str, int]]) -> None:
        """Of the workers that were taken over, end those that do not train what they should."""

    def now_s(self) -> float:
        """That of the clock, which never goes back."""
        return self.clock.now_s()

    def warm_up(self, count: int) -> None:
        """Start some workers before there is work, so that they import torch while the sweep is being read."""
        for name in list(self._devices)[:count]:
            self._worker(name)

    def launch(self, devices: Sequence[str], task: Task, *, attempt: int, folder: Path, storage: str = "") -> None:
        """Send the task to the workers of its devices, starting those that are not there."""
        shards = tuple(f"{place}/{task.name}" for place in self.shards)
        self._send(devices, task, partial(Train, storage=storage, shards=shards), attempt=attempt, folder=folder)

    def try_out(self, devices: Sequence[str], task: Task, *, number: int, folder: Path) -> None:
        """Have the workers of some devices time a few steps of a task."""
        self._send(devices, task, Try, attempt=number, folder=folder)

    def look(
        self,
        device: str,
        task: Task,
        *,
        number: int,
        folder: Path,
        counts: Sequence[int],
        known: Path,
        alike: int,
        search: bool,
    ) -> None:
        """Have the worker of a device find out what a task costs, also in ways that only this process knows."""
        payload = _pickled(task, *registered())
        inside.enter(folder.absolute())
        worker = self._worker(device)
        worker.begin(task.name)
        command = Look(
            task=task.name,
            attempt=number,
            folder=str(folder.absolute()),
            import_path=_import_path(),
            counts=tuple(counts),
            known=str(known),
            alike=alike,
            search=search,
            setup_timeout_s=task.setup_timeout_s,
        )
        worker.send(command, payload)

    def _send(
        self, devices: Sequence[str], task: Task, kind: Callable[..., Train | Try], *, attempt: int, folder: Path
    ) -> None:
        payload = _pickled(task)
        path = _import_path()
        folder = folder.absolute()
        meeting = self._meeting(devices, folder, attempt)
        key = secrets.token_hex(16)
        for rank, device in enumerate(devices):
            worker = self._worker(device)
            worker.begin(task.name)
            command = kind(
                task=task.name,
                attempt=attempt,
                folder=str(folder),
                import_path=path,
                rank=rank,
                size=len(devices),
                meeting=meeting,
                key=key,
                setup_timeout_s=task.setup_timeout_s,
            )
            worker.send(command, payload)

    def _meeting(self, devices: Sequence[str], folder: Path, attempt: int) -> str:
        """Where the processes of a task find each other: a file, if nothing is said."""
        inside.enter(folder)
        inside.remove_each(folder, r"gang-\d+")  # of processes that were killed
        return ""

    def open_pool(self, devices: Sequence[str], count: int) -> tuple[str, ...]:
        """A worker for each task, and a thread that lets them take turns."""
        from rota.memory.arbiter import Arbiter
        from rota.memory.arena import make_arena

        members = [self._devices[name] for name in devices]
        memory_bytes = min(one.memory_bytes for one in members)
        names = tuple(f"{'+'.join(devices)} {number}" for number in range(1, count + 1))
        ours: dict[str, socket.socket] = {}
        arenas = [make_arena(memory_bytes) for _ in members]
        try:
            for name in names:
                ours[name], theirs = socket.socketpair()
                self._devices[name] = dataclasses.replace(
                    members[0],
                    cores=tuple(sorted({core for one in members for core in one.cores})),
                    memory_bytes=memory_bytes,
                )
                with theirs:
                    seat = PoolSeat(turns=theirs, cores=tuple(one.cores for one in members), arenas=tuple(arenas))
                    self._add(name, _WorkerProcess(name, self._devices[name], seat))
        finally:
            for arena in arenas:
                os.close(arena)
        arbiter = Arbiter(ours, devices=len(devices), memory_bytes=memory_bytes)
        pool = _Pool(arbiter=arbiter, places=set(names))
        self._pools |= dict.fromkeys(names, pool)
        return names

    def close_place(self, place: str) -> None:
        """End its worker; with the last one, the thread."""
        pool = self._pools.pop(place)
        self.kill(place)
        del self._devices[place]
        pool.places.remove(place)
        if not pool.places:
            pool.arbiter.close()

    def unseen(self, path: Path) -> list[str]:
        """The nodes that do not see a file of this machine."""
        return []

    def halt(self, device: str) -> None:
        """Pass the request on."""
        worker = self._workers.get(device)
        if worker is not None and worker.task is not None:
            worker.send(Halt(task=worker.task))

    def kill(self, device: str) -> None:
        """End the worker with SIGKILL."""
        worker = self._workers.pop(device, None)
        if worker is not None:
            if worker.socket is not None:
                self._selector.unregister(worker.socket)
            worker.end()

    def stored(self, devices: Sequence[str]) -> None:
        """Pass the confirmation on, where there is something new."""
        for device in devices:
            worker = self._workers.get(device)
            if worker is not None and worker.heard > worker.confirmed:
                worker.confirmed = worker.heard
                worker.send(Stored(count=worker.heard))

    def poll(self, timeout_s: float) -> list[Sign]:
        """Read from the workers and look after them."""
        for key, _ in self._selector.select(0 if self._signs else timeout_s):
            self._read(key.data)
        for worker in list(self._workers.values()):
            worker.flush()
            self._look_after(worker)
        signs, self._signs = self._signs, []
        return signs

    def close(self) -> None:
        """Let idle workers go, and end the others."""
        for worker in self._workers.values():
            if worker.task is None and worker.ready:
                worker.send(Shutdown())
        deadline_s = time.monotonic() + _GOODBYE_S
        for name, worker in list(self._workers.items()):
            if worker.task is None and worker.ready:
                worker.wait(max(0.0, deadline_s - time.monotonic()))
            self.kill(name)
        for place in list(self._pools):
            self.close_place(place)
        self._selector.close()

    def _worker(self, device: str) -> Peer:
        worker = self._workers.get(device)
        if worker is not None and worker.exit_code() is not None:  # died while it had nothing to do
            self.kill(device)
            worker = None
        return worker if worker is not None else self._add(device, self._start(device))

    def _start(self, device: str) -> Peer:
        return _WorkerProcess(device, self._devices[device])

    def _add(self, device: str, worker: Peer) -> Peer:
        self._workers[device] = worker
        if worker.socket is not None:
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        return worker

    def _read(self, worker: Peer) -> None:
        while worker.socket is not None:
            try:
                data = worker.socket.recv(1 << 20)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                worker.hung_up()
                return  # it has died; _look_after tells how
            worker.heard_s = time.monotonic()
            try:
                for message, _ in worker.deframer.feed(data):
                    self._hear(worker, message)
            except MessageError as error:
                self._lose(worker, f"its worker sent nonsense ({error})", retry=True)
                return

    def _hear(self, worker: Peer, message: Any) -> None:
        if isinstance(message, Beat):
            worker.take_beat(message)
        else:
            worker.heard += 1
        if isinstance(message, Ready):
            worker.ready = True
        if type(message).__name__ in ("Finished", "Halted", "Left", "Failed", "Looked", "Tried"):
            worker.task = None
        self._signs.append((worker.name, message))

    def _look_after(self, worker: Peer) -> None:
        code = worker.exit_code()
        if code is not None:
            self._read(worker)  # what it said before it died still counts
            reason = worker.cause_of_death(code)
            if code in _CRASHES and not worker.ready:
                reservoir.leave_out(reason)
            self._lose(worker, reason, retry=True)
            return
        silent_s = time.monotonic() - worker.heard_s
        if silent_s > _SILENT_S and worker.is_still():
            self._lose(worker, f"its worker gave no sign of life for {silent_s:.0f} s", retry=True)
            return
        overrun = worker.overrun()
        if overrun is not None:
            self._lose(worker, overrun.reason, retry=overrun.retry)

    def _lose(self, worker: Peer, reason: str, *, retry: bool) -> None:
        busy = worker.task is not None
        self.kill(worker.name)
        if busy:
            self._signs.append((worker.name, WorkerLost(reason=reason, retry=retry)))


def _pickled(task: Task, *beside: Any) -> bytes:
    try:
        return pickle_task((task, *beside) if beside else task)
    except Exception as error:  # whatever the user's objects raise
        raise TaskError(
            f"task {task.name!r} cannot be sent to its worker ({type(error).__name__}: {error}); create locks, "
            "files and connections inside the factories"
        ) from error


def _import_path() -> tuple[str, ...]:
    """A worker may have been started before the sweep's folder was known."""
    return tuple(entry or os.getcwd() for entry in sys.path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSeat:
    """What a worker in a pool is started with."""

    turns: socket.socket
    """Where it takes its turns, on devices"""
    cores: tuple[tuple[int, ...], ...]
    """with these cores,"""
    arenas: tuple[int, ...]
    """and this memory, as open files."""


@dataclasses.dataclass(kw_only=True)
class _Pool:
    """Tasks that share devices."""

    arbiter: Arbiter
    places: set[str]


class Peer:
    """A worker, seen from outside: what is sent to it and heard of it, wherever it runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.task: str | None = None
        self.ready = False
        self.deframer = channel.Deframer()
        self.beat: Beat | None = None
        self.heard = self.confirmed = 0
        """How many reports came, and how many of them are known to be in the journal; without beats."""
        self.heard_s = time.monotonic()
        self._asked_s = self._beaten_s = self.heard_s
        """Since when it has its task, and when its last beat came."""
        self.socket: socket.socket | None = None
        """None until it is connected."""
        self._outbox = bytearray()

    def send(self, message: Any, payload: bytes = b"") -> None:
        """Send without ever waiting for the worker; what does not fit is sent by `flush`."""
        self._outbox += channel.frame(message, payload)
        self.flush()

    def flush(self) -> None:
        """Send what the worker is ready to take."""
        while self._outbox and self.socket is not None:
            try:
                sent = self.socket.send(memoryview(self._outbox)[: 1 << 20])
            except BlockingIOError:
                return
            except OSError:  # it has died, and poll will tell
                self._outbox.clear()
                return
            del self._outbox[:sent]

    def begin(self, task: str) -> None:
        """It is given a task."""
        self.task = task
        self._asked_s = time.monotonic()

    def overrun(self) -> WorkerLost | None:
        """That it works on something for longer than that may take; None if it does not."""
        if self.task is None:
            return None
        beat = self.beat
        if beat is None or beat.task != self.task:  # it has not said so yet: it may still import torch
            what, busy_s, limit_s, retry = STARTING, time.monotonic() - self._asked_s, START_S, True
        elif beat.limit_s is None:
            return None
        else:
            busy_s = beat.phase_s + time.monotonic() - self._beaten_s
            what, limit_s, retry = beat.phase, beat.limit_s, beat.retry
        return WorkerLost(reason=f"{what} did not end within {limit_s:g} s", retry=retry) if busy_s > limit_s else None

    def take_beat(self, beat: Beat) -> None:
        """It is alive."""
        self.beat, self._beaten_s = beat, time.monotonic()

    def hung_up(self) -> None:
        """Nothing more will be heard of it."""

    def exit_code(self) -> int | None:
        """How its process ended; None while it runs."""
        raise NotImplementedError

    def cause_of_death(self, code: int) -> str:
        """A sentence about how it ended."""
        raise NotImplementedError

    def is_still(self) -> bool:
        """Whether it has not computed for a while."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> None:
        """Until it has ended by itself, for a while."""
        raise NotImplementedError

    def end(self) -> None:
        """Kill it and what it started, if it lives, and release what belonged to it."""
        raise NotImplementedError


class _WorkerProcess(Peer):
    """A worker on this machine."""

    def __init__(self, name: str, device: Device, seat: PoolSeat | None = None) -> None:
        """`seat` is that of one in a pool."""
        super().__init__(name)
        self._cpu_s = 0.0
        self._cpu_since_s = time.monotonic()
        # What it prints before its first task is only of interest if it dies.
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = spawn(device, theirs, self._output, seat)
        self.socket.setblocking(False)

    def exit_code(self) -> int | None:
        """Of the process."""
        return self.process.poll()

    def wait(self, timeout_s: float) -> None:
        """For the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)

    def is_still(self) -> bool:
        """By the time that it has used of the processor."""
        now_s = time.monotonic()
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return True
        cpu_s = times.user + times.system
        if cpu_s - self._cpu_s > _IDLE_CPU_S:
            self._cpu_s, self._cpu_since_s = cpu_s, now_s
        return now_s - self._cpu_since_s > _IDLE_S

    def cause_of_death(self, code: int) -> str:
        """With the last line that it wrote, if it says why."""
        return how_it_ended(code, last_line(self._output), ready=self.ready)

    def end(self) -> None:
        """With everything that it started."""
        end_process(self.process)
        assert self.socket is not None
        self.socket.close()
        self._output.close()


def last_line(output: IO[bytes]) -> str:
    """Of what a worker wrote outside of its tasks; of a crash, what Python calls it and not where it happened."""
    output.seek(0, os.SEEK_END)
    output.seek(max(0, output.tell() - _OUTPUT_TAIL_BYTES))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")


def how_it_ended(code: int, line: str, *, ready: bool) -> str:
    """A sentence about the end of a process, with the line that it left about it."""
    how = f"exited with code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        line = line or ("the machine may have run out of memory" if -code == signal.SIGKILL else "")
    return f"its worker {how}{'' if ready else ' before it was ready'}" + (f" ({line})" if line else "")


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it started."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.wait()


def spawn(
    device: Device,
    theirs: socket.socket,
    output: IO[bytes],
    seat: PoolSeat | None = None,
    more: Mapping[str, str] | None = None,
    keeper: socket.socket | None = None,
) -> subprocess.Popen[bytes]:
    """Start a worker that listens to a socket; `more` goes into its environment, and `keeper` connects it anew."""
    settings = WorkerSettings(
        socket=theirs.fileno(),
        kind=device.kind,
        cores=device.cores,
        memory_bytes=device.memory_bytes,
        parent=os.getpid(),
        keeper=-1 if keeper is None else keeper.fileno(),
        pool_socket=-1 if seat is None else seat.turns.fileno(),
        pool_cores=() if seat is None else seat.cores,
        pool_arenas=() if seat is None else seat.arenas,
        threads=device.threads or max(1, len(device.cores if seat is None else seat.cores[0])),
    )
    threads = str(settings.threads)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    limits.prepare(environment)
    if device.kind == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = str(device.index)
    else:
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""}
        if device.threads:  # also where there are fewer cores
            environment |= {"OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE"}
    # Workers on one machine talk to each other, and to nobody outside.
    if sys.platform == "linux" and more is None:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment |= more or {}
    # -P: the current folder is only importable if it is for the controller too.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _START, json.dumps(dataclasses.asdict(settings))],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[
            *(one.fileno() for one in (theirs, keeper, None if seat is None else seat.turns) if one is not None),
            *(() if seat is None else seat.arenas),
        ],
    )
