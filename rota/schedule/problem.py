"""What is to be scheduled and where, what a schedule of it is, and whether it is a valid one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

from rota.errors import InputError, ScheduleError

Objective = Literal["makespan", "completion", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("makespan", "completion", "cost")
"""The end of the last task; the mean of the ends of all; the price of the device hours that the tasks use."""

_SLACK = 1e-6
"""Of the makespan: how much two tasks may overlap by rounding."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """Devices of one kind that share a fast link."""

    name: str
    kind: str
    devices: tuple[str, ...]
    """Their names, unique in the problem."""
    memory_bytes: int | None = None
    """Of each device; None if it does not matter."""
    price_per_hour: float = 0.0
    """Of each device."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A way to bring tasks to their end: mostly one task; several if they share the devices."""

    tasks: tuple[str, ...]
    kind: str
    """The kind of the devices."""
    devices: int
    """How many it takes, from its start to its end."""
    seconds: float
    """From its start to its end, with what starting, or switching to it, takes."""
    memory_bytes: int = 0
    """On each device."""
    spans: bool = False
    """Whether its devices may be of several nodes."""
    held: tuple[str, ...] = ()
    """The devices on which it runs already: it goes on there from the first moment on, or not at all."""
    label: str = ""
    """How it runs: a strategy with its knobs."""

    @property
    def area_s(self) -> float:
        """Device seconds."""
        return self.devices * self.seconds


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tasks with their options, and nodes with their devices. Every task is in exactly one of the chosen options."""

    options: tuple[Option, ...]
    nodes: tuple[Node, ...]
    objective: Objective = "makespan"
    deadlines: Mapping[str, float] = field(default_factory=dict)
    """Seconds from now by which a task should have ended; being late is worse than anything else."""

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Each once, in the order of the options."""
        return tuple(dict.fromkeys(task for option in self.options for task in option.tasks))

    @cached_property
    def options_of(self) -> Mapping[str, tuple[int, ...]]:
        """task -> the indices of the options that it is in."""
        found: dict[str, list[int]] = {task: [] for task in self.tasks}
        for index, option in enumerate(self.options):
            for task in option.tasks:
                found[task].append(index)
        return {task: tuple(indices) for task, indices in found.items()}

    @cached_property
    def node_of(self) -> Mapping[str, Node]:
        """device -> its node."""
        return {device: node for node in self.nodes for device in node.devices}

    def fitting(self, option: Option) -> tuple[Node, ...]:
        """The nodes whose devices the option can use."""
        return tuple(node for node in self.nodes if node.kind == option.kind and fits_memory(option, node))

    def can_run(self, option: Option) -> bool:
        """Whether there are devices enough for an option."""
        if option.held:
            nodes = {self.node_of[device].name for device in option.held if device in self.node_of}
            there = all(device in self.node_of for device in option.held) and len(option.held) == option.devices
            return there and (option.spans or len(nodes) == 1)
        sizes = [len(node.devices) for node in self.fitting(option)]
        return (sum(sizes) if option.spans else max(sizes, default=0)) >= option.devices


@dataclass(frozen=True, kw_only=True)
class Placement:
    """An option that was chosen, with its start and its devices."""

    option: int
    """Its index in the problem."""
    start_s: float
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The chosen options, in the order of their starts."""

    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, placements: Iterable[Placement]) -> Schedule:
        """In order."""
        return cls(placements=tuple(sorted(placements, key=lambda one: (one.start_s, one.option))))


@dataclass(frozen=True, kw_only=True, order=True)
class Value:
    """How good a schedule is; the smaller the better."""

    late_s: float
    """By how much deadlines are missed, in all."""
    objective: float
    """Seconds, or money."""
    makespan_s: float
    """Of two that are equal otherwise, the shorter."""


def fits_memory(option: Option, node: Node) -> bool:
    """Whether each device of a node holds what the option puts on it."""
    return node.memory_bytes is None or option.memory_bytes <= node.memory_bytes


def ends_of(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """task -> when it ends."""
    return {
        task: one.start_s + problem.options[one.option].seconds
        for one in schedule.placements
        for task in problem.options[one.option].tasks
    }


def makespan_s(problem: Problem, schedule: Schedule) -> float:
    """When the last task ends."""
    return max((one.start_s + problem.options[one.option].seconds for one in schedule.placements), default=0.0)


def price_of(problem: Problem, option: Option, devices: Iterable[str]) -> float:
    """What an option costs on these devices."""
    return sum(problem.node_of[device].price_per_hour for device in devices) * option.seconds / 3600


def value_of(problem: Problem, schedule: Schedule) -> Value:
    """How good a schedule is, by the problem's objective."""
    ends = ends_of(problem, schedule)
    last_s = max(ends.values(), default=0.0)
    late_s = sum(max(0.0, ends[task] - by_s) for task, by_s in problem.deadlines.items() if task in ends)
    if problem.objective == "makespan":
        measure = last_s
    elif problem.objective == "completion":
        measure = sum(ends.values()) / len(ends) if ends else 0.0
    else:
        measure = sum(price_of(problem, problem.options[one.option], one.devices) for one in schedule.placements)
    return Value(late_s=late_s, objective=measure, makespan_s=last_s)


def check_problem(problem: Problem) -> None:
    """InputError if something cannot be: a device twice, an option that takes no time, a task that fits nowhere."""
    names = [device for node in problem.nodes for device in node.devices]
    if len(set(names)) != len(names):
        raise InputError("two devices of the cluster have the same name")
    if len({node.name for node in problem.nodes}) != len(problem.nodes):
        raise InputError("two nodes of the cluster have the same name")
    if problem.objective not in OBJECTIVES:
        raise InputError(f"the objective {problem.objective!r} is unknown; it can be {', '.join(OBJECTIVES)}")
    for option in problem.options:
        if not (math.isfinite(option.seconds) and option.seconds > 0) or option.devices < 1 or not option.tasks:
            raise InputError(
                f"the option {option.label!r} of {', '.join(option.tasks)} takes {option.seconds} s on "
                f"{option.devices} devices, which cannot be"
            )
    for task in problem.tasks:
        if not any(problem.can_run(problem.options[index]) for index in problem.options_of[task]):
            raise InputError(f"task {task!r} fits nowhere: {_needs(problem, task)}")


def _needs(problem: Problem, task: str) -> str:
    """What the smallest of a task's options would need."""
    options = [problem.options[index] for index in problem.options_of[task]]
    least = min(options, key=lambda one: (one.memory_bytes, one.devices))
    return (
        f"its smallest option{f' ({least.label})' if least.label else ''} needs {least.devices} of {least.kind} "
        f"with {least.memory_bytes} bytes each"
    )


def check(problem: Problem, schedule: Schedule) -> None:
    """ScheduleError if a schedule is not one of this problem."""
    seen: set[str] = set()
    for placement in schedule.placements:
        option = problem.options[placement.option]
        words = f"{', '.join(option.tasks)} ({option.label})"
        if seen & set(option.tasks):
            raise ScheduleError(f"{', '.join(sorted(seen & set(option.tasks)))} is scheduled twice")
        seen |= set(option.tasks)
        _check_devices(problem, placement, option, words)
        if placement.start_s < 0 or not math.isfinite(placement.start_s):
            raise ScheduleError(f"{words} starts at {placement.start_s}")
        if option.held and (placement.start_s != 0 or set(placement.devices) != set(option.held)):
            raise ScheduleError(f"{words} runs already on {', '.join(option.held)} and is moved without a switch")
    if seen != set(problem.tasks):
        raise ScheduleError(f"{', '.join(sorted(set(problem.tasks) - seen))} is not scheduled")
    _check_overlap(problem, schedule)


def _check_devices(problem: Problem, placement: Placement, option: Option, words: str) -> None:
    devices = placement.devices
    if len(set(devices)) != option.devices or len(devices) != option.devices:
        raise ScheduleError(f"{words} needs {option.devices} devices and has {', '.join(devices)}")
    if unknown := [device for device in devices if device not in problem.node_of]:
        raise ScheduleError(f"{words} is on {', '.join(unknown)}, which the cluster does not have")
    nodes = {problem.node_of[device].name: problem.node_of[device] for device in devices}
    for node in nodes.values():
        if node.kind != option.kind:
            raise ScheduleError(f"{words} needs {option.kind} and is on {node.name}, which has {node.kind}")
        if not option.held and not fits_memory(option, node):
            raise ScheduleError(f"{words} does not fit into the memory of {node.name}")
    if len(nodes) > 1 and not option.spans:
        raise ScheduleError(f"{words} spans {', '.join(sorted(nodes))} and may not")


def _check_overlap(problem: Problem, schedule: Schedule) -> None:
    slack_s = _SLACK * max(1.0, makespan_s(problem, schedule))
    used: dict[str, list[tuple[float, float, str]]] = {}
    for one in schedule.placements:
        option = problem.options[one.option]
        for device in one.devices:
            used.setdefault(device, []).append((one.start_s, one.start_s + option.seconds, option.tasks[0]))
    for device, spans in used.items():
        for (_, end_s, first), (start_s, _, second) in pairwise(sorted(spans)):
            if start_s < end_s - slack_s:
                raise ScheduleError(f"{first} and {second} are on {device} at the same time")
