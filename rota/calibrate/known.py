"""What was measured on this kind of device, and the file in the user's cache that keeps it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rota.cluster.discover import cpu_label
from rota.plan.costs import LinkCost
from rota.plan.layout import Kind
from rota.state.files import write_private

FORMAT = 3
"""Of what is kept. Another number makes everything be measured again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A measured part of an op."""

    kind: str
    flops: float
    touched_bytes: float
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class Links:
    """What was measured between the devices of this machine."""

    costs: Mapping[Kind, tuple[LinkCost, ...]]
    overlap_share: float
    crowding: tuple[tuple[int, float], ...]
    disturbance: float = 1.0
    """How much longer things took because of others on the machine."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "costs": {kind.value: [dataclasses.asdict(one) for one in found] for kind, found in self.costs.items()},
            "overlap_share": self.overlap_share,
            "crowding": [list(one) for one in self.crowding],
            "disturbance": self.disturbance,
        }

    @classmethod
    def from_json(cls, plain: Any) -> Links:
        """From plain values; ValueError, KeyError or TypeError if they are not what `to_json` makes."""
        return cls(
            costs={
                Kind(kind): tuple(
                    LinkCost(group=int(one["group"]), **{key: _seconds(one[key]) for key in LINK_FIELDS})
                    for one in found
                )
                for kind, found in plain["costs"].items()
            },
            overlap_share=_seconds(plain["overlap_share"]),
            crowding=tuple((int(count), _seconds(factor)) for count, factor in plain["crowding"]),
            disturbance=_seconds(plain["disturbance"]),
        )


LINK_FIELDS = ("launch_s", "launch_byte_s", "latency_s", "byte_s")


@dataclass(kw_only=True)
class Known:
    """Everything that was measured on one kind of device."""

    parts: dict[str, Part] = field(default_factory=dict)
    """signature -> seconds"""
    overheads: list[tuple[int, float, float]] = field(default_factory=list)
    """(entries that return a gradient, seconds forward, seconds backward) beyond the ops, of windows"""
    updates: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """optimizer -> (bytes of a parameter, seconds)"""
    copies: dict[str, float] = field(default_factory=dict)
    pace_s: float = 0.0
    """What a fixed little work takes when nobody disturbs (`clocks.pace_s`); 0 if it is not known."""
    links: dict[str, Links] = field(default_factory=dict)
    """number of devices -> between them"""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "parts": {name: dataclasses.asdict(part) for name, part in self.parts.items()},
            "overheads": self.overheads[-_KEPT_OVERHEADS:],
            "updates": self.updates,
            "copies": self.copies,
            "pace_s": self.pace_s,
            "links": {count: links.to_json() for count, links in self.links.items()},
        }

    @classmethod
    def from_json(cls, plain: Any) -> Known:
        """From plain values; ValueError, KeyError or TypeError if they are not what `to_json` makes."""
        return cls(
            parts={
                str(name): Part(kind=str(one["kind"]), **{key: _seconds(one[key]) for key in _PART_FIELDS})
                for name, one in plain["parts"].items()
            },
            overheads=[(int(count), _seconds(a), _seconds(b)) for count, a, b in plain["overheads"]],
            updates={
                str(name): tuple((int(size), _seconds(s)) for size, s in points)
                for name, points in plain["updates"].items()
            },
            copies={str(name): _seconds(s) for name, s in plain["copies"].items()},
            pace_s=_seconds(plain["pace_s"]),
            links={str(count): Links.from_json(one) for count, one in plain["links"].items()},
        )


_PART_FIELDS = ("flops", "touched_bytes", "forward_s", "backward_s")
_KEPT_OVERHEADS = 200


def _seconds(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{value!r} is not a time")
    return number


@dataclass(kw_only=True)
class Store:
    """What is known of one kind of device, and its file."""

    path: Path
    machine: Mapping[str, Any]
    known: Known

    @classmethod
    def open(cls, folder: Path, *, threads: int, kind: str = "cpu") -> Store:
        """Read what is there; what cannot be read is measured again."""
        label = cpu_label() if kind == "cpu" else torch.cuda.get_device_name()
        machine = {
            "format": FORMAT,
            "torch": torch.__version__,
            "kind": kind,
            "label": label,
            "threads": threads,
            "cores": os.cpu_count() or 1,
        }
        name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
        store = cls(path=folder / f"costs-{name}.json", machine=machine, known=Known())
        store.known = store._read() or Known()
        return store

    def _read(self) -> Known | None:
        try:
            plain = json.loads(self.path.read_text(encoding="utf-8"))
            return Known.from_json(plain) if plain["machine"] == dict(self.machine) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self) -> None:
        """Replace the file; what others have measured meanwhile stays. Without a place to write, nothing is kept."""
        others = self._read()
        if others is not None:
            self.known.parts = {**others.parts, **self.known.parts}
            self.known.links = {**others.links, **self.known.links}
            self.known.updates = {**others.updates, **self.known.updates}
        text = json.dumps({"machine": dict(self.machine), **self.known.to_json()})
        with contextlib.suppress(OSError):
            write_private(self.path, text)
