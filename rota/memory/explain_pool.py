"""Tells how tasks that share devices shard by shard would run: their units, what each moves, and when all would end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rota.cluster.device import format_bytes
from rota.memory.pooled import Fitting
from rota.memory.residency import Rates
from rota.memory.sharp import Work, lower_bound_s, play
from rota.plan.explain import format_seconds

_MOST_UNITS = 5_000
"""Played on the virtual clock; of longer runs, several steps are played as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitLine:
    """One unit of a task: what it needs, and what it does."""

    stages: tuple[str, ...]
    size_bytes: int
    comes_bytes: int
    """Read before it, where it does not follow the one before on the same device,"""
    leaves_bytes: int
    """and written after it."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PooledTask:
    """A task as one of a pool."""

    name: str
    shards: int
    made_again: bool
    """Whether what shards keep is computed again for their backward passes."""
    units: tuple[UnitLine, ...]
    steps: int
    step_s: float
    """What a step computes."""
    read_bytes: int
    written_bytes: int
    """Of a step, at most."""
    read_s: float
    write_s: float

    @property
    def total_s(self) -> float:
        """What it computes in all."""
        return self.steps * self.step_s


@dataclass(frozen=True, kw_only=True)
class PoolExplanation:
    """Everything that `rota explain` tells of a pool."""

    devices: int
    memory_bytes: int
    room_bytes: int
    """Of a device, for the units that run, come and leave."""
    tasks: tuple[PooledTask, ...]
    work_s: float
    longest_s: float
    bound_s: float
    """No schedule is shorter."""
    disk_s: float
    """How long the disk, of which there is one, reads or writes at most."""
    played_s: float
    """On the virtual clock, where each device has a disk of its own."""
    makespan_s: float

    @property
    def limit(self) -> str:
        """What it waits for."""
        return "the disk" if self.disk_s > self.played_s else "the processor"

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"limit": self.limit}


def pooled_task(name: str, made: Fitting, *, steps: int, rates: Rates) -> PooledTask:
    """What there is to tell of one."""

    def total(items: frozenset[str]) -> int:
        return sum(made.step.items[item].size_bytes for item in items)

    units = tuple(
        UnitLine(
            stages=tuple(made.step.stages[position].name for position in unit.stages),
            size_bytes=unit.device_bytes(1),
            comes_bytes=total(unit.needs),
            leaves_bytes=total(unit.changes),
            seconds=unit.seconds,
        )
        for unit in made.units
    )
    read, written = sum(unit.comes_bytes for unit in units), sum(unit.leaves_bytes for unit in units)
    return PooledTask(
        name=name,
        shards=len(made.program.segments),
        made_again=bool(made.cut.recomputed),
        units=units,
        steps=steps,
        step_s=sum(unit.seconds for unit in units),
        read_bytes=read,
        written_bytes=written,
        read_s=read * rates.read_byte_s,
        write_s=written * rates.write_byte_s,
    )


def summarise(tasks: Sequence[PooledTask], *, devices: int, memory_bytes: int, room_bytes: int) -> PoolExplanation:
    """The tasks together."""
    works = [Work(name=one.name, units_s=tuple(u.seconds for u in one.units), steps=one.steps) for one in tasks]
    disk_s = sum(one.steps * (one.read_s + one.write_s) for one in tasks)
    played_s = _played_s(tasks, works, devices)
    return PoolExplanation(
        devices=devices,
        memory_bytes=memory_bytes,
        room_bytes=room_bytes,
        tasks=tuple(tasks),
        work_s=sum(work.total_s for work in works),
        longest_s=max(work.total_s for work in works),
        bound_s=lower_bound_s(works, devices),
        disk_s=disk_s,
        played_s=played_s,
        makespan_s=max(played_s, disk_s),
    )


def _played_s(tasks: Sequence[PooledTask], works: Sequence[Work], devices: int) -> float:
    """What the policy makes of it, with loads that take as long as the mean one of the task."""
    as_one = max(1, -(-sum(work.steps * len(work.units_s) for work in works) // _MOST_UNITS))
    shorter, loads_s = [], {}
    for task, work in zip(tasks, works, strict=True):
        steps = -(-work.steps // as_one)
        scale = work.steps / steps
        shorter.append(Work(name=work.name, units_s=tuple(scale * one for one in work.units_s), steps=steps))
        loads_s[work.name] = scale * task.read_s / len(work.units_s)
    return play(shorter, devices, loads_s=loads_s)


def lines_of(told: PoolExplanation, *, units_of: str | None) -> list[str]:
    """The text for people, with the units of one task."""
    found = [
        f"pool    {_count(len(told.tasks), 'task')} on {_count(told.devices, 'device')} of "
        f"{format_bytes(told.memory_bytes)}: units that run, come and leave have {format_bytes(told.room_bytes)} "
        "of each",
        f"bound   {format_seconds(told.bound_s)}: no order is faster than all work over all devices "
        f"({format_seconds(told.work_s)} over {told.devices}), nor than the longest task "
        f"({format_seconds(told.longest_s)})",
        f"ends    after {format_seconds(told.makespan_s)} as predicted, limited by {told.limit}: the devices would end "
        f"after {format_seconds(told.played_s)}, and the disk reads and writes for {format_seconds(told.disk_s)}",
        "",
    ]
    rows = [("task", "shards", "units", "steps", "a step computes", "reads", "writes", "in all")]
    for one in told.tasks:
        rows.append(
            (
                one.name,
                f"{one.shards}{', made again' if one.made_again else ''}",
                str(len(one.units)),
                str(one.steps),
                format_seconds(one.step_s),
                f"{format_bytes(one.read_bytes)}, {format_seconds(one.read_s)}",
                f"{format_bytes(one.written_bytes)}, {format_seconds(one.write_s)}",
                format_seconds(one.total_s),
            )
        )
    found += _table(rows)
    for task in told.tasks:
        if task.name == units_of:
            found += ["", *_table(_unit_rows(task))]
    return found


def _unit_rows(task: PooledTask) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("unit", "stages", "takes", "needs", "comes", "leaves")]
    for number, unit in enumerate(task.units):
        sizes = (format_bytes(size) for size in (unit.size_bytes, unit.comes_bytes, unit.leaves_bytes))
        rows.append((str(number), ", ".join(unit.stages), format_seconds(unit.seconds), *sizes))
    return rows


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
