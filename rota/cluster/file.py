"""Reads a cluster that need not be there from a TOML file: nodes, the link between them, and a user's own kinds."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rota.cluster.device import parse_bytes
from rota.cluster.kinds import KINDS, DeviceKind, find_kind
from rota.errors import InputError
from rota.schedule.problem import Node

_NODE = ("name", "kind", "devices", "count", "price")
_LINK = ("bandwidth", "latency_us")
_KIND = (
    *("flops", "memory", "memory_bandwidth", "link_bandwidth"),
    *("half_flops", "tf32_flops", "float64_flops"),
)
_NEEDED = ("flops", "memory", "memory_bandwidth")
_PCIE = 32e9
_MOST_DEVICES, _MOST_NODES = 4096, 10_000
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]?)(i?)(B|bit)\s*(?:/\s*s|ps)\s*")
_SCALES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_WHAT_IF = re.compile(r"\s*\+\s*(?:(\d+)\s+nodes?\s+of\s+)?(\d+)\s*[xX×]\s*(\S+)\s*")


@dataclass(frozen=True, kw_only=True)
class NodeLink:
    """Between any two nodes, in each direction."""

    bytes_per_s: float = 12.5e9
    """100 Gbit/s, if nothing is said."""
    latency_s: float = 2e-5


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster as a file describes it."""

    nodes: tuple[Node, ...]
    kinds: Mapping[str, DeviceKind]
    """All that its nodes may be of, by name."""
    link: NodeLink = NodeLink()

    @property
    def used_kinds(self) -> tuple[DeviceKind, ...]:
        """Those that it has nodes of, in their order."""
        return tuple(self.kinds[name] for name in dict.fromkeys(node.kind for node in self.nodes))

    def plus(self, nodes: Iterable[Node]) -> Site:
        """With more nodes."""
        return replace(self, nodes=(*self.nodes, *nodes))

    def words(self) -> str:
        """What it consists of: 2 x 8 A100-40GB, 4 T4."""
        counts: dict[tuple[int, str], int] = {}
        for node in self.nodes:
            key = (len(node.devices), node.kind)
            counts[key] = counts.get(key, 0) + 1
        return ", ".join(
            f"{many} x {size} {kind}" if many > 1 else f"{size} {kind}" for (size, kind), many in counts.items()
        )


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Nodes to add, and what should be said about how the text was read."""

    text: str
    nodes: tuple[Node, ...]
    note: str = ""


def load_cluster(path: Path) -> Site:
    """The cluster in a TOML file; InputError names the file and what is wrong in it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no cluster file {path}; give the path of a TOML file with [[node]] in it") from None
    except OSError as error:
        raise InputError(f"the cluster file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"the cluster file {path} is not text; give a TOML file with [[node]] in it") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the cluster file {path} is not TOML: {error}") from None
    try:
        return _site(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_what_if(text: str, site: Site) -> WhatIf:
    """Read "+4xA100-40GB" (a node of 4) or "+2 nodes of 8xA100"; the beginning of a kind's name will do."""
    match = _WHAT_IF.fullmatch(text)
    if match is None:
        raise InputError(f"--what-if {text!r} cannot be read; write it like +4xA100-40GB or '+2 nodes of 8xA100'")
    count, devices = int(match[1] or 1), int(match[2])
    if not (1 <= count <= _MOST_NODES and 1 <= devices <= _MOST_DEVICES):
        raise InputError(
            f"--what-if {text!r} must add at least one device, and not more than {_MOST_DEVICES} to a node"
        )
    kind, note = _begun(match[3], site)
    price = next((node.price_per_hour for node in site.nodes if node.kind == kind.name), 0.0)
    taken = {node.name for node in site.nodes}
    names = (name for name in (f"more{i}" for i in range(len(taken) + count)) if name not in taken)
    nodes = tuple(_node(next(names), kind, devices, price) for _ in range(count))
    return WhatIf(text=text.strip(), nodes=nodes, note=note)


def _begun(name: str, site: Site) -> tuple[DeviceKind, str]:
    """The kind whose name is or begins so: one that the cluster has, else the one with the least memory."""
    by_case = {one.casefold(): kind for one, kind in site.kinds.items()}
    if name.casefold() in by_case:
        return by_case[name.casefold()], ""
    begun = [kind for one, kind in by_case.items() if one.startswith(name.casefold())]
    if not begun:
        return find_kind(name, site.kinds), ""
    here = [kind for kind in begun if kind in site.used_kinds]
    chosen = min(here or begun, key=lambda kind: (kind.memory_bytes, kind.name))
    return chosen, f"{name} is taken as {chosen.name}" if len(begun) > 1 else ""


# ---- the file ----


def _site(content: Mapping[str, Any]) -> Site:
    _known("the file", content, ("node", "link", "kind"))
    kinds = dict(KINDS)
    for name, table in _table("kind", content.get("kind", {})).items():
        kinds[name] = _kind(name, table)
    listed = content.get("node", [])
    if isinstance(listed, dict):
        listed = [listed]
    if not isinstance(listed, list) or not listed:
        raise InputError('there are no nodes; add [[node]] with kind = "A100-40GB" and devices = 8')
    nodes: list[Node] = []
    for place, table in enumerate(listed, start=1):
        nodes += _nodes(f"[[node]] number {place}", table, kinds, first=len(nodes))
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise InputError(f"two nodes are named {node.name!r}; give each its own name")
        seen.add(node.name)
    return Site(nodes=tuple(nodes), kinds=kinds, link=_link(content.get("link", {})))


def _nodes(where: str, table: Any, kinds: Mapping[str, DeviceKind], *, first: int) -> list[Node]:
    _known(where, _table(where, table), _NODE)
    for field, what in (("kind", "say which"), ("devices", "say how many it has")):
        if field not in table:
            raise InputError(f"{where} has no {field}; {what}")
    wanted = _text(where, "kind", table["kind"])
    try:
        kind = find_kind(wanted, kinds)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    devices = _count(where, "devices", table["devices"], _MOST_DEVICES)
    count = _count(where, "count", table.get("count", 1), _MOST_NODES)
    price = _number(where, "price", table.get("price", 0.0), least=0.0)
    if "name" not in table:
        names = [f"node{first + i}" for i in range(count)]
    else:
        name = _text(where, "name", table["name"])
        names = [name] if count == 1 else [f"{name}{i}" for i in range(count)]
    return [_node(one, kind, devices, price) for one in names]


def _node(name: str, kind: DeviceKind, devices: int, price: float) -> Node:
    return Node(
        name=name,
        kind=kind.name,
        devices=tuple(f"{name}:{i}" for i in range(devices)),
        memory_bytes=kind.memory_bytes,
        price_per_hour=price,
    )


def _link(table: Any) -> NodeLink:
    _known("[link]", _table("[link]", table), _LINK)
    usual = NodeLink()
    return NodeLink(
        bytes_per_s=_rate("[link]", "bandwidth", table.get("bandwidth", usual.bytes_per_s)),
        latency_s=_number("[link]", "latency_us", table.get("latency_us", usual.latency_s * 1e6), least=0.0) * 1e-6,
    )


def _kind(name: str, table: Any) -> DeviceKind:
    where = f"[kind.{name}]"
    _known(where, _table(where, table), _KIND)
    if name.casefold() in {one.casefold() for one in KINDS}:
        raise InputError(f"{where}: rota knows a kind of this name; choose another")
    if missing := [field for field in _NEEDED if field not in table]:
        raise InputError(f"{where} has no {' and no '.join(missing)}; a kind needs {', '.join(_NEEDED)}")
    flops = {
        field: _number(where, field, table[field], least=1.0)
        for field in _KIND
        if field.endswith("flops") and field in table
    }
    plain = flops["flops"]
    return DeviceKind(
        name=name,
        memory_bytes=_size(where, "memory", table["memory"]),
        memory_bytes_per_s=_rate(where, "memory_bandwidth", table["memory_bandwidth"]),
        half_flops=flops.get("half_flops", plain),
        tf32_flops=flops.get("tf32_flops", plain),
        float32_flops=plain,
        float64_flops=flops.get("float64_flops", plain / 2),
        link_bytes_per_s=_rate(where, "link_bandwidth", table.get("link_bandwidth", _PCIE)),
    )


# ---- values ----


def _table(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a table, not {value!r}")
    return value


def _known(where: str, table: Mapping[str, Any], fields: Sequence[str]) -> None:
    for name in table:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            meant = f"did you mean {near[0]}? It" if near else "it"
            raise InputError(f"{where} has {name!r}, which rota does not know; {meant} can have {', '.join(fields)}")


def _text(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: {name} must be a text, not {value!r}")
    return value


def _count(where: str, name: str, value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{where}: {name} must be a whole number from 1 to {most}, not {value!r}")
    return value


def _number(where: str, name: str, value: Any, *, least: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < float("inf"):
        raise InputError(f"{where}: {name} must be a number of at least {least:g}, not {value!r}")
    return float(value)


def _size(where: str, name: str, value: Any) -> int:
    try:
        return parse_bytes(value, what=name)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _rate(where: str, name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) <= 0:
        raise InputError(f"{where}: {name} {value!r} is not a bandwidth; write it like 12.5GB/s or 100Gbit/s")
    scale = _SCALES[match[2]]
    if match[3]:
        scale = 1024.0 ** {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}[match[2]]
    return float(match[1]) * scale / (8 if match[4] == "bit" else 1)
