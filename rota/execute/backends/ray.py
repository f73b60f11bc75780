"""Runs tasks on a Ray cluster: one actor for each device, which starts the same worker that runs on one machine.

Ray places the actors, tells which nodes there are, and ends what is left. Messages do not go through it: a worker
listens to a connection to the controller, which both have authenticated with the key of the run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray as untyped_ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rota.cluster.device import Cluster
from rota.errors import InputError
from rota.execute.backends import handshake
from rota.execute.backends.base import DeviceCame, DeviceGone, WorkerLost
from rota.execute.backends.local import LocalBackend, Peer, how_it_ended
from rota.execute.backends.ray_keeper import LOST, NAMESPACE, Keeper, packed
from rota.execute.backends.ray_nodes import ANSWER_S, START_S, alive, ask_facts, devices_of
from rota.runtime.link import LEASE_S
from rota.runtime.messages import Beat, Here, Ready
from rota.state import inside

_log = logging.getLogger(__name__)

ray_: Any = untyped_ray

_NODES_EVERY_S = 1.0
_MOST_GUESTS = 64
"""Connections that have not answered yet; workers answer within milliseconds."""
_WARN_EVERY_S = 60.0
_DOUBT_S = 15.0
"""Ray takes some seconds to notice that a node is gone."""
_CUT_OFF_S = LEASE_S * 1.05
"""A worker that was silent for so long has ended, wherever it is: its lease is over by its own clock."""
_BROKEN_S = 3.0
"""How long a process may take to end after its connection was closed."""


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
        """`started` is a promise of Ray: it breaks if the worker cannot be started or connected."""
        super().__init__(name)
        self.keeper = keeper
        self._started = started
        self._begun_s = time.monotonic()
        self._asked: Any = None
        self._asked_s = 0.0
        self._ended: tuple[int, str] | None = None
        self._closed_s: float | None = None
        self._cpu = (0.0, time.monotonic())

    def take_beat(self, beat: Beat) -> None:
        """The answer renews its lease."""
        super().take_beat(beat)
        self.send(Here(at_s=beat.at_s))

    def hung_up(self) -> None:
        """Its connection is closed: it has ended, or cannot be reached."""
        if self._closed_s is None:
            self._closed_s = time.monotonic()

    def is_over(self) -> bool:
        """Whether it trains no more: never connected, hung up, or cut off for longer than its lease.

        One whose connection alone was broken waits for another controller, and holds the folder of its task meanwhile.
        """
        closed = self.socket is None or self._closed_s is not None
        return closed or time.monotonic() - self.heard_s > _CUT_OFF_S

    def exit_code(self) -> int | None:
        """What its keeper says; if that says nothing either, both are lost."""
        if self._ended is None and self.socket is None:
            self._check_start()
        if self._ended is None and self._closed_s is not None:
            told = self._ask()
            if told is not None and told[0] is not None:
                self._ended = (told[0], told[1])
            elif told is not None and time.monotonic() - self._closed_s > _BROKEN_S:
                self._ended = (LOST, "its connection broke")
        return None if self._ended is None else self._ended[0]

    def _check_start(self) -> None:
        done, _ = ray_.wait([self._started], timeout=0)
        if done:
            try:
                ray_.get(self._started)
            except Exception as error:  # Ray has many
                self._ended = (LOST, _first_line(error))
        if self._ended is None and time.monotonic() - self._begun_s > START_S:
            self._ended = (LOST, f"it did not start within {START_S:g} s")

    def _ask(self) -> tuple[int | None, str, float] | None:
        """What the keeper knows; None while it has not answered, or while the worker may live on without it."""
        if self._asked is None:
            self._asked, self._asked_s = self.keeper.look.remote(), time.monotonic()
        done, _ = ray_.wait([self._asked], timeout=0)
        if not done:
            silent = time.monotonic() - self._asked_s > ANSWER_S and self.is_over()
            return (LOST, "its node does not answer", 0.0) if silent else None
        try:
            told: tuple[int | None, str, float] | None = ray_.get(self._asked)
        except Exception as error:  # Ray has many
            told = (LOST, _first_line(error), 0.0) if self.is_over() else None
        self._asked = None
        return told

    def cause_of_death(self, code: int) -> str:
        """As on this machine, or that the node is gone."""
        line = self._ended[1] if self._ended is not None else ""
        return f"its node is gone ({line})" if code == LOST else how_it_ended(code, line, ready=self.ready)

    def is_still(self) -> bool:
        """By the time that it has used of the processor, as its keeper says."""
        if self.socket is None:
            return False  # it is being started, which may take longer than an answer
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
        """Its keeper ends it, which is told to; if the keeper is gone, so is the worker."""
        if self.socket is not None:
            # What is still on its way to it must not arrive: it would renew the lease of a worker that is given up.
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.close()


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


class RayBackend(LocalBackend):
    """The workers of a Ray cluster."""

    def __init__(self, cluster: Cluster, *, code: Path | None = None, session: str = "") -> None:
        """`code` is the folder of the sweep, whose Python files travel; workers of a `session` are taken over."""
        super().__init__(cluster)
        self._key = handshake.new_key()
        self._code = packed(code) if code is not None else b""
        self._node_ids = dict(cluster.nodes)
        self._keepers: dict[str, Any] = {}
        self._leaving: list[Any] = []
        """promises of those that were told to end"""
        self._numbers: dict[bytes, str] = {}
        """what a worker says when it connects -> its device"""
        self._warned_s = -math.inf
        self._looked_s = time.monotonic()
        self._lost_nodes: set[str] = set()
        self._new_nodes: dict[str, tuple[Any, float]] = {}
        """nodes that were asked for their facts, and when"""
        self._refused: set[str] = set()
        self._doubtful: dict[str, float] = {}
        """devices that could not be reached, and since when"""
        self._grows = cluster.grows
        self._memory_bytes = cluster.devices[0].memory_bytes if cluster.memory_is_said else None
        self._door = socket.create_server(("", 0))
        self._door.setblocking(False)
        self._address = (ray_.util.get_node_ip_address(), self._door.getsockname()[1])
        self._selector.register(self._door, selectors.EVENT_READ, self._door)
        self.session = session or secrets.token_hex(8)
        self._taken_over: set[str] = set()
        if session:
            self._take_over()

    # ---- workers ----

    def _start(self, device: str) -> Peer:
        keeper = self._keeper(device)
        known = replace(self._devices[device], node="")
        number = self._expect(device)
        return _Remote(device, keeper, keeper.start.remote(known, self._address, self._key, number))

    def _expect(self, device: str) -> bytes:
        """What the worker of a device will say when it connects."""
        number = os.urandom(handshake.NUMBER_BYTES)
        self._numbers = {one: name for one, name in self._numbers.items() if name != device} | {number: device}
        return number

    def _keeper(self, device: str) -> Any:
        if device not in self._keepers:
            known = self._devices[device]
            where = NodeAffinitySchedulingStrategy(node_id=self._node_ids[known.node], soft=False)
            made = ray_.remote(Keeper).options(
                name=f"{self.session}/{device}/{secrets.token_hex(4)}",
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=1 if known.kind == "cpu" else 0,
                num_gpus=1 if known.kind == "cuda" else 0,
                max_restarts=0,
                scheduling_strategy=where,
            )
            self._keepers[device] = made.remote(self._code)
        return self._keepers[device]

    def kill(self, device: str) -> None:
        """End the worker with its keeper; another one is made when it is needed."""
        super().kill(device)
        keeper = self._keepers.pop(device, None)
        if keeper is not None:
            self._leaving.append(keeper.leave.remote())

    def _take_over(self) -> None:
        """Connect the workers that outlived the controller before this one; what has no worker is ended."""
        asked: dict[str, Any] = {}
        for name in self._names():
            device = name.removeprefix(f"{self.session}/").rpartition("/")[0]
            with contextlib.suppress(Exception):  # it has ended meanwhile
                keeper = ray_.get_actor(name, namespace=NAMESPACE)
                if device not in self._devices or device in asked:
                    self._leaving.append(keeper.leave.remote())
                    continue
                self._keepers[device] = keeper
                asked[device] = keeper.connect.remote(self._address, self._key, self._expect(device))
                self._add(device, _Remote(device, keeper, asked[device]))
        refused = [device for device, told in asked.items() if not self._patiently(told, or_else=False)]
        for device in refused:
            self.kill(device)
        self._hear_until(lambda: all(worker.ready for worker in self._workers.values()), limit_s=ANSWER_S)
        for device in [name for name, worker in self._workers.items() if not worker.ready]:
            self.kill(device)
        self._taken_over = set(self._workers)

    def _names(self) -> list[str]:
        """Of all actors of this session that there are."""
        return [
            one["name"]
            for one in ray_.util.list_named_actors(all_namespaces=True)
            if one["namespace"] == NAMESPACE and one["name"].startswith(f"{self.session}/")
        ]

    def keep(self, kept: Mapping[str, tuple[str, int]]) -> None:
        """Of the workers that were taken over, end those that do not train what they should."""
        for name in self._taken_over:
            if name in kept and name in self._workers:
                self._workers[name].begin(kept[name][0])
            else:
                self.kill(name)
        self._signs = [(device, sign) for device, sign in self._signs if device in kept]

    def taken_over(self) -> dict[str, tuple[str, int]]:
        """Devices whose workers were taken over, and what they train: a task, and which attempt."""
        readies = [(device, sign) for device, sign in self._signs if isinstance(sign, Ready)]
        return {device: (sign.task, sign.attempt) for device, sign in readies}

    def _meeting(self, devices: Sequence[str], folder: Path, attempt: int) -> str:
        inside.enter(folder)
        super()._meeting(devices, folder, attempt)  # one device meets itself in a file, as anywhere
        if len(devices) == 1:
            return ""
        # If that keeper does not answer, its worker is lost as well, and the attempt with it.
        place = self._patiently(self._keeper(devices[0]).free_port.remote(), or_else=("", 0))
        return f"tcp://{place[0]}:{place[1]}"

    def open_pool(self, devices: Sequence[str], count: int) -> tuple[str, ...]:
        """Not across machines."""
        raise InputError("pools (strategy='pool') run on one machine only; leave --cluster ray out")

    def unseen(self, path: Path) -> list[str]:
        """The nodes that do not see a file of this machine."""
        first = {self._devices[name].node: name for name in reversed(self._devices)}
        asked = {node: self._keeper(name).sees.remote(str(path.absolute())) for node, name in first.items()}
        return sorted(node for node, told in asked.items() if not self._patiently(told, or_else=False))

    def _patiently(self, promise: Any, *, or_else: Any) -> Any:
        """What Ray has promised, or something else if that fails; workers are listened to meanwhile."""
        self._hear_until(lambda: bool(ray_.wait([promise], timeout=0)[0]), limit_s=START_S)
        try:
            return ray_.get(promise, timeout=0)
        except Exception as error:  # Ray has many
            _log.warning("a node did not answer: %s", _first_line(error))
            return or_else

    def _hear_until(self, done: Callable[[], bool], *, limit_s: float) -> None:
        """Whoever trains needs answers to its beats; what is heard is told by the next poll."""
        deadline_s = time.monotonic() + limit_s
        while not done() and time.monotonic() < deadline_s:
            for key, _ in self._selector.select(0.05):
                self._read(key.data)

    # ---- connections ----

    def _read(self, worker: Any) -> None:
        if worker is self._door:
            self._let_in()
        elif isinstance(worker, _Guest):
            self._greet(worker)
        else:
            super()._read(worker)

    def _let_in(self) -> None:
        try:
            stream, _ = self._door.accept()
        except OSError:  # nobody any more, or no more files: a flood must not end the run
            return
        guests = [key.data for key in self._selector.get_map().values() if isinstance(key.data, _Guest)]
        if len(guests) >= _MOST_GUESTS:  # one of ours answers at once, so that it is hardly ever the oldest
            self._send_off(min(guests, key=lambda guest: guest.since_s))
        stream.setblocking(False)
        guest = _Guest(stream=stream)
        with contextlib.suppress(OSError):
            stream.send(guest.challenged)
        self._selector.register(stream, selectors.EVENT_READ, guest)

    def _send_off(self, guest: _Guest) -> None:
        self._selector.unregister(guest.stream)
        guest.stream.close()

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
                self._warn_of_strangers()
            guest.stream.close()
            return
        with contextlib.suppress(OSError):  # if it is gone again, reading will tell
            guest.stream.send(handshake.welcome(self._key, guest.challenged, number))
            guest.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        worker.socket, worker.heard_s = guest.stream, time.monotonic()
        self._selector.register(guest.stream, selectors.EVENT_READ, worker)
        worker.flush()

    def _warn_of_strangers(self) -> None:
        """Not more often than they can be read."""
        if time.monotonic() - self._warned_s > _WARN_EVERY_S:
            self._warned_s = time.monotonic()
            _log.warning("somebody who is no worker of this run connected, and was sent away")

    # ---- nodes ----

    def poll(self, timeout_s: float) -> list[Any]:
        """As on one machine; and look whether all nodes are still there."""
        for key in list(self._selector.get_map().values()):
            guest = key.data
            if isinstance(guest, _Guest) and time.monotonic() - guest.since_s > ANSWER_S:
                self._send_off(guest)
        if time.monotonic() - self._looked_s > _NODES_EVERY_S:
            self._looked_s = time.monotonic()
            nodes = alive()
            self._look_for_lost_nodes(nodes)
            self._look_for_found_devices(nodes)
            if self._grows:
                self._look_for_new_nodes(nodes)
        return super().poll(timeout_s)

    def _lose(self, worker: Peer, reason: str, *, retry: bool) -> None:
        """What cannot be reached is gone, until its node is seen again: nothing is started there meanwhile."""
        unreachable = worker.exit_code() == LOST
        super()._lose(worker, reason, retry=retry)
        if unreachable and worker.name in self._devices:
            self._doubtful[worker.name] = time.monotonic()
            self._signs.append((worker.name, DeviceGone(reason=reason, in_doubt=True)))

    def _look_for_found_devices(self, nodes: Sequence[dict[str, Any]]) -> None:
        there = {node["NodeID"] for node in nodes}
        for name, since_s in list(self._doubtful.items()):
            device = self._devices.get(name)
            if device is None:
                del self._doubtful[name]
            elif time.monotonic() - since_s > _DOUBT_S and self._node_ids[device.node] in there:
                del self._doubtful[name]
                self._signs.append((name, DeviceCame(memory_bytes=device.memory_bytes)))

    def _look_for_lost_nodes(self, nodes: Sequence[dict[str, Any]]) -> None:
        there = {node["NodeID"] for node in nodes}
        for name, identity in self._node_ids.items():
            if identity in there or name in self._lost_nodes:
                continue
            its = [one.name for one in self._devices.values() if one.node == name]
            workers = [self._workers[device] for device in its if device in self._workers]
            if not all(worker.is_over() for worker in workers if isinstance(worker, _Remote)):
                continue  # Ray has lost the node, but what runs there may still train, and write
            self._lost_nodes.add(name)
            for device in its:
                worker = self._workers.get(device)
                busy = worker is not None and worker.task is not None
                self.kill(device)
                if busy:
                    self._signs.append((device, WorkerLost(reason=f"its node {name} is gone", retry=True)))
                self._doubtful.pop(device, None)
                self._signs.append((device, DeviceGone(reason=f"node {name} is lost")))
                del self._devices[device]

    def _look_for_new_nodes(self, nodes: Sequence[dict[str, Any]]) -> None:
        known = set(self._node_ids.values()) | self._refused
        for node in nodes:
            identity = node["NodeID"]
            if identity in known:
                continue
            asked, since_s = self._new_nodes.setdefault(identity, (ask_facts(node), time.monotonic()))
            if not ray_.wait([asked], timeout=0)[0] and time.monotonic() - since_s < START_S:
                continue  # it starts a process there
            host = node.get("NodeManagerHostname") or node["NodeManagerAddress"]
            name = host if host not in self._node_ids else f"{host}-{identity[:4]}"
            try:
                found = devices_of(node, name, asked, self._memory_bytes, timeout_s=0.0)
            except InputError as error:
                _log.warning("a new node is not used: %s", error)
                self._refused.add(identity)
                continue
            self._node_ids[name] = identity
            for device in found:
                self._devices[device.name] = device
                self._signs.append((device.name, DeviceCame(memory_bytes=device.memory_bytes)))

    def close(self) -> None:
        """End all workers and let the actors go; the cluster stays."""
        super().close()
        for device in list(self._keepers):
            self.kill(device)
        for name in self._names():  # also of one that the controller before asked for, and that came after it had died
            with contextlib.suppress(Exception):
                self._leaving.append(ray_.get_actor(name, namespace=NAMESPACE).leave.remote())
        if self._leaving:  # what is asked of them must reach them before this process ends
            ray_.wait(self._leaving, num_returns=len(self._leaving), timeout=ANSWER_S)
        self._door.close()
