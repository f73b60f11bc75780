"""The random number generators that a training step may draw from: torch (CPU and CUDA), numpy and random."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def keeping_random_state(device: torch.device | None = None) -> Iterator[None]:
    """What is drawn meanwhile, on the CPU and on a device, is not missed by the task."""
    device = device or torch.device("cpu")
    before = get_state(device)
    try:
        yield
    finally:
        set_state(before, device)


def seed_all(seed: int) -> None:
    """Start every generator from one seed."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator, as a tree that a checkpoint can hold."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, [int(key) for key in keys], position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_state(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator back to where `get_state` found it."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
