"""Strategies over an axis of devices, and their products: each says of an op whether it is cut, copied or pinned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Protocol

import numpy as np

from rota.errors import InputError
from rota.given import check_amounts, check_fields
from rota.graph.graph import Graph, Op
from rota.graph.refine import Refined, refine
from rota.plan.plan import Part, Plan, check_graph
from rota.strategies.turns import one_after_another
from rota.whole import positive


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

    orders_microbatches: ClassVar[bool]
    """Whether it says itself in which order micro-batches run."""

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
    if not any(axis.orders_microbatches for axis, _ in axes):
        one_after_another(plan)
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

    orders_microbatches: ClassVar[bool] = False
    """Whether it says itself in which order micro-batches run."""
    balances: ClassVar[bool] = False
    """Whether it heeds `shares`."""
    degree: int | None = None
    """How many devices along its axis; what is left over if not given."""
    microbatches: int | None = None
    """In how many parts a batch is taken, one after another; one if nobody says more."""
    shares: tuple[float, ...] | None = field(default=None, repr=False)
    """How the work is divided between the places of its axis; evenly if not given."""

    def __post_init__(self) -> None:
        check_fields(self, _name(self))
        if self.shares is not None:
            check_amounts(self.shares, f"{_name(self)}: shares")

    def prepare(self, graph: Graph, degree: int, *, whole: bool) -> Graph:
        """The same computation in ops that it can cut; the graph itself if it needs no others.

        `whole` says that a batch is not taken in micro-batches.
        """
        return graph

    def begin(self, plan: Plan, degree: int) -> Chooser:
        """Look at a graph; InputError if it cannot be run in this way."""
        raise NotImplementedError

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """A plan on so many devices."""
        return Product(recipes=(self,))(graph, devices)

    def __mul__(self, other: Recipe | Product) -> Product:
        """Both, each along its own axis."""
        return NotImplemented if not isinstance(other, Recipe | Product) else Product(recipes=(self,)) * other

    @property
    def fixed_devices(self) -> int | None:
        """How many devices it needs, if its degree says so."""
        return self.degree

    def default_microbatches(self, samples: int, degree: int) -> int:
        """In how many parts it likes to take a batch, if nobody says."""
        return 1

    def __str__(self) -> str:
        """As the user writes it."""
        knobs = [] if self.degree is None else [str(self.degree)]
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "degree" and one.repr and value != one.default:
                knobs.append(f"{one.name}={value!r}")
        return f"{_name(self)}({', '.join(knobs)})" if knobs else _name(self)


@dataclass(frozen=True, kw_only=True)
class Product:
    """Several strategies, each along its own axis of devices."""

    recipes: tuple[Recipe, ...]
    microbatches: int | None = None
    """In how many parts a batch is taken; by default what its strategies say."""

    def __mul__(self, other: Recipe | Product) -> Product:
        """One more."""
        if not isinstance(other, Recipe | Product):
            return NotImplemented
        return Product(recipes=(*self.recipes, *(other.recipes if isinstance(other, Product) else (other,))))

    def __str__(self) -> str:
        """As the user writes it."""
        return " * ".join(map(str, self.recipes))

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """A plan on so many devices."""
        check_graph(graph)
        devices = positive(devices, "the number of devices")
        degrees = self.degrees(devices)
        axes = list(zip(self.recipes, degrees, strict=True))
        whole = self.takes_whole_batches(degrees)
        for recipe, degree in axes:
            graph = recipe.prepare(graph, degree, whole=whole)
        refined = refine(graph)
        microbatches = self._microbatches(refined.samples or 1, degrees)
        return lay_out(graph, axes, microbatches=microbatches, devices=devices, refined=refined)

    def takes_whole_batches(self, degrees: Sequence[int]) -> bool:
        """Whether nothing makes it take a batch in parts."""
        return self._microbatches(2**30, degrees) == 1

    def _microbatches(self, samples: int, degrees: Sequence[int]) -> int:
        said = [one.microbatches for one in self.recipes if one.microbatches is not None]
        if self.microbatches is not None:
            said = [self.microbatches]
        if len(set(said)) > 1:
            raise InputError(f"{self} asks for {' and '.join(map(str, said))} micro-batches; give one number")
        if said:
            return said[0]
        likes = zip(self.recipes, degrees, strict=True)
        return max(recipe.default_microbatches(samples, degree) for recipe, degree in likes)

    @property
    def fixed_devices(self) -> int | None:
        """How many devices it needs, if its degrees say so."""
        if any(recipe.degree is None for recipe in self.recipes):
            return None
        return math.prod(recipe.degree or 1 for recipe in self.recipes)

    def degrees(self, devices: int) -> tuple[int, ...]:
        """Of each axis."""
        known = math.prod(recipe.degree for recipe in self.recipes if recipe.degree is not None)
        open_axes = [recipe for recipe in self.recipes if recipe.degree is None]
        if known == 0 or devices % known or (not open_axes and devices != known):
            raise InputError(f"{self} does not fit {devices} devices; the degrees must multiply to {devices}")
        if len(open_axes) > 1:
            named = " and ".join(_name(recipe) for recipe in open_axes)
            raise InputError(f"give the degree of all but one of {named}")
        return tuple(recipe.degree if recipe.degree is not None else devices // known for recipe in self.recipes)


def can_balance(strategy: object) -> bool:
    """Whether devices may get unequal shares of the work under a strategy."""
    recipes = strategy.recipes if isinstance(strategy, Product) else (strategy,)
    return any(isinstance(recipe, Recipe) and recipe.balances for recipe in recipes)


def has_shares(strategy: object) -> bool:
    """Whether it is said already how the work is divided."""
    recipes = strategy.recipes if isinstance(strategy, Product) else (strategy,)
    return any(isinstance(recipe, Recipe) and recipe.shares is not None for recipe in recipes)


def with_shares(strategy: Recipe | Product, shares: Sequence[float]) -> Recipe | Product:
    """The strategy with its work divided between devices in this proportion, as near as its axes can come to it."""
    if isinstance(strategy, Recipe):
        return replace(strategy, shares=tuple(shares))
    degrees = strategy.degrees(len(shares))
    heed = [recipe.balances and degree > 1 for recipe, degree in zip(strategy.recipes, degrees, strict=True)]
    found = axis_shares(shares, degrees, heed)
    recipes = zip(strategy.recipes, found, strict=True)
    return replace(strategy, recipes=tuple(replace(recipe, shares=one) for recipe, one in recipes))


def axis_shares(
    shares: Sequence[float], degrees: Sequence[int], heed: Sequence[bool]
) -> list[tuple[float, ...] | None]:
    """Shares along each axis; their products are what devices get, and no device should get too much."""
    wanted = np.asarray(shares, dtype=float).reshape(tuple(degrees))
    found = [np.full(degree, 1 / degree) for degree in degrees]
    for _ in range(_ROUNDS):
        for axis, heeds in enumerate(heed):
            if heeds:
                others = np.ones_like(wanted)
                for number, one in enumerate(found):
                    if number != axis:
                        others = others * one.reshape([-1 if i == number else 1 for i in range(len(degrees))])
                rest = tuple(i for i in range(len(degrees)) if i != axis)
                most = (wanted / others).min(axis=rest)
                found[axis] = most / most.sum()
    return [tuple(one.tolist()) if heeds else None for one, heeds in zip(found, heed, strict=True)]


_ROUNDS = 10


def _name(recipe: Recipe) -> str:
    return type(recipe).__name__.lower()
