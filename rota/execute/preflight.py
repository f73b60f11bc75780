"""Checks before anything runs: how many devices each task gets, and that its strategy can run its model on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rota.cluster import Cluster
from rota.cluster.device import LEAST_MARGIN_BYTES, too_little_to_run, too_little_to_spill
from rota.errors import CaptureError, InputError, RotaError
from rota.profile.likeness import code_key
from rota.sweep import Sweep
from rota.task import Task
from rota.techniques import arrived

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rota.graph.graph import Graph


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


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A sweep that can run."""

    sweep: Sweep
    """With the strategies that its tasks run by."""
    widths: dict[str, int]
    """How many devices each task gets."""
    notes: tuple[str, ...]
    """What does not run as it was asked for."""


def ready(sweep: Sweep, cluster: Cluster, *, strict: bool = False) -> Ready:
    """Plan the first batch of each task whose strategy the user chose. InputError names a task that cannot run.

    A model that cannot be captured needs no strategy to run on one device: so it does, unless the user is `strict`.
    """
    memory_bytes = min(device.memory_bytes for device in cluster.devices)
    allotted = widths(sweep, cluster)
    known: dict[str, str] = {}
    tasks, notes = [], []
    for task in sweep:
        words, width = _words(task.strategy), allotted[task.name]
        reason = ""
        if spills(task.strategy) and memory_bytes <= LEAST_MARGIN_BYTES:
            raise InputError(f"task {task.name!r} cannot run as {words}: {too_little_to_spill(memory_bytes)}")
        if needs_graph(task.strategy) and (strict or not spills(task.strategy)):
            key = code_key(task, width=width)
            if key not in known:
                known[key] = _uncaptured(task, width, memory_bytes)
            reason = known[key]
        if reason and strict:
            raise InputError(
                f"task {task.name!r} cannot run as {words}: {reason}; without --strict (strict=True) it runs on one "
                "device"
            )
        if reason:
            task = replace(task, strategy="single", devices=None)
            allotted[task.name] = 1
            notes.append(
                f"{task.name}: {reason}; it runs on one device instead of as {words} (torch_ddp and torch_fsdp2 need "
                "no capture, and --strict refuses the sweep)"
            )
        tasks.append(task)
    return Ready(sweep=replace(sweep, tasks=tuple(tasks)), widths=allotted, notes=tuple(notes))


def _uncaptured(task: Task, width: int, memory_bytes: int) -> str:
    """Why the model cannot be captured; nothing if it can, and InputError if it cannot run for another reason."""
    try:
        if spills(task.strategy):
            from rota.memory.look import check_captured

            check_captured(task, memory_bytes=memory_bytes)
        else:
            _plan(task, width, memory_bytes)
    except CaptureError as error:
        return str(error)
    except RotaError as error:
        raise InputError(f"task {task.name!r} cannot run as {_words(task.strategy)}: {error}") from error
    except Exception as error:  # the user's strategy
        if type(task.strategy).__module__.startswith("rota."):
            raise
        raise InputError(
            f"task {task.name!r}: the strategy {_words(task.strategy)} raised {type(error).__name__}: {error}"
        ) from error
    return ""


def _plan(task: Task, width: int, memory_bytes: int) -> None:
    """Make the plan of the first batch."""
    from rota.runtime import first_step

    training, graph = first_step.first_step(task)
    with _refusing_unplanned(task):
        _check_plan(task, graph, training.optimizer, width, memory_bytes)


@contextlib.contextmanager
def _refusing_unplanned(task: Task) -> Iterator[None]:
    """What rota's own strategy raises about a graph of the user's is about this model, not about the sweep."""
    try:
        yield
    except RotaError:
        raise
    except Exception as error:
        if not type(task.strategy).__module__.startswith("rota."):
            raise
        told = next(iter(str(error).splitlines()), "")
        raise CaptureError(f"rota cannot plan the ops of its model ({type(error).__name__}: {told})") from error


def _check_plan(task: Task, graph: Graph, optimizer: Optimizer, width: int, memory_bytes: int) -> None:
    from rota.runtime.planned import check_optimizer

    plan = task.strategy(graph, width)
    if not hasattr(plan, "compile"):
        raise InputError(f"its strategy returned {type(plan).__name__}; it must return a rota.Plan")
    if plan.devices != width:
        raise InputError(f"its plan is for {plan.devices} devices, and the task has {width}")
    check_optimizer(optimizer, plan.compile(memory_bytes=memory_bytes), _words(task.strategy))


def _words(strategy: Any) -> str:
    if isinstance(strategy, str):
        return strategy
    from rota.strategies.base import describe

    return describe(strategy)


def needs_graph(strategy: Any) -> bool:
    """Whether it is a strategy of the user's choice that makes a plan; PyTorch's own and techniques make none."""
    return not isinstance(strategy, str) and not hasattr(strategy, "execute")


def spills(strategy: Any) -> bool:
    """Whether its model may be larger than the memory of this process: workers look at it."""
    return bool(getattr(strategy, "spills", False))
