"""A task while it is being trained: model, optimizer, schedule, place in the data; one step; its whole state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from rota.errors import CheckpointError, TaskError, UnfitCheckpointError
from rota.refusals import refusal
from rota.runtime.batches import Cursor, training_cursor, validation_batches
from rota.runtime.executor import Eager, Executor, Parts, Room, TakesSteps, Watch, check_finite, unwatched
from rota.runtime.one_device import is_elsewhere, plainly, waits_on_host
from rota.runtime.user_code import calling, is_out_of_memory
from rota.state import rng
from rota.task import Data, Task, is_map_style

Choose = Callable[[Parts, Any], Executor]


class Training:
    """Holds everything that the next step depends on."""

    def __init__(
        self,
        task: Task,
        *,
        device: torch.device,
        watch: Watch = unwatched,
        choose: Choose | None = None,
        room: Room | None = None,
        in_any: Callable[[bool], bool] = bool,
    ) -> None:
        """`choose` says how batches are run, when the first is there. With `room` the model may be larger than it.

        `in_any` says whether something holds in any of the processes that train the task together: they must all
        choose at the same moment, and their devices may differ.
        """
        self.task = task
        self.device = device
        rng.seed_all(task.seed)
        self._building = contextlib.nullcontext() if room is None else room.building
        refused = ""
        try:
            self.model = self._make_model(watch, room)
        except TaskError as error:
            if room is None or not is_out_of_memory(error.__cause__ or error):
                raise
            refused = str(error)
        if room is not None and refused:  # here, where nothing holds what was made of the model any more
            from rota.memory.sizing import too_large

            raise too_large(task, room, refused, watch=watch)
        self.data: Data = _made_by("the data factory", watch, task.data, Data)
        with self._building:
            self.optimizer: torch.optim.Optimizer = _made_by(
                "the optimizer factory", watch, lambda: task.optimizer(self.model), torch.optim.Optimizer
            )
            _check_parameters(self.model, self.optimizer)
        self.lr_schedule: Any = None
        if task.lr_schedule is not None:
            make_schedule = task.lr_schedule
            self.lr_schedule = _made_by(
                "the lr_schedule factory",
                watch,
                lambda: make_schedule(self.optimizer),
                torch.optim.lr_scheduler.LRScheduler,
            )
            if getattr(self.lr_schedule, "optimizer", self.optimizer) is not self.optimizer:
                raise TaskError(
                    "the lr_schedule factory returned a schedule of another optimizer, which changes no learning rate "
                    "of this one; make it of the optimizer that it is called with"
                )
        self.parts = Parts(task=task, model=self.model, optimizer=self.optimizer, device=device, room=room, watch=watch)
        self._choose: Choose = choose or (lambda parts, batch: plainly(parts))
        self._in_any = in_any
        self._run: Executor | None = None
        watch("opening the training data")
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
        self.fresh = False
        """Whether nobody changes the large tensors of the last `state_dict`."""
        self.last: dict[str, float] = {}
        """The latest value of each metric."""

    def _make_model(self, watch: Watch, room: Room | None) -> torch.nn.Module:
        with self._building:
            model: torch.nn.Module = _made_by("the model factory", watch, self.task.model, torch.nn.Module)
            _check_model(model)
            watch("moving the model to its device")
            with calling("moving the model to its device"):
                if self.task.precision == "float64" and room is not None:
                    room.building.convert(model, torch.float64)
                elif self.task.precision == "float64":
                    model.double()
                if not waits_on_host(model, room):
                    model.to(self.device)
                    if room is not None and self.device.type != "cpu":
                        room.building.forget_others(model)
                return model.train()

    # ---- training ----

    def train_batch(self) -> dict[str, float] | None:
        """Train on one batch, or on those of a step. The step's metrics, if that completed a step, else None."""
        if self._run is None:
            self.parts.watch("reading the first batch")
            batches = [self._next_batch()]
            self._begin(batches[0])
        else:
            batches = [self._next_batch()]
        run = self._run
        assert run is not None
        number = self.step * self.task.accumulate + self.batches
        at_once = self.batches == 0 and isinstance(run, TakesSteps) and run.takes_steps(batches[0])
        if at_once:
            batches += [self._next_batch() for _ in range(self.task.accumulate - 1)]
        if self.batches == 0:
            run.zero_grad()
        with calling("the loss function"):
            if at_once:
                assert isinstance(run, TakesSteps)
                found = run.backward_all(batches, number=number)
            else:
                found = [run.backward(batches[0], number=number)]
            for metrics in found:
                check_finite(metrics, kind="training", step=self.step + 1)
        for metrics in found:
            for name, value in metrics.items():
                self.sums[name] = self.sums.get(name, 0.0) + value
        self.batches += len(batches)
        if self.batches < self.task.accumulate:
            return None
        return self._take_step()

    def _next_batch(self) -> Any:
        with calling("reading the training data"):
            return self.cursor.next()[0]

    def _take_step(self) -> dict[str, float]:
        task = self.task
        assert self._run is not None
        with calling("the optimizer"):
            self._run.update()
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
        executor = self._executor  # in train mode: it may be made now, from the graph of a training step
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
                    metrics = executor.measure(batch)
                    check_finite(metrics, kind="validation", step=self.step)
                    for name, value in metrics.items():
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

    @property
    def begun(self) -> bool:
        """Whether a batch was run."""
        return self._run is not None

    def adopt(self, executor: Executor) -> None:
        """Have it run the batches from now on."""
        self._run = executor

    def _begin(self, batch: Any) -> None:
        self.parts.watch("choosing how it runs")
        self._run = self._choose(self.parts, batch)
        self.parts.watch("the first batch")

    def _schedule_wants_metric(self) -> bool:
        return isinstance(self.lr_schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)

    @property
    def _executor(self) -> Executor:
        """What runs batches; before the first training batch that is plain PyTorch, in every process."""
        room = self.parts.room
        if self._run is None and room is not None and self._in_any(room.building.away or is_elsewhere(self.parts)):
            self._begin(self._coming_batch())
        return self._run if self._run is not None else Eager(self.parts)

    def _coming_batch(self) -> Any:
        """The next training batch; it will come again."""
        before = self.cursor.state_dict()
        with rng.keeping_random_state(), calling("reading the training data"):
            batch, _ = self.cursor.next()
            self.cursor.load_state_dict(before, lambda text: None)
        return batch

    # ---- state ----

    def state_dict(self) -> dict[str, Any] | None:
        """Everything that the next step depends on, as a tree of tensors and plain values; None if another has it."""
        weights = self._executor.weights(between_steps=self.batches == 0)
        if weights is None:
            return None
        self.fresh = weights.fresh
        return {
            "model": weights.model,
            "buffers": weights.buffers,
            "gradients": weights.gradients,
            "optimizer": weights.optimizer,
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
        """Go on from where `state_dict` was called; before the first batch.

        After an UnfitCheckpointError another state can be loaded: it replaces all that was taken of this one.
        """
        assert self._run is None
        try:
            self._load(state, notice)
        except TaskError as error:
            if is_out_of_memory(error.__cause__ or error):
                raise
            raise UnfitCheckpointError(str(error)) from error
        except CheckpointError:
            raise  # of the disk that shards are on
        except Exception as error:  # what was altered, or is of another model, may raise anything
            if is_out_of_memory(error) or refusal(error) is not None:
                raise
            lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
            first = " ".join(lines[:2]).rstrip(".")
            raise UnfitCheckpointError(
                f"the checkpoint does not fit the model or optimizer that the factories make now ({first}); "
                "undo the change, or start a new run"
            ) from error

    def _load(self, state: dict[str, Any], notice: Callable[[str], None]) -> None:
        with self._building:
            self.model.load_state_dict(state["model"])
            for name, value in self.model.named_buffers():
                if name in state["buffers"]:
                    value.copy_(state["buffers"][name])
        for name, parameter in self.model.named_parameters():
            gradient = state["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.lr_schedule is not None and state["lr_schedule"] is not None:
            self.lr_schedule.load_state_dict(state["lr_schedule"])
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


def _check_model(model: torch.nn.Module) -> None:
    """TaskError for parameters without values."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise TaskError(
                f"the model factory returned a model whose {name} has no shape yet; call the model once in the "
                "factory, or give its layers their input sizes"
            )
        if parameter.is_meta:
            raise TaskError(
                f"the model factory returned a model whose {name} is on the meta device and has no values; make it on "
                "the CPU"
            )


def _check_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """TaskError for an optimizer that trains what is not the model: rota neither saves that nor moves it."""
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not held:
        raise TaskError(
            "the optimizer factory returned an optimizer without parameters; give it those of the model that it is "
            "called with"
        )
    strange = sum(id(parameter) not in own for parameter in held)
    if strange:
        share = "all" if strange == len(held) else f"{strange} of {len(held)}"
        raise TaskError(
            f"the optimizer factory returned an optimizer of which {share} parameters are not the model's; make it of "
            "those of the model that it is called with, and put what else is to be trained into the model"
        )


def _made_by(what: str, watch: Watch, factory: Callable[[], Any], expected: type) -> Any:
    watch(what)
    with calling(what):
        made = factory()
    if not isinstance(made, expected):
        is_dataset = (
            expected is Data and (is_map_style(made) or hasattr(made, "__iter__")) and not isinstance(made, str)
        )
        remedy = ", as in rota.Data(train=dataset, batch_size=...)" if is_dataset else ""
        raise TaskError(f"{what} returned {type(made).__name__}; it must return a {expected.__name__}{remedy}")
    return made


def _count_steps(task: Task, cursor: Cursor) -> int:
    if task.steps is not None:
        return task.steps
    assert task.epochs is not None
    if cursor.batches_per_epoch is None:
        raise TaskError("epochs needs training data with a length, and this iterable has none; give steps instead")
    return max(1, task.epochs * cursor.batches_per_epoch // task.accumulate)
