"""Faults that befall a run on a Ray cluster: of its workers, actors, controller, nodes, and of the network between."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil

from bench.chaos_local import Fault, kill_controller, kill_worker, stop_worker
from bench.chaos_storm import KEEPER, MARK, Storm, command_of, ours

_SPACE = "rota-chaos"
_HOST, _GUEST = "10.77.0.1", "10.77.0.2"
_NOWHERE = "02:00:00:00:00:01"
_PARTITION_S = 30.0
_LEASE_OVER_S = 26.0
_JOINS_S = 60.0


class Nodes:
    """A head without devices, two nodes, and one in a network of its own where that can be made."""

    def __init__(self, mark: str) -> None:
        from ray.cluster_utils import Cluster

        os.environ[MARK] = mark  # what Ray starts inherits it
        self.apart = _make_network()
        head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False}
        if self.apart:
            head["node_ip_address"] = _HOST
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self._nodes = [self._add() for _ in range(2)]
        self._far: subprocess.Popen[bytes] | None = None
        if self.apart:
            self.start_far()
            self._wait_for(3)

    def _add(self) -> Any:
        where = {"node_ip_address": _HOST} if self.apart else {}
        return self._cluster.add_node(num_cpus=1, **where)

    def kill_raylet(self, dice: random.Random) -> None:
        """Of one node; a new node comes for it."""
        node = self._nodes.pop(dice.randrange(len(self._nodes)))
        for one in node.all_processes["raylet"]:
            psutil.Process(one.process.pid).kill()
        self._nodes.append(self._add())

    def start_far(self) -> None:
        """The node in a network of its own."""
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={self.address}", "--num-cpus=1"]
        self._far = subprocess.Popen(
            ["ip", "netns", "exec", _SPACE, *start, f"--node-ip-address={_GUEST}", "--block"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def revive_far(self) -> None:
        """Start it again if it has ended."""
        if self._far is not None and self._far.poll() is not None:
            self.start_far()

    def _wait_for(self, count: int) -> None:
        """Until so many nodes have joined, beside the head."""
        deadline_s = time.monotonic() + _JOINS_S
        while self.joined() < count:
            if time.monotonic() > deadline_s:
                raise SystemExit("a node in a network of its own did not join the cluster")
            time.sleep(0.5)

    def joined(self) -> int:
        """How many nodes with devices Ray has."""
        return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in self._cluster_nodes())

    def _cluster_nodes(self) -> list[dict[str, Any]]:
        import ray

        if not ray.is_initialized():
            ray.init(address=self.address, log_to_driver=False, logging_level="error")
        return list(ray.nodes())

    def close(self) -> None:
        """End the cluster and the network."""
        if self._far is not None:
            _kill_tree(self._far.pid)
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()
        self._cluster.shutdown()
        if self.apart:
            _ip("netns", "del", _SPACE)
            _ip("link", "del", "rotahost")
        os.environ.pop(MARK, None)


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for one in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.Error):
                one.kill()


def _ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0


def _make_network() -> bool:
    """Two ends of a cable, one of them in a network of its own; False where this cannot be made."""
    _ip("netns", "del", _SPACE)
    _ip("link", "del", "rotahost")
    steps = (
        ("netns", "add", _SPACE),
        ("link", "add", "rotahost", "type", "veth", "peer", "name", "rotafar", "netns", _SPACE),
        ("addr", "add", f"{_HOST}/24", "dev", "rotahost"),
        ("link", "set", "rotahost", "up"),
        ("-n", _SPACE, "addr", "add", f"{_GUEST}/24", "dev", "rotafar"),
        ("-n", _SPACE, "link", "set", "rotafar", "up"),
        ("-n", _SPACE, "link", "set", "lo", "up"),
    )
    return all(_ip(*step) for step in steps)


@contextlib.contextmanager
def _cut() -> Iterator[None]:
    """What either side sends goes nowhere, and nobody is told."""
    _ip("neigh", "replace", _GUEST, "lladdr", _NOWHERE, "dev", "rotahost", "nud", "permanent")
    _ip("-n", _SPACE, "neigh", "replace", _HOST, "lladdr", _NOWHERE, "dev", "rotafar", "nud", "permanent")
    try:
        yield
    finally:
        _ip("neigh", "del", _GUEST, "dev", "rotahost")
        _ip("-n", _SPACE, "neigh", "del", _HOST, "dev", "rotafar")


def faults_of(nodes: Nodes) -> dict[str, Fault]:
    """What can befall a run there."""

    def kill_raylet(storm: Storm, dice: random.Random) -> bool:
        """A node is lost, and another one comes."""
        nodes.kill_raylet(dice)
        return True

    def kill_keeper(storm: Storm, dice: random.Random) -> bool:
        """The actor of a device; its worker must not outlive it."""
        keepers = [one for one in ours(storm.mark) if KEEPER in command_of(one)]
        if not keepers:
            return False
        dice.choice(keepers).kill()
        return True

    def partition(storm: Storm, dice: random.Random) -> bool:
        """A node cannot be reached for a while. What trains there must have ended when its task goes on elsewhere."""
        there = [one for one in storm.workers() if _is_far(one)]
        with _cut():
            time.sleep(_LEASE_OVER_S)
            training = [one for one in there if one.is_running() and _has_task(one, storm)]
            if training:
                raise AssertionError("a worker that was cut off went on after its lease")
            time.sleep(_PARTITION_S - _LEASE_OVER_S)
        deadline_s = time.monotonic() + _JOINS_S
        while nodes.joined() < 3:  # Ray may have given the node up; then it ends, and is started again
            nodes.revive_far()
            if time.monotonic() > deadline_s:
                raise AssertionError("the node did not come back")
            time.sleep(0.5)
        return True

    found = {
        "kill worker": kill_worker,
        "kill controller": kill_controller,
        "kill raylet": kill_raylet,
        "kill actor": kill_keeper,
        "stop worker": stop_worker,
    }
    return found | ({"partition": partition} if nodes.apart else {})


def _is_far(process: psutil.Process) -> bool:
    """Whether it is in the network of its own."""
    try:
        return os.stat(f"/proc/{process.pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return False


def _has_task(process: psutil.Process, storm: Storm) -> bool:
    """Whether it holds the folder of a task."""
    try:
        return any(f.path.startswith(str(storm.run / "tasks")) for f in process.open_files())
    except psutil.Error:
        return False
