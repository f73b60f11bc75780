"""Finds what tasks cost the same: each different model, batch and optimizer is made and captured once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rota.cluster.kinds import arithmetic_of
from rota.errors import InputError, RotaError
from rota.profile.likeness import making_key
from rota.profile.predict import Subject, digest_of
from rota.runtime.first_step import first_step
from rota.runtime.planned import moments_of, needs_of
from rota.runtime.training import Training
from rota.runtime.user_code import calling
from rota.strategies.base import describe
from rota.sweep import Sweep
from rota.task import Task


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A task, what its cost depends on, and how long it is."""

    task: Task
    subject: Subject
    steps: int


def profiled(sweep: Sweep, *, notice: Callable[[str], None] = lambda sentence: None) -> list[Profiled]:
    """The tasks in their order; InputError names one that cannot be made or captured."""
    groups: dict[str, list[Task]] = {}
    for task in sweep:
        groups.setdefault(making_key(task), []).append(task)
    known: dict[Subject, Subject] = {}
    found: dict[str, Profiled] = {}
    for tasks in groups.values():
        notice(f"capturing {tasks[0].name}")
        for one in _of_group(tasks):
            # Of equal subjects one graph is kept.
            subject = known.setdefault(one.subject, one.subject)
            found[one.task.name] = Profiled(task=one.task, subject=subject, steps=one.steps)
    return [found[task.name] for task in sweep]


def _of_group(tasks: list[Task]) -> list[Profiled]:
    first = tasks[0]
    try:
        training, graph = first_step(first)
        digest = digest_of(graph)
        found = []
        for task in tasks:
            optimizer = training.optimizer if task is first else _optimizer(task, training)
            needs = needs_of(optimizer)
            subject = Subject(
                graph=graph,
                digest=digest,
                arithmetic=arithmetic_of(task.precision, float32_matmul=torch.get_float32_matmul_precision()),
                moments=moments_of(optimizer),
                whole_parameters=needs != "elements",
                replicas_only=needs == "everything",
                accumulate=task.accumulate,
                strategy=describe(task.strategy),
                devices=task.devices,
                made=None if isinstance(task.strategy, str) else task.strategy,
            )
            found.append(Profiled(task=task, subject=subject, steps=_steps(task, training)))
    except RotaError as error:
        raise InputError(f"task {first.name!r} cannot be predicted: {error}") from error
    return found


def _optimizer(task: Task, training: Training) -> torch.optim.Optimizer:
    with calling("the optimizer factory"):
        made: Any = task.optimizer(training.model)
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(f"the optimizer factory of {task.name!r} returned {type(made).__name__}")
    return made


def _steps(task: Task, training: Training) -> int:
    """As `Training` counts them; the data of all tasks of a group are the same."""
    if task.steps is not None:
        return task.steps
    per_epoch = training.cursor.batches_per_epoch
    assert task.epochs is not None
    if per_epoch is None:
        raise InputError("epochs needs training data with a length, and this iterable has none; give steps instead")
    return max(1, task.epochs * per_epoch // task.accumulate)
