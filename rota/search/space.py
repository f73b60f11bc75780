"""All the strategies that may suit a graph on so many devices, as values that can be written and found again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from rota.errors import InputError, RotaError
from rota.graph.graph import Graph
from rota.graph.refine import Refined, refine
from rota.plan.plan import Plan
from rota.strategies.base import Strategy, describe, find, names
from rota.strategies.coshard import coshard
from rota.strategies.dap import dap
from rota.strategies.data import data
from rota.strategies.dims import paired_families
from rota.strategies.mesh import Product, Recipe
from rota.strategies.pipeline import pipeline
from rota.strategies.single import single
from rota.strategies.tensor import tensor
from rota.strategies.zero import Stage, Zero, zero

AXES = ("data", "zero", "tensor", "pipeline", "dap")
"""What a degree can be fixed of; "data" is the number of replicas, stored whole or, by zero, cut."""

_BY_NAME = ("interlaced", "recycled")
"""Strategies that stand alone, taken as they are where they are known."""

_PARTS = (2, 4, 8)
"""Into how many parts coshard cuts, and a batch is taken to save memory."""

_CHUNKS = 2


def strategies(refined: Refined, devices: int, *, degrees: Mapping[str, int] | None = None) -> list[Strategy]:
    """Each once, in a fixed order; with these degrees of their axes, if any are given."""
    for axis, degree in (degrees or {}).items():
        if axis not in AXES:
            raise InputError(f"there is no axis {axis!r} to fix the degree of; choose one of {', '.join(AXES)}")
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1 or devices % degree:
            raise InputError(f"the degree of {axis} must be a whole number that divides {devices}, not {degree!r}")
    found: dict[str, Strategy] = {}
    for one in _all(refined, devices):
        if all(degree_of(one, axis) == degree for axis, degree in (degrees or {}).items()):
            found.setdefault(text_of(one), one)
    return list(found.values())


def text_of(strategy: Strategy) -> str:
    """What `rota.strategies.find` finds the strategy by."""
    return describe(strategy)


def recipes_of(strategy: Strategy) -> tuple[Recipe, ...]:
    """The axes of a product; none of a strategy that stands alone."""
    if isinstance(strategy, Product):
        return strategy.recipes
    return (strategy,) if isinstance(strategy, Recipe) else ()


def degree_of(strategy: Strategy, axis: str) -> int:
    """Along an axis; one if the strategy does not have it."""
    for recipe in recipes_of(strategy):
        name = type(recipe).__name__.lower()
        if name == axis or (axis, name) == ("data", "zero"):
            return recipe.degree or 1
    return 1


def _all(refined: Refined, devices: int) -> Iterator[Strategy]:
    samples = refined.samples or 1
    yield single()
    yield from (single(microbatches=count) for count in _PARTS if count <= samples)
    yield from (coshard(parts) for parts in _PARTS if paired_families(refined, parts))
    if devices > 1:
        options = _Options(refined, devices)
        for replicas, columns, stages in _factorizations(devices):
            yield from options.products(replicas, columns, stages)
        yield from options.positions()
    known = names()
    for name in _BY_NAME:
        if name in known:
            yield _named(name)


def _named(name: str) -> Strategy:
    """By its text, since a registered function need not know its own name."""
    made = find(name)
    return made if text_of(made) == name else _Named(name, made)


@dataclass(frozen=True)
class _Named:
    """A strategy that is written as it was found."""

    name: str
    made: Strategy

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """As the strategy itself."""
        return self.made(graph, devices)

    def __str__(self) -> str:
        """Its name."""
        return self.name


class _Options:
    """The knobs of the strategies for one graph."""

    def __init__(self, refined: Refined, devices: int) -> None:
        self._samples = refined.samples or 1
        self._devices = devices
        self._refined = refined
        self._looks = _distinct_looks(refined)
        self._extremes = list(dict.fromkeys((self._looks[0], self._looks[-1])))

    def products(self, replicas: int, columns: int, stages: int) -> Iterator[Strategy]:
        """All strategies of these degrees."""
        if replicas > self._samples or (columns > 1 and not self._can_cut(columns)):
            return
        axes = sum(degree > 1 for degree in (replicas, columns, stages))
        for first in self._replicas(replicas, axes):
            # With other axes the small differences are left out, or there would be thousands.
            for second in self._columns(columns, self._looks if stages == 1 and _is_plain(first) else self._extremes):
                for third in self._stages(stages, replicas, plain=columns == 1 and _is_plain(first)):
                    recipes = [one for one in (first, second, third) if one is not None]
                    if len(recipes) == 1:
                        yield recipes[0]
                    elif recipes:
                        yield Product(recipes=tuple(recipes))
        if stages == 1:
            yield from self._in_parts(replicas, columns)

    def positions(self) -> Iterator[Strategy]:
        """Cuts along positions, where the batch has any."""
        for degree in _divisors(self._devices):
            replicas = self._devices // degree
            if degree == 1 or replicas > self._samples or not self._begins(dap(degree), degree):
                continue
            yield dap(degree) if replicas == 1 else data(replicas) * dap(degree)

    def _replicas(self, degree: int, axes: int) -> Iterator[Recipe | None]:
        if degree == 1:
            yield None
            return
        yield data(degree)
        stages: tuple[Stage, ...] = (1, 2, 3) if axes == 1 else (2, 3) if axes == 2 else ()
        yield from (zero(degree, stage=stage) for stage in stages)

    def _columns(self, degree: int, looks: Iterable[tuple[bool, bool]]) -> Iterator[Recipe | None]:
        if degree == 1:
            yield None
            return
        for sequence, vocabulary in looks:
            yield tensor(degree, sequence=sequence, vocabulary=vocabulary)

    def _stages(self, degree: int, replicas: int, *, plain: bool) -> Iterator[Recipe | None]:
        if degree == 1:
            yield None
            return
        most = self._samples // replicas
        counts = sorted({min(most, factor * degree) for factor in (2, 4)})
        for count in counts:
            yield pipeline(degree, microbatches=count)
        if plain and counts[-1] > 1:
            if replicas == 1:
                yield pipeline(degree, microbatches=counts[-1], order="gpipe")
            if degree * _CHUNKS <= len(self._refined.graph.ops):
                yield pipeline(degree, microbatches=counts[-1], order="interleaved", chunks=_CHUNKS)

    def _in_parts(self, replicas: int, columns: int) -> Iterator[Strategy]:
        """The batch in parts, one after another, to save memory: less is kept at a time."""
        for count in (count for count in _PARTS if count * replicas <= self._samples):
            if columns == 1:
                yield data(replicas, microbatches=count)
                yield zero(replicas, stage=3, microbatches=count)
            elif count == _PARTS[1]:
                last = tensor(columns, sequence=self._looks[-1][0], vocabulary=self._looks[-1][1])
                if replicas == 1:
                    yield replace(last, microbatches=count)
                else:
                    yield zero(replicas, stage=3, microbatches=count) * last

    def _can_cut(self, degree: int) -> bool:
        """Whether all that can be cut in two can be cut so often: no more devices than heads."""
        return len(paired_families(self._refined, degree)) == len(paired_families(self._refined, 2)) > 0

    def _begins(self, recipe: Recipe, degree: int) -> bool:
        try:
            recipe.begin(Plan(self._refined.graph, devices=degree, refined=self._refined), degree)
        except InputError:
            return False
        return True


def _distinct_looks(refined: Refined) -> list[tuple[bool, bool]]:
    """Which of (sequence, vocabulary) make a difference to how tensor parallelism cuts this graph."""
    seen: dict[object, tuple[bool, bool]] = {}
    for look in ((False, False), (False, True), (True, False), (True, True)):
        recipe = tensor(2, sequence=look[0], vocabulary=look[1])
        try:
            graph = recipe.prepare(refined.graph, 2, whole=True)
            own = refined if graph is refined.graph else refine(graph)
            chooser = recipe.begin(Plan(graph, devices=2, refined=own), 2)
            seen.setdefault(tuple((op.name, chooser.choose(op)) for op in graph.ops), look)
        except RotaError:
            continue
    return list(seen.values()) or [(False, False)]


def _factorizations(devices: int) -> Iterator[tuple[int, int, int]]:
    """Into replicas, columns and stages."""
    for replicas in reversed(_divisors(devices)):
        for columns in _divisors(devices // replicas):
            yield replicas, columns, devices // replicas // columns


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _is_plain(replicas: Recipe | None) -> bool:
    return not isinstance(replicas, Zero)
