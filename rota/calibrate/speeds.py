"""How fast each device of a machine is: a product, timed where the device's worker would run it.

python -m rota.calibrate.speeds reads [{"kind": ..., "index": ..., "cores": [...]}] and prints the speeds as JSON; a
process of its own, because cores and threads are those of a whole process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

_SIZE = 512
_ROUNDS = 9


def flops_per_s(device: dict[str, Any]) -> float:
    """Of single-precision products; the best of some, since others may disturb one for a moment."""
    where = torch.device(f"cuda:{device['index']}" if device["kind"] == "cuda" else "cpu")
    if device["kind"] == "cpu" and device["cores"]:
        os.sched_setaffinity(0, device["cores"])
        torch.set_num_threads(len(device["cores"]))
    one = torch.ones(_SIZE, _SIZE, device=where)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        made = one @ one
        if where.type == "cuda":  # written with care, never run
            torch.cuda.synchronize(where)
        best_s = min(best_s, time.perf_counter() - began_s)
        del made
    return 2 * _SIZE**3 / best_s


if __name__ == "__main__":
    sys.stdout.write(json.dumps([flops_per_s(one) for one in json.load(sys.stdin)]))
