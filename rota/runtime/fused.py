"""Lets PyTorch's optimizers run as one kernel for each parameter, where the user has left the choice to PyTorch."""

from __future__ import annotations

from typing import Any

import torch

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def fuse(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Turn the fused implementation on; it computes the same in one pass over memory instead of ten."""
    if type(optimizer) not in _FUSED:
        return optimizer
    for group in optimizer.param_groups:
        if _is_open(group) and all(_can(parameter) for parameter in group["params"]):
            group["fused"] = True
    return optimizer


def _is_open(group: dict[str, Any]) -> bool:
    """Whether nobody has said how."""
    return (
        group.get("fused", False) is None
        and group.get("foreach") is None
        and not group.get("differentiable")
        and not group.get("capturable")
    )


def _can(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.layout is torch.strided and parameter.device.type == "cpu"
