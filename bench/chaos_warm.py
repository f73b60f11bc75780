"""Processes of rota that are forked from one in which everything is imported, instead of started anew.

A run and its resumption import torch six times, which takes ten times as long as what a small sweep trains. The process
that is forked (the nursery) has nothing open and one thread. What it makes is given the arguments, the environment, the
files and the parent that a process which was started would have, runs the same code from its first line, and ends as an
interpreter ends.

python -m bench.chaos_warm SOCKET
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

_SUBREAPER, _DEATH_SIGNAL = 36, 1
_HIGH = 100
"""Files that came are put aside here, while those below get their places."""
_MOST_FILES = 32
_PAUSE_S = 0.005
_FORKED_S = 30.0


class Forked:
    """As much of `subprocess.Popen` as is used of one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(_PAUSE_S)
        return code

    def kill(self) -> None:
        """SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """This process's end of one."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        _prctl(_SUBREAPER, 1)  # what is forked there becomes a child of this process

    @classmethod
    def started(cls, environment: Mapping[str, str]) -> Nursery:
        """One that has imported everything."""
        ours, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "bench.chaos_warm", str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return cls(ours)

    def fork(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        files: Mapping[int, int],
        session: bool = False,
        folder: str | None = None,
    ) -> Forked:
        """A process that runs these arguments of an interpreter; `files` are those that it has, and ours."""
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "files": list(files),
            "session": session,
            "folder": folder or os.getcwd(),
            "parent": os.getpid(),
        }
        data = json.dumps(request).encode()
        handles = array.array("i", files.values())
        self._end.sendmsg([len(data).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
        self._end.sendall(data)
        return Forked(int.from_bytes(_exactly(self._end, 8), "big"))

    def close(self) -> None:
        """It ends."""
        self._end.close()


def _exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = end.recv(size - len(data))
        if not more:
            raise EOFError("the other end is gone")
        data += more
    return data


# ---- in the nursery ----


def _serve(end: socket.socket) -> dict[str, Any]:
    """Fork when asked to; comes back in each process that was forked, with what it is to be."""
    while True:
        try:
            head, told, _, _ = socket.socket.recvmsg(end, 8, socket.CMSG_SPACE(_MOST_FILES * 4))
        except OSError:
            head = b""
        if not head:
            os._exit(0)
        handles = array.array("i")
        for _, _, data in told:
            handles.frombytes(data[: len(data) - len(data) % handles.itemsize])
        request: dict[str, Any] = json.loads(_exactly(end, int.from_bytes(head, "big")))
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            _become(request, handles, end)
            return request
        os.waitpid(between, 0)
        for handle in handles:
            os.close(handle)


def _become(request: Mapping[str, Any], handles: Sequence[int], end: socket.socket) -> None:
    """Be as the process that was asked for would be at its first line."""
    parent = request["parent"]
    deadline_s = time.monotonic() + _FORKED_S
    while os.getppid() != parent:  # what is between has yet to end
        if time.monotonic() > deadline_s:
            os._exit(98)
        time.sleep(0.001)
    end.sendall(os.getpid().to_bytes(8, "big"))
    end.close()
    aside = [fcntl.fcntl(handle, fcntl.F_DUPFD, _HIGH) for handle in handles]
    os.closerange(3, _HIGH)
    for handle, place in zip(aside, request["files"], strict=True):
        os.dup2(handle, place, inheritable=True)
        os.close(handle)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments = list(request["arguments"])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    first = [request["folder"]] if "-m" in arguments else []
    sys.path[:] = list(dict.fromkeys([*first, *filter(None, given), *sys.path]))


def _run(request: Mapping[str, Any]) -> None:
    arguments = list(request["arguments"])
    if "-m" in arguments:
        _faults_begin(b"controller")
        own, theirs = socket.socketpair()
        # The workers of this controller are forked from what it is now: before it has read or opened anything.
        if os.fork() == 0:
            own.close()
            _prctl(_DEATH_SIGNAL, signal.SIGKILL)
            _faults_begin(None)
            _run(_serve(theirs))
            return
        theirs.close()
        os.set_inheritable(own.fileno(), False)
        _start_warm(Nursery(own))
        sys.argv = ["rota", *arguments[arguments.index("rota") + 1 :]]
        from rota.cli import main as rota

        rota(sys.argv[1:])
    else:
        _faults_begin(b"worker")
        sys.argv = ["-c", *arguments[arguments.index("-c") + 2 :]]
        from rota.runtime.worker import main as worker

        worker()


def _start_warm(nursery: Nursery) -> None:
    """From now on workers come from a nursery."""
    cold: Any = subprocess.Popen

    def start(arguments: Sequence[str], **how: Any) -> Any:
        if not any("rota.runtime.worker" in one for one in arguments):
            return cold(arguments, **how)
        with open(os.devnull, "rb") as nothing:
            files = {0: nothing.fileno(), 1: how["stdout"].fileno(), 2: how["stderr"].fileno()}
            files |= {handle: handle for handle in how["pass_fds"]}
            return nursery.fork(arguments, environment=how["env"], files=files)

    subprocess.Popen = start  # type: ignore[assignment, misc]


def _faults_begin(role: bytes | None) -> None:
    """Nothing where the library of faults is not there."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).rota_faults_begin(role)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _import_all() -> None:
    """What controllers and workers of all kinds of tasks import."""
    import torch  # noqa: I001
    import torch._dynamo
    import torch.distributed
    import torch.export
    import torch.distributed.fsdp

    import rota.cli
    import rota.execute.backends.local
    import rota.memory.arbiter
    import rota.memory.pooling
    import rota.memory.spilling
    import rota.runtime.choose
    import rota.runtime.loop
    import rota.runtime.planned
    import rota.runtime.worker
    import rota.testing.models  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _import_all()
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
