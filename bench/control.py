"""The control plane at scale: 5,000 tasks on 512 devices of a virtual clock, with the journal on.

python -m bench.control [--quick] [--json]
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from bench import harness
from rota.execute.backends.simulated import SimulatedBackend, SimulatedTask
from rota.execute.events import Event
from rota.execute.record import RunRecord
from rota.execute.states import RunState
from rota.store.journal import read_events
from rota.store.run_folder import RunFolder
from rota.sweep import Sweep
from rota.task import Task
from rota.testing.runs import controlling

TASKS, DEVICES = 5000, 512
STEP_S = 5.0


def main() -> None:
    """Run it once and print."""
    chosen = harness.options(__doc__)
    sweep = _sweep()
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        started_s = time.perf_counter()
        times_s, record = _run(folder.path, sweep)
        wall_s = time.perf_counter() - started_s
        replayed = RunRecord.replay(read_events(folder.journal))
        assert replayed.counts() == record.counts() == {"finished": TASKS}
        journal_bytes = folder.journal.stat().st_size
    tenth = len(times_s) // 10
    first = (times_s[tenth] - times_s[0]) / tenth
    last = (times_s[-1] - times_s[-1 - tenth]) / tenth
    figures = {
        "tasks": TASKS,
        "devices": DEVICES,
        "wall_s": wall_s,
        "events_per_s": len(times_s) / wall_s,
        "growth": last / first,
    }
    details = {
        "events": len(times_s),
        "virtual_makespan_s": record.last_s,
        "bound_s": _bound_s(sweep),
        "journal_bytes": journal_bytes,
    }
    harness.finish("control", figures, details, chosen)


def _sweep() -> Sweep:
    lengths = random.Random(0)

    def nothing(*_: object) -> None:
        raise AssertionError("a simulated task has no code")

    tasks = tuple(
        Task(
            name=f"task-{i}",
            model=nothing,
            data=nothing,
            loss=nothing,
            optimizer=nothing,
            steps=lengths.randint(20, 200),
        )  # type: ignore[arg-type]
        for i in range(TASKS)
    )
    return Sweep(tasks=tasks)


def _plan(task: Task, devices: int) -> SimulatedTask:
    assert task.steps is not None
    # The same work for each event, whichever task it is of: otherwise the growth would show the order of tasks.
    return SimulatedTask(steps=task.steps, step_s=STEP_S, report_every=20, save_every=50)


def _bound_s(sweep: Sweep) -> float:
    steps = [task.steps or 0 for task in sweep]
    return max(sum(steps) * STEP_S / DEVICES, max(steps) * STEP_S)


def _run(path: Path, sweep: Sweep) -> tuple[list[float], RunRecord]:
    times_s: list[float] = []

    def note(_: RunRecord, event: Event | None) -> None:
        if event is not None:
            times_s.append(time.perf_counter())

    devices = [f"sim:{i}" for i in range(DEVICES)]
    with controlling(sweep, path, SimulatedBackend(_plan), devices, observer=note) as controller:
        state = controller.run()
    assert state is RunState.FINISHED
    return times_s, controller.record


if __name__ == "__main__":
    main()
