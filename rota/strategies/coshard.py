"""Coshard: the parts of a layer run one after another on one device, each recomputed: less memory, no exchange.

Heads, columns, windows or positions are cut, whichever leaves the least to keep. What lies between two layers is kept;
what a part of a layer makes inside is there only while the part runs, and once more while its backward pass does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rota.errors import InputError
from rota.graph.cost import work_of
from rota.graph.graph import Graph, Op, Role
from rota.graph.refine import Dim, Refined
from rota.graph.rules import occurrences
from rota.plan.plan import Part, Plan
from rota.strategies.base import register
from rota.strategies.mesh import Choice, Copy, Mesh, Recipe, lay_out

_USUAL_PARTS = 4
_PRODUCTS_OF_A_LAYER = 4
"""A numbered module with fewer is a part of a layer: an expert, or a step of a Sequential."""


@dataclass(frozen=True, kw_only=True)
class Coshard(Recipe):
    """Cuts each layer into parts that follow each other on one device; one part is recomputing alone."""

    degree: int | None = 1
    """It needs no axis of devices: in a product each device does it to what it has."""
    parts: int = _USUAL_PARTS

    def __str__(self) -> str:
        """As the user writes it."""
        more = "" if self.microbatches is None else f", microbatches={self.microbatches}"
        return f"coshard({self.parts}{more})"

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """A plan on one device; others stay idle."""
        return lay_out(graph, [(self, 1)], microbatches=self.microbatches or 1, devices=devices)

    def begin(self, plan: Plan, degree: int) -> _OneAfterAnother:
        """Refused if no layer can be cut so often."""
        return _OneAfterAnother(plan, self.parts)


class _OneAfterAnother:
    def __init__(self, plan: Plan, parts: int) -> None:
        self._parts = parts
        # Recomputing alone is to be compared with cutting: it takes the runs that would be cut.
        self._runs = find_runs(plan.refined, parts if parts > 1 else _USUAL_PARTS)
        if not self._runs and parts == 1:
            raise InputError("the model has no layer that coshard can compute again; use single, or micro-batches")
        if not self._runs:
            fewer = "fewer parts, single, or micro-batches" if parts > 2 else "single, or micro-batches"
            raise InputError(f"the model has no layer that can be cut into {parts}; use {fewer}")

    def choose(self, op: Op) -> Choice:
        """Other axes say where it is."""
        return Copy()

    def finish(self, mesh: Mesh) -> None:
        """Cut what each device has."""
        for run in self._runs:
            _cut(mesh.plan, run, self._parts)


@dataclass(kw_only=True)
class Run:
    """Ops that are cut alike, so that a part of the one needs only the same part of the other."""

    dims: dict[str, str] = field(default_factory=dict)
    """op -> the dim along which it is cut, in the order of the graph"""
    saved_bytes: float = 0.0


def _cut(plan: Plan, run: Run, parts: int) -> None:
    """Cut what each device has of a run, and compute each part of the run apart and again for its backward pass."""
    lanes: dict[tuple[int | None, int], list[Part]] = {}
    for op, dim in run.dims.items():
        for part in plan.parts(op):
            device = plan.device_of(part)
            start, stop = dict(part.ranges).get(dim, (0, plan.dims(op)[dim].size))
            count = min(parts, stop - start)  # other axes may have left less of it
            for number, lane in enumerate(plan.split(part, dim, count) if count > 1 else [part]):
                lanes.setdefault((device, number), []).append(lane)
    for lane_parts in lanes.values():
        plan.recompute(lane_parts)


def find_runs(refined: Refined, parts: int) -> list[Run]:
    """The runs of all layers; of those that share ops, the ones that save more."""
    graph = refined.graph
    worth = _worth_cutting(graph)
    found: list[Run] = []
    for ops in layer_visits(graph):
        visit = _Visit(refined, ops, worth, parts)
        found += visit.chosen()
    return found


class _Visit:
    """One pass through a layer, and how it is cut."""

    def __init__(self, refined: Refined, ops: Sequence[Op], worth: set[str], parts: int) -> None:
        self._refined = refined
        self._ops = ops
        self._parts = parts
        self._free = {op.name for op in ops if op.name in worth}
        self._maker = {name: op.name for op in ops for name in op.outputs if name is not None}
        self._readers: dict[str, list[str]] = {}
        for op in refined.graph.ops:
            for name in op.inputs:
                if name in self._maker:
                    self._readers.setdefault(name, []).append(op.name)
        self._unit: dict[str, int] = {}
        """op -> the run it is in"""

    def chosen(self) -> list[Run]:
        """The best run, the best of what is left, and so on."""
        found: list[Run] = []
        refused: set[tuple[str, ...]] = set()
        while True:
            runs = [run for run in self._candidates() if run.saved_bytes > 0 and tuple(run.dims) not in refused]
            if not runs:
                return found
            best = max(runs, key=lambda run: run.saved_bytes)
            units = self._unit | dict.fromkeys(best.dims, len(found))
            if self._is_acyclic(units):
                found.append(best)
                self._unit = units
                self._free -= best.dims.keys()
            else:
                refused.add(tuple(best.dims))

    def _candidates(self) -> Iterator[Run]:
        families = {
            dim.family: None
            for op in self._ops
            if op.name in self._free
            for dim in self._refined.frames[op.name].dims.values()
        }
        samples = self._refined.batch_families()
        for family in families:
            if family not in samples:
                yield from self._runs(family)

    def _runs(self, family: int) -> Iterator[Run]:
        """The ops of a family, in as few runs as the data flow allows."""
        stage: dict[str, int] = {}
        """op of a run -> the number of the run; other op -> the number of the first run that may read from it"""
        cut: dict[str, int | None] = {}
        """tensor that a run makes -> which of its factors is cut; None for partial sums"""
        runs: dict[int, Run] = {}
        for op in self._ops:
            placed = self._placed(op, family, stage, cut) if op.name in self._free else None
            if placed is None:
                after = [stage[self._maker[name]] + (name in cut) for name in op.inputs if name in self._maker]
                stage[op.name] = max(after, default=0)
                continue
            number, dim = placed
            stage[op.name] = number
            run = runs.setdefault(number, Run())
            run.dims[op.name] = dim.name
            for name, names in zip(op.outputs, self._refined.frames[op.name].makes, strict=True):
                if name is not None:
                    cut[name] = names.index(dim.name) if names is not None and dim.name in names else None
        for run in runs.values():
            run.saved_bytes = self._saved(run, cut)
            yield run

    def _placed(self, op: Op, family: int, stage: dict[str, int], cut: dict[str, int | None]) -> tuple[int, Dim] | None:
        """In which run an op can be, and along which of its dims."""
        frame = self._refined.frames[op.name]
        best: tuple[int, Dim] | None = None
        for dim in frame.dims.values():
            if dim.family != family or not frame.can_cut(dim) or dim.size < self._parts:
                continue
            needed, aligned, whole = [0], [], False
            for name, names in zip(occurrences(op), frame.reads, strict=True):
                coordinate = cut.get(name)
                if coordinate is not None and names[coordinate] == dim.name:
                    aligned.append(stage[self._maker[name]])
                elif name in self._maker:
                    needed.append(stage[self._maker[name]] + (name in cut))
                    whole = whole or dim.name in names
                else:
                    activation = self._refined.graph.tensors[name].role is Role.ACTIVATION
                    whole = whole or (activation and dim.name in names)
            number = max(needed + aligned)
            if dim.reduced and (whole or not aligned or min(aligned) < number):
                continue  # partial sums are worth it only at the end of a run
            if best is None or number < best[0]:
                best = (number, dim)
        return best

    def _saved(self, run: Run, cut: dict[str, int | None]) -> float:
        """What is never there as a whole, forward and as a gradient, less the partial sums that are."""
        saved = 0.0
        for name, factor in cut.items():
            maker = self._maker[name]
            work = work_of(self._refined, maker, {}) if maker in run.dims else None
            if work is None or work.touched_bytes == 0:  # a view
                continue
            tensor = self._refined.graph.tensors[name]
            size = float(_elements(tensor.shape))
            if factor is None:
                saved -= size * (self._parts - 1)
            elif self._readers.get(name) and all(
                reader in run.dims and self._reads_alike(reader, name, factor, run) for reader in self._readers[name]
            ):
                saved += 2 * size * (1 - 1 / self._parts)
        return saved

    def _reads_alike(self, reader: str, name: str, factor: int, run: Run) -> bool:
        frame = self._refined.frames[reader]
        reads = zip(occurrences(self._refined.cases[reader].op), frame.reads, strict=True)
        return all(names[factor] == run.dims[reader] for tensor, names in reads if tensor == name)

    def _is_acyclic(self, units: dict[str, int]) -> bool:
        """Whether all of a run can be done at once, for each run."""
        node = {op.name: ("run", str(units[op.name])) if op.name in units else ("op", op.name) for op in self._ops}
        before: dict[tuple[str, str], set[tuple[str, str]]] = {one: set() for one in node.values()}
        for op in self._ops:
            before[node[op.name]] |= {node[self._maker[name]] for name in op.inputs if name in self._maker}
        left = {one: others - {one} for one, others in before.items()}
        while left:
            done = {one for one, others in left.items() if not others & left.keys()}
            if not done:
                return False
            left = {one: others for one, others in left.items() if one not in done}
        return True


def _elements(shape: Sequence[int]) -> int:
    size = 1
    for width in shape:
        size *= width
    return size


def _worth_cutting(graph: Graph) -> set[str]:
    """The ops that depend on the batch, and whose outputs the backward pass may need or no pass keeps."""
    reached = set(graph.inputs)
    found: set[str] = set()
    for op in graph.ops:
        if reached.isdisjoint(op.inputs):
            continue
        made = [name for name in op.outputs if name is not None]
        reached.update(made)
        if not op.with_grad or any(graph.tensors[name].requires_grad for name in made):
            found.add(op.name)
    return found


def layer_visits(graph: Graph) -> Iterator[list[Op]]:
    """The ops of each layer, one list for each time that the model comes to it."""
    products: dict[str, set[str]] = {}
    for op in graph.ops:
        weights = {
            name
            for name in op.inputs
            if graph.tensors[name].role is Role.PARAMETER and len(graph.tensors[name].shape) > 1
        }
        for prefix in _numbered(op.module):
            products.setdefault(prefix, set()).update(weights)
    for _, ops in itertools.groupby(graph.ops, key=lambda op: _layer(op.module, products)):
        yield list(ops)


def _layer(module: str, products: dict[str, set[str]]) -> str:
    """The innermost numbered module with enough products to be a layer; else the outermost one."""
    numbered = _numbered(module)
    large = [prefix for prefix in numbered if len(products[prefix]) >= _PRODUCTS_OF_A_LAYER]
    return large[-1] if large else next(iter(numbered), "")


def _numbered(module: str) -> list[str]:
    """The paths of the numbered modules that a module is in, the outermost first."""
    names = module.split(".")
    return [".".join(names[: i + 1]) for i, name in enumerate(names) if name.isdigit()]


def coshard(parts: int = _USUAL_PARTS, *, microbatches: int | None = None) -> Coshard:
    """So many parts, one after another; coshard(1) recomputes the same layers without cutting them."""
    return Coshard(parts=parts, microbatches=microbatches)


register("coshard", coshard)
