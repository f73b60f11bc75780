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


def finish(name: str, figures: dict[str, Any], details: dict[str, Any], chosen: argparse.Namespace) -> None:
    """Print the result, and keep it if asked to."""
    if chosen.keep:
        RESULTS.mkdir(exist_ok=True)
        kept = {**figures, "details": details, "quick": chosen.quick, "machine": machine()}
        (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n")
    if chosen.json:
        print(json.dumps(figures))
        return
    for key, value in (figures | details).items():
        print(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")
