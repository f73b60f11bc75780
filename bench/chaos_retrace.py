"""What a task must come to that went on with another number of devices: the same widths again, without a fault.

Sums over several devices are added in another order, and the last bits grow. So such a task equals no run of one width;
it equals, bit for bit, one that changes its width at the same steps.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

import rota
from rota.execute.events import Launched
from rota.runtime.messages import Began
from rota.store.journal import Journal, read_events
from rota.store.run_folder import RunFolder

_ENDS_S = 300.0
WHERE = ("--devices", "2", "--memory", "1GiB")
"""The options of runs that nothing befalls."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps that were taken on so many devices and counted."""

    width: int
    begin: int
    end: int


def stretches(run: Path, task: str, total: int) -> list[Stretch]:
    """The way of a task through all its attempts."""
    width, began = 0, list[tuple[int, int]]()
    for _, event in read_events(run / "journal.db"):
        if isinstance(event, Launched) and event.task == task:
            width = len(event.devices)
        elif isinstance(event, Began) and event.task == task:
            # What was taken after the checkpoint that this one begins with does not count.
            began = [one for one in began if one[1] < event.from_step]
            if not began or began[-1][0] != width:
                began.append((width, event.from_step))
    ends = [begin for _, begin in began[1:]] + [total]
    return [Stretch(width=width, begin=begin, end=end) for (width, begin), end in zip(began, ends, strict=True)]


def retraced(way: Sequence[Stretch], task: str, *, file: Path, run: Path) -> list[rota.Result]:
    """A task of the sweep in `file` goes this way without a fault: a run for each stretch, beside the file."""
    results: list[rota.Result] = []
    for number, stretch in enumerate(way):
        out = file.parent / f"{run.name}-{task}-{number}"
        sweep = file.parent / f"{out.name}.py"
        sweep.write_text(
            f"{file.read_text()}\nimport dataclasses\nsweep = rota.Sweep(tasks=[dataclasses.replace(one, steps="
            f"{stretch.end}, devices={stretch.width}) for one in sweep.tasks if one.name == {task!r}])\n"
        )
        if results:
            before = results[-1].path / "tasks" / task / "checkpoints"
            shutil.copytree(before, out / "tasks" / task / "checkpoints")
            Journal(RunFolder(out).journal).close()  # a run that has not begun yet; what is in its folder is its own
        command = [sys.executable, "-m", "rota", "run", str(sweep), "--out", str(out), *WHERE]
        subprocess.run([*command, "--no-profile", "--quiet"], check=True, timeout=_ENDS_S, stdout=subprocess.DEVNULL)
        results.append(rota.open_run(out))
    return results


def difference(result: rota.Result, rights: Sequence[rota.Result], task: str, way: Sequence[Stretch]) -> str:
    """What is other in a task's weights and its history than in runs of its stretches; nothing if all is the same."""
    mine, its = result.task(task).model_path, rights[-1].task(task).model_path
    assert mine is not None
    assert its is not None
    found, wanted = load_file(mine), load_file(its)
    told = []
    if not all(torch.equal(found[name], value) for name, value in wanted.items()):
        off = max(float((found[name] - value).abs().max()) for name, value in wanted.items())
        told.append(f"weights that are off by {off:.1e}")
    rows = [
        row
        for right, stretch in zip(rights, way, strict=True)
        for row in right.history(task)
        if stretch.begin < row["step"] <= stretch.end
    ]
    # A run of a stretch ends with a validation, the task itself did not.
    ends = {stretch.end for stretch in way[:-1]}
    if [_without(ends, row) for row in result.history(task)] != [_without(ends, row) for row in rows]:
        told.append("another history")
    return " and ".join(told)


def _without(ends: set[int], row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if row["step"] not in ends or not name.startswith("valid")}
