"""A GPT whose training state is eight times its memory, against the same training with all the memory it wants.

python -m bench.spill [--quick] [--json] [--huge]

Every arm is a process of its own: the same model, batches, optimizer (AdamW, fused) and threads. They take turns of two
steps, each beside a turn of plain PyTorch, because the machine's own pace changes within minutes; a turn ends when
nothing moves any more. A ratio is the median of those of the turns. The first three steps, in which rota measures its
stages, do not count. All arms but plain PyTorch run in a control group that the system keeps within 1.1 of their
memory, page cache and all (where a group can be made: it needs root; `confined` says so). What they took is measured
as well.

The mapped arm is plain PyTorch on tensors that are files, under the same limit. Small batches are 64 tokens, where
moving cannot hide. `--huge` trains 2 billion parameters, 32 GB of state, with 4 GiB, for some steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from bench import harness
from bench.spill_arm import Setting
from rota.runtime.limits import prepare

OVER = 8
WARM = 3
TURN = 2
"""Steps."""
ROUNDS = {"spill": 4, "mapped": 1, "no_prefetch": 1, "no_clean_tracking": 1, "recompute_only": 1}


def main() -> None:
    """Compare."""
    parser = harness.parser(__doc__)
    parser.add_argument("--huge", action="store_true", help="train a model whose state is larger than the memory")
    chosen = parser.parse_args()
    if chosen.huge:
        huge(chosen)
        return
    setting, rounds = Setting(arm="memory", width=1024, depth=12, rows=8, length=128, steps=64), ROUNDS
    if chosen.quick:
        setting, rounds = replace(setting, width=512, rows=2), {"spill": 2, "mapped": 1}
    setting = replace(setting, memory_bytes=setting.state_bytes // OVER)
    compared = compare(setting, rounds, quick=chosen.quick)
    figures = figures_of(setting, compared)
    details: dict[str, Any] = {"setting": asdict(setting), "arms": compared}
    figures["small_batch"] = harness.LEFT_OUT
    if not chosen.quick:
        details["small"] = compare(replace(setting, rows=1, length=64), {"spill": 4})
        figures["small_batch"] = ratio(details["small"]["spill"])
    del details["setting"]["folder"]  # of this machine only
    harness.finish("spill", figures, details, chosen)


def compare(setting: Setting, rounds: dict[str, int], *, quick: bool = False) -> dict[str, dict[str, Any]]:
    """Each arm, as often as is wanted, in turns with plain PyTorch; quick takes one step where others take several."""
    found: dict[str, dict[str, Any]] = {}
    warm, turn = (1, 1) if quick else (WARM, TURN)
    with started(replace(setting, arm="memory")) as memory:
        memory.turn(warm)
        for arm, count in rounds.items():
            with started(replace(setting, arm=arm)) as other:
                other.turn(warm)
                pairs = [(memory.turn(turn)["step_s"], other.turn(turn)["step_s"]) for _ in range(count)]
            found[arm] = {"memory_and_arm_step_s": pairs, "losses": other.losses, **other.facts}
    found["memory"] = {"losses": memory.losses, **memory.facts}
    return found


def ratio(arm: dict[str, Any]) -> float:
    """How fast an arm is if plain PyTorch is 1."""
    return statistics.median(memory_s / arm_s for memory_s, arm_s in arm["memory_and_arm_step_s"])


def figures_of(setting: Setting, compared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The ratios."""
    exact = [one["losses"] for name, one in compared.items() if name not in ("memory", "mapped")]
    found: dict[str, Any] = {
        "state_over_budget": setting.state_bytes / setting.memory_bytes,
        "throughput_vs_memory": ratio(compared["spill"]),
        "peak_over_budget": compared["spill"]["peak_bytes"] / setting.memory_bytes,
        "bit_equal": all(losses == compared["memory"]["losses"][: len(losses)] for losses in exact),
        "vs_mmap": ratio(compared["spill"]) / ratio(compared["mapped"]),
    }
    for arm in ("no_prefetch", "no_clean_tracking", "recompute_only"):
        found[arm] = ratio(compared[arm]) if arm in compared else harness.LEFT_OUT
    return found


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
    with started(setting) as arm:
        steps_s = [arm.turn(1)["step_s"] for _ in range(setting.steps)]
    losses = arm.losses
    figures = {
        "parameters": setting.state_bytes // 16,
        "state_bytes": setting.state_bytes,
        "machine_bytes": harness.machine()["memory_bytes"],
        "losses": losses,
        "falls": sum(losses[-2:]) < sum(losses[:2]),  # of the same two batches, which come again after four steps
        "step_s": statistics.median(steps_s[1:]),
        "peak_over_budget": arm.facts["peak_bytes"] / setting.memory_bytes,
    }
    harness.finish("spill_huge", figures, {"steps_s": steps_s, "facts": arm.facts}, chosen)


class Arm:
    """A process that trains when it is its turn."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self._process = process
        self._name = name
        self.losses: list[float] = []
        self.facts: dict[str, Any] = {}
        """Known when it has ended."""

    def turn(self, steps: int) -> dict[str, Any]:
        """So many steps."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        found = self._answer()
        self.losses += found["losses"]
        return found

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.facts = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the arm {self._name} ended with {self._process.wait()}; see what it said above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def started(setting: Setting) -> Iterator[Arm]:
    """An arm, in a process and a folder of its own."""
    environment = dict(os.environ)
    if setting.arm != "memory":  # plain PyTorch is no faster with it
        prepare(environment)
    with tempfile.TemporaryDirectory(dir=os.getcwd(), prefix=".bench-spill-") as folder:
        command: Sequence[str] = [
            sys.executable,
            "-m",
            "bench.spill_arm",
            json.dumps(asdict(replace(setting, folder=folder))),
        ]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                arm = Arm(process, setting.arm)
                yield arm
                arm.end()
            finally:
                process.kill()


if __name__ == "__main__":
    main()
