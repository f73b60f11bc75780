"""What a batch looks like: the tree that a graph was captured with, and the tensors of another batch in its order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rota.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A tensor of a batch, or a plain value, which became part of the graph."""

    dtype: str = ""
    value: str = ""


Skeleton = Any
"""Dicts as tuples of (key, skeleton), sequences as tuples of skeletons, and leaves."""


def skeleton_of(batch: Any) -> Skeleton:
    """The tree of a batch without its tensors."""
    if isinstance(batch, torch.Tensor):
        return Leaf(dtype=str(batch.dtype).removeprefix("torch."))
    if isinstance(batch, Mapping):
        return ("dict", tuple((key, skeleton_of(value)) for key, value in batch.items()))
    if isinstance(batch, list | tuple):
        return ("list", tuple(skeleton_of(value) for value in batch))
    leaves = pytree.tree_leaves(batch)
    if len(leaves) == 1 and leaves[0] is batch:
        return Leaf(value=repr(batch)[:200])
    return ("tree", tuple(skeleton_of(value) for value in leaves))


def tensors_of(batch: Any, skeleton: Skeleton, where: str = "the batch") -> Iterator[torch.Tensor]:
    """The tensors of a batch, in the order of the one that the graph was captured with; InputError if it is unlike."""
    if isinstance(skeleton, Leaf):
        if skeleton.dtype:
            if not isinstance(batch, torch.Tensor):
                raise InputError(f"{where} must be a tensor of {skeleton.dtype}, not {type(batch).__name__}")
            if str(batch.dtype) != f"torch.{skeleton.dtype}":
                raise InputError(f"{where} must be of {skeleton.dtype}, not {batch.dtype}; capture it for this type")
            yield batch
        elif repr(batch)[:200] != skeleton.value:
            raise InputError(
                f"{where} was {skeleton.value} when the model was captured and is {repr(batch)[:40]}; capture it again"
            )
        return
    kind, parts = skeleton
    if kind == "dict":
        if not isinstance(batch, Mapping) or set(batch) != {key for key, _ in parts}:
            wanted = ", ".join(repr(key) for key, _ in parts)
            raise InputError(f"{where} must be a dict with {wanted}")
        for key, part in parts:
            yield from tensors_of(batch[key], part, f"{where}[{key!r}]")
        return
    values = pytree.tree_leaves(batch) if kind == "tree" else batch
    if not isinstance(values, list | tuple) or len(values) != len(parts):
        raise InputError(f"{where} must have {len(parts)} parts, as the one that was captured")
    for i, (value, part) in enumerate(zip(values, parts, strict=True)):
        yield from tensors_of(value, part, f"{where}[{i}]")
