"""What lasts from step to step of a model that comes and goes: its weights and what the optimizer remembers of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from rota.memory.residency import Item
from rota.memory.steps import Group
from rota.memory.tiers import Held, Tiers


class Holdings:
    """The groups of a model's parameters, and where they are."""

    def __init__(
        self,
        groups: Mapping[str, Group],
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        items: Mapping[str, Item],
        tiers: Tiers,
        clip_norm: float | None = None,
    ) -> None:
        """`parameters` are the model's own, in its order, by the names of the graph; the optimizer has them."""
        self.groups = groups
        self.parameters = parameters
        self.tiers = tiers
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._norms: dict[str, torch.Tensor] = {}
        """Of the gradients that are complete."""
        self._scale: torch.Tensor | None = None
        for group in groups.values():
            self._hold(group, items)

    def _hold(self, group: Group, items: Mapping[str, Item]) -> None:
        kinds: dict[str, Callable[[], Sequence[torch.Tensor]]] = {
            group.weights: lambda: [self.parameters[name] for name in group.parameters],
            group.gradients: lambda: self._gradients(group),
            group.moments: lambda: [value for _, _, value in self.remembered(group)],
        }
        for item, tensors in kinds.items():
            if item in items and items[item].movable:
                self.tiers.held[item] = Held(size_bytes=items[item].size_bytes, tensors=tensors)

    def settle(self, release: Callable[[torch.nn.Parameter], None] = lambda parameter: None) -> None:
        """Bring what is in memory under the budget, and out to disk. `release` brings what is not in memory yet."""
        for group in self.groups.values():
            for name in group.parameters:
                release(self.parameters[name])
            self._send(group.weights)
            if group.moments in self.tiers.held and self.remembered(group):
                self._send(group.moments)
            if group.gradients in self.tiers.held and self._gradients(group):
                self._send(group.gradients)

    def _send(self, item: str) -> None:
        self.tiers.admit(item)
        self.tiers.begin_write(item)
        self.tiers.finish_write(item)

    def _gradients(self, group: Group) -> list[torch.Tensor]:
        found = [self.parameters[name].grad for name in group.parameters]
        return [one for one in found if one is not None]

    def remembered(self, group: Group) -> list[tuple[str, str, torch.Tensor]]:
        """What the optimizer remembers of each element: the parameter, the name that the optimizer gives it, and it."""
        found = []
        for name in group.parameters:
            parameter = self.parameters[name]
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape:
                    found.append((name, key, value))
        return found

    # ---- updates ----

    def begin_step(self) -> None:
        """Forget the norm of the step before."""
        self._norms, self._scale = {}, None

    def complete(self, names: Sequence[str]) -> None:
        """The step's gradients of these parameters are complete, and may leave."""
        if self._clip_norm is not None:
            for name in names:
                gradient = self.parameters[name].grad
                assert gradient is not None
                self._norms[name] = torch.linalg.vector_norm(gradient)

    def update(self, group: Group) -> None:
        """Take the optimizer's step for a group, all of which is in memory."""
        mine = [self.parameters[name] for name in group.parameters]
        if self._clip_norm is not None:
            scale = self._clipping(self._clip_norm)
            for parameter in mine:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        with _only(self._optimizer, mine):
            self._optimizer.step()
        for parameter in mine:
            parameter.grad = None
        if group.moments in self.tiers.held:
            self.tiers.admit(group.moments)

    def _clipping(self, clip_norm: float) -> torch.Tensor:
        """By what gradients are scaled, as `clip_grad_norm_` does it; they themselves may be away."""
        if self._scale is None:
            norms = []
            for name, parameter in self.parameters.items():
                if name in self._norms:
                    norms.append(self._norms[name])
                elif parameter.grad is not None:
                    norms.append(torch.linalg.vector_norm(parameter.grad))
            whole = torch.linalg.vector_norm(torch.stack(norms))
            self._scale = torch.clamp(clip_norm / (whole + 1e-6), max=1.0)
        return self._scale


@contextlib.contextmanager
def _only(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """The optimizer with some of its parameters only."""
    wanted = set(map(id, parameters))
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
