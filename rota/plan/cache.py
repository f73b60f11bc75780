"""Programs by the shape of the batch: a smaller last one, or another length, is compiled when it comes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rota.graph.capture import Loss, capture
from rota.graph.graph import Graph
from rota.plan.plan import Plan
from rota.plan.program import Program


class Programs:
    """The programs of one model under one strategy, for all the shapes and modes that come up."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        strategy: Callable[[Graph], Plan],
        *,
        most: int = 32,
    ) -> None:
        self._model = model
        self._loss = loss
        self._strategy = strategy
        self._most = most
        self._known: OrderedDict[Any, Program] = OrderedDict()
        self.compiled = 0
        """How many programs were compiled so far."""

    def of(self, batch: Any) -> Program:
        """The program for a batch, in the modes (train or eval) that the model is in, and with what it trains now."""
        modes = tuple(module.training for module in self._model.modules())
        trained = tuple(parameter.requires_grad for parameter in self._model.parameters())
        key = (modes, trained, shape_of(batch))
        if key not in self._known:
            self._known[key] = self._strategy(capture(self._model, batch, self._loss)).compile()
            self.compiled += 1
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def shape_of(batch: Any) -> tuple[Any, ...]:
    """What a program depends on: the tree of a batch, and the shape and type of each tensor in it."""
    leaves, tree = pytree.tree_flatten(batch)
    found = tuple(
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    )
    return (str(tree), found)
