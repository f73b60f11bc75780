"""What one way of running a task costs, as a value."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

PREDICTED_SPREAD = 0.25
"""By which part a step may differ from what was predicted."""
WORTH_S = 20.0
"""Not worth cutting: a task that one device trains while one looks at others."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A way to run a task on so many devices of a kind, and what a step takes."""

    label: str
    """The strategy with its knobs, as `rota.strategies.find` reads it, or the name of a technique with its knobs."""
    kind: str
    devices: int
    step_s: float
    spread: float
    """By which part of it the step may be wrong."""
    memory_bytes: int
    """On the device that needs the most."""
    measured: bool
    """Real steps were timed; otherwise it is predicted."""
    start_s: float = 0.0
    """From the launch to the first step."""
    spans: bool = False
    """Whether it may run over several nodes."""
    technique: str = ""
    """Who executes it; empty for rota's own strategies."""
    compute_s: float = 0.0
    """Of a step that spills: what it does not wait for the disk. 0 if that is not known."""
    moves_s: float = 0.0
    """What the disk would work for a step in a pool, where shards come for each pass and leave after it."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Any) -> Estimate:
        """From plain values; ValueError, KeyError or TypeError if they are not what `to_json` makes."""
        number = {name: float(plain[name]) for name in ("step_s", "spread", "start_s", "compute_s", "moves_s")}
        whole = {name: int(plain[name]) for name in ("devices", "memory_bytes")}
        words = {name: str(plain[name]) for name in ("label", "kind", "technique")}
        truth = {name: bool(plain[name]) for name in ("measured", "spans")}
        sane = all(math.isfinite(one) and one >= 0 for one in number.values())
        if not sane or number["step_s"] == 0 or whole["devices"] < 1:
            raise ValueError("an estimate is out of range")
        return cls(**number, **whole, **words, **truth)  # type: ignore[arg-type]
