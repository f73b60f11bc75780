"""Tells whether two tasks cost the same, once model and batch are there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rota.fingerprint import code_parts

if TYPE_CHECKING:
    from rota.runtime.training import Training


def signature_of(training: Training, batch: Any, *, besides: tuple[Mapping[str, Any], Sequence[Any]] = ({}, ())) -> str:
    """A digest of what a step computes: modules with their plain attributes and code, parameters, batch, optimizer.

    `besides` are the user's own strategies and techniques, which take part in the choice.
    """
    import torch

    from rota.graph.batch import leaves_of

    task = training.task
    told: list[Any] = [task.precision, task.accumulate, task.compile, task.clip_norm is None]
    seen: set[type] = set()
    for name, module in training.model.named_modules():
        kind = type(module)
        plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        told.append([name, kind.__qualname__, plain])
        if kind not in seen and not kind.__module__.startswith("torch."):
            seen.add(kind)
            told.append(list(code_parts(kind.forward, seen=set())))
    for name, tensor in (*training.model.named_parameters(), *training.model.named_buffers()):
        told.append([name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad])
    for where, leaf in leaves_of(batch):
        is_tensor = isinstance(leaf, torch.Tensor)
        told.append([where, [list(leaf.shape), str(leaf.dtype)] if is_tensor else type(leaf).__qualname__])
    told.append(list(code_parts(task.loss, seen=set())))
    told.append(type(training.optimizer).__qualname__)
    for group in training.optimizer.param_groups:
        flags = {key: value for key, value in group.items() if isinstance(value, bool)}
        told.append([flags, len(group["params"])])
    strategies, techniques = besides
    for name, strategy in sorted(strategies.items()):
        told.append([name, list(code_parts(getattr(strategy, "func", strategy), seen=set()))])
    for technique in techniques:
        kind = type(technique)
        plain = {key: value for key, value in vars(technique).items() if isinstance(value, bool | int | float | str)}
        told.append([technique.name, kind.__qualname__, plain])
        told.append([list(code_parts(getattr(kind, name), seen=set())) for name in ("search", "execute")])
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]
