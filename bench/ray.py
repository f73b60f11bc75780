"""The same sweep on Ray on one node against the local backend, start-up apart, arms interleaved.

python -m bench.ray [--quick] [--json] [--keep]

What counts is the time of the device that takes longest, from its first task's first step to the end of its last, as
the journal has it: workers and actors start before that in both arms. One run of the same arm may take a tenth longer
than the next on a machine whose cores others use as well, so that there are many short pairs, and the median of their
ratios counts.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import harness
from rota.execute.events import Launched
from rota.runtime.messages import Began, Finished
from rota.store.journal import read_events

SWEEP = """
import torch, rota
import torch.nn.functional as F
from rota.testing.models import GPT

ROWS = torch.randint(0, 128, (256, 65), generator=torch.Generator().manual_seed(1))


def task(number):
    return rota.Task(
        name=f"t{{number}}",
        model=lambda: GPT(vocabulary=128, context=64, width=128, depth=2, heads=4),
        data=lambda: rota.Data(train=ROWS, batch_size=8),
        loss=lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3 * (number + 1)),
        steps={steps},
        strategy="single",
    )


sweep = rota.Sweep(tasks=[task(number) for number in range(6)])
"""


def measured_s(folder: Path, arm: str, round_: int) -> float:
    """Run the sweep in a process of its own."""
    out = folder / f"{arm}-{round_}"
    more = ["--cluster", "ray"] if arm == "ray" else ["--devices", "2"]
    command = [sys.executable, "-m", "rota", "run", str(folder / "sweep.py"), "--out", str(out), "--no-profile"]
    done = subprocess.run(
        [*command, "--memory", "1GiB", "--quiet", *more], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"the {arm} arm failed: {done.stderr[-2000:]}")
    device_of: dict[str, str] = {}
    began_s: dict[str, float] = {}
    ended_s: dict[str, float] = {}
    for time_s, event in read_events(out / "journal.db"):
        if isinstance(event, Launched):
            (device_of[event.task],) = event.devices
        elif isinstance(event, Began):
            began_s.setdefault(device_of[event.task], time_s)
        elif isinstance(event, Finished):
            ended_s[device_of[event.task]] = time_s
    return max(ended_s[device] - began_s[device] for device in ended_s)


def main() -> None:
    """Both arms, in turns."""
    chosen = harness.options(__doc__)
    steps, rounds = (60, 1) if chosen.quick else (200, 9)
    found: dict[str, list[float]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "sweep.py").write_text(SWEEP.format(steps=steps))
        for round_ in range(rounds):
            for arm in ("local", "ray") if round_ % 2 == 0 else ("ray", "local"):
                found[arm].append(measured_s(folder, arm, round_))
    ratios = [ray_s / local_s for ray_s, local_s in zip(found["ray"], found["local"], strict=True)]
    figures: dict[str, Any] = {"ray_vs_local": statistics.median(ratios)}
    details = {f"{arm}_s": harness.spread(times) for arm, times in found.items()} | {"ratios": harness.spread(ratios)}
    harness.finish("ray", figures, details, chosen)


if __name__ == "__main__":
    main()
