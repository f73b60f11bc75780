"""Checks before anything runs: how many devices each task gets, and that its strategy can run its model on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rota.cluster import Cluster
from rota.cluster.device import LEAST_MARGIN_BYTES, too_little_to_run, too_little_to_spill
from rota.errors import InputError, RotaError
from rota.profile.likeness import code_key
from rota.sweep import Sweep
from rota.task import Task
from rota.techniques import arrived


def resolve(sweep: Sweep, *, strategy: str | None) -> Sweep:
    """The sweep with its strategies found by name; `strategy` is for all tasks, if given."""
    tasks = [replace(task, strategy=strategy) if strategy is not None else task for task in sweep]
    return replace(sweep, tasks=tuple(_found(task) for task in tasks))


def _found(task: Task) -> Task:
    # What a sweep's file registers is known here and not in the workers, so the strategy itself travels.
    try:
        return replace(task, strategy=arrived(task.strategy))
    except InputError as error:
        raise InputError(f"task {task.name!r}: {error}") from error


def check_memory(cluster: Cluster) -> None:
    """InputError for devices in which no task can run."""
    if refusal := too_little_to_run(min(device.memory_bytes for device in cluster.devices)):
        raise InputError(refusal)


def widths(sweep: Sweep, cluster: Cluster) -> dict[str, int]:
    """How many devices each task gets."""
    total = len(cluster.devices)
    shared = max(1, total // len(sweep))
    found = {task.name: _width(task, total, shared) for task in sweep}
    for task in sweep:
        if found[task.name] > total:
            raise InputError(
                f"task {task.name!r} needs {found[task.name]} devices ({task.strategy}), and there are {total}; "
                "give it fewer, or run with more (--devices)"
            )
    return found


def undecided(tasks: Sequence[Task], cluster: Cluster, widths: Mapping[str, int], objective: str) -> bool:
    """Whether it matters what tasks take: not where each says how it runs and all run at once."""
    if len(cluster.devices) == 1:
        return objective != "makespan"
    alike = len({(device.kind, device.label) for device in cluster.devices}) == 1
    at_once = sum(widths[task.name] for task in tasks) <= len(cluster.devices)
    return not (alike and at_once and all(task.strategy != "auto" for task in tasks))


def _width(task: Task, total: int, shared: int) -> int:
    fixed = getattr(task.strategy, "fixed_devices", None)
    if task.devices is not None:
        if fixed is not None and fixed != task.devices:
            raise InputError(
                f"task {task.name!r}: {task.strategy} is for {fixed} devices, and devices is {task.devices}; change one"
            )
        return task.devices
    if fixed is not None:
        return int(fixed)
    if task.strategy == "single":
        return 1
    return shared if task.strategy == "auto" else total


def check(
    sweep: Sweep, allotted: dict[str, int], cluster: Cluster, *, notice: Callable[[str], None] = lambda text: None
) -> None:
    """Plan the first batch of each task whose strategy the user chose. InputError names the task that cannot run."""
    memory_bytes = min(device.memory_bytes for device in cluster.devices)
    for task in sweep:
        if getattr(task.strategy, "spills", False) and memory_bytes <= LEAST_MARGIN_BYTES:
            raise InputError(f"task {task.name!r} cannot run as {task.strategy}: {too_little_to_spill(memory_bytes)}")
    if all(isinstance(task.strategy, str) or is_planned_by_workers(task.strategy) for task in sweep):
        return
    from rota.runtime import first_step
    from rota.runtime.planned import check_optimizer

    known: set[str] = set()
    for task in sweep:
        if isinstance(task.strategy, str) or is_planned_by_workers(task.strategy):
            continue
        key = code_key(task, width=allotted[task.name])
        if key in known:
            continue
        known.add(key)
        notice(f"planning {task.name}")
        try:
            training, graph = first_step.first_step(task)
            plan = task.strategy(graph, allotted[task.name])
            if not hasattr(plan, "compile"):
                raise InputError(f"its strategy returned {type(plan).__name__}; it must return a rota.Plan")
            if plan.devices != allotted[task.name]:
                raise InputError(f"its plan is for {plan.devices} devices, and the task has {allotted[task.name]}")
            check_optimizer(training.optimizer, plan.compile(memory_bytes=memory_bytes), _words(task.strategy))
        except RotaError as error:
            raise InputError(f"task {task.name!r} cannot run as {_words(task.strategy)}: {error}") from error
        except Exception as error:  # the user's strategy
            if type(task.strategy).__module__.startswith("rota."):
                raise
            raise InputError(
                f"task {task.name!r}: the strategy {_words(task.strategy)} raised {type(error).__name__}: {error}"
            ) from error


def _words(strategy: Any) -> str:
    from rota.strategies.base import describe

    return describe(strategy)


def is_planned_by_workers(strategy: Any) -> bool:
    """Whether nothing can be looked at beforehand.

    PyTorch's own and techniques make no plan, and what spills may be larger than the memory of this process, too.
    """
    return hasattr(strategy, "execute") or getattr(strategy, "spills", False)
