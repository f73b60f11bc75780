"""The devices of a Ray cluster, as Ray and the nodes themselves tell of them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import ray as untyped_ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rota.cluster.device import Cluster, Device, parse_bytes, said
from rota.cluster.discover import available_cores, cpu_label
from rota.errors import InputError, TooFewDevicesError
from rota.execute.backends import ray_token

ray_: Any = untyped_ray

ANSWER_S = 10.0
START_S = 60.0
_HOST_SHARE = 0.1
_NICENESS = "RAY_worker_niceness"
_OWN = "local"
"""What Ray calls a cluster that ends with the process that started it."""


def ray_cluster(address: str | None = None, *, devices: int | None = None, memory: str | int | None = None) -> Cluster:
    """What `rota.ray` gives."""
    _connect(address)
    memory_bytes = None if memory is None else parse_bytes(memory, what="rota.ray: memory")
    nodes = alive()
    names = _node_names(nodes)
    asked = {node["NodeID"]: ask_facts(node) for node in nodes}  # all at once: each starts a process on its node
    found: list[Device] = []
    for node in nodes:
        found += devices_of(node, names[node["NodeID"]], asked[node["NodeID"]], memory_bytes)
    if not found:
        raise InputError("rota.ray: the cluster has no CPUs; add a node with `ray start`")
    if devices is not None:
        if devices > len(found):
            raise TooFewDevicesError(
                f"rota.ray: {devices} devices were asked for, and the cluster has {len(found)}", there=len(found)
            )
        found = found[:devices]
    used = {device.node for device in found}
    chosen = tuple((names[node["NodeID"]], node["NodeID"]) for node in nodes if names[node["NodeID"]] in used)
    return Cluster(
        devices=tuple(found),
        manager="ray",
        nodes=chosen,
        grows=devices is None,
        memory_is_said=memory is not None,
        asked=said(cluster=f"ray={address}" if address else "ray", devices=devices, memory=memory),
    )


def _connect(address: str | None) -> None:
    if ray_.is_initialized():
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address or os.environ.get("RAY_ADDRESS")
    if address and _is_place(address):
        _check_address(address)
        ray_token.show_what_is_asked_for(address)
    address = address or _running() or _OWN
    if address == _OWN:
        ray_token.make_one_for_this_process()
        os.environ.setdefault(_NICENESS, "0")  # Ray's 15 lets all else go first, unlike a run without Ray
    try:
        with _no_paragraphs():
            if address != _OWN:
                ray_.init(address=address, **quiet)
            else:
                ray_.init(address=_OWN, num_cpus=len(available_cores()), include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f" at {address}" if address != _OWN else ""
        raise InputError(f"rota.ray: there is no Ray cluster{where} that can be used: {first}") from error


@contextlib.contextmanager
def _no_paragraphs() -> Iterator[None]:
    """Connect without the thread that writes a paragraph to stdout for each process that died, whatever Ray is told.

    Actors of devices end all the time, and what dies is told by rota itself; stdout may be a file of JSON.
    """
    known = ray_._private.worker
    its = getattr(known, "listen_error_messages", None)
    known.listen_error_messages = lambda *_: None
    try:
        yield
    finally:
        known.listen_error_messages = its


def _running() -> str | None:
    """The cluster on this machine, if there is one that answers.

    One that another program has started for itself, and that does not let this one in, is none.
    """
    services = ray_._private.services
    try:
        found: str | None = services.canonicalize_bootstrap_address("auto")
        if found is None:
            return None
        _check_address(found)
    except (ConnectionError, InputError):
        return None
    try:
        ray_token.show_what_is_asked_for(found)
    except InputError:
        if found == services.find_bootstrap_address(None):
            raise  # by `ray start`: it is meant
        return None
    return found


def _is_place(address: str) -> bool:
    """Whether it is HOST:PORT, and not something else that Ray knows."""
    host, _, port = address.rpartition(":")
    return port.isdecimal() and "/" not in host


def _check_address(address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise InputError(
            f"rota.ray: there is no Ray cluster at {address} ({error}); start one with `ray start`"
        ) from None


def alive() -> list[dict[str, Any]]:
    """The nodes that Ray has now."""
    return sorted((node for node in ray_.nodes() if node["Alive"]), key=lambda node: node["NodeID"])


def _node_names(nodes: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Short and unique: the host's name, with a piece of Ray's own where several have the same."""
    hosts = [node.get("NodeManagerHostname") or node["NodeManagerAddress"] for node in nodes]
    return {
        node["NodeID"]: host if hosts.count(host) == 1 else f"{host}-{node['NodeID'][:4]}"
        for node, host in zip(nodes, hosts, strict=True)
    }


def ask_facts(node: dict[str, Any]) -> Any:
    """The facts of a node, under way."""
    facts = ray_.remote(num_cpus=0)(facts_here)
    where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
    return facts.options(scheduling_strategy=where).remote()


def devices_of(
    node: dict[str, Any], name: str, asked: Any, memory_bytes: int | None, *, timeout_s: float = START_S
) -> list[Device]:
    """The devices of a node; InputError if it cannot run what this machine runs."""
    try:
        told: dict[str, Any] = ray_.get(asked, timeout=timeout_s)
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
