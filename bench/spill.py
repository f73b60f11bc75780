"""A GPT whose training state is eight times its memory, against the same training with all the memory it wants.

python -m bench.spill [--quick] [--json] [--huge]

Every arm is a process of its own: the same model, batches, optimizer (AdamW, fused) and threads. Arms take turns, two
rounds of each; ratios are those of the medians of their steps after the first three, in which rota measures its stages.
All arms but plain PyTorch run in a control group that the system keeps within 1.1 of their memory, page cache and all
(where a group can be made: it needs root; `confined` says so). What they took is measured as well.

The mapped arm is plain PyTorch on tensors that are files, under the same limit. Small batches are 64 tokens, where
moving cannot hide. `--huge` trains 2 billion parameters, 32 GB of state, with 4 GiB, for some steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from typing import Any

from bench import harness
from bench.spill_arm import Setting
from rota.runtime.limits import HUGE_PAGES

OVER = 8
WARM = 3
_PATIENCE_S = 3600.0


def main() -> None:
    """Compare."""
    parser = harness.parser(__doc__)
    parser.add_argument("--huge", action="store_true", help="train a model whose state is larger than the memory")
    chosen = parser.parse_args()
    if chosen.huge:
        huge(chosen)
        return
    setting = Setting(arm="memory", width=1024, depth=12, rows=8, length=128, steps=6)
    rounds = 2
    arms = ["memory", "spill", "mapped", "no_prefetch", "no_clean_tracking", "recompute_only"]
    if chosen.quick:
        setting, rounds = replace(setting, width=768, depth=8, rows=4, steps=5), 1
        arms = ["memory", "spill", "mapped"]
    setting = replace(setting, memory_bytes=setting.state_bytes // OVER)
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            runs[arm].append(run(replace(setting, arm=arm)))
    small = {}
    if not chosen.quick:
        tiny = replace(setting, rows=1, length=64)
        small = {arm: [run(replace(tiny, arm=arm))] for arm in ("memory", "spill")}
    figures = figures_of(setting, runs)
    if small:
        figures["small_batch"] = median_s(small["memory"]) / median_s(small["spill"])
    harness.finish("spill", figures, {"runs": runs, "small": small}, chosen)


def figures_of(setting: Setting, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The ratios."""
    memory_s, spill_s = median_s(runs["memory"]), median_s(runs["spill"])
    found: dict[str, Any] = {
        "state_over_budget": setting.state_bytes / setting.memory_bytes,
        "throughput_vs_memory": memory_s / spill_s,
        "peak_over_budget": max(one["peak_bytes"] for one in runs["spill"]) / setting.memory_bytes,
        "bit_equal": all(
            one["losses"] == runs["memory"][0]["losses"] for arm in runs if arm != "mapped" for one in runs[arm]
        ),
        "vs_mmap": median_s(runs["mapped"]) / spill_s,
    }
    for arm in ("no_prefetch", "no_clean_tracking", "recompute_only"):
        if arm in runs:
            found[arm] = memory_s / median_s(runs[arm])
    return found


def median_s(runs: list[dict[str, Any]]) -> float:
    """Of all steps after the first few."""
    return statistics.median(step_s for one in runs for step_s in one["steps_s"][WARM:])


def huge(chosen: Any) -> None:
    """More than the machine has."""
    setting = Setting(
        arm="spill",
        width=2560,
        depth=25,
        rows=8,
        length=128,
        steps=2 if chosen.quick else 6,
        memory_bytes=4 * 2**30,
        lr=2e-5,  # two billion parameters want small steps
    )
    found = run(setting)
    losses = found["losses"]
    figures = {
        "parameters": setting.state_bytes // 16,
        "state_bytes": setting.state_bytes,
        "machine_bytes": harness.machine()["memory_bytes"],
        "losses": losses,
        "falls": sum(losses[-2:]) < sum(losses[:2]),  # of the same two batches, which come again after four steps
        "step_s": statistics.median(found["steps_s"][1:]),
        "peak_over_budget": found["peak_bytes"] / setting.memory_bytes,
    }
    harness.finish("spill_huge", figures, {"run": found}, chosen)


def run(setting: Setting) -> dict[str, Any]:
    """One arm, in a process of its own; its own words if it fails."""
    environment = dict(os.environ)
    if setting.arm != "memory":  # plain PyTorch is no faster with it
        environment.setdefault(*HUGE_PAGES)
    with tempfile.TemporaryDirectory(dir=os.getcwd(), prefix=".bench-spill-") as folder:
        told = json.dumps(asdict(replace(setting, folder=folder)))
        done = subprocess.run(
            [sys.executable, "-m", "bench.spill_arm", told],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"the arm {setting.arm} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    del found["setting"]["folder"]  # of this machine only
    return found


if __name__ == "__main__":
    main()
