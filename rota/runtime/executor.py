"""How a batch becomes gradients and metrics: plainly on one device, or by a plan or a wrapper over several."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from rota.errors import DivergedError, TaskError
from rota.graph.batch import mapped
from rota.runtime.limits import anonymous_bytes
from rota.state.writer import Saver, Written
from rota.task import Task

if TYPE_CHECKING:
    from rota.memory.building import Building


@dataclass(frozen=True, kw_only=True)
class Weights:
    """All tensors that a task's next step depends on, whole and under PyTorch's own names."""

    model: Mapping[str, Any]
    """What `model.state_dict()` gives."""
    buffers: Mapping[str, torch.Tensor]
    """Those that are not in there."""
    gradients: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]
    """What `optimizer.state_dict()` gives."""
    fresh: bool = False
    """Its large tensors were made for it, so that they need not be copied before training goes on."""


PLANNING_S = 600.0
"""How long what is rota's own work may take at least, whatever a task allows its factories."""


class Watch(Protocol):
    """Told what is done from now on, so that a hang can be named."""

    def __call__(self, what: str, *, ours: bool = False) -> None:
        """`ours` is what runs none of the user's code."""
        ...


def unwatched(what: str, *, ours: bool = False) -> None:
    """Where nobody waits for it."""


def setup_limit_s(task: Task, *, ours: bool) -> float:
    """How long something may take that comes before the first step."""
    return max(task.setup_timeout_s, PLANNING_S) if ours else task.setup_timeout_s


@dataclass(kw_only=True)
class Parts:
    """What the user's factories made."""

    task: Task
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    room: Room | None = None
    """Of a task that may be larger than its device's memory."""
    watch: Watch = unwatched


@dataclass(kw_only=True)
class Room:
    """What a task that may not fit has."""

    memory_bytes: int
    """Of its device."""
    before_bytes: int
    """What the process took of it before."""
    folder: Path
    """For what leaves memory."""
    building: Building
    """Makes its model, in the host's memory."""
    host_bytes: int | None = None
    """Of the host of a GPU, for what leaves that; None where the device has the host's own memory."""
    devices: int = 1
    """So many devices train the task together, each in a process that makes the model."""

    def taken_bytes(self) -> int:
        """What the process took since, beside parameters: for the graph of the model, and the user's data."""
        if self.host_bytes is not None:
            return max(0, device_bytes() - self.before_bytes)
        return max(0, anonymous_bytes() - self.before_bytes - self.building.here_bytes)


def free_device_bytes() -> int | None:
    """What this process can still take of its GPU; None without one (never run)."""
    if not torch.cuda.is_available():
        return None
    free_bytes: int = torch.cuda.mem_get_info()[0]
    return free_bytes + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def device_bytes() -> int:
    """What this process takes of its GPU; nothing without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


class Executor(Protocol):
    """Runs batches."""

    def zero_grad(self) -> None:
        """Forget the gradients of what the optimizer has."""
        ...

    def backward(self, batch: Any, *, number: int) -> dict[str, float]:
        """Add the batch's share of the step's gradient; its metrics. `number` counts batches over the whole task."""
        ...

    def update(self) -> None:
        """Clip the gradient and take the optimizer's step."""
        ...

    def measure(self, batch: Any) -> dict[str, float]:
        """The metrics of a validation batch; the model is in eval mode and autograd is off."""
        ...

    def weights(self, *, between_steps: bool) -> Weights | None:
        """Everything, whole, in the process that leads; in the others it may be None, and is not used."""
        ...


@runtime_checkable
class TakesSteps(Protocol):
    """An executor that can do better with all batches of a step at once."""

    def takes_steps(self, batch: Any) -> bool:
        """Whether that is so with batches like this one."""
        ...

    def backward_all(self, batches: Sequence[Any], *, number: int) -> list[dict[str, float]]:
        """What `backward` does, for all batches of a step; the metrics of each."""
        ...


@runtime_checkable
class KeepsItself(Protocol):
    """An executor that saves its state in its own way."""

    def writer(self, done: Callable[[Written], None]) -> Saver:
        """What saves the task from now on."""
        ...

    def close(self) -> None:
        """Let go of threads and files."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An executor that has something to let go of when the task ends."""

    def close(self) -> None:
        """Let go of threads and files."""
        ...


@runtime_checkable
class HasPace(Protocol):
    """An executor of several devices that knows what each of them takes."""

    def pace(self) -> tuple[float, ...]:
        """Seconds that each device computed in the latest step, without its waits for others; empty if unknown."""
        ...


class Eager:
    """Plain PyTorch on one device."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._updated = False

    def zero_grad(self) -> None:
        """As the user's own loop would."""
        self._parts.optimizer.zero_grad()

    def backward(self, batch: Any, *, number: int) -> dict[str, float]:
        """Forward and backward by autograd."""
        outputs = outputs_of(self._parts, self._parts.model, batch)
        loss = outputs["loss"]
        check_loss(loss)
        accumulate = self._parts.task.accumulate
        (loss / accumulate if accumulate > 1 else loss).backward()
        # Numbers last: on a GPU, asking for one waits for everything before it.
        return numbers_of(outputs)

    def update(self) -> None:
        """One step of the optimizer."""
        if not self._updated:
            check_trained(self._parts.optimizer)
            self._updated = True
        clip_norm = self._parts.task.clip_norm
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parts.model.parameters(), clip_norm)
        self._parts.optimizer.step()

    def measure(self, batch: Any) -> dict[str, float]:
        """One forward pass."""
        return numbers_of(outputs_of(self._parts, self._parts.model, batch))

    def weights(self, *, between_steps: bool) -> Weights:
        """Nothing is copied."""
        return weights_of(self._parts.model, self._parts.optimizer, between_steps=between_steps)


def weights_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, between_steps: bool) -> Weights:
    """What a whole model and its optimizer hold."""
    state = model.state_dict()
    # Between steps, the next one clears what the optimizer has; gradients of other parameters stay, as they do in a
    # plain loop, and count for clipping.
    cleared = {id(p) for group in optimizer.param_groups for p in group["params"]} if between_steps else set()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and id(parameter) not in cleared
    }
    return Weights(
        model=dict(state),
        buffers={name: value for name, value in model.named_buffers() if name not in state},
        gradients=gradients,
        optimizer=optimizer.state_dict(),
    )


def check_loss(loss: torch.Tensor) -> None:
    """TaskError if nothing can be trained by a loss."""
    if not loss.is_floating_point():
        kind = str(loss.dtype).removeprefix("torch.")
        raise TaskError(f"the loss is of {kind}, which has no gradient; compute it in real numbers, such as float32")
    check_gradient(loss.requires_grad)


def check_gradient(has_gradient: bool) -> None:
    """TaskError if there is nothing to train."""
    if not has_gradient:
        raise TaskError(
            "the loss has no gradient: it does not depend on a parameter that requires one; "
            "compute it from the model's output, with at least one parameter not frozen"
        )


def check_trained(optimizer: torch.optim.Optimizer) -> None:
    """TaskError if a first step would change nothing."""
    if all(one.grad is None for group in optimizer.param_groups for one in group["params"]):
        raise TaskError(
            "the loss gave no gradient to any parameter of the optimizer, so that nothing is trained; compute it with "
            "the model that the loss function is given, and give the optimizer the parameters that it depends on"
        )


def loss_of(task: Task, model: torch.nn.Module, batch: Any, device_type: str) -> Any:
    """What the user's loss function gives, in the task's precision."""
    if task.precision == "bfloat16":
        with torch.autocast(device_type, dtype=torch.bfloat16):
            return task.loss(model, batch)
    return task.loss(model, batch)


def outputs_of(parts: Parts, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
    """What the loss function gives, with a scalar tensor as "loss"."""
    return outputs_in(loss_of(parts.task, model, placed(batch, parts), parts.device.type))


_LABELS = "if the model computes it, give the model labels"


def outputs_in(result: Any) -> dict[str, Any]:
    """What a loss function returned, with a scalar tensor as "loss"; TaskError says what it is instead."""
    outputs = result if isinstance(result, dict) else {"loss": result}
    if type(result) is not dict and hasattr(result, "loss"):  # what models of transformers return, and the like
        kind = type(result).__name__
        if result.loss is None:
            raise TaskError(f"the loss function returned a {kind} whose loss is None; {_LABELS}, and return its .loss")
        if not isinstance(result, dict) or not all(map(_is_scalar, result.values())):
            raise TaskError(f"the loss function returned a {kind}, which is a model's output; return its .loss")
    loss = outputs.get("loss")
    if not isinstance(loss, torch.Tensor):
        found = f"a {type(loss).__name__}" if "loss" in outputs else "a dict without it"
        raise TaskError(
            f"the loss function must return a scalar tensor, or a dict with one as 'loss', not {found}{_remedy(loss)}"
        )
    if loss.numel() != 1:
        raise TaskError(
            f"the loss must be a scalar, and has shape {tuple(loss.shape)}; end the loss function with .mean()"
        )
    return outputs


def _remedy(loss: Any) -> str:
    """What to do where something else than a tensor stands for the loss."""
    if loss is None:
        return f"; return the loss, and {_LABELS}"
    if isinstance(loss, tuple | list):
        return "; return the loss alone, or a dict that also has what else is to be reported"
    if isinstance(loss, int | float):
        return "; return the tensor itself, for .item() and float() drop its gradient"
    return ""


def _is_scalar(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)


def numbers_of(outputs: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as numbers."""
    return {name: _as_number(name, value) for name, value in outputs.items()}


def check_finite(metrics: Mapping[str, float], *, kind: str, step: int) -> None:
    """DivergedError if the loss is not finite."""
    if not math.isfinite(metrics["loss"]):
        raise DivergedError(
            f"the {kind} loss became {metrics['loss']} at step {step}; try a lower learning rate, or clip_norm",
            step=step,
        )


def on_device(parts: Parts) -> AbstractContextManager[Any]:
    """Where tensors are made that no other says the device of. On CUDA: written with care, never run."""
    return torch.device(parts.device) if parts.device.type == "cuda" else nullcontext()


def placed(batch: Any, parts: Parts) -> Any:
    """A batch on the device, and in double precision where the task asks for it; the containers keep their types."""
    double = parts.task.precision == "float64"
    if parts.device.type == "cpu" and not double:
        return batch

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device=parts.device, dtype=torch.float64 if double and leaf.is_floating_point() else None)
        return leaf.to(parts.device) if hasattr(leaf, "to") else leaf

    return mapped(moved, batch)


def _as_number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TaskError(
                f"the metric {name!r} must be a scalar, and has shape {tuple(value.shape)}; leave it out of the dict "
                "that the loss function returns, or reduce it, as by .mean()"
            )
        return float(value.item())
    if isinstance(value, int | float):
        return float(value)
    raise TaskError(f"the metric {name!r} must be a number, not {type(value).__name__}")
