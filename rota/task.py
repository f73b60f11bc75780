"""What the user asks for: a `Task` is one model to train, and `Data` is what it is trained on."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rota.errors import InputError
from rota.given import flag, quoted
from rota.whole import at_least, positive
from rota.written import check_readable

if TYPE_CHECKING:
    import torch

Precision = Literal["float32", "float64", "bfloat16"]
BALANCES = ("migrate", "semi", "resize", "off")
PRECISIONS: tuple[str, ...] = ("float32", "float64", "bfloat16")

# A task's name is also the name of its folder, on every file system.
NAME_RULE = (
    "a name starts with a letter or digit and holds only letters, digits and . _ = , + @ - (at most 128), because it "
    "names a folder"
)
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+@-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training and validation data of a task.

    A dataset is either map-style (it has a length and an index: a torch `Dataset`, a tensor, a list), which is
    shuffled anew each epoch from the task's seed, or any other iterable, which is taken in its own order.
    """

    train: Any
    """The training dataset."""
    valid: Any = None
    """The validation dataset; None means that the task is not validated."""
    batch_size: int | None = None
    """Samples in a batch. None is for an iterable that yields whole batches."""
    valid_batch_size: int | None = None
    """Samples in a validation batch; by default `batch_size`."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; by default torch's own collation."""
    shuffle: bool = True
    """Whether map-style training data is shuffled; validation data never is."""
    drop_last: bool = False
    """Whether the smaller batch at the end of an epoch is left out."""

    def __post_init__(self) -> None:
        where = "rota.Data"
        for name in ("shuffle", "drop_last"):
            flag(getattr(self, name), f"{where}: {name}")
        for name in ("batch_size", "valid_batch_size"):
            if getattr(self, name) is not None:
                _set_count(self, name, where)
        for name, size in (("train", self.batch_size), ("valid", self.valid_batch_size or self.batch_size)):
            _check_indexed(where, name, getattr(self, name))
            if size is not None and _makes_batches(getattr(self, name)):
                raise InputError(
                    f"{where}: {name} is a DataLoader, which makes batches itself, and batch_size would make batches "
                    f"of batches; give its dataset, as in {name}=loader.dataset"
                )
        if self.batch_size is None and is_map_style(self.train):
            raise InputError(f"{where}: batch_size is missing; give the number of samples in a batch")
        if self.valid is not None and is_map_style(self.valid) and not (self.valid_batch_size or self.batch_size):
            raise InputError(f"{where}: valid_batch_size is missing; give the number of samples in a validation batch")
        _check_dataset(where, "train", self.train)
        if self.valid is not None:
            _check_dataset(where, "valid", self.valid)
        if self.batch_size is not None and is_map_style(self.train) and self.batch_size > len(self.train):
            raise InputError(
                f"{where}: batch_size ({self.batch_size}) is larger than the training dataset "
                f"({len(self.train)} samples); give a batch_size of at most {len(self.train)}"
            )
        if self.collate is not None and not callable(self.collate):
            raise InputError(f"{where}: collate must be a function, not {type(self.collate).__name__}")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One model to train. The factories are called in the worker process that trains it, in the order of the fields."""

    name: str
    """Names the task and its folder: letters, digits and ``. _ = , + @ -``."""
    model: Callable[[], torch.nn.Module]
    """Makes the model, on the CPU; rota moves it to its device."""
    data: Callable[[], Data]
    """Makes the datasets."""
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    """Makes the optimizer; parameter groups and frozen parameters work as in plain PyTorch."""
    lr_schedule: Callable[[Any], Any] | None = None
    """Makes the learning-rate schedule from the optimizer. It steps after each optimizer step."""
    loss: Callable[[torch.nn.Module, Any], Any]
    """`loss(model, batch)`: a scalar, or a dict with "loss" and other scalars to report."""
    steps: int | None = None
    """Optimizer steps to take. Give this or `epochs`."""
    epochs: int | None = None
    """Passes over the training data. Give this or `steps`."""
    valid_every: int | None = None
    """Steps between validations; the end of training is always validated."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; by default rota saves every 30 s, or less often where saving is slow."""
    seed: int = 0
    """Seeds torch, numpy and random before the model is made, and the order of the data."""
    precision: Precision = "float32"
    """float32: the model as it is made. bfloat16: autocast, parameters stay as they are. float64: all in doubles."""
    clip_norm: float | None = None
    """Clips the norm of the whole gradient before each step."""
    accumulate: int = 1
    """Batches whose gradients are averaged into one optimizer step."""
    strategy: Any = "auto"
    """How the model runs on several devices: "auto", a name such as "tensor", or a strategy (rota.strategies)."""
    devices: int | None = None
    """How many devices it gets; by default what its strategy needs, or its share of all."""
    balance: Any = "migrate"
    """How its devices keep their pace: "migrate" moves work between them and changes no result; "semi" and "resize" may
    also leave work out, which may cost accuracy; "off"; or your own policy (see docs/balance.md)."""
    deadline_s: float | None = None
    """By when it should have ended, in seconds from the beginning of the run; the schedule heeds it first of all."""
    compile: bool = False
    """Whether a strategy's segments go through torch.compile; kept for each one that is faster compiled."""
    setup_timeout_s: float = 600.0
    """How long importing, each of the factories, capturing the model, and the first batch may take."""
    step_timeout_s: float = 600.0
    """How long one batch may take before the worker counts as hung."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What distinguishes this task, for tables and the report; `rota.grid` fills it in."""

    def __post_init__(self) -> None:
        if not is_safe_name(self.name):
            raise InputError(f"task name {quoted(self.name)} cannot be used; {NAME_RULE}")
        where = f"task {quoted(self.name)}"
        for name in ("model", "data", "optimizer", "loss"):
            if not callable(getattr(self, name)):
                raise InputError(
                    f"{where}: {name} must be a function, not {type(getattr(self, name)).__name__}; "
                    f"write {name}=lambda ...: ..."
                )
        _check_makers(self, where)
        if self.lr_schedule is not None and not callable(self.lr_schedule):
            raise InputError(f"{where}: lr_schedule must be a function of the optimizer")
        for name, parameters in _CALLED_WITH.items():
            check_call(where, name, getattr(self, name), parameters)
        if (self.steps is None) == (self.epochs is None):
            given = "both are given" if self.steps is not None else "neither is given"
            raise InputError(f"{where}: give either steps or epochs; {given}")
        _check_strategy(self.strategy, where)
        is_policy = callable(self.balance) and not isinstance(self.balance, type)
        if not is_policy and not (isinstance(self.balance, str) and self.balance in BALANCES):
            raise InputError(f"{where}: balance can be {', '.join(BALANCES)} or a policy, not {quoted(self.balance)}")
        if not isinstance(self.settings, Mapping):
            raise InputError(f"{where}: settings must be a dict of names and values, not {quoted(self.settings)}")
        for name in ("steps", "epochs", "valid_every", "checkpoint_every", "accumulate", "devices"):
            if getattr(self, name) is not None or name == "accumulate":
                _set_count(self, name, where)
        for name in ("clip_norm", "deadline_s", "setup_timeout_s", "step_timeout_s"):
            value = getattr(self, name)
            if (value is not None or name not in ("clip_norm", "deadline_s")) and not (_is_number(value) and value > 0):
                raise InputError(f"{where}: {name} must be a positive number, not {quoted(value)}")
        object.__setattr__(self, "seed", at_least(self.seed, 0, f"{where}: seed"))
        if self.seed >= 2**32:
            raise InputError(f"{where}: seed must be less than 2**32, not {quoted(self.seed)}")
        flag(self.compile, f"{where}: compile")
        if not isinstance(self.precision, str) or self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise InputError(f"{where}: precision {quoted(self.precision)} is unknown; it can be {known}")


def _check_strategy(strategy: Any, where: str) -> None:
    """InputError for what can be no strategy. Whether its name is known is looked up when the run begins."""
    if isinstance(strategy, str):
        try:
            check_readable(strategy)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        return
    if not callable(strategy) or isinstance(strategy, type) or _descends(type(strategy), "torch.nn", "Module"):
        given = strategy.__name__ if isinstance(strategy, type) else type(strategy).__name__
        raise InputError(
            f"{where}: strategy must be a name such as 'tensor' or a strategy of rota.strategies, not {given}"
        )
    check_call(where, "strategy", strategy, ("graph", "devices"))


def _check_makers(task: Task, where: str) -> None:
    """InputError for what can be called, and is not the function that makes something, or that computes the loss."""
    if _descends(type(task.model), "torch.nn", "Module"):
        raise InputError(
            f"{where}: model is a {type(task.model).__name__} and not a function that makes one; write "
            "model=lambda: ... with the code that makes it, because each attempt makes its own"
        )
    made = task.optimizer.func if isinstance(task.optimizer, functools.partial) else task.optimizer
    if isinstance(made, type) and made.__module__.startswith("torch.optim"):
        raise InputError(
            f"{where}: optimizer is called with the model, and {made.__name__} takes parameters; write "
            f"optimizer=lambda model: torch.optim.{made.__name__}(model.parameters(), ...)"
        )
    check_loss_function(where, task.loss)


def check_loss_function(where: str, loss: Any) -> None:
    """InputError for a loss of PyTorch, which takes no model."""
    loss = loss if isinstance(loss, type) or inspect.isroutine(loss) else type(loss)
    if getattr(loss, "__module__", None) in ("torch.nn.functional", "torch.nn.modules.loss"):
        raise InputError(
            f"{where}: loss is called with the model and a batch, and {loss.__name__} takes predictions and targets; "
            "write loss=lambda model, batch: ... that calls both"
        )


_CALLED_WITH = {
    "model": (),
    "data": (),
    "optimizer": ("model",),
    "lr_schedule": ("optimizer",),
    "loss": ("model", "batch"),
}


def check_call(where: str, name: str, function: Any, parameters: tuple[str, ...]) -> None:
    """InputError for a Python function, or a class with a constructor in Python, that takes something else."""
    called = function.func if isinstance(function, functools.partial) else function
    if isinstance(called, type):
        known = inspect.isfunction(getattr(called, "__init__", None)) and type(called).__call__ is type.__call__
    else:
        known = inspect.isfunction(called) or inspect.ismethod(called)
    if not known:
        return
    try:
        inspect.signature(function, follow_wrapped=False).bind(*parameters)
    except TypeError as error:
        given = " and ".join(f"the {one}" for one in parameters) or "nothing"
        raise InputError(
            f"{where}: {name} is called with {given}, and {called.__qualname__} does not take that ({error}); "
            f"write {name}=lambda{' ' * bool(parameters)}{', '.join(parameters)}: ..."
        ) from error
    except ValueError:  # it has no signature that can be read
        return


def _descends(kind: type, module: str, name: str) -> bool:
    """Whether a class is, or comes from, one of PyTorch, which is not imported here."""
    return any(base.__name__ == name and base.__module__.startswith(module) for base in kind.__mro__)


def is_safe_name(name: Any) -> bool:
    """Whether a name can be that of a folder, everywhere."""
    return isinstance(name, str) and _SAFE_NAME.fullmatch(name) is not None


def is_map_style(dataset: Any) -> bool:
    """Whether a dataset can be indexed in any order, and therefore shuffled."""
    kind = type(dataset)
    # torch's IterableDataset inherits an index that only raises.
    is_stream = any(base.__name__ == "IterableDataset" for base in kind.__mro__)
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not is_stream


def _makes_batches(dataset: Any) -> bool:
    is_loader = _descends(type(dataset), "torch.utils.data", "DataLoader")
    return is_loader and getattr(dataset, "batch_sampler", None) is not None


def _check_indexed(where: str, name: str, dataset: Any) -> None:
    """InputError for what has an index, but not that of a dataset."""
    if isinstance(dataset, Mapping) and len(dataset) and 0 not in dataset:
        raise InputError(
            f"{where}: {name} is a {type(dataset).__name__} with {', '.join(map(repr, list(dataset)[:3]))}, and a "
            "dataset has samples 0, 1, 2, ...; give one of its splits, or samples made of its columns "
            "(torch.utils.data.TensorDataset)"
        )


def _check_dataset(where: str, name: str, dataset: Any) -> None:
    if is_map_style(dataset):
        if len(dataset) == 0:
            raise InputError(f"{where}: the {name} dataset is empty; give at least one sample")
    elif not hasattr(dataset, "__iter__"):
        raise InputError(
            f"{where}: {name} must be a dataset (with a length and an index) or an iterable, "
            f"not {type(dataset).__name__}"
        )


def _set_count(holder: Any, name: str, where: str) -> None:
    """Check a count and keep it as a plain int, also if it came as one of numpy's."""
    object.__setattr__(holder, name, positive(getattr(holder, name), f"{where}: {name}"))


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
