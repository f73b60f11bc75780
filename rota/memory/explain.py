"""Tells how a model that does not fit is trained: its shards, what stays, what moves when, what a step waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rota.cluster.device import format_bytes
from rota.memory.arrange import Arrangement
from rota.memory.steps import Group, item_of, name_of
from rota.plan.explain import format_seconds
from rota.plan.program import NodeKind, Segment, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What happens to a part of a shard in a step."""

    size_bytes: int
    comes: int
    """How often it is read from disk in a step,"""
    leaves: int
    """and how often it is written there."""

    def __str__(self) -> str:
        """For a cell of a table."""
        if not self.size_bytes:
            return "-"
        if not self.comes and not self.leaves:
            return f"{format_bytes(self.size_bytes)} stays"
        return f"{format_bytes(self.size_bytes)} in {self.comes}x, out {self.leaves}x"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLine:
    """One shard."""

    modules: str
    weights: Moved
    moments: Moved
    gradients: Moved
    activations: Moved
    made_again: bool


@dataclass(frozen=True, kw_only=True)
class SpillExplanation:
    """Everything that `rota explain` tells of an arrangement."""

    memory_bytes: int
    budget_bytes: int
    peak_bytes: int
    shards: tuple[ShardLine, ...]
    shared: tuple[ShardLine, ...]
    """Of parameters that several shards read."""
    step_s: float
    compute_s: float
    read_s: float
    write_s: float
    read_bytes: int
    written_bytes: int
    limit: str
    ahead: int
    """How many stages before it is needed the earliest load begins."""
    moves: tuple[tuple[str, str, str], ...]
    """(before or after a stage, what moves, how), in the order of a step."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def summarise(made: Arrangement, *, memory_bytes: int) -> SpillExplanation:
    """What there is to tell."""
    residency, told = made.residency, made.forecast
    comes = Counter(load.item for load in residency.loads)
    leaves = Counter(write.item for write in residency.writes)

    def moved(item: str) -> Moved:
        size = made.step.items[item].size_bytes if item in made.step.items else 0
        return Moved(size_bytes=size, comes=comes[item], leaves=leaves[item])

    def line(modules: str, group: Group | None, tape: str, again: bool) -> ShardLine:
        return ShardLine(
            modules=modules,
            weights=moved(group.weights if group else ""),
            moments=moved(group.moments if group else ""),
            gradients=moved(group.gradients if group else ""),
            activations=moved(tape),
            made_again=again,
        )

    own, shared = _owners(made)
    shards = [
        line(name_of(made.program, segment), own.get(segment.index), item_of(0, tape), segment.recompute)
        for segment, tape in _in_order(made)
    ]
    read, written = residency.moved_bytes
    return SpillExplanation(
        memory_bytes=memory_bytes,
        budget_bytes=residency.budget_bytes,
        peak_bytes=max(residency.used_bytes),
        shards=tuple(shards),
        shared=tuple(line(", ".join(group.parameters), group, "", False) for group in shared),
        step_s=told.step_s,
        compute_s=told.compute_s,
        read_s=told.read_s,
        write_s=told.write_s,
        read_bytes=read,
        written_bytes=written,
        limit=told.limit,
        ahead=max((load.stage - load.begin for load in residency.loads), default=0),
        moves=tuple(_moves(made)),
    )


def _in_order(made: Arrangement) -> list[tuple[Segment, tuple[int, int]]]:
    """The segments as they are run, and the key of what each keeps."""
    program = made.program
    return [
        (program.segments[node.segment], (node.segment, node.microbatch))
        for node in program.nodes
        if node.kind is NodeKind.FORWARD and node.devices == (0,)
    ]


def _owners(made: Arrangement) -> tuple[dict[int, Group], list[Group]]:
    """The group that only one segment reads, by segment; and those that several do."""
    readers: dict[str, set[int]] = {}
    of = {name: group for group in made.groups.values() for name in group.parameters}
    for segment in made.program.segments:
        for entry in segment.entries if segment.device == 0 else ():
            if entry.source is Source.STORED and entry.tensor in of:
                readers.setdefault(of[entry.tensor].name, set()).add(segment.index)
    own = {min(by): made.groups[name] for name, by in readers.items() if len(by) == 1}
    return own, [made.groups[name] for name, by in readers.items() if len(by) > 1]


def _moves(made: Arrangement) -> Iterator[tuple[str, str, str]]:
    residency = made.residency
    written: dict[int, list[str]] = {}
    for write in residency.writes:
        written.setdefault(write.stage, []).append(write.item)
    for position, stage in enumerate(residency.stages):
        for load in residency.beginning[position]:
            yield f"before {stage.name}", load.item, "begins to come"
        for item in sorted(written.get(position, ())):
            yield f"after {stage.name}", item, "leaves"
        for item in sorted(residency.drops[position]):
            yield f"after {stage.name}", item, "is dropped, unchanged"


def lines_of(told: SpillExplanation) -> list[str]:
    """The text for people."""
    state = sum(
        part.size_bytes
        for line in (*told.shards, *told.shared)
        for part in (line.weights, line.moments, line.gradients)
    )
    activations = sum(line.activations.size_bytes for line in told.shards)
    found = [
        f"memory  {format_bytes(told.budget_bytes)} of {format_bytes(told.memory_bytes)} for {format_bytes(state)} of "
        f"weights, gradients and moments, and {format_bytes(activations)} of activations",
        f"step    {format_seconds(told.step_s)} predicted, limited by {told.limit}: compute "
        f"{format_seconds(told.compute_s)}, reading {format_bytes(told.read_bytes)} {format_seconds(told.read_s)}, "
        f"writing {format_bytes(told.written_bytes)} {format_seconds(told.write_s)}",
        f"loads   begin up to {told.ahead} stages before they are needed; the most in memory at once is "
        f"{format_bytes(told.peak_bytes)}",
        "",
    ]
    table: list[tuple[str, ...]] = [("shard", "modules", "weights", "moments", "gradients", "activations")]
    for number, line in enumerate(told.shards):
        table.append((str(number), *_cells(line)))
    table += [("shared", *_cells(line)) for line in told.shared]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        found.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return found


def _cells(line: ShardLine) -> tuple[str, ...]:
    activations = "made again" if line.made_again else str(line.activations)
    return (line.modules, str(line.weights), str(line.moments), str(line.gradients), activations)
