"""The plain PyTorch training loop that rota must equal, bit for bit.

It uses PyTorch's own loader and sampler and shares no code with `rota.runtime`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

from rota.graph.batch import mapped
from rota.task import Data, Task, is_map_style


@dataclass(frozen=True, kw_only=True)
class PlainResult:
    """What the plain loop ends with."""

    model: torch.nn.Module
    history: list[dict[str, float]]
    """As `rota.Result.history`: a dict per step, with "step" and the metrics."""


def train(task: Task) -> PlainResult:
    """Train a task on the CPU, as a script without rota would."""
    random.seed(task.seed)
    np.random.seed(task.seed)
    torch.manual_seed(task.seed)

    model = task.model()
    if task.precision == "float64":
        model.double()
    data = task.data()
    optimizer = task.optimizer(model)
    schedule = task.lr_schedule(optimizer) if task.lr_schedule else None
    batches = _training_batches(data, task.seed)
    steps = task.steps
    if steps is None:
        assert task.epochs is not None
        loader = DataLoader(data.train, batch_size=data.batch_size, drop_last=data.drop_last)
        steps = max(1, task.epochs * len(loader) // task.accumulate)

    history: list[dict[str, float]] = []
    model.train()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        totals: dict[str, float] = {}
        for _ in range(task.accumulate):
            outputs = _outputs(task, model, next(batches))
            (outputs["loss"] / task.accumulate).backward()
            for name, value in outputs.items():
                totals[name] = totals.get(name, 0.0) + _number(value)
        if task.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        row = {"step": step} | {f"train/{name}": total / task.accumulate for name, total in totals.items()}
        if data.valid is not None and (step == steps or (task.valid_every and step % task.valid_every == 0)):
            row |= validate(task, model, data)
        history.append(row)
    return PlainResult(model=model, history=history)


def validate(task: Task, model: torch.nn.Module, data: Data) -> dict[str, float]:
    """The mean of each metric over the validation samples."""
    totals: dict[str, float] = {}
    samples = 0
    loader = DataLoader(
        data.valid,
        batch_size=data.valid_batch_size or data.batch_size,
        collate_fn=data.collate,
        generator=torch.Generator(),
    )
    model.eval()
    with torch.no_grad():
        for i, batch in enumerate(loader):
            size = min(loader.batch_size or 1, len(data.valid) - i * (loader.batch_size or 1))
            for name, value in _outputs(task, model, batch).items():
                totals[name] = totals.get(name, 0.0) + _number(value) * size
            samples += size
    model.train()
    return {f"valid/{name}": total / samples for name, total in totals.items()}


def _training_batches(data: Data, seed: int) -> Iterator[Any]:
    epoch = 0
    while True:
        sampler: DistributedSampler[Any] | None = None
        if data.shuffle and is_map_style(data.train):
            sampler = DistributedSampler(data.train, num_replicas=1, rank=0, seed=seed)
            sampler.set_epoch(epoch)
        # A generator of its own: otherwise each epoch would draw from the one that dropout draws from.
        yield from DataLoader(
            data.train,
            batch_size=data.batch_size,
            sampler=sampler,
            drop_last=data.drop_last if data.batch_size else False,
            collate_fn=data.collate,
            generator=torch.Generator(),
        )
        epoch += 1


def _outputs(task: Task, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
    if task.precision == "float64":
        batch = _double(batch)
    autocast = torch.autocast("cpu", torch.bfloat16) if task.precision == "bfloat16" else contextlib.nullcontext()
    with autocast:
        result = task.loss(model, batch)
    return result if isinstance(result, dict) else {"loss": result}


def _double(batch: Any) -> Any:
    return mapped(lambda leaf: leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, batch)


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)
