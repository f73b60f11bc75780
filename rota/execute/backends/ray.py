"""Runs tasks on a Ray cluster: one actor for each device, which starts the same worker that runs on one machine.

Ray places the actors, tells which nodes there are, and ends what is left. Messages do not go through it: a worker
listens to a connection to the controller, which both have authenticated with the key of the run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import os
import platform
import selectors
import socket
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import psutil
import ray as untyped_ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rota.cluster.device import Cluster, Device, parse_bytes
from rota.cluster.discover import available_cores, cpu_label
from rota.errors import InputError
from rota.execute.backends import handshake
from rota.execute.backends.base import DeviceCame, DeviceGone, WorkerLost
from rota.execute.backends.local import LocalBackend, Peer, end_process, how_it_ended, last_line, spawn
from rota.runtime.worker import CODE_FOLDER

_log = logging.getLogger(__name__)

ray_: Any = untyped_ray

_ANSWER_S = 10.0
_START_S = 60.0
_MOST_CODE_BYTES = 20 * 2**20
_HOST_SHARE = 0.1
_LOST = 10**6
"""Stands for the exit code of a process of which nothing can be learned any more."""
_NODES_EVERY_S = 1.0
_DOUBT_S = 15.0
"""Ray takes some seconds to notice that a node is gone."""


# ---- the cluster ----


def ray_cluster(address: str | None = None, *, devices: int | None = None, memory: str | int | None = None) -> Cluster:
    """What `rota.ray` gives."""
    _connect(address)
    memory_bytes = None if memory is None else parse_bytes(memory, what="rota.ray: memory")
    nodes = _alive()
    names = _node_names(nodes)
    asked = {node["NodeID"]: _asked(node) for node in nodes}  # all at once: each starts a process on its node
    found: list[Device] = []
    for node in nodes:
        found += _devices_of(node, names[node["NodeID"]], asked[node["NodeID"]], memory_bytes)
    if not found:
        raise InputError("rota.ray: the cluster has no CPUs; add a node with `ray start`")
    if devices is not None:
        if devices > len(found):
            raise InputError(f"rota.ray: {devices} devices were asked for, and the cluster has {len(found)}")
        found = found[:devices]
    used = {device.node for device in found}
    chosen = tuple((names[node["NodeID"]], node["NodeID"]) for node in nodes if names[node["NodeID"]] in used)
    return Cluster(
        devices=tuple(found),
        manager="ray",
        nodes=chosen,
        grows=devices is None,
        memory_is_said=memory is not None,
    )


def _connect(address: str | None) -> None:
    if ray_.is_initialized():
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address or os.environ.get("RAY_ADDRESS")
    _check_address(address)
    try:
        if address:
            ray_.init(address=address, **quiet)
            return
        with contextlib.suppress(ConnectionError):
            ray_.init(address="auto", **quiet)
            return
        ray_.init(num_cpus=len(available_cores()), include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f" at {address}" if address else ""
        raise InputError(f"rota.ray: there is no Ray cluster{where} that can be used: {first}") from error


def _check_address(address: str | None) -> None:
    """Ray itself tries for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise InputError(
            f"rota.ray: there is no Ray cluster at {address} ({error}); start one with `ray start`"
        ) from None


def _alive() -> list[dict[str, Any]]:
    return sorted((node for node in ray_.nodes() if node["Alive"]), key=lambda node: node["NodeID"])


def _node_names(nodes: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Short and unique: the host's name, with a piece of Ray's own where several have the same."""
    hosts = [node.get("NodeManagerHostname") or node["NodeManagerAddress"] for node in nodes]
    return {
        node["NodeID"]: host if hosts.count(host) == 1 else f"{host}-{node['NodeID'][:4]}"
        for node, host in zip(nodes, hosts, strict=True)
    }


def _asked(node: dict[str, Any]) -> Any:
    """The facts of a node, under way."""
    facts = ray_.remote(num_cpus=0)(facts_here)
    where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
    return facts.options(scheduling_strategy=where).remote()


def _devices_of(node: dict[str, Any], name: str, asked: Any, memory_bytes: int | None) -> list[Device]:
    try:
        told: dict[str, Any] = ray_.get(asked, timeout=_START_S)
    except Exception as error:  # Ray has many
        first = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise InputError(f"rota.ray: node {name} cannot run rota ({first}); install the same version there") from error
    ours = versions()
    for what, version in told["versions"].items():
        if version != ours[what]:
            raise InputError(
                f"rota.ray: node {name} has {what} {version} and this machine has {ours[what]}; install the same on all"
            )
    resources = node["Resources"]
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    count = gpus or cpus
    own = int(resources.get("memory", told["memory_bytes"]) * (1 - _HOST_SHARE)) // max(1, count)
    kind = "cuda" if gpus else "cpu"
    return [
        Device(index=i, kind=kind, memory_bytes=memory_bytes or own, label=told["label"], node=name)  # type: ignore[arg-type]
        for i in range(count)
    ]


def versions() -> dict[str, str]:
    """What must be the same on all nodes."""
    return {
        "rota": importlib.metadata.version("rota"),
        "torch": importlib.metadata.version("torch"),
        "Python": platform.python_version(),
    }


def facts_here() -> dict[str, Any]:
    """Asked of each node."""
    return {"versions": versions(), "memory_bytes": psutil.virtual_memory().total, "label": cpu_label()}


# ---- on the nodes ----


class Keeper:
    """The actor of a device: it has the device's worker."""

    def __init__(self, code: bytes) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rota-code-")
        if code:
            with zipfile.ZipFile(io.BytesIO(code)) as files:
                files.extractall(self._folder.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def start(self, device: Device, address: tuple[str, int], key: bytes, number: bytes) -> int:
        """Start a worker and connect it with the controller."""
        self.end()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        more = {CODE_FOLDER: self._folder.name}
        if device.kind == "cuda":  # the one that Ray gave to this actor; never run
            more["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        with handshake.connect(address, key, number, timeout_s=_ANSWER_S) as theirs:
            self._process = spawn(device, theirs, self._output, None, (), more)
        return self._process.pid

    def look(self) -> tuple[int | None, str, float]:
        """How the worker ended, if it has; the last line that it wrote; what it has used of the processor."""
        if self._process is None or self._output is None:
            return _LOST, "", 0.0
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
        if self._process is not None:
            end_process(self._process)
        if self._output is not None:
            self._output.close()
        self._process = self._output = None


# ---- on the controller's machine ----


@dataclass(kw_only=True)
class _Guest:
    """A connection that has not proved yet that it is ours."""

    stream: socket.socket
    challenged: bytes = field(default_factory=handshake.challenge)
    said: bytearray = field(default_factory=bytearray)
    since_s: float = field(default_factory=time.monotonic)


class _Remote(Peer):
    """A worker on a node, seen from here."""

    def __init__(self, name: str, keeper: Any, started: Any) -> None:
        super().__init__(name)
        self.keeper = keeper
        self._started = started
        self._begun_s = time.monotonic()
        self._asked: Any = None
        self._asked_s = 0.0
        self._ended: tuple[int, str] | None = None
        self._gone = False
        self._cpu = (0.0, time.monotonic())

    def hung_up(self) -> None:
        """Its connection is closed: it has ended, or cannot be reached."""
        self._gone = True

    def exit_code(self) -> int | None:
        """What its keeper says; if that says nothing either, both are lost."""
        if self._ended is None and self.socket is None:
            self._check_start()
        if self._ended is None and self._gone:
            told = self._ask()
            if told is not None and told[0] is not None:
                self._ended = (told[0], told[1])
        return None if self._ended is None else self._ended[0]

    def _check_start(self) -> None:
        done, _ = ray_.wait([self._started], timeout=0)
        if done:
            try:
                ray_.get(self._started)
            except Exception as error:  # Ray has many
                self._ended = (_LOST, _first_line(error))
        if self._ended is None and time.monotonic() - self._begun_s > _START_S:
            self._ended = (_LOST, f"it did not start within {_START_S:g} s")

    def _ask(self) -> tuple[int | None, str, float] | None:
        """What the keeper knows; None while it has not answered."""
        if self._asked is None:
            self._asked, self._asked_s = self.keeper.look.remote(), time.monotonic()
        done, _ = ray_.wait([self._asked], timeout=0)
        if not done:
            return (_LOST, "its node does not answer", 0.0) if time.monotonic() - self._asked_s > _ANSWER_S else None
        try:
            told: tuple[int | None, str, float] = ray_.get(self._asked)
        except Exception as error:  # Ray has many
            told = (_LOST, _first_line(error), 0.0)
        self._asked = None
        return told

    def cause_of_death(self, code: int) -> str:
        """As on this machine, or that the node is gone."""
        line = self._ended[1] if self._ended is not None else ""
        return f"its node is gone ({line})" if code == _LOST else how_it_ended(code, line)

    def is_still(self) -> bool:
        """By the time that it has used of the processor, as its keeper says."""
        told = self._ask()
        if told is None:
            return False
        if told[0] is not None:
            self._ended = (told[0], told[1])
            return False
        cpu_s, since_s = self._cpu
        if told[2] - cpu_s > 0.05:
            self._cpu = (told[2], time.monotonic())
            return False
        return time.monotonic() - since_s > 2.0

    def wait(self, timeout_s: float) -> None:
        """It ends with its keeper."""

    def end(self) -> None:
        """The keeper ends it; if the keeper is gone, so is the worker."""
        with contextlib.suppress(Exception):
            self.keeper.end.remote()
        if self.socket is not None:
            self.socket.close()


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


class RayBackend(LocalBackend):
    """The workers of a Ray cluster."""

    def __init__(self, cluster: Cluster, *, code: Path | None = None) -> None:
        """`code` is the folder of the sweep, whose Python files travel."""
        super().__init__(cluster)
        self._key = handshake.new_key()
        self._code = packed(code) if code is not None else b""
        self._node_ids = dict(cluster.nodes)
        self._keepers: dict[str, Any] = {}
        self._numbers: dict[bytes, str] = {}
        """what a worker says when it connects -> its device"""
        self._looked_s = time.monotonic()
        self._lost_nodes: set[str] = set()
        self._refused: set[str] = set()
        self._doubtful: dict[str, float] = {}
        """devices that could not be reached, and since when"""
        self._grows = cluster.grows
        self._memory_bytes = cluster.devices[0].memory_bytes if cluster.memory_is_said else None
        self._door = socket.create_server(("", 0))
        self._door.setblocking(False)
        self._address = (ray_.util.get_node_ip_address(), self._door.getsockname()[1])
        self._selector.register(self._door, selectors.EVENT_READ, self._door)

    def _start(self, device: str) -> Peer:
        number = os.urandom(handshake.NUMBER_BYTES)
        self._numbers = {one: name for one, name in self._numbers.items() if name != device} | {number: device}
        keeper = self._keeper(device)
        known = replace(self._devices[device], node="")
        return _Remote(device, keeper, keeper.start.remote(known, self._address, self._key, number))

    def _keeper(self, device: str) -> Any:
        if device not in self._keepers:
            known = self._devices[device]
            where = NodeAffinitySchedulingStrategy(node_id=self._node_ids[known.node], soft=False)
            made = ray_.remote(Keeper).options(
                num_cpus=1 if known.kind == "cpu" else 0,
                num_gpus=1 if known.kind == "cuda" else 0,
                max_restarts=0,
                scheduling_strategy=where,
            )
            self._keepers[device] = made.remote(self._code)
        return self._keepers[device]

    def kill(self, device: str) -> None:
        """End the worker; a keeper that is gone is forgotten, so that a new one can be made."""
        super().kill(device)
        keeper = self._keepers.pop(device, None)
        if keeper is not None:
            with contextlib.suppress(Exception):
                ray_.kill(keeper)

    def _meeting(self, devices: Sequence[str], folder: Path, attempt: int) -> str:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if len(devices) == 1:
            return ""
        host, port = ray_.get(self._keeper(devices[0]).free_port.remote(), timeout=_START_S)
        return f"tcp://{host}:{port}"

    def open_pool(self, devices: Sequence[str], count: int) -> tuple[str, ...]:
        """Not across machines."""
        raise InputError("pools (strategy='pool') run on one machine only; leave --cluster ray out")

    def unseen(self, path: Path) -> list[str]:
        """The nodes that do not see a file of this machine."""
        first = {self._devices[name].node: name for name in reversed(self._devices)}
        asked = {node: self._keeper(name).sees.remote(str(path.absolute())) for node, name in first.items()}
        return sorted(node for node, told in asked.items() if not ray_.get(told, timeout=_START_S))

    # ---- connections ----

    def _read(self, worker: Any) -> None:
        if worker is self._door:
            self._let_in()
        elif isinstance(worker, _Guest):
            self._greet(worker)
        else:
            super()._read(worker)

    def _let_in(self) -> None:
        with contextlib.suppress(BlockingIOError):
            stream, _ = self._door.accept()
            stream.setblocking(False)
            guest = _Guest(stream=stream)
            with contextlib.suppress(OSError):
                stream.send(guest.challenged)
            self._selector.register(stream, selectors.EVENT_READ, guest)

    def _greet(self, guest: _Guest) -> None:
        try:
            data = guest.stream.recv(handshake.ANSWER_BYTES - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        guest.said += data
        if data and len(guest.said) < handshake.ANSWER_BYTES:
            return
        self._selector.unregister(guest.stream)
        whole = len(guest.said) == handshake.ANSWER_BYTES
        number = handshake.number_of(self._key, guest.challenged, bytes(guest.said)) if whole else None
        device = self._numbers.pop(number, None) if number is not None else None
        worker = self._workers.get(device) if device is not None else None
        if number is None or not isinstance(worker, _Remote) or worker.socket is not None:
            if whole and number is None:  # otherwise it is one that was ended before it came
                _log.warning("somebody who is no worker of this run connected, and was sent away")
            guest.stream.close()
            return
        guest.stream.send(handshake.welcome(self._key, guest.challenged, number))
        guest.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        worker.socket, worker.heard_s = guest.stream, time.monotonic()
        self._selector.register(guest.stream, selectors.EVENT_READ, worker)
        worker.flush()

    def poll(self, timeout_s: float) -> list[Any]:
        """As on one machine; and look whether all nodes are still there."""
        for key in list(self._selector.get_map().values()):
            guest = key.data
            if isinstance(guest, _Guest) and time.monotonic() - guest.since_s > _ANSWER_S:
                self._selector.unregister(guest.stream)
                guest.stream.close()
        if time.monotonic() - self._looked_s > _NODES_EVERY_S:
            self._looked_s = time.monotonic()
            nodes = _alive()
            self._look_for_lost_nodes(nodes)
            self._look_for_found_devices(nodes)
            if self._grows:
                self._look_for_new_nodes(nodes)
        return super().poll(timeout_s)

    def _lose(self, worker: Peer, reason: str, *, retry: bool) -> None:
        """What cannot be reached is gone, until its node is seen again: nothing is started there meanwhile."""
        unreachable = worker.exit_code() == _LOST
        super()._lose(worker, reason, retry=retry)
        if unreachable and worker.name in self._devices:
            self._doubtful[worker.name] = time.monotonic()
            self._signs.append((worker.name, DeviceGone(reason=reason)))

    def _look_for_found_devices(self, nodes: Sequence[dict[str, Any]]) -> None:
        alive = {node["NodeID"] for node in nodes}
        for name, since_s in list(self._doubtful.items()):
            device = self._devices.get(name)
            if device is None:
                del self._doubtful[name]
            elif time.monotonic() - since_s > _DOUBT_S and self._node_ids[device.node] in alive:
                del self._doubtful[name]
                self._signs.append((name, DeviceCame(memory_bytes=device.memory_bytes)))

    def _look_for_lost_nodes(self, nodes: Sequence[dict[str, Any]]) -> None:
        alive = {node["NodeID"] for node in nodes}
        for name, identity in self._node_ids.items():
            if identity in alive or name in self._lost_nodes:
                continue
            self._lost_nodes.add(name)
            for device in [one.name for one in self._devices.values() if one.node == name]:
                worker = self._workers.get(device)
                busy = worker is not None and worker.task is not None
                self.kill(device)
                if busy:
                    self._signs.append((device, WorkerLost(reason=f"its node {name} is gone", retry=True)))
                if device not in self._doubtful:  # otherwise that is told
                    self._signs.append((device, DeviceGone(reason=f"node {name} is lost")))
                del self._devices[device]

    def _look_for_new_nodes(self, nodes: Sequence[dict[str, Any]]) -> None:
        known = set(self._node_ids.values()) | self._refused
        for node in nodes:
            if node["NodeID"] in known:
                continue
            host = node.get("NodeManagerHostname") or node["NodeManagerAddress"]
            name = host if host not in self._node_ids else f"{host}-{node['NodeID'][:4]}"
            try:
                found = _devices_of(node, name, _asked(node), self._memory_bytes)
            except InputError as error:
                _log.warning("a new node is not used: %s", error)
                self._refused.add(node["NodeID"])
                continue
            self._node_ids[name] = node["NodeID"]
            for device in found:
                self._devices[device.name] = device
                self._signs.append((device.name, DeviceCame(memory_bytes=device.memory_bytes)))

    def close(self) -> None:
        """End all workers and let the actors go; the cluster stays."""
        super().close()
        for keeper in self._keepers.values():
            with contextlib.suppress(Exception):
                ray_.kill(keeper)
        self._keepers.clear()
        self._door.close()


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
