"""What ways of running were found to cost, kept in the user's cache: by machine, versions and signature."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rota.cluster.device import Device
from rota.profile.estimate import Estimate
from rota.state.files import write_private

FORMAT = 3
"""Of what is kept. Another number makes everything be measured again."""
_MOST = 2000
"""Signatures; the oldest are forgotten."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What was found out of tasks with one signature."""

    counts: tuple[int, ...]
    """The numbers of devices that were looked at; for some of them there may be no way."""
    estimates: tuple[Estimate, ...]


@dataclass(frozen=True, kw_only=True)
class EstimateStore:
    """The file of one kind of machine."""

    path: Path

    @classmethod
    def of(cls, folder: Path, devices: Sequence[Device]) -> EstimateStore:
        """The file for devices like these, with the torch and the rota that are installed."""
        first = devices[0]
        machine = {
            "format": FORMAT,
            "torch": importlib.metadata.version("torch"),
            "rota": importlib.metadata.version("rota"),
            "kind": first.kind,
            "label": first.label,
            "threads": first.threads or len(first.cores),
            "memory_bytes": first.memory_bytes,
            "cores": os.cpu_count() or 1,
        }
        name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
        return cls(path=folder / f"steps-{name}.json")

    def read(self) -> dict[str, Known]:
        """signature -> what is known; what cannot be read is measured again."""
        try:
            plain = json.loads(self.path.read_text(encoding="utf-8"))
            return {
                str(name): Known(
                    counts=tuple(int(count) for count in found["counts"]),
                    estimates=tuple(Estimate.from_json(one) for one in found["estimates"]),
                )
                for name, found in plain["known"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def add(self, found: Mapping[str, Known]) -> None:
        """Keep these; what others have kept meanwhile stays. Without a place to write, nothing is kept."""
        if not found:
            return
        known = self.read()
        for name, one in found.items():
            known.pop(name, None)
            known[name] = one
        plain = {
            name: {"counts": list(one.counts), "estimates": [way.to_json() for way in one.estimates]}
            for name, one in list(known.items())[-_MOST:]
        }
        text = json.dumps({"known": plain})
        with contextlib.suppress(OSError):
            write_private(self.path, text)
