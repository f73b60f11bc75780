"""Runs batches by PyTorch's own DistributedDataParallel or FSDP2, for models that cannot be captured and as peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from rota.errors import TaskError
from rota.runtime.executor import Parts, Weights, check_loss, numbers_of, outputs_of, weights_of
from rota.runtime.gang import Gang, talking
from rota.runtime.shares import Lookout, share_of
from rota.strategies.wrapper import Wrapper


class Wrapped:
    """A model inside of PyTorch's wrapper. Each process computes its share of the samples.

    The loss of the whole batch is taken as the mean of the shares' losses, weighted by their samples, or as their sum:
    the batches that are compared with one device say which, or that the loss is neither.
    """

    def __init__(
        self, parts: Parts, batch: Any, *, gang: Gang, wrapper: Wrapper, notice: Callable[[str], None]
    ) -> None:
        self._parts = parts
        self._gang = gang
        self._wrapper = wrapper
        self._names = {id(p): name for name, p in parts.model.named_parameters()}
        self._lookout = Lookout(parts, batch, gang=gang, strategy=str(wrapper), notice=notice)
        with talking():
            if wrapper.kind == "ddp":
                self._run: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(
                    parts.model, find_unused_parameters=wrapper.find_unused
                )
            else:
                self._run = self._sharded()

    def _sharded(self) -> torch.nn.Module:
        """fully_shard of each layer and of the whole; the optimizer's parameters become the pieces."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if type(self._parts.optimizer).__module__.startswith("torch.optim.lbfgs"):
            raise TaskError("LBFGS looks at all parameters at once; use torch_ddp")
        model, optimizer = self._parts.model, self._parts.optimizer
        state = optimizer.state_dict()["state"]
        old = [[self._names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        mesh = init_device_mesh(self._parts.device.type, (self._gang.size,))
        for layers in model.modules():
            if isinstance(layers, torch.nn.ModuleList | torch.nn.Sequential):
                for layer in layers:
                    if any(True for _ in layer.parameters()):
                        fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        new = dict(model.named_parameters())
        optimizer.state.clear()
        for group, names in zip(optimizer.param_groups, old, strict=True):
            group["params"] = [new[name] for name in names]
        if state:
            flat = [name for names in old for name in names]
            named = {flat[number]: values for number, values in state.items()}
            groups = [
                {**{k: v for k, v in group.items() if k != "params"}, "params": names}
                for group, names in zip(optimizer.param_groups, old, strict=True)
            ]
            set_optimizer_state_dict(
                model,
                optimizer,
                {"state": named, "param_groups": groups},
                options=StateDictOptions(full_state_dict=True),
            )
        return model

    # ---- batches ----

    def zero_grad(self) -> None:
        """As the user's own loop would."""
        self._parts.optimizer.zero_grad()

    def backward(self, batch: Any, *, number: int) -> dict[str, float]:
        """This process's share; the wrapper averages gradients over processes."""
        self._lookout.look(batch)
        share, samples, total = share_of(batch, rank=self._gang.rank, size=self._gang.size)
        outputs = outputs_of(self._parts, self._run, share)
        loss = outputs["loss"]
        check_loss(loss)
        # The wrapper divides by the number of processes; shares of a batch that does not divide differ in size.
        part = self._lookout.makeup.part("loss", samples, total)
        weight = part * self._gang.size / self._parts.task.accumulate
        with talking():
            (loss * weight).backward()
        return self._whole(numbers_of(outputs), samples, total)

    def update(self) -> None:
        """One step of the optimizer."""
        clip_norm = self._parts.task.clip_norm
        with talking():
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._parts.model.parameters(), clip_norm)
            self._parts.optimizer.step()

    def measure(self, batch: Any) -> dict[str, float]:
        """Every process measures the whole batch, as one alone would."""
        module = self._parts.model if self._wrapper.kind == "ddp" else self._run
        with talking():
            return numbers_of(outputs_of(self._parts, module, batch))

    def _whole(self, mine: dict[str, float], samples: int, total: int) -> dict[str, float]:
        parts = [value * self._lookout.makeup.part(name, samples, total) for name, value in mine.items()]
        weighted = torch.tensor(parts, dtype=torch.float64)
        return dict(zip(mine, self._gang.sum(weighted).tolist(), strict=True))

    # ---- state ----

    def weights(self, *, between_steps: bool) -> Weights | None:
        """Whole, on the leader."""
        parts = self._parts
        if self._wrapper.kind == "ddp":
            return weights_of(parts.model, parts.optimizer, between_steps=between_steps)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        with talking():
            model = get_model_state_dict(parts.model, options=options)
            optimizer = get_optimizer_state_dict(parts.model, parts.optimizer, options=options)
            gradients = dict(self._gradients(between_steps))
        if not self._gang.leads:
            return None
        return Weights(
            model=model,
            buffers={name: value for name, value in parts.model.named_buffers() if name not in model},
            gradients=gradients,
            optimizer=_numbered(optimizer),
        )

    def _gradients(self, between_steps: bool) -> Iterator[tuple[str, torch.Tensor]]:
        held = {id(p) for group in self._parts.optimizer.param_groups for p in group["params"]}
        for name, parameter in self._parts.model.named_parameters():
            if parameter.grad is not None and not (between_steps and id(parameter) in held):
                gradient: Any = parameter.grad
                yield name, gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by the numbers of its parameters, as `optimizer.state_dict()` has it."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {number[name]: values for name, values in state["state"].items()}, "param_groups": groups}
