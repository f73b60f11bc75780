"""The computation of a model as immutable values: tensors, ops in order, and what is read and written."""

from __future__ import annotations

import enum
import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ELEMENT_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


class Role(enum.StrEnum):
    """Where a tensor comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    ACTIVATION = "activation"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of the graph, without its values."""

    name: str
    """Parameters and buffers have the name that the model gives them."""
    shape: tuple[int, ...]
    dtype: str
    role: Role
    requires_grad: bool = False
    """Whether the backward pass computes a gradient of it."""

    @property
    def size_bytes(self) -> int:
        """Of all of it."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Ref:
    """Stands for a tensor in the arguments of an op."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation: a function of ATen, the tensors it reads and the tensors it makes."""

    name: str
    """Unique, and telling: the path of the module it is part of, and its kind."""
    kind: str
    """linear, layer_norm, add, ..."""
    target: str
    """The overload, for example aten.add.Tensor."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...]
    """The tensors it reads, in the order of their first appearance in the arguments."""
    outputs: tuple[str | None, ...]
    """The tensors it makes; None for one that nobody reads."""
    module: str = ""
    with_grad: bool = True
    """False inside of torch.no_grad."""
    autocast: str = ""
    """The dtype of the torch.autocast that it is in, if any."""
    checkpoint: int = 0
    """The number of the torch.utils.checkpoint that it is in; 0 if it is in none."""

    def bind(self, value_of: Callable[[str], Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with each reference replaced by what `value_of` gives for it."""
        return [replace_refs(one, value_of) for one in self.args], {
            name: replace_refs(one, value_of) for name, one in self.kwargs.items()
        }


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model, its loss and nothing else. Two captures of the same model give equal graphs."""

    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    """In an order in which each op reads only what is there."""
    inputs: tuple[str, ...]
    """The tensors of the batch, in the order in which its tree is flattened."""
    outputs: Mapping[str, str]
    """metric -> tensor; "loss" is one of them."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The metrics that are plain numbers."""
    aliases: Mapping[str, str]
    """The other names of tied parameters -> the name under which the graph has them."""
    updates: Mapping[str, str]
    """buffer -> the tensor that replaces its value after the step."""
    constants: Mapping[str, Any] = field(compare=False, repr=False)
    """The values of tensors that the model's code made while it was captured."""
    batch: Any = field(default=None, repr=False)
    """What the batch looks like, see batch.py."""
    notes: tuple[str, ...] = ()
    """What the user should know about how it was captured."""
    rewrites: tuple[tuple[Any, ...], ...] = ()
    """What it went through since then, see rewrite.py: the name of each rewrite and its arguments."""

    @property
    def loss(self) -> Tensor:
        """The tensor that is differentiated."""
        return self.tensors[self.outputs["loss"]]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters, tied ones once."""
        return tuple(tensor for tensor in self.tensors.values() if tensor.role is Role.PARAMETER)

    def find(self, *, kind: str | None = None, name: str | None = None) -> Iterator[Op]:
        """The ops of a kind, or whose name fits a pattern such as ``*.fc1.*``."""
        for op in self.ops:
            if (kind is None or op.kind == kind) and (name is None or fnmatch.fnmatchcase(op.name, name)):
                yield op


def differentiated(graph: Graph) -> frozenset[str]:
    """The tensors whose gradient is needed: those on a way from a trained parameter to the loss."""
    found = {graph.outputs["loss"]} if graph.loss.requires_grad else set()
    for op in reversed(graph.ops):
        if op.with_grad and any(name in found for name in op.outputs):
            found |= {name for name in op.inputs if graph.tensors[name].requires_grad}
    return frozenset(found)


def trained_ops(graph: Graph) -> frozenset[str]:
    """The ops that have a backward pass: the loss depends on them, and they on a trained parameter."""
    wanted = differentiated(graph)
    return frozenset(op.name for op in graph.ops if op.with_grad and not wanted.isdisjoint(op.outputs))


def replace_refs(value: Any, value_of: Callable[[str], Any]) -> Any:
    """A nested argument with each Ref replaced."""
    if isinstance(value, Ref):
        return value_of(value.name)
    if isinstance(value, tuple | list):
        return type(value)(replace_refs(item, value_of) for item in value)
    return value


def refs(value: Any) -> Iterator[str]:
    """The names that a nested argument refers to."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple | list):
        for item in value:
            yield from refs(item)
