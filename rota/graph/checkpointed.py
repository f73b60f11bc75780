"""Finds the ops that a model runs inside of torch.utils.checkpoint, while it is captured.

A checkpoint is a hook of autograd, or a function with its own backward, of which no trace has a record. So the two
functions of PyTorch that make one are replaced by ones that only mark the ops.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.fx import traceback

_MARK = "rota checkpoint"
_LOST = (
    "the model says itself what autograd keeps (torch.autograd.graph.saved_tensors_hooks), which a plan does not "
    "follow: the memory that this saves is needed; torch.utils.checkpoint is followed"
)


@contextlib.contextmanager
def marking() -> Iterator[list[str]]:
    """While this lasts, what runs inside of a checkpoint is traced as if there were none, with a mark at each op.

    The list gets a note if the model saves memory in another way, of which there is no trace either.
    """
    numbers = itertools.count(1)
    depth = 0
    notes: list[str] = []

    @contextlib.contextmanager
    def marked() -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            with contextlib.ExitStack() as stack:
                if depth == 1:  # one inside of another is computed again with it
                    stack.enter_context(traceback.preserve_node_meta())
                    stack.enter_context(traceback.annotate({_MARK: next(numbers)}))
                yield
        finally:
            depth -= 1

    def around(*arguments: Any, **keywords: Any) -> Iterator[None]:
        """PyTorch's generator for use_reentrant=False: the function runs while it waits."""
        with marked():
            yield

    def apply(function: Callable[..., Any], preserve: bool, *arguments: Any) -> Any:
        """PyTorch's function for use_reentrant=True, which gives a gradient only if one of its arguments has one."""
        wanted = any(isinstance(one, torch.Tensor) and one.requires_grad for one in arguments)
        with marked(), torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return function(*arguments)

    enter = torch.autograd.graph.saved_tensors_hooks.__enter__

    def noted(hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
        notes[:] = [_LOST]
        enter(hooks)

    module = torch.utils.checkpoint
    with (
        mock.patch.object(module, "_checkpoint_without_reentrant_generator", around),
        mock.patch.object(module.CheckpointFunction, "apply", staticmethod(apply)),
        mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", noted),
    ):
        yield notes


def checkpoint_of(node: torch.fx.Node) -> int:
    """The number of the checkpoint that a traced op is in; 0 if it is in none."""
    return int((node.meta.get("custom") or {}).get(_MARK, 0))
