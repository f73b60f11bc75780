"""Devices and clusters as values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rota.errors import InputError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+(?=\s*[a-zA-Z]))?)\s*([a-zA-Z]*)\s*")
_LONGEST_SIZE = 40
_LEAST_BYTES = 8 * 2**20
"""The stack of a thread: with less, nothing of PyTorch runs."""
LEAST_MARGIN_BYTES = 24 * 2**20
"""Left to allocators where a model spills: the code of shards is made in the first step, and takes some megabytes."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One place where a model, or a part of one, can run."""

    index: int
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    """What a task may use; on a CPU rota enforces it."""
    cores: tuple[int, ...] = ()
    """The CPU cores that its worker is pinned to; empty means any."""
    label: str = ""
    """What people call it, for example the GPU's product name."""
    node: str = ""
    """The machine that it is in, where there are several."""
    threads: int = 0
    """How many compute on a CPU, if the user has said that; the last digits of results depend on it."""

    @property
    def name(self) -> str:
        """A short name, unique in its cluster: cpu:0, cuda:3, and with nodes alpha/cpu:0."""
        return f"{self.node}/{self.kind}:{self.index}" if self.node else f"{self.kind}:{self.index}"

    @property
    def thread_count(self) -> int:
        """How many threads compute on it: by default one on each of its cores."""
        return self.threads or max(1, len(self.cores))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The devices that a run may use."""

    devices: tuple[Device, ...]
    manager: Literal["local", "ray"] = "local"
    """What starts processes on them: this machine itself, or Ray."""
    nodes: tuple[tuple[str, str], ...] = ()
    """(the name of a node, what its manager calls it)"""
    grows: bool = False
    """Whether nodes that come later are used, too."""
    memory_is_said: bool = False
    """Whether the user has said how much memory devices have."""
    asked: Mapping[str, str | int] = field(default_factory=dict, compare=False)
    """What the user said when it was made, so that a resumed run can have such devices again."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError("the cluster has no devices; give at least one")


def said(**asked: str | int | None) -> dict[str, str | int]:
    """Of what can be asked for, what was."""
    return {name: value for name, value in asked.items() if value is not None}


def parse_bytes(size: str | int, *, what: str = "memory") -> int:
    """Read a size such as "4GiB", "500 MB" or a plain number of bytes."""
    if isinstance(size, int) and not isinstance(size, bool):
        amount = size
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) and len(size) < _LONGEST_SIZE else None
        if match is None or match[2].lower() not in _UNITS:
            shown = repr(size)[:_LONGEST_SIZE]
            raise InputError(f"{what} {shown} is not a size; write it like 4GiB, 500MB or 1073741824")
        amount = int(float(match[1]) * _UNITS[match[2].lower()]) if match[2] else int(match[1])
    if amount <= 0:
        raise InputError(f"{what} must be more than nothing, not {size!r}")
    return amount


def too_little_to_run(memory_bytes: int) -> str:
    """What to say of a device in whose memory no task can run; empty for others."""
    if memory_bytes >= _LEAST_BYTES:
        return ""
    return (
        f"{format_bytes(memory_bytes)} of memory is too little for any task; give each device at least "
        f"{format_bytes(_LEAST_BYTES)}, and more than {format_bytes(LEAST_MARGIN_BYTES)} where a model does not fit"
    )


def too_little_to_spill(memory_bytes: int) -> str:
    """What to say of a device that has no more than what is left to allocators."""
    least = format_bytes(LEAST_MARGIN_BYTES)
    return (
        f"{format_bytes(memory_bytes)} of memory is too little for any model: {least} are left to allocators, and the "
        f"largest op must fit beside them; give each device more than {least} (--memory)"
    )


def format_bytes(amount_bytes: float) -> str:
    """Write a size for people: 512 MiB, 11.3 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while amount_bytes >= 1024 and power < len(units) - 1:
        amount_bytes, power = amount_bytes / 1024, power + 1
    number = f"{amount_bytes:.3g}" if amount_bytes < 999 else f"{amount_bytes:.0f}"
    return f"{number} {units[power]}"
