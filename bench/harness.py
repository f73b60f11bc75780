"""What every benchmark needs: options, the machine's facts, medians, and a place to keep results."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rota.cluster.discover import available_cores, cpu_label, memory_limit_bytes

RESULTS = Path(__file__).parent / "results"
LEFT_OUT = "left out by --quick"
"""Stands for a figure that takes too long for --quick."""
_BESIDE = {"details", "quick", "machine"}
"""What a kept file has beside its figures."""


def options(description: str | None) -> argparse.Namespace:
    """--quick, --json and --keep."""
    return parser(description).parse_args()


def parser(description: str | None) -> argparse.ArgumentParser:
    """For those that have options of their own, too."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="end within 50 seconds on two cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--keep", action="store_true", help="keep the result in bench/results/")
    return parser


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_label(),
        "cores": len(available_cores()),
        "memory_bytes": memory_limit_bytes(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def kept(name: str) -> dict[str, Any]:
    """The figures of the last result that was kept; none if there is no such file."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {key: value for key, value in found.items() if key not in _BESIDE}


def _lacks(value: Any, wanted: Any) -> bool:
    """Whether there is no value, or a part of it is not there."""
    if isinstance(value, dict):
        parts = wanted if isinstance(wanted, dict) else {}
        return any(_lacks(value.get(key), parts.get(key)) for key in {*parts, *value})
    if isinstance(value, list):
        return any(_lacks(one, None) for one in value)
    return value is None


def finish(name: str, figures: dict[str, Any], details: dict[str, Any], chosen: argparse.Namespace) -> None:
    """Print the result, and keep it if asked to. It has all figures of the kept one: SystemExit names what it lacks."""
    wanted = figures if chosen.keep else kept(name)
    lacking = sorted(key for key in {*wanted, *figures} if _lacks(figures.get(key), wanted.get(key)))
    if chosen.keep and not lacking:
        RESULTS.mkdir(exist_ok=True)
        result = {**figures, "details": details, "quick": chosen.quick, "machine": machine()}
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    if chosen.json:
        print(json.dumps(figures))
    else:
        for key, value in (figures | details).items():
            print(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")
    if lacking:
        raise SystemExit(f"bench.{name} has no value for {', '.join(lacking)}; say why there is none instead of it")
