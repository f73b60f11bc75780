"""Leaves out a part of a slow device's products: fewer columns of the contraction dim, so that it keeps the pace.

Nothing is moved, and every shape stays as it is; what is computed is another thing. Of a product `x w^T` the kept
columns are computed and scaled up, as dropout does it, so that training and evaluation agree. What is missing of the
gradients is imputed. Columns whose gradient is imputed as zero are frozen: neither weight decay nor fading moments
touch them until they are back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F

from rota.balance.division import products_of
from rota.plan.box import Box
from rota.plan.program import Program
from rota.runtime.device_run import DeviceRun

Impute = Literal["zero", "average", "same"]
Select = Literal["random", "priority", "per_layer"]
IMPUTES: tuple[Impute, ...] = ("zero", "average", "same")
SELECTS: tuple[Select, ...] = ("random", "priority", "per_layer")

_REFRESH_STEPS = 20
"""How often it is looked at which columns change."""
_MOST = 0.95


@dataclass(frozen=True, kw_only=True)
class Resizing:
    """What is left out, and what stands for it; by default what lost least in bench.resize_accuracy."""

    impute: Impute = "zero"
    select: Select = "per_layer"


@dataclass(kw_only=True)
class _Product:
    """A product of this device with a piece of a parameter."""

    weight: tuple[str, Box]
    columns: int
    changes: torch.Tensor
    """How much each column changed when it was last kept."""
    before: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    gone: torch.Tensor | None = None
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    """The gradients of the last time, where missing ones are taken from there."""


class Resizer:
    """Computes the products of one device, as far as they are not left out."""

    def __init__(self, program: Program, device: DeviceRun, *, how: Resizing, seed: int = 0) -> None:
        self._device = device
        self._how = how
        self._draw = torch.Generator().manual_seed(seed + 1)
        self._left_out = 0.0
        self._steps = 0
        self._saved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._hooks: list[Any] = []
        self._products = {
            op: _Product(weight=weight, columns=columns, changes=torch.full((columns,), float("inf")))
            for op, (weight, columns) in products_of(program, device.device).items()
        }

    def leave_out(self, part: float) -> None:
        """From the next step on, so much of each product."""
        self._left_out = part
        for product in self._products.values():
            product.before, product.last = None, {}
        self._steps = 0

    def begin_step(self) -> None:
        """Choose the columns of the coming step."""
        if not self._left_out:
            for product in self._products.values():
                product.kept = product.gone = None
            return
        if self._how.select == "random":
            self._choose(dict.fromkeys(self._products, self._left_out))
        elif self._steps % _REFRESH_STEPS == 0:
            self._look()
            self._choose(self._parts())
        self._steps += 1

    def _look(self) -> None:
        """How much the kept columns changed since the last time; those that were left out keep what is known."""
        for product in self._products.values():
            weight = self._device.stored(*product.weight).detach()
            if product.before is not None:
                change = (weight - product.before).abs().sum(0).to(product.changes.dtype)
                if product.kept is None:
                    product.changes = change
                else:
                    product.changes[product.kept] = change[product.kept]
            product.before = weight.clone()

    def _parts(self) -> dict[str, float]:
        """How much of each product is left out: the same of all, or more of those that change less."""
        if self._how.select != "per_layer":
            return dict.fromkeys(self._products, self._left_out)
        means = {op: product.changes.mean().item() for op, product in self._products.items()}
        if any(mean in (0.0, float("inf")) for mean in means.values()):
            return dict.fromkeys(self._products, self._left_out)
        inverse = {op: 1 / mean for op, mean in means.items()}
        middle = sum(inverse.values()) / max(1, len(inverse))
        return {op: min(_MOST, self._left_out * one / middle) for op, one in inverse.items()}

    def _choose(self, parts: Mapping[str, float]) -> None:
        for op, product in self._products.items():
            count = max(1, round(product.columns * (1 - parts[op])))
            if self._how.select == "random":
                order = torch.randperm(product.columns, generator=self._draw)
            else:  # among those of which nothing is known, by lot
                shuffled = torch.randperm(product.columns, generator=self._draw)
                order = shuffled[product.changes[shuffled].argsort(descending=True, stable=True)]
            product.kept, product.gone = order[:count].sort().values, order[count:].sort().values

    def __call__(self, op: str, values: list[Any]) -> torch.Tensor | None:
        """A product, if a part of it is left out."""
        product = self._products.get(op)
        if product is None or product.kept is None:
            return None
        bias = values[2] if len(values) > 2 else None
        made: torch.Tensor = _Resized.apply(values[0], values[1], bias, product, self._how.impute)  # type: ignore[no-untyped-call]
        return made

    # ---- the optimizer ----

    def freeze(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer's steps leave alone what has no gradient."""
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._save(optimizer)),
            optimizer.register_step_post_hook(lambda *_: self._restore()),
        ]

    def close(self) -> None:
        """Leave the optimizer alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _save(self, optimizer: torch.optim.Optimizer) -> None:
        self._saved = []
        if self._how.impute != "zero":
            return
        for product in self._products.values():
            if product.gone is None:
                continue
            weight = self._device.stored(*product.weight)
            state = optimizer.state.get(weight, {}).values()
            for tensor in (weight.detach(), *state):
                if isinstance(tensor, torch.Tensor) and tensor.shape == weight.shape:
                    self._saved.append((tensor, product.gone, tensor.index_select(1, product.gone)))

    def _restore(self) -> None:
        for tensor, columns, before in self._saved:
            tensor.index_copy_(1, columns, before)
        self._saved = []


class _Resized(torch.autograd.Function):
    """`x w^T + b` over some of the columns."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, product: _Product, impute: Impute
    ) -> torch.Tensor:
        assert product.kept is not None
        context.product, context.impute, context.kept = product, impute, product.kept
        context.scale = product.columns / len(product.kept)
        context.has_bias = bias is not None
        some_x, some_weight = x.index_select(-1, product.kept), weight.index_select(1, product.kept)
        context.save_for_backward(some_x, some_weight)
        return F.linear(some_x, some_weight * context.scale, bias)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        some_x, some_weight = context.saved_tensors
        product: _Product = context.product
        flat = gradient.reshape(-1, gradient.shape[-1])
        some_dx = gradient @ (some_weight * context.scale)
        some_dw = flat.t() @ some_x.reshape(-1, some_x.shape[-1]) * context.scale
        dx = _imputed(some_dx, context.kept, product, context.impute, "x")
        dw = _imputed(some_dw, context.kept, product, context.impute, "weight")
        return dx, dw, flat.sum(0) if context.has_bias else None, None, None


def _imputed(some: torch.Tensor, kept: torch.Tensor, product: _Product, impute: Impute, what: str) -> torch.Tensor:
    shape = (*some.shape[:-1], product.columns)
    if impute == "average":
        made = some.mean(-1, keepdim=True).expand(shape).clone()
    elif impute == "same" and what in product.last and product.last[what].shape == shape:
        made = product.last[what]
    else:
        made = some.new_zeros(shape)
    made.index_copy_(made.dim() - 1, kept, some)
    if impute == "same":
        product.last[what] = made
        made = made.clone()
    return made
