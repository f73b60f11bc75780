"""Runs a task's batches on one device that has less memory than the task needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from rota.cluster.device import format_bytes
from rota.errors import FitError, TaskError
from rota.graph.graph import Graph
from rota.memory.arrange import Arrangement, arrange, arranged
from rota.memory.disk import measured_rates
from rota.memory.holdings import Holdings
from rota.memory.keeping import StoreWriter, references
from rota.memory.residency import Rates
from rota.memory.slab import Budget
from rota.memory.spillable import check_outputs, check_spillable, margin_bytes, training_of
from rota.memory.spilled import Spilled
from rota.memory.store import Store
from rota.memory.tiers import Tiers
from rota.plan.cache import shape_of
from rota.plan.costs import Costs
from rota.plan.program import NodeKind, Segment
from rota.runtime.choose import graph_of
from rota.runtime.executor import Parts, Weights, numbers_of, placed
from rota.state.writer import Written
from rota.store.run_folder import STORE_FOLDER
from rota.strategies.spill import Spill

_MEASURED_STEPS = 2
"""After so many steps of a shape it is known what its stages take."""


class Spilling:
    """A model and its optimizer of which a part is in memory, and all of it on disk."""

    def __init__(
        self,
        parts: Parts,
        batch: Any,
        *,
        spill: Spill,
        graph: Graph | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        assert parts.room is not None
        self._parts = parts
        self._room = parts.room
        self._model = parts.model
        building = parts.room.building
        building.finish(parts.model)
        batch = placed(batch, parts)
        graph = graph or graph_of(parts, batch)
        check_spillable(parts, graph)
        self._tiers = Tiers(Store(self._room.folder / STORE_FOLDER, notice=notice), Budget(0))
        self._tiers.store.recover()
        self._tiers.store.start_over()
        training = training_of(parts, graph, batch)
        budget_bytes = self._budget_bytes()
        self._usual = rates = measured_rates(self._room.folder)
        try:
            first = arrange(graph, spill, training, budget_bytes=budget_bytes, rates=rates)
        except FitError as error:
            raise TaskError(self._too_small(error, budget_bytes)) from error
        self._tiers.budget.budget_bytes = first.residency.budget_bytes
        self._cut = first.cut
        self._training = first.training
        self._groups = first.groups
        names = {graph.aliases.get(name, name): one for name, one in parts.model.named_parameters()}
        held = {name for group in self._groups.values() for name in group.parameters}
        self._rest = {name: one for name, one in names.items() if name not in held}
        for one in self._rest.values():
            building.release(one)
        self._holdings = Holdings(
            self._groups,
            {name: one for name, one in names.items() if name in held},
            parts.optimizer,
            items=first.step.items,
            tiers=self._tiers,
            clip_norm=parts.task.clip_norm,
        )
        self._holdings.settle(building.release)
        building.close()
        self._graph = graph
        self._ways: dict[Any, Spilled] = {self._key(batch, backward=True): self._spilled(first)}
        self._active: Spilled | None = None
        self._steps = 0
        notice(_told(first, self._tiers.budget.budget_bytes))

    # ---- how batches of each shape are run ----

    def _budget_bytes(self) -> int:
        """What the device has, without what the process took since."""
        return max(0, self._room.memory_bytes - self._room.taken_bytes() - margin_bytes(self._room.memory_bytes))

    def _too_small(self, error: FitError, budget_bytes: int) -> str:
        if error.needed_bytes is None:
            return str(error)
        beside = self._room.memory_bytes - budget_bytes
        needed = format_bytes(error.needed_bytes + beside)
        return (
            f"{str(error).split(', and')[0]}: the task needs a device with at least {needed}, and this one has "
            f"{format_bytes(self._room.memory_bytes)}; give it more (--memory), or use a smaller batch"
        )

    def _key(self, batch: Any, *, backward: bool) -> Any:
        """What a program depends on: also the modes that modules are in, and what is trained now."""
        modes = tuple(module.training for module in self._model.modules())
        trained = tuple(parameter.requires_grad for parameter in self._model.parameters())
        return backward, modes, trained, shape_of(batch)

    def _way(self, batch: Any, *, backward: bool) -> Spilled:
        key = self._key(batch, backward=backward)
        if key not in self._ways:
            graph = graph_of(self._parts, batch)
            check_outputs(graph)
            program = self._cut.program(graph, forward_only=not backward)
            try:
                made = arranged(
                    self._cut,
                    program,
                    self._groups,
                    self._training if backward else replace(self._training, batches=1, clipped=False),
                    budget_bytes=self._tiers.budget.budget_bytes,
                    rates=self._rates,
                    costs=Costs(),
                )
            except FitError as error:
                raise TaskError(self._too_small(error, self._tiers.budget.budget_bytes)) from error
            self._ways[key] = self._spilled(made)
        return self._ways[key]

    def _spilled(self, made: Arrangement) -> Spilled:
        return Spilled(
            made.program,
            self._holdings,
            {self._graph.aliases.get(name, name): one for name, one in self._model.named_buffers()},
            step=made.step,
            residency=made.residency,
            batches=made.training.batches,
            seed=self._parts.task.seed,
        )

    def _enter(self, way: Spilled, place: int) -> None:
        if self._active is not way:
            if self._active is not None:
                self._active.leave()
            way.enter(place)
            self._active = way

    # ---- batches ----

    def zero_grad(self) -> None:
        """The update of a group has forgotten its gradient."""
        self._holdings.begin_step()

    def backward(self, batch: Any, *, number: int) -> dict[str, float]:
        """Run a batch through all shards and back; those whose gradient is complete are updated."""
        batch = placed(batch, self._parts)
        way = self._way(batch, backward=True)
        place = number % self._training.batches
        self._enter(way, place)
        outputs = way.batch(batch, place=place, number=number)
        return numbers_of(outputs) | dict(way.program.refined.graph.numbers)

    def update(self) -> None:
        """All groups were updated on the way; what that took is looked at."""
        self._steps += 1
        if self._steps == _MEASURED_STEPS:
            self._look_again()

    def measure(self, batch: Any) -> dict[str, float]:
        """One forward run."""
        batch = placed(batch, self._parts)
        way = self._way(batch, backward=False)
        self._enter(way, 0)
        outputs = way.batch(batch, place=0, number=0)
        return numbers_of(outputs) | dict(way.program.refined.graph.numbers)

    # ---- what was measured ----

    @property
    def _rates(self) -> Rates:
        return self._tiers.rates(self._usual)

    def _look_again(self) -> None:
        """Plan once more what is where when, with what stages and moves really take."""
        way = self._active
        assert way is not None
        taken: dict[tuple[int, NodeKind], float] = {}
        for act, took_s in zip(way.step.acts, way.run.stage_s, strict=True):
            if act.kind != "update":
                node = way.program.nodes[act.node]
                taken[(node.segment, node.kind)] = took_s

        def seconds(segment: Segment) -> tuple[float, float]:
            return taken[(segment.index, NodeKind.FORWARD)], taken.get((segment.index, NodeKind.BACKWARD), 0.0)

        made = arranged(
            self._cut,
            way.program,
            self._groups,
            self._training,
            budget_bytes=self._tiers.budget.budget_bytes,
            rates=self._rates,
            costs=Costs(),
            seconds=seconds,
        )
        if made.residency != way.residency:
            way.leave()
            self._active = None
            key = next(key for key, one in self._ways.items() if one is way)
            self._ways[key] = self._spilled(made)

    # ---- state ----

    def weights(self, *, between_steps: bool) -> Weights:
        """References to what is in the store, and what is not there itself."""
        if not between_steps and self._active is not None:
            self._active.leave()  # gradients that wait for the rest of the step are written, too
            self._active = None
        self._tiers.flush()
        away = self._references()
        model = {
            name: away.get(("model", id(value)), value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in self._model.state_dict(keep_vars=True).items()
        }
        gradients = {}
        for name, parameter in self._model.named_parameters():
            if ("gradients", id(parameter)) in away:
                gradients[name] = away[("gradients", id(parameter))]
            elif parameter.grad is not None:
                gradients[name] = parameter.grad
        return Weights(
            model=model,
            buffers={name: value for name, value in self._model.named_buffers() if name not in model},
            gradients=gradients,
            optimizer=self._optimizer_state(away),
        )

    def _references(self) -> dict[tuple[Any, ...], Any]:
        """(what it is, the id of the parameter, and the name of a moment) -> what stands for it"""
        found: dict[tuple[Any, ...], Any] = {}
        held = self._tiers.held
        parameters = self._holdings.parameters
        for group in self._groups.values():
            for name, one in zip(group.parameters, references(group.weights, held[group.weights]), strict=True):
                found[("model", id(parameters[name]))] = one
            moments = held.get(group.moments)
            if moments is not None and moments.shelf is not None:
                remembered = self._holdings.remembered(group)
                for (name, key, _), one in zip(remembered, references(group.moments, moments), strict=True):
                    found[("moments", id(parameters[name]), key)] = one
            gradients = held.get(group.gradients)
            if gradients is not None and gradients.shelf is not None:
                having = [name for name in group.parameters if parameters[name].grad is not None]
                if having:
                    for name, one in zip(having, references(group.gradients, gradients), strict=True):
                        found[("gradients", id(parameters[name]))] = one
        return found

    def _optimizer_state(self, away: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
        optimizer = self._parts.optimizer
        whole = optimizer.state_dict()
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        whole["state"] = {
            number: {key: away.get(("moments", id(order[number]), key), value) for key, value in values.items()}
            for number, values in whole["state"].items()
        }
        return whole

    def writer(self, done: Callable[[Written], None]) -> StoreWriter:
        """What saves a task whose shards are in a store."""
        return StoreWriter(self._tiers, done=done)

    def close(self) -> None:
        """End the threads that move, and let go of the files."""
        self._tiers.close()


def _told(made: Arrangement, budget_bytes: int) -> str:
    read, written = map(format_bytes, made.residency.moved_bytes)
    again = f", {len(made.cut.recomputed)} of them computed again" if made.cut.recomputed else ""
    return (
        f"spill: {len(made.program.segments)} shards{again}; a step reads {read} and writes {written} "
        f"with {format_bytes(budget_bytes)} for weights, gradients, moments and activations"
    )
