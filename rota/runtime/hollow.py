"""Lets go of a model's memory and keeps the module, so that it can be captured again for another batch."""

from __future__ import annotations

import mmap
import warnings
from typing import Any

import torch


def hollow_out(model: torch.nn.Module, *, keep: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Replace each parameter and buffer by one of the same shape that reads as zeros and takes no memory.

    Names, types and ties stay. Those whose id is in `keep` stay as they are.
    """
    # With the new ones the old ones are kept for the while: the id of something that is gone may be given again.
    made: dict[int, tuple[Any, torch.Tensor]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or id(tensor) in keep:
                    continue
                if id(tensor) not in made:
                    hollow = hollow_like(tensor)
                    if isinstance(tensor, torch.nn.Parameter):
                        hollow = torch.nn.Parameter(hollow, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = (hollow, tensor)
                table[name] = made[id(tensor)][0]


def hollow_like(tensor: torch.Tensor) -> torch.Tensor:
    """Pages that are mapped and never touched: the system gives them no memory, and a limit on data ignores them.

    On a GPU, one number for all of them (never run).
    """
    if tensor.numel() == 0:
        return torch.empty_like(tensor)
    if tensor.device.type == "cuda":
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    size_bytes = tensor.numel() * tensor.element_size()
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it cannot be written to, which is as it should be
        return torch.frombuffer(pages, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
