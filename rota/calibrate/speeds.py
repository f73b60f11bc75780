"""How fast each device of a machine is: a product, timed where the device's worker would run it.

python -m rota.calibrate.speeds reads [{"kind": ..., "index": ..., "cores": [...], "threads": ...}] and prints the
speeds as JSON; a process of its own, because cores and threads are those of a whole process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from rota.calibrate.clocks import product_s

_SIZE = 512


def flops_per_s(device: dict[str, Any]) -> float:
    """Of single-precision products."""
    where = torch.device(f"cuda:{device['index']}" if device["kind"] == "cuda" else "cpu")
    if device["kind"] == "cpu" and device["cores"]:
        os.sched_setaffinity(0, device["cores"])
        torch.set_num_threads(device["threads"])
    return 2 * _SIZE**3 / product_s(_SIZE, device=where)


if __name__ == "__main__":
    sys.stdout.write(json.dumps([flops_per_s(one) for one in json.load(sys.stdin)]))
