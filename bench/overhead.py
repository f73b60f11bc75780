"""What rota costs on one device: its median step and its start against a plain PyTorch script, interleaved.

    python -m bench.overhead [--quick] [--json]

Both arms run the same model on the same core with one thread, and note the time at each call of the loss function.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import harness
from rota.cluster.discover import available_cores

HERE = Path(__file__).parent


def main() -> None:
    """Interleave the arms and print the ratios."""
    chosen = harness.options(__doc__)
    pairs, steps = (4, 150) if chosen.quick else (12, 400)
    core = available_cores()[0]
    ratios: dict[str, list[float]] = {"step": [], "mean": [], "start": []}
    plain_steps_s: list[float] = []
    plain_starts_s: list[float] = []
    for pair in range(pairs):
        arms = {}
        # Each goes first in turn: the second of a pair finds warmer caches.
        for arm in ("plain", "rota") if pair % 2 else ("rota", "plain"):
            arms[arm] = _run(arm, steps=steps, core=core)
        plain, rota = arms["plain"], arms["rota"]
        ratios["step"].append(rota["step_s"] / plain["step_s"])
        ratios["mean"].append(rota["mean_s"] / plain["mean_s"])
        ratios["start"].append(rota["start_s"] / plain["start_s"])
        plain_steps_s.append(plain["step_s"])
        plain_starts_s.append(plain["start_s"])
    figures = {name + "_ratio": statistics.median(values) for name, values in ratios.items() if name != "mean"}
    details = {
        "mean_step_ratio": statistics.median(ratios["mean"]),
        "spreads": {name: harness.spread(values) for name, values in ratios.items()},
        "plain_step_s": statistics.median(plain_steps_s),
        "plain_start_s": statistics.median(plain_starts_s),
        "pairs": pairs,
        "steps": steps,
    }
    harness.finish("overhead", figures, details, chosen)


def _run(arm: str, *, steps: int, core: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        times = Path(place) / "times.json"
        environment = os.environ | {
            "BENCH_TIMES": str(times),
            "BENCH_STEPS": str(steps),
            "BENCH_CORE": str(core),
            "BENCH_SAVE_EVERY": str(max(1, steps // 4)),
            "OMP_NUM_THREADS": "1",
        }
        if arm == "plain":
            command = [sys.executable, str(HERE / "overhead_plain.py")]
        else:
            command = [sys.executable, "-m", "rota", "run", str(HERE / "overhead_sweep.py"), "--out", f"{place}/run"]
        started_s = time.time()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(f"the {arm} arm failed:\n{done.stderr}")
        times_s = json.loads(times.read_text())
    # The first steps allocate memory and are slow in both arms.
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)][10:]
    return {
        "start_s": times_s[0] - started_s,
        "step_s": statistics.median(gaps_s),
        "mean_s": statistics.fmean(gaps_s),
    }


if __name__ == "__main__":
    main()
