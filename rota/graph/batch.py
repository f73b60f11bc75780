"""What a batch looks like: containers around tensors and plain values. Its tree, its tensors, and others instead."""

from __future__ import annotations

import copy
import datetime
import enum
import numbers
import pathlib
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rota.errors import InputError

_PLAIN = (
    type(None),
    numbers.Number,
    str,
    bytes,
    enum.Enum,
    range,
    slice,
    pathlib.PurePath,
    datetime.date,
    datetime.timedelta,
    torch.dtype,
    torch.device,
)
"""Values whose text says all that they are."""
_REMEDY = "use a dict, or register the class with torch.utils._pytree.register_pytree_node"
_SHOWN = 40


# ---- containers ----


@dataclass(frozen=True, kw_only=True)
class _Container:
    kind: str
    """Containers of the same kind and with the same keys stand for each other."""
    keys: tuple[Any, ...]
    values: list[Any]
    remake: Callable[[list[Any]], Any]
    """Makes one of the same type with other values."""


def _opened(value: Any) -> _Container | None:
    """A container with what is in it; None for a tensor and whatever else is a leaf."""
    if isinstance(value, torch.Tensor):
        return None
    values, spec = pytree.tree_flatten(value, is_leaf=lambda one: one is not value)
    known = not (len(values) == 1 and values[0] is value)
    if isinstance(value, Mapping):
        keys = tuple(value)
        items = values if known else [value[key] for key in keys]
        kind = "mapping"
        if len(items) != len(keys) or any(value[key] is not item for key, item in zip(keys, items, strict=True)):
            kind, keys = repr(spec), tuple(range(len(items)))
    elif known or isinstance(value, list | tuple):
        items = values if known else list(value)
        kind = "sequence" if isinstance(value, list | tuple | deque) else repr(spec)
        keys = tuple(range(len(items)))
    else:
        return None

    def remake(others: list[Any]) -> Any:
        return pytree.tree_unflatten(others, spec) if known else _remade(value, keys, items, others)

    return _Container(kind=kind, keys=keys, values=items, remake=remake)


def _remade(value: Any, keys: tuple[Any, ...], items: Sequence[Any], others: list[Any]) -> Any:
    """A container that pytree does not know, of the same type and with all else that it holds, with other values."""

    def written() -> Any:
        if not isinstance(value, dict | UserDict | list):
            raise TypeError
        made = copy.copy(value)
        for key, other in zip(keys, others, strict=True):
            made[key] = other
        return made

    def copied() -> Any:
        return copy.deepcopy(value, {id(item): other for item, other in zip(items, others, strict=True)})

    def constructed() -> Any:
        return type(value)(dict(zip(keys, others, strict=True)) if isinstance(value, Mapping) else others)

    for make in (written, copied, constructed):
        try:
            made = make()
            if type(made) is type(value) and all(made[key] is other for key, other in zip(keys, others, strict=True)):
                return made
        except Exception:  # the class is the user's, and may refuse each of these in its own way
            continue
    raise InputError(f"a {type(value).__name__} of the batch cannot be made again with other tensors; {_REMEDY}")


def leaves_of(batch: Any, where: str = "the batch") -> Iterator[tuple[str, Any]]:
    """Tensors and plain values of a batch, in order, and where each is."""
    container = _opened(batch)
    if container is None:
        yield where, batch
        return
    for key, value in zip(container.keys, container.values, strict=True):
        yield from leaves_of(value, f"{where}[{key!r}]")


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in order."""
    return [leaf for _, leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)]


def mapped(change: Callable[[Any], Any], batch: Any) -> Any:
    """The same containers around what `change` makes of each leaf; what does not change is not copied."""
    container = _opened(batch)
    if container is None:
        return change(batch)
    others = [mapped(change, value) for value in container.values]
    if all(other is value for other, value in zip(others, container.values, strict=True)):
        return batch
    return container.remake(others)


def with_tensors(batch: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The same batch with other tensors, in the order of `tensors_in`."""
    others = iter(tensors)
    return mapped(lambda leaf: next(others) if isinstance(leaf, torch.Tensor) else leaf, batch)


def check_leaves(batch: Any) -> None:
    """InputError for what may hide tensors: they would become constants of a graph."""
    for where, leaf in leaves_of(batch):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise InputError(f"{where} is a {type(leaf).__name__}, of which rota cannot tell what is in it; {_REMEDY}")


# ---- what a graph remembers ----


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A tensor of a batch, or a plain value, which became part of the graph."""

    dtype: str = ""
    value: str = ""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A container of a batch."""

    kind: str
    type: str
    keys: tuple[Any, ...]
    parts: tuple[Skeleton, ...]


Skeleton = Leaf | Branch
"""The tree of a batch without its tensors; it can be compared and hashed."""


def skeleton_of(batch: Any) -> Skeleton:
    """The tree of a batch without its tensors."""
    if isinstance(batch, torch.Tensor):
        return Leaf(dtype=_dtype(batch))
    container = _opened(batch)
    if container is None:
        return Leaf(value=repr(batch))
    parts = tuple(skeleton_of(value) for value in container.values)
    return Branch(kind=container.kind, type=type(batch).__qualname__, keys=container.keys, parts=parts)


def tensors_of(batch: Any, skeleton: Skeleton, where: str = "the batch") -> Iterator[torch.Tensor]:
    """The tensors of a batch, in the order of the one that the graph was captured with; InputError if it is unlike."""
    if isinstance(skeleton, Leaf):
        yield from _leaf(batch, skeleton, where)
        return
    container = _opened(batch)
    if container is None or container.kind != skeleton.kind or not _same_keys(container, skeleton):
        raise InputError(f"{where} must be {_words(skeleton)}, as the one that was captured")
    found = dict(zip(container.keys, container.values, strict=True))
    for key, part in zip(skeleton.keys, skeleton.parts, strict=True):
        yield from tensors_of(found[key], part, f"{where}[{key!r}]")


def _leaf(batch: Any, leaf: Leaf, where: str) -> Iterator[torch.Tensor]:
    if not leaf.dtype:
        if repr(batch) != leaf.value:
            raise InputError(
                f"{where} was {leaf.value[:_SHOWN]} when the model was captured and is {repr(batch)[:_SHOWN]}; "
                "capture it again"
            )
        return
    if not isinstance(batch, torch.Tensor):
        raise InputError(f"{where} must be a tensor of {leaf.dtype}, not {type(batch).__name__}")
    if _dtype(batch) != leaf.dtype:
        raise InputError(f"{where} must be of {leaf.dtype}, not {batch.dtype}; capture it for this type")
    yield batch


def _same_keys(container: _Container, skeleton: Branch) -> bool:
    return len(container.keys) == len(skeleton.keys) and set(container.keys) == set(skeleton.keys)


def _words(skeleton: Branch) -> str:
    if skeleton.kind == "mapping":
        return f"a mapping with {', '.join(map(repr, skeleton.keys))}"
    count = len(skeleton.parts)
    parts = f"{count} part{'s' * (count != 1)}"
    return f"a list or tuple with {parts}" if skeleton.kind == "sequence" else f"a {skeleton.type} with {parts}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
