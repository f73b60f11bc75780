"""Runs batches by a plan, each process one device of it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch

from rota.balance.decide import Facts, Mode, Resize, Standing, after_step
from rota.balance.division import division_of
from rota.balance.pace import Shares, even
from rota.errors import TaskError
from rota.graph.capture import capture
from rota.graph.graph import Graph
from rota.plan.box import Box
from rota.plan.cache import Programs
from rota.plan.program import Program
from rota.runtime.balancing import Balancer, Tell, Way, silent
from rota.runtime.engine import Engine
from rota.runtime.executor import Parts, Weights, check_gradient, loss_of, numbers_of, on_device, placed
from rota.runtime.gang import Gang, talking
from rota.runtime.gathering import PieceOptimizer, gather
from rota.runtime.hollow import hollow_out
from rota.runtime.pieces import cut
from rota.runtime.resharding import GRADIENT, VALUE, Held, Resharding
from rota.runtime.resizing import Resizer, Resizing
from rota.strategies.base import Strategy, describe
from rota.strategies.mesh import Product, Recipe, can_balance, has_shares, with_shares

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
        total_steps: int = 0,
        tell: Tell = silent,
    ) -> None:
        """`total_steps` and `tell` are for the balance between devices: how long it may pay, and who is told of it."""
        self._parts = parts
        self._gang = gang
        self._model = parts.model
        self._strategy = strategy
        kind = parts.device.type
        self._programs = Programs(
            parts.model,
            lambda model, one: loss_of(parts.task, model, one, kind),
            lambda graph: strategy(graph, gang.size),
            notice=notice,
        )
        batch = placed(batch, parts)
        if graph is None:
            parts.watch("capturing the model")
        graph = graph or capture(parts.model, batch, lambda model, one: loss_of(parts.task, model, one, kind))
        for note in graph.notes:
            notice(note)
        parts.watch(f"planning {describe(strategy)}", ours=True)
        began_s = time.perf_counter()
        self._first = self._programs.of(batch, graph=graph)
        compile_s = time.perf_counter() - began_s
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
        self._balancer = self._balanced(compile_s, total_steps, tell)
        self._resizer: Resizer | None = None
        self._step = 0
        self._pace: tuple[float, ...] = ()

    def _balanced(self, compile_s: float, total_steps: int, tell: Tell) -> Balancer | None:
        """What keeps the pace, where that is wished and the strategy can do it."""
        wish = self._parts.task.balance
        if wish == "off" or self._gang.size == 1 or not can_balance(self._strategy):
            return None
        division = division_of(self._first)
        mode = cast(Mode, wish if isinstance(wish, str) else getattr(wish, "mode", "migrate"))
        facts = Facts(
            mode=mode,
            ranks=self._gang.size,
            least=1 / (64 * self._gang.size),
            products=division.products if self._can_resize(mode) else 0.0,
        )
        return Balancer(
            rank=self._gang.rank,
            facts=facts,
            standing=Standing.begin(division.shares, fixed=division.fixed),
            policy=after_step if isinstance(wish, str) else wish,
            total_steps=total_steps,
            cost_s=compile_s,
            asked=() if has_shares(self._strategy) else even(self._gang.size),
            make=self._way_with,
            tell=tell,
        )

    def _can_resize(self, mode: Mode) -> bool:
        """Whether products may leave something out: if the user allows it, and the code is not compiled by others."""
        return mode in ("semi", "resize") and not self._parts.task.compile

    def _resize(self, left_out: tuple[float, ...]) -> None:
        """From the next step on, leave out so much of this device's products."""
        if self._resizer is None:
            self._resizer = Resizer(self._first, self._main.device, how=Resizing(), seed=self._parts.task.seed)
            self._resizer.freeze(self._optimizer.optimizer)
        self._resizer.leave_out(left_out[self._gang.rank])

    def _way_with(self, shares: Shares) -> Callable[[], Way]:
        """Begins to make the programs for other shares; what is returned does the rest, in any thread."""
        assert isinstance(self._strategy, Recipe | Product)
        other, size = with_shares(self._strategy, shares), self._gang.size
        programs = self._programs.under(lambda graph: other(graph, size))

        def make() -> Way:
            programs.compile_all()
            return Way(programs=programs, engine=self._made_engine(programs.first, None))

        return make

    def _name(self, name: str) -> str:
        """Under which name the graph has it."""
        return self._first.refined.graph.aliases.get(name, name)

    def _engine(self, program: Program, state: dict[str, torch.Tensor]) -> Engine:
        found = self._engines.get(id(program))
        if found is None:
            beside = None if not self._engines else self._main
            with talking():
                engine = self._made_engine(program, state, beside=beside)
            found = self._engines[id(program)] = (program, engine)
            if len(self._engines) > _MOST_ENGINES:  # the first one has the pieces
                del self._engines[list(self._engines)[1]]
        return found[1]

    def _made_engine(
        self, program: Program, state: dict[str, torch.Tensor] | None, *, beside: Engine | None = None
    ) -> Engine:
        return Engine(
            program,
            state,
            rank=self._gang.rank,
            groups=self._gang.groups,
            seed=self._parts.task.seed,
            compiled=self._parts.task.compile,
            beside=beside,
        )

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
        """Of the pieces on this device. A step begins: if work is to be moved, now."""
        self._optimizer.optimizer.zero_grad()
        if self._resizer is not None:
            self._resizer.begin_step()
        way = None if self._balancer is None else self._balancer.due()
        if way is not None:
            self._change_to(way)

    def backward(self, batch: Any, *, number: int) -> dict[str, float]:
        """One run of the program, and its gradients added to those of the pieces."""
        batch = placed(batch, self._parts)
        engine = self._engine(self._programs.of(batch), self._rest)
        engine.device.products = self._resizer
        with self._timed(engine):
            with talking(), on_device(self._parts):
                outputs = engine.run(batch, step=number)
            engine.device.hand_over_gradients(divisor=self._parts.task.accumulate)
        self._step = number // self._parts.task.accumulate + 1
        return self._shared(engine, outputs, self._balancer)

    def update(self) -> None:
        """Each device updates its pieces."""
        with self._timed(self._main):
            with talking():
                self._main.clip(self._parts.task.clip_norm)
            self._optimizer.optimizer.step()
        if self._balancer is not None:
            self._pace = self._balancer.times
            decision = self._balancer.step_ended(self._step)
            if isinstance(decision, Resize):
                self._resize(decision.left_out)

    @contextlib.contextmanager
    def _timed(self, engine: Engine) -> Iterator[None]:
        """Count what this device computes, without what it waits for others."""
        began_s, waited_s = time.perf_counter(), engine.waited_s
        yield
        if self._balancer is not None:
            self._balancer.spent(time.perf_counter() - began_s - (engine.waited_s - waited_s))

    def pace(self) -> tuple[float, ...]:
        """Seconds that each device computed in the latest step."""
        return self._pace

    def close(self) -> None:
        """Prepare nothing any more."""
        if self._balancer is not None:
            self._balancer.close()

    # ---- balance ----

    def _change_to(self, way: Way) -> None:
        """Move work: every process comes to this between the same two steps."""
        assert self._balancer is not None
        began_s = time.perf_counter()
        program, division = way.programs.first, division_of(way.programs.first)
        if program.stored == self._first.stored and division.shares == division_of(self._first).shares:
            self._balancer.give_up("")  # heads and columns cannot be cut any finer
            return
        made = Resharding(self._first, program, self._gang, self._held()).run()
        if made is None:
            self._balancer.give_up("a device has no room for what it would get")
            return
        old = Way(programs=self._programs, engine=self._main)
        if self._resizer is not None:
            self._resizer.close()
            self._resizer = None
        self._take(way, made)
        self._balancer.changed(division.shares, old=old, pause_s=time.perf_counter() - began_s)

    def _held(self) -> Held:
        """The pieces of this device, with what the optimizer remembers and the gradients that it does not clear."""
        found: dict[tuple[str, Box], dict[str, Any]] = {}
        for name, box, tensor in self._main.device.pieces():
            held = {VALUE: tensor, **self._optimizer.held(tensor)}
            if tensor.grad is not None:
                held[GRADIENT] = tensor.grad
            found[(name, box)] = held
        return found

    def _take(self, way: Way, made: dict[tuple[str, Box], dict[str, Any]]) -> None:
        """Go on with other programs and these pieces."""
        program = way.programs.first
        pieces: dict[tuple[str, Box], torch.Tensor] = {}
        trained: dict[str, list[tuple[Box, Any]]] = {}
        remembered: dict[int, dict[str, Any]] = {}
        for (name, box), held in made.items():
            tensor, gradient = held.pop(VALUE), held.pop(GRADIENT, None)
            if program.refined.graph.tensors[name].requires_grad and not isinstance(tensor, torch.nn.Parameter):
                tensor = torch.nn.Parameter(tensor)
            tensor.grad = gradient
            pieces[(name, box)] = tensor
            if name in program.gradients:
                trained.setdefault(name, []).append((box, tensor))
                remembered[id(tensor)] = held
        self._optimizer.replace(trained, remembered)
        self._main.device.release()
        with talking():
            way.engine.take(pieces)
        self._programs, self._first, self._main = way.programs, program, way.engine
        self._engines = {id(program): (program, way.engine)}

    def measure(self, batch: Any) -> dict[str, float]:
        """One forward run."""
        batch = placed(batch, self._parts)
        engine = self._engine(self._programs.of(batch, backward=False), self._rest)
        with talking(), on_device(self._parts):
            outputs = engine.run(batch)
        return self._shared(engine, outputs)

    def _shared(
        self, engine: Engine, outputs: dict[str, torch.Tensor], balancer: Balancer | None = None
    ) -> dict[str, float]:
        """All metrics, on every device; what each of them took travels with them."""
        program = engine.program
        names = list(program.refined.graph.outputs)
        mine = numbers_of(outputs)
        mine |= {name: float(engine.free_output(name)) for name in names if engine.gives_free_output(name)}
        told = [mine.get(name, 0.0) for name in names] + ([] if balancer is None else balancer.numbers())
        summed = self._gang.sum(torch.tensor(told, dtype=torch.float64)).tolist()
        if balancer is not None:
            balancer.heard(summed[len(names) :])
        return dict(zip(names, summed[: len(names)], strict=True)) | dict(program.refined.graph.numbers)

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
