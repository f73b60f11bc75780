"""The graphs that a search looks at: whole, with fewer layers, with fewer samples; each refined once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rota.graph.graph import Graph
from rota.graph.refine import Refined, refine
from rota.plan.plan import Plan
from rota.search.layers import Stack, stack_of
from rota.search.samples import with_samples
from rota.search.space import recipes_of
from rota.strategies.base import Strategy
from rota.strategies.coshard import Coshard
from rota.strategies.mesh import Product, Recipe, lay_out


class Prepared:
    """A graph in all the sizes that are asked for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.stack: Stack | None = stack_of(graph)
        self._known: dict[object, Refined | None] = {}

    @property
    def whole(self) -> Refined:
        """The graph as it is."""
        found = self.sized()
        assert found is not None
        return found

    def sized(self, *, layers: int | None = None, samples: int | None = None) -> Refined | None:
        """With fewer layers or samples; None if that cannot be told from the graph."""
        if samples is None:
            return self._once((layers, None), lambda: refine(self._with_layers(layers)))
        return self._once((layers, samples), lambda: self._with_samples(layers, samples))

    def plan(
        self, strategy: Strategy, devices: int, *, layers: int | None = None, samples: int | None = None
    ) -> Plan | None:
        """What the strategy makes of the graph in that size; None if it does not come in it."""
        refined = self.sized(layers=layers, samples=samples)
        recipes = recipes_of(strategy)
        if refined is None:
            return None
        if not recipes or isinstance(strategy, Coshard):  # which leaves other devices idle
            return strategy(refined.graph, devices)
        product = strategy if isinstance(strategy, Product) else Product(recipes=recipes)
        degrees = product.degrees(devices)
        refined = self.cuttable(refined, recipes, degrees, whole=product.takes_whole_batches(degrees))
        count = product._microbatches(refined.samples or 1, degrees)
        axes = list(zip(recipes, degrees, strict=True))
        return lay_out(refined.graph, axes, microbatches=count, devices=devices, refined=refined)

    def cuttable(self, refined: Refined, recipes: Sequence[Recipe], degrees: Sequence[int], *, whole: bool) -> Refined:
        """As these strategies want to have it: the same computation in ops that they can cut."""
        graph = refined.graph
        changed = []
        for recipe, degree in zip(recipes, degrees, strict=True):
            made = recipe.prepare(graph, degree, whole=whole)
            if made is not graph:
                changed.append(str(replace(recipe, degree=degree, microbatches=None)))
            graph = made
        if not changed:
            return refined
        found = self._once((id(refined), *changed), lambda: refine(graph))
        assert found is not None
        return found

    def _with_layers(self, layers: int | None) -> Graph:
        return self.graph if self.stack is None or layers is None else self.stack.with_layers(layers)

    def _with_samples(self, layers: int | None, samples: int) -> Refined | None:
        refined = self.sized(layers=layers)
        made = None if refined is None else with_samples(refined, samples)
        return None if made is None else refine(made)

    def _once(self, key: object, make: Callable[[], Refined | None]) -> Refined | None:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]
