"""Records at each traced op what PyTorch does there: torch.export keeps not every region, and no change of a flag."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.fx import Node
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from rota.errors import CaptureError

_MARK = "rota record"
_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is so where an op is traced."""

    with_grad: bool = True
    autocast: str = ""
    """The dtype of the torch.autocast that the op is in, if any."""
    differentiable: tuple[bool, ...] = ()
    """Whether PyTorch gives each result a gradient."""


def record_of(node: Node) -> Record:
    """What was recorded at a node."""
    found = (node.meta.get("custom") or {}).get(_MARK)
    return found if isinstance(found, Record) else Record()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """While this lasts, each node of a trace gets a record, and code that a trace cannot show is refused."""
    real: Callable[..., Any] = proxy_tensor.set_meta
    dtype = torch.get_default_dtype()

    def noted(proxy: Any, value: Any) -> Any:
        results = list(value) if isinstance(value, tuple | list) else [value]
        check_dense(results, "it makes")
        if torch.get_default_dtype() != dtype:
            raise CaptureError("it changes the default dtype (torch.set_default_dtype)")
        made = real(proxy, value)
        record = Record(
            with_grad=torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
            autocast=_autocast_now(),
            differentiable=tuple(isinstance(one, torch.Tensor) and one.requires_grad for one in results),
        )
        # A new dict: PyTorch shares one among the nodes that it annotates together.
        proxy.node.meta["custom"] = {**(proxy.node.meta.get("custom") or {}), _MARK: record}
        return made

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise CaptureError("it computes gradients itself (torch.autograd.grad, backward() or torch.func)")

    try:
        with (
            mock.patch.object(proxy_tensor, "set_meta", noted),
            mock.patch.object(torch.autograd, "_engine_run_backward", refuse),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


def check_dense(values: Sequence[Any], who: str) -> None:
    """CaptureError for a tensor that is not one block of numbers; `who` has it."""
    for value in values:
        if isinstance(value, torch.Tensor) and (value.is_nested or value.layout != torch.strided):
            raise CaptureError(f"{who} a {'nested' if value.is_nested else 'sparse'} tensor; use a dense one")


class Watched(TorchFunctionMode):
    """While this lasts, calls that change or read what a trace has no record of are refused."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._parameters = {id(one): name for name, one in model.named_parameters()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func == _DATA.__get__:
            return args[0].detach()  # the same memory, and then a write into it is seen
        if func == _DATA.__set__:
            raise CaptureError("it assigns to the .data of a tensor")
        name = self._parameters.get(id(args[0])) if args else None
        if name is not None and func == _GRAD.__get__:
            raise CaptureError(f"it reads the gradient of {name}")
        if name is not None and func in (torch.Tensor.requires_grad_, _REQUIRES_GRAD.__set__):
            wanted = args[1] if len(args) > 1 else keywords.get("requires_grad", True)
            if bool(wanted) != args[0].requires_grad:
                raise CaptureError(
                    f"it switches requires_grad of {name} within a step; compute what needs no gradient of it under "
                    "torch.no_grad(), or with detached parameters (torch.func.functional_call)"
                )
        return func(*args, **keywords)


def _autocast_now() -> str:
    """The type of the torch.autocast here, if any: a model that is captured on the CPU may be for a GPU."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return ""
