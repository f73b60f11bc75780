"""The actor of a device on a Ray cluster: it starts the device's worker, and outlives the controller with it.

A controller that dies leaves its actors. The next one finds them by the name of its session and has each connect its
worker anew; one that nobody comes for ends.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import psutil
import ray as untyped_ray

from rota.cluster.device import Device
from rota.cluster.discover import available_cores
from rota.errors import InputError
from rota.execute.backends import handshake
from rota.execute.backends.cores import ClaimedCore, claim_core
from rota.execute.backends.local import end_process, last_line, spawn
from rota.execute.backends.ray_nodes import ANSWER_S
from rota.runtime.link import ORPHAN_S, clock_s, hand_over
from rota.runtime.worker import CODE_FOLDER
from rota.threads import OwnedThread, safe_point

ray_: Any = untyped_ray

LOST = 10**6
"""Stands for the exit code of a process of which nothing can be learned any more."""
NAMESPACE = "rota"
_CODE = "rota-code-"
_MOST_CODE_BYTES = 20 * 2**20


class Keeper:
    """It has the device's worker."""

    def __init__(self, code: bytes) -> None:
        _remove_leftovers()
        self._folder = tempfile.TemporaryDirectory(prefix=f"{_CODE}{os.getpid()}-")
        if code:
            with zipfile.ZipFile(io.BytesIO(code)) as files:
                files.extractall(self._folder.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._line: socket.socket | None = None
        self._core: ClaimedCore | None = None
        self._called_s = time.monotonic()
        self._raylet = os.getppid()
        self._leaving = threading.Event()
        self._watch = OwnedThread(self._end_when_forgotten, name="keeper", wake=self._leaving.set)
        self._watch.start()

    def _end_when_forgotten(self) -> None:
        """A worker whose controller has ended waits for another, and ends; so does this.

        Without the raylet of its node Ray takes this actor for dead, and nobody can reach it any more: both end at
        once, so that the worker's task goes on elsewhere.
        """
        while True:
            self._leaving.wait(1.0)
            safe_point()
            process = self._process
            if os.getppid() != self._raylet:
                if process is not None:
                    end_process(process)
                self._vanish()
            if process is not None and process.poll() is None:
                self._called_s = time.monotonic()
            elif time.monotonic() - self._called_s > ORPHAN_S:
                self._vanish()

    def leave(self) -> None:
        """End, with the worker."""
        self._watch.end()
        self.end()
        self._vanish()

    def _vanish(self) -> None:
        self._folder.cleanup()
        os._exit(0)

    def start(self, device: Device, address: tuple[str, int], key: bytes, number: bytes) -> int:
        """Start a worker and connect it with the controller."""
        self.end()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        more = {CODE_FOLDER: self._folder.name, **_interface()}
        if device.kind == "cuda":  # the one that Ray gave to this actor; never run
            more["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        self._line, its = socket.socketpair()
        pinned = self._pinned(device)
        with its, handshake.connect(address, key, number, timeout_s=ANSWER_S) as theirs:
            self._process = spawn(pinned, theirs, self._output, None, more, its)
        return self._process.pid

    def _pinned(self, device: Device) -> Device:
        """As on one machine a worker has a core for itself, if Ray gives out this node's cores one by one."""
        if device.kind == "cpu" and self._core is None:
            self._core = claim_core(_whole_cores(), first=device.index)
        return device if self._core is None else replace(device, cores=(self._core.core,))

    def connect(self, address: tuple[str, int], key: bytes, number: bytes) -> bool:
        """Connect the worker with another controller; False if there is none."""
        self._called_s = time.monotonic()
        if self._process is None or self._process.poll() is not None or self._line is None:
            return False
        since_s = clock_s()
        with handshake.connect(address, key, number, timeout_s=ANSWER_S) as theirs:
            hand_over(self._line, theirs, since_s=since_s)
        return True

    def look(self) -> tuple[int | None, str, float]:
        """How the worker ended, if it has; the last line that it wrote; what it has used of the processor."""
        self._called_s = time.monotonic()
        if self._process is None or self._output is None:
            return LOST, "", 0.0
        code = self._process.poll()
        try:
            times = psutil.Process(self._process.pid).cpu_times()
            cpu_s = times.user + times.system
        except psutil.Error:
            cpu_s = 0.0
        return code, "" if code is None else last_line(self._output), cpu_s

    def free_port(self) -> tuple[str, int]:
        """Where the processes of a task can meet, if this one leads."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray_.util.get_node_ip_address(), probe.getsockname()[1]

    def sees(self, path: str) -> bool:
        """Whether this node has a file."""
        return Path(path).exists()

    def end(self) -> None:
        """End the worker."""
        self._called_s = time.monotonic()
        if self._process is not None:
            end_process(self._process)
        for one in (self._output, self._line):
            if one is not None:
                one.close()
        self._process = self._output = self._line = None


def _whole_cores() -> tuple[int, ...]:
    """Those of this node, if it has as many as Ray counts.

    A container that may use a part of each core, or a node that shares its machine with others, counts fewer.
    """
    here = ray_.get_runtime_context().get_node_id()
    counted = [node["Resources"].get("CPU", 0) for node in ray_.nodes() if node["NodeID"] == here]
    cores = available_cores()
    return cores if counted == [len(cores)] else ()


def _remove_leftovers() -> None:
    """Of keepers that were killed on this machine."""
    for path in Path(tempfile.gettempdir()).glob(f"{_CODE}*-*"):
        pid = path.name.removeprefix(_CODE).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _interface() -> dict[str, str]:
    """The network on which the cluster knows this node: a machine may have others, which lead nowhere."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    address = ray_.util.get_node_ip_address()
    found = [name for name, its in psutil.net_if_addrs().items() if any(one.address == address for one in its)]
    return {"GLOO_SOCKET_IFNAME": found[0]} if found else {}


def packed(folder: Path) -> bytes:
    """The Python files of a folder and those below it, for machines that do not have them."""
    made = io.BytesIO()
    total = 0
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as files:
        for path in _python_files(folder):
            total += path.stat().st_size
            if total > _MOST_CODE_BYTES:
                raise InputError(
                    f"the Python files in {folder} are more than {_MOST_CODE_BYTES >> 20} MiB; move the sweep"
                )
            files.write(path, path.relative_to(folder))
    return made.getvalue()


def _python_files(folder: Path) -> Iterable[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [one for one in folders if not one.startswith((".", "__pycache__")) and one not in _NOT_CODE]
        yield from (Path(root) / name for name in sorted(names) if name.endswith(".py"))


_NOT_CODE = frozenset({"runs", "venv", "env", "node_modules", "site-packages"})
