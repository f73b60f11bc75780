"""A real sweep on two CPU devices: rota, with its profiling, against what people do and what simple rules do.

python -m bench.sweep [--quick] [--json]

Every arm trains the same thirteen tasks to their end. The others follow their own schedule, made from what rota has
measured before (which costs them nothing); rota starts with an empty cache, measures, schedules and trains, and then
once more with what it knows. The bound is that of the step times that were lived through in any of these runs: what was
measured beforehand is not what the machine does later. With --quick there are three tasks of a few steps, and
the others share their workers: what profiling and starting take is then the larger part of the whole.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import harness
from bench.sweep_tasks import quick_sweep, sweep
from rota.cluster import Cluster, local
from rota.execute.backends.local import LocalBackend
from rota.execute.events import Event
from rota.execute.forecast import Forecast, forecast
from rota.execute.preflight import widths
from rota.execute.record import RunRecord
from rota.execute.run import RunOptions, Source, run_source
from rota.execute.scheduled import Scheduled
from rota.execute.solvers import InlineSolver
from rota.execute.states import RunState
from rota.runtime.messages import Began, Finished
from rota.schedule.bounds import lower_bound
from rota.schedule.heuristics import HEURISTICS
from rota.schedule.replan import Left, intents_of, problem_of
from rota.store.journal import read_events
from rota.store.run_folder import RunFolder
from rota.sweep import Sweep
from rota.testing.runs import controlling

RULES = ("max", "min", "optimus", "random")
MEMORY, QUICK_MEMORY = "640MiB", "96MiB"


Way = tuple[str, str, int]
"""Task, strategy, number of devices."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What a run took."""

    seconds: float
    before_s: float
    """Until the first task began to train."""
    lived_s: Mapping[Way, float]
    """What a step took."""


def main() -> None:
    """Train it all."""
    chosen = harness.options(__doc__)
    tasks, memory, rounds = (quick_sweep(), QUICK_MEMORY, 1) if chosen.quick else (sweep(0.7), MEMORY, 2)
    cluster = local(devices=2, memory=memory, kind="cpu")
    times: dict[str, list[Arm]] = {name: [] for name in (*RULES, "rota", "rota_again")}
    with tempfile.TemporaryDirectory() as root:
        place = Path(root)
        with closing(LocalBackend(cluster)) as backend:
            known = _known(tasks, cluster, backend, place)
            for name in RULES if chosen.quick else ():
                times[name].append(_rule(name, tasks, cluster, backend, place / name, known, seed=0))
        for turn in range(rounds):
            for name in () if chosen.quick else RULES if turn % 2 else RULES[::-1]:
                with closing(LocalBackend(cluster)) as backend:
                    arm = _rule(name, tasks, cluster, backend, place / f"{name}-{turn}", known, seed=turn)
                times[name].append(arm)
            cache = place / f"cache-{turn}"
            times["rota"].append(_rota(tasks, cluster, place / f"rota-{turn}", cache))
            times["rota_again"].append(_rota(tasks, cluster, place / f"again-{turn}", cache))
    _finish(times, known, chosen)


def _finish(times: dict[str, list[Arm]], known: Forecast, chosen: Any) -> None:
    middle = {name: statistics.median(arm.seconds for arm in arms) for name, arms in times.items()}
    before = {name: statistics.median(arm.before_s for arm in arms) for name, arms in times.items()}
    assert known.solved is not None
    bound_s = _lived_bound_s(known, [arm for arms in times.values() for arm in arms])
    # The workers' own start is in every arm, and none of it is profiling.
    start_s = min(before[name] for name in RULES)
    names = {"vs_current_practice": "max", "vs_min": "min", "vs_optimus": "optimus", "vs_random": "random"}
    figures: dict[str, Any] = {key: middle[name] / middle["rota"] for key, name in names.items()}
    figures["of_bound"] = (middle["rota"] - start_s) / bound_s
    profiling_s = max(0.0, before["rota"] - start_s)
    figures["profiling_share"] = profiling_s / middle["rota"]
    # Optimus decides by rota's estimates and is given them; this is what it would take if it had to measure them.
    figures["vs_optimus_measuring"] = (middle["optimus"] + profiling_s) / middle["rota"]
    figures["profiling_share_again"] = max(0.0, before["rota_again"] - start_s) / middle["rota_again"]
    details = {
        "seconds": {name: [arm.seconds for arm in arms] for name, arms in times.items()},
        "before_s": {name: [arm.before_s for arm in arms] for name, arms in times.items()},
        "bound_s": bound_s,
        "bound_beforehand_s": known.solved.bound,
        "predicted_s": {name: value.makespan_s for name, value in known.solved.heuristics.items()}
        | {"rota": known.solved.value.makespan_s},
        "chosen": {one.task: f"{one.label} on {len(one.devices)}" for one in known.intents},
        "ways": {
            task: {f"{way.label} on {way.devices}": way.step_s for way in ways}
            for task, ways in known.profile.estimates.items()
        },
    }
    harness.finish("sweep", figures, details, chosen)


def _lived_bound_s(known: Forecast, arms: Sequence[Arm]) -> float:
    """No schedule is shorter, with steps as they were lived through."""
    lived: dict[Way, list[float]] = defaultdict(list)
    for arm in arms:
        for (task, label, devices), step_s in arm.lived_s.items():
            lived[known.profile.classes[task], label, devices].append(step_s)
    left = []
    for task, ways in known.profile.estimates.items():
        of_class = known.profile.classes[task]
        seen = {way: lived.get((of_class, way.label, way.devices), []) for way in ways}
        # A way that nobody went is off by as much as the others were.
        off = statistics.median(statistics.median(found) / way.step_s for way, found in seen.items() if found)
        steps_s = {way: statistics.median(found) if found else way.step_s * off for way, found in seen.items()}
        estimates = tuple(replace(way, step_s=step_s, start_s=0.0) for way, step_s in steps_s.items())
        left.append(Left(task=task, steps=float(known.profile.steps[task]), estimates=estimates))
    return lower_bound(problem_of(left, known.nodes))


def _known(tasks: Sweep, cluster: Cluster, backend: LocalBackend, place: Path) -> Forecast:
    """What rota measures, for the others."""
    os.environ["ROTA_CACHE"] = str(place / "cache")
    return forecast(
        tasks,
        cluster=cluster,
        backend=backend,
        folder=place / "profile",
        widths=widths(tasks, cluster),
        thorough=True,
        worth_s=0.0,
    )


def _rule(
    name: str, tasks: Sweep, cluster: Cluster, backend: LocalBackend, path: Path, known: Forecast, *, seed: int
) -> Arm:
    """Train by a simple rule's schedule, which nothing changes."""
    intents = intents_of(known.problem, HEURISTICS[name](known.problem, seed), now_s=0.0)
    policy = Scheduled(
        estimates=known.profile.estimates,
        classes=known.profile.classes,
        nodes=known.nodes,
        solver=InlineSolver(),
        intents=intents,
        replan=False,
    )
    devices = [device.name for device in cluster.devices]
    started_s = time.perf_counter()
    with controlling(tasks, path, backend, devices, policy=policy) as controller:
        backend.warm_up(len(devices))
        state = controller.run()
        seconds = time.perf_counter() - started_s
    assert state is RunState.FINISHED, {task.name: task.reason for task in controller.record.tasks.values()}
    return _arm(RunFolder(path), seconds)


def _rota(tasks: Sweep, cluster: Cluster, path: Path, cache: Path) -> Arm:
    """All of rota, as a user runs it."""
    os.environ["ROTA_CACHE"] = str(cache)
    started_s = time.perf_counter()
    result = run_source(lambda: Source(sweep=tasks), RunOptions(cluster=cluster, out=path, progress=False))
    seconds = time.perf_counter() - started_s
    assert result.state is RunState.FINISHED, [task.reason for task in result.tasks]
    return _arm(RunFolder(path), seconds)


def _arm(folder: RunFolder, seconds: float) -> Arm:
    events = list(read_events(folder.journal))
    first_s = next(time_s for time_s, event in events if isinstance(event, Began))
    arm = Arm(seconds=seconds, before_s=first_s - events[0][0], lived_s=_lived(events))
    shutil.rmtree(folder.path)
    return arm


def _lived(events: Sequence[tuple[float, Event]]) -> dict[Way, float]:
    """What a step took in the last way of each task."""
    record = RunRecord()
    found = {}
    for time_s, event in events:
        if isinstance(event, Finished):
            task = record.tasks[event.task]
            assert task.began_s is not None
            assert task.total_steps is not None
            steps = max(1, task.total_steps - task.began_step)
            found[task.name, task.strategy, len(task.devices)] = (time_s - task.began_s) / steps
        record.apply(event, time_s)
    return found


if __name__ == "__main__":
    main()
