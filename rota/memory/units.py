"""A step as units that any device of a pool may run: a shard's forward pass, or its backward pass with its update."""

from __future__ import annotations

from dataclasses import dataclass

from rota.memory.slab import ALIGNMENT, rounded
from rota.memory.steps import FIXED, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Stages that run on one device, one after another."""

    stages: tuple[int, ...]
    needs: frozenset[str]
    """The movable items that must be there before it."""
    changes: frozenset[str]
    """Of those that are there after it, the ones that are not as they were, or were not there before."""
    ends: frozenset[str]
    work_bytes: int
    """What it needs at once beside what moves."""
    made_bytes: int
    """Of what it makes that moves later."""
    moved_bytes: int
    """Of what moves, with that: whole pages for each."""
    seconds: float

    def device_bytes(self, count: int) -> int:
        """What a device needs for so many like it, of which one works and the others come or leave."""
        return self.work_bytes + count * self.moved_bytes


def units_of(step: Step, movable: frozenset[str]) -> tuple[Unit, ...]:
    """The units of a step; an update belongs to the backward pass before it if that has the gradient, else to none."""
    rows: list[list[int]] = []
    for position, act in enumerate(step.acts):
        if act.kind == "update" and rows and step.groups[act.group].gradients in step.stages[rows[-1][0]].holds:
            rows[-1].append(position)
        else:
            rows.append([position])
    return tuple(_unit(step, row, movable) for row in rows)


def _unit(step: Step, row: list[int], movable: frozenset[str]) -> Unit:
    needs: set[str] = set()
    made: set[str] = set()
    changed: set[str] = set()
    ended: set[str] = set()
    work = 0
    for position in row:
        stage = step.stages[position]
        needs |= (stage.reads & movable) - made
        made |= stage.makes & movable
        changed |= stage.changes & movable
        ended |= stage.ends & movable
        # What is made and does not move is a part of the work here; afterwards it is in the memory that all share.
        beside = sum(step.items[item].size_bytes for item in stage.makes - movable if item != FIXED)
        work = max(work, stage.work_bytes + beside)
    return Unit(
        stages=tuple(row),
        needs=frozenset(needs),
        changes=frozenset((changed | made) - ended),
        ends=frozenset(ended),
        work_bytes=work,
        made_bytes=sum(step.items[item].size_bytes for item in made),
        moved_bytes=max(ALIGNMENT, sum(rounded(step.items[item].size_bytes) for item in needs | made)),
        seconds=sum(step.stages[position].seconds for position in row),
    )
