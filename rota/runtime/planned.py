"""Runs batches by a plan, each process one device of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from rota.errors import TaskError
from rota.graph.graph import Graph
from rota.plan.box import Box
from rota.plan.cache import Programs
from rota.plan.program import Program
from rota.runtime.engine import Engine
from rota.runtime.executor import Parts, Weights, check_gradient, loss_of, numbers_of, placed
from rota.runtime.gang import Gang, talking
from rota.runtime.gathering import PieceOptimizer, gather
from rota.runtime.hollow import hollow_out
from rota.runtime.pieces import cut
from rota.strategies.base import Strategy, describe

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}
)
"""PyTorch's optimizers that treat every element of a parameter alike."""
_MOST_ENGINES = 32
"""Of as many shapes of batches; the others are made again when they come back."""
_MOMENTS = {"Adagrad": 1.0, "Adadelta": 2.0, "Rprop": 2.0, "ASGD": 1.0, "Adafactor": 0.1, "Muon": 1.0}
"""Of optimizers whose settings do not matter; those that are not known count as Adam."""
WHOLE_PARAMETERS = frozenset({"Adafactor", "Muon"})
"""Those that look at one parameter at a time."""


class Planned:
    """A model and its optimizer in pieces; the whole is put together only to be saved."""

    def __init__(
        self,
        parts: Parts,
        batch: Any,
        *,
        gang: Gang,
        strategy: Strategy,
        graph: Graph | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._parts = parts
        self._gang = gang
        self._model = parts.model
        kind = parts.device.type
        self._programs = Programs(
            parts.model,
            lambda model, one: loss_of(parts.task, model, one, kind),
            lambda graph: strategy(graph, gang.size),
            notice=notice,
        )
        batch = placed(batch, parts)
        self._first = self._programs.of(batch, graph=graph)
        check_gradient(self._first.refined.graph.loss.requires_grad)
        check_optimizer(parts.optimizer, self._first, describe(strategy))
        whole = {**dict(parts.model.named_parameters()), **dict(parts.model.named_buffers())}
        self._rest = {name: value for name, value in whole.items() if self._name(name) not in self._first.stored}
        """What no batch uses: it stays whole, in every process."""
        self._state_names = list(parts.model.state_dict(keep_vars=True))
        self._extra = {
            name: value for name, value in parts.model.state_dict().items() if not isinstance(value, torch.Tensor)
        }
        self._parameter_names = [name for name, _ in parts.model.named_parameters()]
        self._buffer_names = [name for name, _ in parts.model.named_buffers()]
        self._engines: dict[int, tuple[Program, Engine]] = {}
        self._main = self._engine(self._first, whole)
        self._optimizer = self._cut_optimizer()
        hollow_out(parts.model, keep=set(map(id, self._rest.values())))

    def _name(self, name: str) -> str:
        """Under which name the graph has it."""
        return self._first.refined.graph.aliases.get(name, name)

    def _engine(self, program: Program, state: dict[str, torch.Tensor]) -> Engine:
        found = self._engines.get(id(program))
        if found is None:
            beside = None if not self._engines else self._main
            with talking():
                engine = Engine(
                    program,
                    state,
                    rank=self._gang.rank,
                    groups=self._gang.groups,
                    seed=self._parts.task.seed,
                    compiled=self._parts.task.compile,
                    beside=beside,
                )
            found = self._engines[id(program)] = (program, engine)
            if len(self._engines) > _MOST_ENGINES:  # the first one has the pieces
                del self._engines[list(self._engines)[1]]
        return found[1]

    def _cut_optimizer(self) -> PieceOptimizer:
        """Hand the optimizer this device's pieces, with the gradients that a checkpoint may have brought."""
        names = {id(p): self._name(name) for name, p in self._model.named_parameters() if name not in self._rest}
        pieces: dict[str, list[tuple[Box, Any]]] = {}
        for name, piece, parameter in self._main.device.parameters():
            pieces.setdefault(name, []).append((piece.box, parameter))
        gradients = {self._name(name): p.grad for name, p in self._model.named_parameters() if p.grad is not None}
        for name, gradient in gradients.items():
            for box, parameter in pieces.get(name, ()):
                parameter.grad = _part(self._first, name, box, gradient)
        optimizer = PieceOptimizer(self._parts.optimizer, pieces, names)
        optimizer.cut(self._first)
        return optimizer

    # ---- batches ----

    def zero_grad(self) -> None:
        """Of the pieces on this device."""
        self._optimizer.optimizer.zero_grad()

    def backward(self, batch: Any, *, number: int) -> dict[str, float]:
        """One run of the program, and its gradients added to those of the pieces."""
        batch = placed(batch, self._parts)
        engine = self._engine(self._programs.of(batch), self._rest)
        with talking(), self._on_device():
            outputs = engine.run(batch, step=number)
        engine.device.hand_over_gradients(divisor=self._parts.task.accumulate)
        return self._shared(engine, outputs)

    def update(self) -> None:
        """Each device updates its pieces."""
        with talking():
            self._main.clip(self._parts.task.clip_norm)
        self._optimizer.optimizer.step()

    def measure(self, batch: Any) -> dict[str, float]:
        """One forward run."""
        batch = placed(batch, self._parts)
        engine = self._engine(self._programs.of(batch, backward=False), self._rest)
        with talking(), self._on_device():
            outputs = engine.run(batch)
        return self._shared(engine, outputs)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Where tensors are made that no other says the device of. On CUDA: written with care, never run."""
        return torch.device(self._parts.device) if self._parts.device.type == "cuda" else nullcontext()

    def _shared(self, engine: Engine, outputs: dict[str, torch.Tensor]) -> dict[str, float]:
        """All metrics, on every device."""
        program = engine.program
        names = list(program.refined.graph.outputs)
        mine = numbers_of(outputs)
        mine |= {name: float(engine.free_output(name)) for name in names if engine.gives_free_output(name)}
        summed = self._gang.sum(torch.tensor([mine.get(name, 0.0) for name in names], dtype=torch.float64))
        return dict(zip(names, summed.tolist(), strict=True)) | dict(program.refined.graph.numbers)

    # ---- state ----

    def weights(self, *, between_steps: bool) -> Weights | None:
        """Gathered to the leader."""
        program, device = self._first, self._main.device
        graph = program.refined.graph
        dtypes = {name: getattr(torch, graph.tensors[name].dtype) for name in program.stored}
        whole = dict(gather(program, self._gang, program.stored, device.stored, dtypes=dtypes))
        gradients = dict(self._gradients(dtypes, between_steps=between_steps))
        optimizer = self._optimizer.state_dict(program, self._gang)
        if not self._gang.leads:
            return None
        everything = {**{name: value.detach() for name, value in self._rest.items()}, **whole}
        state = {
            name: self._extra[name] if name in self._extra else everything[self._known(name, everything)]
            for name in self._state_names
        }
        return Weights(
            model=state,
            buffers={
                name: everything[self._known(name, everything)] for name in self._buffer_names if name not in state
            },
            gradients=gradients,
            optimizer=optimizer,
            fresh=True,
        )

    def _known(self, name: str, everything: dict[str, Any]) -> str:
        return self._name(name) if self._name(name) in everything else name

    def _gradients(self, dtypes: dict[str, torch.dtype], *, between_steps: bool) -> Any:
        """Those that the next step does not clear."""
        cleared = (
            {id(p) for group in self._optimizer.optimizer.param_groups for p in group["params"]}
            if between_steps
            else set()
        )
        device = self._main.device
        kept = {
            name
            for name, _, parameter in device.parameters()
            if parameter.grad is not None and id(parameter) not in cleared
        }
        names = sorted(set(itertools.chain.from_iterable(self._gang.everyone(sorted(kept)))))

        def of(name: str, box: Box) -> torch.Tensor:
            parameter = device.stored(name, box)
            return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)

        found = dict(gather(self._first, self._gang, names, of, dtypes=dtypes))
        for name in self._parameter_names:
            if self._name(name) in found:
                yield name, found[self._name(name)]


Needs = Literal["elements", "parameters", "everything"]


def needs_of(optimizer: torch.optim.Optimizer) -> Needs:
    """What an optimizer looks at in one go. Of what is not PyTorch's own, and of hooks, nothing is known."""
    kind = type(optimizer)
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if not kind.__module__.startswith("torch.optim") or hooks:
        return "everything"
    if kind.__name__ in ELEMENTWISE:
        return "elements"
    return "parameters" if kind.__name__ in WHOLE_PARAMETERS else "everything"


def moments_of(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state that an optimizer keeps for each byte of a parameter."""
    name = type(optimizer).__name__
    settings = optimizer.defaults
    if name == "SGD":
        return 1.0 if settings.get("momentum") else 0.0
    if name == "RMSprop":
        return 1.0 + bool(settings.get("momentum")) + bool(settings.get("centered"))
    return _MOMENTS.get(name, 2.0 + bool(settings.get("amsgrad")))


def check_optimizer(optimizer: torch.optim.Optimizer, program: Program, strategy: str) -> None:
    """TaskError if an optimizer would get less than it looks at."""
    needs = needs_of(optimizer)
    if needs == "elements":
        return
    name = type(optimizer).__name__
    others = f"or one of {', '.join(sorted(ELEMENTWISE))} without hooks"
    for parameter in program.gradients:
        layout = program.stored[parameter]
        whole = Box.whole(program.refined.shape(parameter))
        if any(piece.box != whole for piece in layout):
            ways = "data or pipeline" if needs == "parameters" else "data"
            raise TaskError(f"{name} looks at whole parameters, and {strategy} cuts {parameter}; use {ways}, {others}")
        if needs == "everything" and len({piece.device for piece in layout}) < program.devices:
            raise TaskError(
                f"{name} may look at all parameters at once, and {strategy} puts {parameter} on some devices only; "
                f"use data, {others}"
            )


def _part(program: Program, name: str, box: Box, whole: torch.Tensor) -> torch.Tensor:
    everything = Box.whole(program.refined.shape(name))
    return cut(whole, program.refined.factors[name], everything, box).clone(memory_format=torch.contiguous_format)
