"""What rota costs on one device: its median step and its start against a plain PyTorch script.

    python -m bench.overhead [--quick] [--json]

Both arms run the same model on the same core with one thread, and note the time at each call of the loss function. For
the start, whole commands run one after another, in turns. For the step, both live at the same time and train in turns
of 25 steps, so that a machine that becomes slower or faster meanwhile does so for both.
"""

from __future__ import annotations

import contextlib
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
from bench.overhead_model import ARMS, CHUNK
from rota.cluster.discover import available_cores

HERE = Path(__file__).parent
# The first steps allocate memory and are slow in both arms.
WARM_UP = 5
_MOST_S = 600.0


def main() -> None:
    """Measure both and print the ratios."""
    chosen = harness.options(__doc__)
    pairs, steps = (2, 200) if chosen.quick else (12, 2000)
    starts_s = _starts(pairs)
    chunks = _steps(steps)
    start_ratios = [rota / plain for plain, rota in zip(starts_s["plain"], starts_s["rota"], strict=True)]
    # The k-th chunks of the arms ran one right after the other.
    step_ratios = [
        statistics.median(rota) / statistics.median(plain)
        for plain, rota in zip(chunks["plain"], chunks["rota"], strict=True)
    ]
    totals_s = {arm: statistics.fmean(gap for chunk in chunks[arm] for gap in chunk) for arm in ARMS}
    figures = {"step_ratio": statistics.median(step_ratios), "start_ratio": statistics.median(start_ratios)}
    details = {
        "mean_step_ratio": totals_s["rota"] / totals_s["plain"],
        "step_ratio_spread": harness.spread(step_ratios),
        "start_ratio_spread": harness.spread(start_ratios),
        "plain_step_s": statistics.median(gap for chunk in chunks["plain"] for gap in chunk),
        "plain_start_s": statistics.median(starts_s["plain"]),
        "pairs": pairs,
        "steps": steps,
        "checkpoint_every_steps": SAVE_EVERY,
    }
    harness.finish("overhead", figures, details, chosen)


SAVE_EVERY = 90
"""About every two seconds, far more often than by default (30 s, and at most 1% of the time). Not a multiple of the
chunk, so that a checkpoint is written while its own arm trains."""


def _starts(pairs: int) -> dict[str, list[float]]:
    """From the command to the first step, in turns; each goes first as often, for the second finds warmer caches."""
    starts_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for pair in range(pairs):
        for arm in ARMS if pair % 2 else reversed(ARMS):
            with tempfile.TemporaryDirectory() as place:
                started_s = time.time()
                _wait({arm: _start(arm, place, steps=3)})
                starts_s[arm].append(_times(arm, place)[0] - started_s)
    return starts_s


def _steps(steps: int) -> dict[str, list[list[float]]]:
    """The times between steps, chunk by chunk."""
    with tempfile.TemporaryDirectory() as place:
        for arm in ARMS:
            os.mkfifo(f"{place}/{arm}")
        processes = {arm: _start(arm, place, steps=steps, turns=True) for arm in ARMS}
        _wait(processes)
        return {arm: _chunks(_times(arm, place)) for arm in ARMS}


def _chunks(times_s: list[float]) -> list[list[float]]:
    chunks = []
    for first in range(CHUNK, len(times_s) - CHUNK + 1, CHUNK):
        chunk = times_s[first : first + CHUNK]
        chunks.append([later - earlier for earlier, later in itertools.pairwise(chunk)][WARM_UP:])
    return chunks


def _start(arm: str, place: str, *, steps: int, turns: bool = False) -> subprocess.Popen[str]:
    environment = os.environ | {
        "BENCH_TIMES": f"{place}/{arm}.json",
        "BENCH_STEPS": str(steps),
        "BENCH_ARM": arm,
        "BENCH_CORE": str(available_cores()[0]),
        "BENCH_SAVE_EVERY": str(SAVE_EVERY),
        "OMP_NUM_THREADS": "1",
    }
    if turns:
        environment["BENCH_TURNS"] = place
    if arm == "plain":
        command = [sys.executable, str(HERE / "overhead_plain.py")]
    else:
        options = ["--out", f"{place}/run", "--no-profile", "--quiet"]
        command = [sys.executable, "-m", "rota", "run", str(HERE / "overhead_sweep.py"), *options]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=HERE.parent
    )


def _wait(processes: dict[str, subprocess.Popen[str]]) -> None:
    """Until all have ended. If one fails, the others end too: they take turns with it."""
    try:
        deadline_s = time.monotonic() + _MOST_S
        left = dict(processes)
        while left:
            for arm, process in list(left.items()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, error = process.communicate(timeout=0.2)
                    del left[arm]
                    if process.returncode:
                        raise SystemExit(f"the {arm} arm failed:\n{error}")
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the arms did not end within {_MOST_S:.0f} s: {', '.join(left)}")
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _times(arm: str, place: str) -> list[float]:
    times_s: list[float] = json.loads(Path(place, f"{arm}.json").read_text())
    return times_s


if __name__ == "__main__":
    main()
