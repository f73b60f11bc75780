"""How long `strategy="auto"` searches: a 24-layer GPT of width 1024 with 16 heads, on 4 and on 32 devices.

python -m bench.search [--quick] [--json]
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.nn.functional as F

from bench import harness
from rota.graph.capture import capture
from rota.graph.graph import Graph
from rota.search.search import Search, search
from rota.testing.models import GPT

LAYERS, QUICK_LAYERS, SAMPLES = 24, 4, 64
DEVICES = (4, 32)


def main() -> None:
    """Search without a limit of memory, and with little of it, when fewer candidates can be left out.

    Quick takes few layers, and all the memory there is.
    """
    chosen = harness.options(__doc__)
    torch.set_num_threads(1)
    graph = _capture(QUICK_LAYERS if chosen.quick else LAYERS)
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for devices in DEVICES:
        seconds, cpu_s, found = _timed(graph, devices, None)
        figures[f"auto_{devices}_devices_s"] = seconds
        figures[f"candidates_{devices}"] = len(found.candidates)
        details |= {f"cpu_{devices}_s": cpu_s} | _told(f"{devices}", found)
        if not chosen.quick:
            peaks = sorted(one.peak_bytes or 0 for one in found.candidates if one.measured)
            seconds, cpu_s, found = _timed(graph, devices, peaks[len(peaks) // 4])
            details |= {f"auto_{devices}_devices_little_memory_s": seconds} | _told(f"{devices}_little_memory", found)
    harness.finish("search", figures, details, chosen)


def _told(name: str, found: Search) -> dict[str, Any]:
    return {f"chosen_{name}": found.chosen.text, f"measured_{name}": sum(one.measured for one in found.candidates)}


def _capture(layers: int) -> Graph:
    with torch.device("meta"):
        model = GPT(vocabulary=50304, context=1024, width=1024, depth=layers, heads=16)
        rows = torch.zeros((SAMPLES, 1025), dtype=torch.int64)
    return capture(
        model,
        rows,
        lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()),
    )


def _timed(graph: Graph, devices: int, memory_bytes: int | None) -> tuple[float, float, Search]:
    gc.collect()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    found = search(graph, devices, memory_bytes=memory_bytes)
    return time.perf_counter() - started_s, time.process_time() - cpu_s, found


if __name__ == "__main__":
    main()
