"""A problem as arrays: what the choice of options, the packing and the bounds are fast with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rota.errors import InputError
from rota.schedule.problem import Node, Option, Problem, fits_memory

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an option may run: nodes with enough memory and, unless it spans, enough devices."""

    nodes: tuple[int, ...]
    spans: bool
    devices: int
    """How many devices they have in all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrays:
    """Arrays with an entry for each option, by its index in the problem, and for each pair of a task and an option."""

    problem: Problem
    seconds: Floats
    width: Ints
    """Devices."""
    members: Ints
    """Tasks."""
    places: tuple[Place, ...]
    place: Ints
    """option -> the index of its place; -1 if it cannot run."""
    price: Floats
    """option -> what it costs at least; infinite if it cannot run."""
    pair_option: Ints
    """The options that can run, task by task."""
    pair_task: Ints
    first_pair: Ints
    """task -> where its pairs begin; each has at least one."""
    members_of: tuple[tuple[int, ...], ...]
    """option -> its tasks' indices."""

    @cached_property
    def area(self) -> Floats:
        """Device seconds of each option."""
        return self.seconds * self.width

    @cached_property
    def usable(self) -> Bools:
        """Whether an option can run."""
        return self.place >= 0

    @cached_property
    def dominated(self) -> frozenset[int]:
        """Options that no schedule needs: another one of the same task takes no more devices and is no longer."""
        found: set[int] = set()
        for task in self.problem.tasks:
            own = [index for index in self.problem.options_of[task] if self._comparable(index)]
            own.sort(key=lambda index: (self.width[index], self.seconds[index], index))
            kept: list[int] = []
            for index in own:
                (found.add if any(self._dominates(one, index) for one in kept) else kept.append)(index)
        return frozenset(found)

    def _comparable(self, option: int) -> bool:
        return bool(self.place[option] >= 0 and self.members[option] == 1 and not self.problem.options[option].held)

    def _dominates(self, one: int, other: int) -> bool:
        mine, theirs = self.places[int(self.place[one])], self.places[int(self.place[other])]
        return bool(
            self.seconds[one] <= self.seconds[other]
            and self.width[one] <= self.width[other]
            and (mine.spans or not theirs.spans)
            and (mine.nodes == theirs.nodes or set(mine.nodes).issuperset(theirs.nodes))
        )

    @cached_property
    def entangled(self) -> tuple[int, ...]:
        """The usable options that cannot be chosen task by task: of several tasks, or on devices that others hold."""
        options = self.problem.options
        return tuple(i for i in np.flatnonzero(self.usable).tolist() if self.members[i] > 1 or options[i].held)

    @cached_property
    def node_of(self) -> Mapping[str, int]:
        """device -> the index of its node."""
        return {device: index for index, node in enumerate(self.problem.nodes) for device in node.devices}

    @cached_property
    def sizes(self) -> Ints:
        """Devices of each node."""
        return np.array([len(node.devices) for node in self.problem.nodes], dtype=np.int64)

    @cached_property
    def dues(self) -> Floats:
        """option -> the earliest deadline of its tasks; infinite without one."""
        due = self.problem.deadlines
        return np.array([min(due.get(task, np.inf) for task in option.tasks) for option in self.problem.options])

    @classmethod
    def of(cls, problem: Problem) -> Arrays:
        """InputError if a task has no option that can run."""
        options = problem.options
        places, place = _places(problem)
        seconds = np.array([option.seconds for option in options], dtype=np.float64)
        number = {task: index for index, task in enumerate(problem.tasks)}
        members_of = tuple(tuple(dict.fromkeys(number[task] for task in option.tasks)) for option in options)
        pair_option, pair_task, first_pair = _pairs(problem, place, members_of)
        return cls(
            problem=problem,
            seconds=seconds,
            width=np.array([option.devices for option in options], dtype=np.int64),
            members=np.array([len(one) for one in members_of], dtype=np.int64),
            places=places,
            place=place,
            price=_prices(problem, places, place) * seconds / 3600,
            pair_option=pair_option,
            pair_task=pair_task,
            first_pair=first_pair,
            members_of=members_of,
        )


def _pairs(problem: Problem, place: Ints, members_of: tuple[tuple[int, ...], ...]) -> tuple[Ints, Ints, Ints]:
    pairs = [(task, index) for index, tasks in enumerate(members_of) if place[index] >= 0 for task in tasks]
    pairs.sort()
    tasks = np.array([task for task, _ in pairs], dtype=np.int64)
    counts = np.bincount(tasks, minlength=len(problem.tasks)) if pairs else np.zeros(len(problem.tasks), dtype=np.int64)
    if (none := np.flatnonzero(counts == 0)).size:
        raise InputError(f"task {problem.tasks[int(none[0])]!r} fits nowhere: no option of it has the devices it needs")
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) if len(counts) else counts
    return np.array([option for _, option in pairs], dtype=np.int64), tasks, first


def _places(problem: Problem) -> tuple[tuple[Place, ...], Ints]:
    """The distinct places, and the place of each option."""
    node_of = {device: index for index, node in enumerate(problem.nodes) for device in node.devices}
    found: dict[Place, int] = {}
    known: dict[tuple[str, int, int, bool], Place] = {}
    place = np.full(len(problem.options), -1, dtype=np.int64)
    for index, option in enumerate(problem.options):
        # With 10,000 tasks there are few distinct needs and many options.
        key = (option.kind, option.memory_bytes, 0 if option.spans else option.devices, option.spans)
        if option.held:
            here = _place(problem, option, _held_nodes(problem, option, node_of))
        elif (seen := known.get(key)) is not None:
            here = seen
        else:
            here = known[key] = _place(problem, option, _free_nodes(problem, option))
        if here.devices >= option.devices:
            place[index] = found.setdefault(here, len(found))
    return tuple(found), place


def _place(problem: Problem, option: Option, nodes: list[int]) -> Place:
    devices = sum(len(problem.nodes[index].devices) for index in nodes)
    return Place(nodes=tuple(nodes), spans=option.spans, devices=devices)


def _free_nodes(problem: Problem, option: Option) -> list[int]:
    least = 1 if option.spans else option.devices
    return [
        index
        for index, node in enumerate(problem.nodes)
        if node.kind == option.kind and len(node.devices) >= least and fits_memory(option, node)
    ]


def _held_nodes(problem: Problem, option: Option, node_of: Mapping[str, int]) -> list[int]:
    """None if it cannot go on where it runs: `check` would refuse it."""
    held = option.held
    if len(held) != option.devices or len(set(held)) != len(held) or any(device not in node_of for device in held):
        return []
    nodes = sorted({node_of[device] for device in held})
    if any(problem.nodes[index].kind != option.kind for index in nodes) or (len(nodes) > 1 and not option.spans):
        return []
    return nodes


def _prices(problem: Problem, places: tuple[Place, ...], place: Ints) -> Floats:
    """The least price per hour of the devices of each option."""
    hourly = np.full(len(problem.options), np.inf)
    sorted_prices = [
        np.sort(np.concatenate([[node.price_per_hour] * len(node.devices) for node in _nodes(problem, one)] or [[]]))
        for one in places
    ]
    for index, option in enumerate(problem.options):
        if place[index] < 0:
            continue
        if option.held:
            hourly[index] = sum(problem.node_of[device].price_per_hour for device in option.held)
        elif option.spans:
            hourly[index] = sorted_prices[place[index]][: option.devices].sum()
        else:
            hourly[index] = sorted_prices[place[index]][0] * option.devices
    return hourly


def _nodes(problem: Problem, place: Place) -> list[Node]:
    return [problem.nodes[index] for index in place.nodes]
