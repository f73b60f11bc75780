"""A task while it is being trained: model, optimizer, schedule, place in the data; one step; its whole state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from rota.errors import CheckpointError, DivergedError, TaskError
from rota.runtime.batches import Cursor, training_cursor, validation_batches
from rota.runtime.user_code import calling
from rota.state import rng
from rota.task import Data, Task

Watch = Callable[[str], AbstractContextManager[None]]
"""Told what is about to be called, so that a hang can be named."""


class Training:
    """Holds everything that the next step depends on."""

    def __init__(self, task: Task, *, device: torch.device, watch: Watch | None = None) -> None:
        self.task = task
        self.device = device
        watch = watch or (lambda what: contextlib.nullcontext())
        rng.seed_all(task.seed)
        self.model: torch.nn.Module = _made_by("the model factory", watch, task.model, torch.nn.Module)
        with calling("moving the model to its device"):
            if task.precision == "float64":
                self.model.double()
            self.model.to(device)
            self.model.train()
        self.data: Data = _made_by("the data factory", watch, task.data, Data)
        self.optimizer: torch.optim.Optimizer = _made_by(
            "the optimizer factory", watch, lambda: task.optimizer(self.model), torch.optim.Optimizer
        )
        self.lr_schedule: Any = None
        if task.lr_schedule is not None:
            make_schedule = task.lr_schedule
            self.lr_schedule = _made_by(
                "the lr_schedule factory",
                watch,
                lambda: make_schedule(self.optimizer),
                torch.optim.lr_scheduler.LRScheduler,
            )
        with calling("the data factory"):
            self.cursor: Cursor = training_cursor(self.data, seed=task.seed)
        self.total_steps = _count_steps(task, self.cursor)
        self.step = 0
        """Optimizer steps taken."""
        self.batches = 0
        """Batches whose gradients are already part of the step under way."""
        self.sums: dict[str, float] = {}
        """The metrics of those batches, added up."""
        self.unvalidated = False
        """Whether a validation is due before the next step."""
        self.best: dict[str, float] | None = None
        """The lowest validation loss so far, and its step."""
        self.last: dict[str, float] = {}
        """The latest value of each metric."""

    # ---- training ----

    def train_batch(self) -> dict[str, float] | None:
        """Train on one batch. The step's metrics, if this batch completed a step, else None."""
        task = self.task
        with calling("reading the training data"):
            batch, _ = self.cursor.next()
        if self.batches == 0:
            self.optimizer.zero_grad()
        with calling("the loss function"):
            outputs = self._outputs(batch)
            loss = outputs["loss"]
            if not loss.requires_grad:
                raise TaskError(
                    "the loss has no gradient: it does not depend on a parameter that requires one; "
                    "compute it from the model's output, with at least one parameter not frozen"
                )
            (loss / task.accumulate if task.accumulate > 1 else loss).backward()
            # Numbers last: on a GPU, asking for one waits for everything before it.
            for name, value in self._numbers(outputs).items():
                self.sums[name] = self.sums.get(name, 0.0) + value
        self.batches += 1
        if self.batches < task.accumulate:
            return None
        return self._take_step()

    def _take_step(self) -> dict[str, float]:
        task = self.task
        with calling("the optimizer"):
            if task.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), task.clip_norm)
            self.optimizer.step()
        if self.lr_schedule is not None and not self._schedule_wants_metric():
            with calling("the lr_schedule"):
                self.lr_schedule.step()
        self.step += 1
        means = {f"train/{name}": total / task.accumulate for name, total in self.sums.items()}
        self.batches, self.sums = 0, {}
        self.last |= means
        self.unvalidated = self.data.valid is not None and (
            self.step == self.total_steps or (task.valid_every is not None and self.step % task.valid_every == 0)
        )
        return means

    def validate(self, *, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """The means over the validation data. None if interrupted; then nothing has changed."""
        before = rng.get_state(self.device)
        sums: dict[str, float] = {}
        samples = 0
        self.model.eval()
        try:
            with torch.no_grad(), calling("the loss function in validation"):
                for batch, size in validation_batches(self.data):
                    if interrupted():
                        rng.set_state(before, self.device)
                        return None
                    for name, value in self._numbers(self._outputs(batch)).items():
                        sums[name] = sums.get(name, 0.0) + value * size
                    samples += size
        finally:
            self.model.train()
        if not samples:
            raise TaskError("the validation dataset gave no batch; give at least one sample, or valid=None")
        means = {f"valid/{name}": total / samples for name, total in sums.items()}
        if self.best is None or means["valid/loss"] < self.best["loss"]:
            self.best = {"loss": means["valid/loss"], "step": self.step}
        if self._schedule_wants_metric():
            with calling("the lr_schedule"):
                self.lr_schedule.step(means["valid/loss"])
        self.last |= means
        self.unvalidated = False
        return means

    def _schedule_wants_metric(self) -> bool:
        return isinstance(self.lr_schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def _outputs(self, batch: Any) -> dict[str, Any]:
        """What the loss function gives, with a scalar tensor as "loss"."""
        batch = self._place(batch)
        if self.task.precision == "bfloat16":
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                result = self.task.loss(self.model, batch)
        else:
            result = self.task.loss(self.model, batch)
        outputs = result if isinstance(result, dict) else {"loss": result}
        loss = outputs.get("loss")
        if not isinstance(loss, torch.Tensor):
            found = f"a {type(loss).__name__}" if "loss" in outputs else "a dict without it"
            raise TaskError(f"the loss function must return a scalar tensor, or a dict with one as 'loss', not {found}")
        if loss.numel() != 1:
            raise TaskError(
                f"the loss must be a scalar, and has shape {tuple(loss.shape)}; end the loss function with .mean()"
            )
        return outputs

    def _numbers(self, outputs: dict[str, Any]) -> dict[str, float]:
        """The metrics as numbers. DivergedError if the loss is not finite."""
        metrics = {name: _as_number(name, value) for name, value in outputs.items()}
        if not math.isfinite(metrics["loss"]):
            kind = "training" if self.model.training else "validation"
            at = self.step + 1 if self.model.training else self.step
            raise DivergedError(
                f"the {kind} loss became {metrics['loss']} at step {at}; try a lower learning rate, or clip_norm",
                step=at,
            )
        return metrics

    def _place(self, value: Any) -> Any:
        """Move a batch to the device, and to double precision where the task asks for it."""
        if self.device.type == "cpu" and self.task.precision != "float64":
            return value
        if isinstance(value, torch.Tensor):
            double = self.task.precision == "float64" and value.is_floating_point()
            return value.to(device=self.device, dtype=torch.float64 if double else None)
        if isinstance(value, dict):
            return {key: self._place(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._place(item) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(self._place(item) for item in value)
        return value.to(self.device) if hasattr(value, "to") else value

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, as a tree of tensors and plain values. Nothing is copied."""
        weights = self.model.state_dict()
        # Between steps, the next one clears what the optimizer has; gradients of other parameters stay, as they do in
        # a plain loop, and count for clipping.
        cleared = set() if self.batches else {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        gradients = {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and id(parameter) not in cleared
        }
        return {
            "model": dict(weights),
            "buffers": {name: value for name, value in self.model.named_buffers() if name not in weights},
            "gradients": gradients,
            "optimizer": self.optimizer.state_dict(),
            "lr_schedule": None if self.lr_schedule is None else self.lr_schedule.state_dict(),
            "cursor": self.cursor.state_dict(),
            "rng": rng.get_state(self.device),
            "step": self.step,
            "batches": self.batches,
            "sums": dict(self.sums),
            "unvalidated": self.unvalidated,
            "best": self.best,
            "last": dict(self.last),
        }

    def load_state_dict(self, state: dict[str, Any], *, notice: Callable[[str], None]) -> None:
        """Go on from where `state_dict` was called."""
        try:
            self.model.load_state_dict(state["model"])
            for name, value in self.model.named_buffers():
                if name in state["buffers"]:
                    value.copy_(state["buffers"][name])
            for name, parameter in self.model.named_parameters():
                if name in state["gradients"]:
                    parameter.grad = state["gradients"][name].to(parameter.device)
            self.optimizer.load_state_dict(state["optimizer"])
            if self.lr_schedule is not None and state["lr_schedule"] is not None:
                self.lr_schedule.load_state_dict(state["lr_schedule"])
        except (RuntimeError, ValueError, KeyError) as error:
            first = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"the checkpoint does not fit the model or optimizer that the factories make now ({first}); "
                "undo the change, or start a new run"
            ) from error
        self.step = state["step"]
        self.batches = state["batches"]
        self.sums = dict(state["sums"])
        self.unvalidated = state["unvalidated"]
        self.best = state["best"]
        self.last = dict(state["last"])
        with calling("the training data"):
            self.cursor.load_state_dict(state["cursor"], notice)
        # Last, because everything before may have drawn random numbers.
        rng.set_state(state["rng"], self.device)


def _made_by(what: str, watch: Watch, factory: Callable[[], Any], expected: type) -> Any:
    with watch(what), calling(what):
        made = factory()
    if not isinstance(made, expected):
        raise TaskError(f"{what} returned {type(made).__name__}; it must return a {expected.__name__}")
    return made


def _count_steps(task: Task, cursor: Cursor) -> int:
    if task.steps is not None:
        return task.steps
    assert task.epochs is not None
    if cursor.batches_per_epoch is None:
        raise TaskError("epochs needs training data with a length, and this iterable has none; give steps instead")
    return max(1, task.epochs * cursor.batches_per_epoch // task.accumulate)


def _as_number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TaskError(f"the metric {name!r} must be a scalar, and has shape {tuple(value.shape)}")
        return float(value.item())
    if isinstance(value, int | float):
        return float(value)
    raise TaskError(f"the metric {name!r} must be a number, not {type(value).__name__}")
