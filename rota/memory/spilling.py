"""Runs a task's batches on a device that has less memory than the task needs, or on several that share samples."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from rota.cluster.device import format_bytes
from rota.errors import FitError, TaskError
from rota.graph.graph import Graph
from rota.memory.arrange import Arrangement, Cut, arrange, arranged
from rota.memory.disk import measured_rates
from rota.memory.holdings import Holdings
from rota.memory.keeping import StoreWriter, references
from rota.memory.residency import Item, Rates
from rota.memory.slab import Budget
from rota.memory.spillable import check_outputs, check_spillable, margin_bytes, too_small, training_of
from rota.memory.spilled import Spilled
from rota.memory.staging import Far
from rota.memory.steps import Group, SegmentSeconds, Training, groups_of
from rota.memory.store import Store
from rota.memory.tiers import Tiers
from rota.plan.cache import shape_of
from rota.plan.costs import Costs
from rota.plan.program import NodeKind, Program, Segment
from rota.runtime.choose import graph_of
from rota.runtime.executor import Parts, Weights, free_device_bytes, numbers_of, on_device, placed
from rota.runtime.gang import Gang, talking
from rota.runtime.reservoir import reservoir
from rota.state import files, inside
from rota.state.writer import Written
from rota.store.run_folder import STORE_FOLDER
from rota.strategies.spill import Spill

_NOT_HELD = "memory that is freed is made zero again each time (`rota doctor` tells why)"
_MEASURED_STEPS = 2
"""After so many steps of a shape it is known what its stages take."""


class Way(Protocol):
    """How batches of one kind are run."""

    program: Program
    at_once: int
    """So many go through the shards side by side."""

    def enter(self, batch: int = 0) -> None:
        """Begin to run batches, from this one of a step on."""
        ...

    def leave(self) -> None:
        """Have everything on disk."""
        ...

    def take(self, batches: Sequence[Any], *, place: int, number: int) -> list[dict[str, torch.Tensor]]:
        """Batches of a step from a place on, and with its last one the update; their metrics."""
        ...


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What is decided with the first batch."""

    cut: Cut
    training: Training
    groups: dict[str, Group]
    items: Mapping[str, Item]
    budget_bytes: int
    way: Callable[[], Way]
    """Made when the groups are on disk."""
    told: str
    """What the user should know."""


class Spilling:
    """A model and its optimizer of which a part is in memory, and all of it on disk."""

    def __init__(
        self,
        parts: Parts,
        batch: Any,
        *,
        spill: Spill,
        gang: Gang | None = None,
        graph: Graph | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """The devices of a gang have all shards each, and a part of every batch."""
        if parts.room is None:
            raise TaskError(f"{spill} needs a device of which the memory is known, and of {parts.device} it is not")
        self._parts = parts
        self._closing = contextlib.ExitStack()
        self._gang = gang if gang is not None and gang.size > 1 else None
        self._rank = 0 if self._gang is None else self._gang.rank
        self._room = parts.room
        inside.check_folder(self._room.folder)
        files.make_private_folder(self._room.folder)
        self._model = parts.model
        parts.room.building.finish(parts.model)
        graph = graph or graph_of(parts, batch)
        batch = placed(batch, parts)
        check_spillable(parts, graph)
        for note in graph.notes:
            notice(note)
        host_bytes = self._room.host_bytes
        far = None if host_bytes is None else Far(device=parts.device, host_bytes=host_bytes)
        self._tiers = Tiers(Store(self._room.folder / STORE_FOLDER, notice=notice), Budget(0), far=far)
        try:
            self._begin(parts, batch, graph, spill, far, notice)
        except BaseException:  # nobody else has this executor yet
            self._tiers.close()
            raise

    def _begin(
        self, parts: Parts, batch: Any, graph: Graph, spill: Spill, far: Far | None, notice: Callable[[str], None]
    ) -> None:
        """Cut the model, and put what leaves memory on disk."""
        building = self._room.building
        self._tiers.store.recover()
        self._tiers.store.start_over()
        self._usual = measured_rates(self._room.folder)
        parts.watch(f"planning {spill}", ours=True)
        first = self._open(graph, spill, training_of(parts, graph, batch))
        self._tiers.budget.budget_bytes = first.budget_bytes
        self._cut = first.cut
        self._training = first.training
        self._groups = first.groups
        names = {graph.aliases.get(name, name): one for name, one in parts.model.named_parameters()}
        held = {name for group in self._groups.values() for name in group.parameters}
        self._rest = {name: one for name, one in names.items() if name not in held}
        for one in self._rest.values():
            building.release(one)
            one.data = one.data.to(parts.device)
        for buffer in parts.model.buffers():
            buffer.data = buffer.data.to(parts.device)
        self._holdings = Holdings(
            self._groups,
            {name: one for name, one in names.items() if name in held},
            parts.optimizer,
            items=first.items,
            tiers=self._tiers,
            clip_norm=parts.task.clip_norm,
        )
        self._holdings.settle(building.release)
        self._bring_the_rest()
        building.close()
        self._graph = graph
        self._ways: dict[Any, Way] = {}
        self._together: tuple[Any, Way] | None = None
        """How batches of one kind go through the shards side by side."""
        key, way = self._key(batch, backward=True), first.way()
        if way.at_once > 1:
            self._together = (key, way)
            self._training = replace(self._training, at_once=1)
        else:
            self._ways[key] = way
        self._active: Way | None = None
        self._steps = 0
        self._computed_s = 0.0
        """What the stages of the latest step took, without what they waited for."""
        held_back = self._hold(first.budget_bytes, far)
        # What is there now stays; to look through all of it for what nobody needs took a hundredth of a pool's time.
        gc.collect()
        gc.freeze()
        self._closing.callback(gc.unfreeze)
        notice(first.told if held_back else f"{first.told}; slower, because {_NOT_HELD}")

    def _hold(self, budget_bytes: int, far: Far | None) -> bool:
        """From now on what large tensors free stays for the next ones, within what is counted; False if it cannot."""
        held = reservoir()
        if far is not None:
            return True
        if held is None or not held.hold(self._most_held_bytes(budget_bytes)):
            return False
        self._tiers.budget.trim()
        self._closing.callback(held.let_go)
        return True

    def _most_held_bytes(self, budget_bytes: int) -> int:
        """What large tensors take at most, those included that were freed: all that is counted, and nothing else."""
        return budget_bytes

    def _bring_the_rest(self) -> None:
        """To a GPU: what is in no item, and may have been loaded while its parameter was on the host (never run)."""
        device = self._parts.device
        for group in self._parts.optimizer.param_groups:
            beside = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.device.type != device.type:
                    parameter.grad = parameter.grad.to(device)
                state = self._parts.optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and (value.dim() > 0 or beside):
                        state[key] = value.to(device)

    # ---- how batches of each shape are run ----

    def _open(self, graph: Graph, spill: Spill, training: Training) -> Opening:
        """How the first batch is run, and with it what comes and goes together."""
        made = self._first(graph, spill, training)
        return Opening(
            cut=made.cut,
            training=made.training,
            groups=made.groups,
            items=made.step.items,
            budget_bytes=made.residency.budget_bytes,
            way=lambda: self._spilled(made),
            told=_told(made, made.residency.budget_bytes),
        )

    def _first(self, graph: Graph, spill: Spill, training: Training) -> Arrangement:
        """How the first batch is run. All devices of a gang cut alike: the leader decides."""
        gang = self._gang
        budget_bytes = self._budget_bytes()
        found: Arrangement | None = None
        answer: tuple[Cut, bool] | None = None
        refused = ""
        if self._rank == 0:
            replicas = 1 if gang is None else gang.size
            try:
                found = arrange(graph, spill, training, budget_bytes=budget_bytes, rates=self._usual, replicas=replicas)
                answer = (found.cut, found.training.activations_move)
            except FitError as error:
                refused = self._too_small(error)
        if gang is not None:
            answer, refused = gang.told((answer, refused))
        if answer is None:
            raise TaskError(refused)
        if found is not None:
            return found
        cut, move = answer
        program = cut.program(graph)
        return self._arranged(
            cut,
            program,
            groups_of(program, self._rank),
            replace(training, activations_move=move),
            budget_bytes=budget_bytes,
            rates=self._usual,
        )

    def _arranged(
        self,
        cut: Cut,
        program: Program,
        groups: dict[str, Group],
        training: Training,
        *,
        budget_bytes: int,
        rates: Rates,
        seconds: SegmentSeconds | None = None,
    ) -> Arrangement:
        try:
            return arranged(
                cut,
                program,
                groups,
                training,
                budget_bytes=budget_bytes,
                rates=rates,
                costs=Costs(),
                seconds=seconds,
                rank=self._rank,
            )
        except FitError as error:
            raise TaskError(self._too_small(error)) from error

    def _budget_bytes(self) -> int:
        """What the device has, without what the process took since, and what others took of a GPU."""
        return max(0, self._room.memory_bytes - self._beside_bytes())

    def _beside_bytes(self) -> int:
        """What of a device's memory is not for weights, gradients, moments and activations."""
        taken_bytes = self._room.taken_bytes()
        free_bytes = free_device_bytes() if self._room.host_bytes is not None else None
        if free_bytes is not None:
            taken_bytes = max(taken_bytes, self._room.memory_bytes - free_bytes)
        return taken_bytes + margin_bytes(self._room.memory_bytes)

    def _too_small(self, error: FitError) -> str:
        """What to tell the user."""
        memory_bytes = self._room.memory_bytes
        taken_bytes = self._beside_bytes() - margin_bytes(memory_bytes)
        return too_small(error, taken_bytes=taken_bytes, memory_bytes=memory_bytes)

    def _key(self, batch: Any, *, backward: bool) -> Any:
        """What a program depends on: also the modes that modules are in, and what is trained now."""
        modes = tuple(module.training for module in self._model.modules())
        trained = tuple(parameter.requires_grad for parameter in self._model.parameters())
        return backward, modes, trained, shape_of(batch)

    def _way(self, batch: Any, *, backward: bool) -> Way:
        key = self._key(batch, backward=backward)
        if key not in self._ways:
            graph = graph_of(self._parts, batch)
            check_outputs(graph)
            self._ways[key] = self._other_way(
                self._cut.program(graph, forward_only=not backward, any_size=True),
                self._training if backward else replace(self._training, batches=1, clipped=False),
            )
        return self._ways[key]

    def _other_way(self, program: Program, training: Training) -> Way:
        """For batches of another kind than the first."""
        made = self._arranged(
            self._cut,
            program,
            self._groups,
            training,
            budget_bytes=self._tiers.budget.budget_bytes,
            rates=self._rates,
        )
        return self._spilled(made)

    def _spilled(self, made: Arrangement) -> Spilled:
        return Spilled(
            made.program,
            self._holdings,
            self._buffers(),
            step=made.step,
            residency=made.residency,
            batches=made.training.batches,
            at_once=made.training.at_once,
            seed=self._parts.task.seed,
            plain_random=self._gang is None,
            rank=self._rank,
            groups=None if self._gang is None else self._gang.groups,
        )

    def _buffers(self) -> dict[str, torch.Tensor]:
        """What programs read and nobody moves: buffers, and parameters of which no op makes anything."""
        buffers = {self._graph.aliases.get(name, name): one for name, one in self._model.named_buffers()}
        return {**buffers, **self._rest}

    def _enter(self, way: Way, place: int) -> None:
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
        with talking(), on_device(self._parts):
            outputs = way.take([batch], place=place, number=number)
        return self._metrics(way, outputs[0])

    def takes_steps(self, batch: Any) -> bool:
        """Whether several batches like this one go through the shards at once."""
        return self._together is not None and self._key(placed(batch, self._parts), backward=True) == self._together[0]

    def backward_all(self, batches: Sequence[Any], *, number: int) -> list[dict[str, float]]:
        """All batches of a step; each shard comes once for several of them."""
        assert self._together is not None
        placed_ = [placed(batch, self._parts) for batch in batches]
        key, way = self._together
        if any(self._key(batch, backward=True) != key for batch in placed_):
            return [self.backward(batch, number=number + i) for i, batch in enumerate(batches)]
        self._enter(way, 0)
        found = []
        for place in range(0, len(batches), way.at_once):
            some = placed_[place : place + way.at_once]
            with on_device(self._parts):
                outputs = way.take(some, place=place, number=number + place)
            found += [self._metrics(way, one) for one in outputs]
        return found

    def _metrics(self, way: Way, outputs: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """All of them, on every device."""
        graph, mine = way.program.refined.graph, numbers_of(outputs)
        if self._gang is not None:
            names = list(graph.outputs)
            summed = self._gang.sum(torch.tensor([mine.get(name, 0.0) for name in names], dtype=torch.float64))
            mine = dict(zip(names, summed.tolist(), strict=True))
        return mine | dict(graph.numbers)

    def update(self) -> None:
        """All groups were updated on the way; what that took is looked at."""
        self._steps += 1
        if isinstance(self._active, Spilled):
            self._computed_s = sum(self._active.run.stage_s)
        if self._steps == _MEASURED_STEPS:
            self._look_again()

    def measure(self, batch: Any) -> dict[str, float]:
        """One forward run."""
        batch = placed(batch, self._parts)
        way = self._way(batch, backward=False)
        self._enter(way, 0)
        with talking(), on_device(self._parts):
            outputs = way.take([batch], place=0, number=0)
        return self._metrics(way, outputs[0])

    # ---- what was measured ----

    @property
    def _rates(self) -> Rates:
        return self._tiers.rates(self._usual)

    def _look_again(self) -> None:
        """Plan once more what is where when, with what stages and moves really take."""
        way = self._active
        assert isinstance(way, Spilled)
        taken: dict[tuple[int, NodeKind], float] = {}
        updates: dict[tuple[int, ...], float] = {}
        for act, took_s in zip(way.step.acts, way.run.stage_s, strict=True):
            if act.kind in ("forward", "backward"):
                node = way.program.nodes[act.node]
                taken[(node.segment, node.kind)] = took_s
            elif act.kind == "update":
                updates[self._groups[act.group].sizes_bytes] = took_s

        def seconds(segment: Segment) -> tuple[float, float]:
            return taken[(segment.index, NodeKind.FORWARD)], taken.get((segment.index, NodeKind.BACKWARD), 0.0)

        made = self._arranged(
            self._cut,
            way.program,
            self._groups,
            replace(self._training, at_once=way.at_once, update_s=lambda sizes: updates.get(sizes, 0.0)),
            budget_bytes=self._tiers.budget.budget_bytes,
            rates=self._rates,
            seconds=seconds,
        )
        if made.residency != way.residency:
            way.leave()
            self._active = None
            if self._together is not None and self._together[1] is way:
                self._together = (self._together[0], self._spilled(made))
            else:
                key = next(key for key, one in self._ways.items() if one is way)
                self._ways[key] = self._spilled(made)

    def in_pool(self) -> tuple[float, float]:
        """What the latest step computed, and what the disk would work for it if shards stayed for one pass only."""
        held = self._tiers.held
        groups = [group for group in self._groups.values() if group.weights in held]
        weights = sum(held[group.weights].size_bytes for group in groups)
        trained = sum(held[group.weights].size_bytes for group in groups if group.trained)
        moments = sum(held[group.moments].size_bytes for group in groups if group.moments in held)
        batches, clipped = self._training.batches, self._training.clipped
        waiting = (batches - 1 + clipped) * trained  # gradients, for other batches or for the norm of all
        rates = self._rates
        read_s = (2 * batches * weights + clipped * trained + moments + waiting) * rates.read_byte_s
        return self._computed_s, read_s + (trained + moments + waiting) * rates.write_byte_s

    # ---- state ----

    def weights(self, *, between_steps: bool) -> Weights | None:
        """References to what is in the store, and what is not there itself; all devices have the same."""
        if self._rank > 0:
            return None
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
        self._closing.close()
        if self._rank > 0:
            inside.remove(self._room.folder, inside.ROOM)


def _told(made: Arrangement, budget_bytes: int) -> str:
    read, written = map(format_bytes, made.residency.moved_bytes)
    again = f", {len(made.cut.recomputed)} of them computed again" if made.cut.recomputed else ""
    if made.training.at_once > 1:
        again += f", each for {made.training.at_once} batches at once"
    shards = sum(segment.device == 0 for segment in made.program.segments)
    return (
        f"spill: {shards} shards{again}; a step reads {read} and writes {written} "
        f"with {format_bytes(budget_bytes)} for weights, gradients, moments and activations"
    )
