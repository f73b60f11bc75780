"""Strategies over an axis of devices, and their products: each says of an op whether it is cut, copied or pinned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rota.errors import InputError
from rota.graph.graph import Graph, Op
from rota.graph.refine import Refined
from rota.plan.plan import Part, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Cut the op along a dim, a part for each place of the axis."""

    dim: str
    widths: tuple[int, ...] | None = None
    """Even if not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Run the op at these places of the axis; at all of them if none are given."""

    places: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """Run the op at one place of the axis."""

    place: int


Choice = Cut | Copy | Pin


class Chooser(Protocol):
    """An axis at work on one plan."""

    def choose(self, op: Op) -> Choice:
        """What becomes of an op along this axis."""
        ...

    def finish(self, mesh: Mesh) -> None:
        """What is left to say when all ops are placed: orders, groups, where parameters are stored."""
        ...


class Axis(Protocol):
    """A strategy that can be multiplied with others."""

    def begin(self, plan: Plan, degree: int) -> Chooser:
        """Look at a graph; InputError if it cannot be run in this way."""
        ...


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The devices of a plan, seen along the axes of a product."""

    plan: Plan
    degrees: tuple[int, ...]
    axis: int
    """The axis of the chooser that is asked."""

    def device(self, places: Sequence[int]) -> int:
        """The device at these places, one for each axis; the last axis changes fastest."""
        found = 0
        for place, degree in zip(places, self.degrees, strict=True):
            found = found * degree + place
        return found

    def place(self, device: int) -> int:
        """Where a device is along the axis."""
        inner = math.prod(self.degrees[self.axis + 1 :])
        return device // inner % self.degrees[self.axis]


def lay_out(
    graph: Graph,
    axes: Sequence[tuple[Axis, int]],
    *,
    microbatches: int,
    devices: int | None = None,
    refined: Refined | None = None,
) -> Plan:
    """The plan in which each axis has its say on each op, in the order of the axes."""
    degrees = tuple(degree for _, degree in axes)
    plan = Plan(graph, devices=devices or math.prod(degrees), microbatches=microbatches, refined=refined)
    choosers = [axis.begin(plan, degree) for axis, degree in axes]
    for op in graph.ops:
        _place(plan, op, choosers, Mesh(plan=plan, degrees=degrees, axis=0))
    for number, chooser in enumerate(choosers):
        chooser.finish(Mesh(plan=plan, degrees=degrees, axis=number))
    return plan


def _place(plan: Plan, op: Op, choosers: Sequence[Chooser], mesh: Mesh) -> None:
    parts: list[tuple[Part, tuple[int, ...]]] = [(plan.parts(op)[0], ())]
    choices = [chooser.choose(op) for chooser in choosers]
    for number, choice in enumerate(choices):
        if isinstance(choice, Cut):
            parts = [
                (part, (*places, place))
                for one, places in parts
                for place, part in enumerate(_cut(plan, one, choice, mesh.degrees[number]))
            ]
        else:  # copies are made when all cuts are, since all copies are cut alike
            parts = [(part, (*places, choice.place if isinstance(choice, Pin) else 0)) for part, places in parts]
    for part, places in parts:
        spread = [places]
        for number, choice in enumerate(choices):
            if isinstance(choice, Copy):
                where = choice.places if choice.places is not None else tuple(range(mesh.degrees[number]))
                spread = [(*one[:number], place, *one[number + 1 :]) for one in spread for place in where]
        copies = plan.replicate(part, len(spread)) if len(spread) > 1 else [part]
        for copy, where in zip(copies, spread, strict=True):
            plan.assign(copy, mesh.device(where))


def _cut(plan: Plan, part: Part, choice: Cut, degree: int) -> list[Part]:
    if choice.widths is not None:
        return plan.split(part, choice.dim, widths=choice.widths)
    return plan.split(part, choice.dim, degree)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A strategy with its knobs; `a * b` runs both, each along its own axis of devices."""

    degree: int | None = None
    """How many devices along its axis; what is left over if not given."""

    def begin(self, plan: Plan, degree: int) -> Chooser:
        """Look at a graph; InputError if it cannot be run in this way."""
        raise NotImplementedError

    def __call__(self, graph: Graph, devices: int, microbatches: int) -> Plan:
        """A plan on so many devices."""
        return Product(recipes=(self,))(graph, devices, microbatches)

    def __mul__(self, other: Recipe | Product) -> Product:
        """Both, each along its own axis."""
        return Product(recipes=(self, *(other.recipes if isinstance(other, Product) else (other,))))


@dataclass(frozen=True, kw_only=True)
class Product:
    """Several strategies, each along its own axis of devices."""

    recipes: tuple[Recipe, ...]

    def __mul__(self, other: Recipe | Product) -> Product:
        """One more."""
        return Product(recipes=(*self.recipes, *(other.recipes if isinstance(other, Product) else (other,))))

    def __call__(self, graph: Graph, devices: int, microbatches: int) -> Plan:
        """A plan on so many devices."""
        degrees = self._degrees(devices)
        return lay_out(graph, list(zip(self.recipes, degrees, strict=True)), microbatches=microbatches, devices=devices)

    def _degrees(self, devices: int) -> tuple[int, ...]:
        known = math.prod(recipe.degree for recipe in self.recipes if recipe.degree is not None)
        open_axes = [recipe for recipe in self.recipes if recipe.degree is None]
        if known == 0 or devices % known or (not open_axes and devices != known):
            named = " x ".join(f"{_name(recipe)}({recipe.degree or ''})" for recipe in self.recipes)
            raise InputError(f"{named} does not fit {devices} devices; the degrees must multiply to {devices}")
        if len(open_axes) > 1:
            named = " and ".join(_name(recipe) for recipe in open_axes)
            raise InputError(f"give the degree of all but one of {named}")
        return tuple(recipe.degree if recipe.degree is not None else devices // known for recipe in self.recipes)


def _name(recipe: Recipe) -> str:
    return type(recipe).__name__.lower()
