"""What a plan costs, by simulation: time and where it goes, memory; of a large model also from smaller ones of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rota.errors import CutError, InputError
from rota.graph.cost import element_bytes
from rota.graph.graph import Role
from rota.graph.refine import Refined
from rota.plan.box import Box
from rota.plan.compile import compile_plan
from rota.plan.costs import Costs
from rota.plan.layout import Kind
from rota.plan.plan import Plan
from rota.plan.program import NodeKind, Program
from rota.plan.simulate import Simulation, simulate
from rota.search.prepared import Prepared
from rota.search.space import degree_of, recipes_of
from rota.strategies.base import Strategy
from rota.strategies.data import Data
from rota.strategies.mesh import Product, Recipe
from rota.strategies.pipeline import Pipeline, op_cost, stages_by_cost
from rota.strategies.zero import Zero

LAYERS = (2, 3)
"""From how many layers the rest is told, where no stages are cut."""

_BALANCED = 1.08
"""How much the dearest stage may be above the mean for a pipeline to be told from fewer layers."""

_WORTH = 0.75
"""Two smaller graphs are worth it if they have this share of the layers together, at most."""

_FEW_OPS = 600
"""A plan of so many ops times devices is measured as it is."""

_REPLICAS, _STORED_REPLICAS = 2, 4
"""How many replicas are looked at, of many that are alike; more where parameters are stored cut among them."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A predicted step."""

    step_s: float
    peak_bytes: tuple[float, ...]
    """Of each device, with the optimizer's moments."""
    busy_s: float
    """Computing, on average over devices."""
    most_busy_s: float
    waits: Mapping[str, float]
    """what is communicated -> seconds, on average over devices"""
    exact: bool
    """Simulated as it is, not told from a smaller one."""


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Measures strategies for one graph."""

    prepared: Prepared
    devices: int
    costs: Costs
    moments: float
    """Bytes of moments for a byte of trained parameters."""
    whole_parameters: bool = False
    pinned: Callable[[Plan], None] | None = None
    _balances: dict[tuple[int | None, int], bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def exact(self, strategy: Strategy) -> Measured:
        """Compile and simulate it as it is."""
        plan = self.prepared.plan(strategy, self.devices)
        assert plan is not None
        return self._measure(plan)

    def quick(self, strategy: Strategy) -> Measured:
        """As exact as it can be had fast: from fewer layers and replicas, where the model allows it."""
        size = len(self.prepared.graph.ops) * self.devices
        if self.pinned is not None or size <= _FEW_OPS:
            return self.exact(strategy)
        smaller, devices, samples = self._fewer_replicas(strategy)
        layers = self._fewer_layers(strategy)
        if layers is None:
            return self._sized(strategy, smaller, devices, samples, None) or self.exact(strategy)
        found = [self._sized(strategy, smaller, devices, samples, count) for count in layers]
        one, other = found
        if one is None or other is None:
            return self.exact(strategy)
        assert self.prepared.stack is not None
        return extrapolated(one, other, (self.prepared.stack.layers - layers[0]) / (layers[1] - layers[0]))

    def _sized(
        self, strategy: Strategy, smaller: Strategy, devices: int, samples: int | None, layers: int | None
    ) -> Measured | None:
        try:
            plan = self.prepared.plan(smaller, devices, layers=layers, samples=samples)
            found = None if plan is None else self._measure(plan, of=strategy, replicas=degree_of(smaller, "data"))
        except (InputError, CutError):
            if devices == self.devices and layers is None:
                raise
            return None  # what refuses the small graph may take the large one
        is_whole = devices == self.devices and layers is None
        return found if found is None or is_whole else replace(found, exact=False)

    def _measure(self, plan: Plan, *, of: Strategy | None = None, replicas: int = 1) -> Measured:
        if self.pinned is not None:
            self.pinned(plan)
        program = compile_plan(plan, checked=False)
        if self.whole_parameters:
            _refuse_cut(program)
        simulation = simulate(program, self.costs)
        trained = trained_bytes(program)
        peaks = [float(one + self.moments * own) for one, own in zip(simulation.peak_bytes, trained, strict=True)]
        step_s = simulation.makespan_s
        if of is not None and replicas < degree_of(of, "data"):
            many = degree_of(of, "data")
            step_s += _more_replicas_s(program, simulation, self.costs, replicas, many)
            if any(isinstance(recipe, Zero) for recipe in recipes_of(of)):
                share = (1 - replicas / many) * (1 + self.moments)
                peaks = [peak - own * share for peak, own in zip(peaks, trained, strict=True)]
        return Measured(
            step_s=step_s,
            peak_bytes=tuple(peaks),
            busy_s=sum(simulation.busy_s) / program.devices,
            most_busy_s=max(simulation.busy_s),
            waits=_waits(program, simulation),
            exact=True,
        )

    # ---- smaller ones ----

    def _fewer_replicas(self, strategy: Strategy) -> tuple[Strategy, int, int | None]:
        """The strategy with fewer replicas, on how many devices, and with how many samples."""
        recipes, many = recipes_of(strategy), degree_of(strategy, "data")
        stored = any(isinstance(recipe, Zero) for recipe in recipes)
        few = _STORED_REPLICAS if stored else _REPLICAS
        samples = self.prepared.whole.samples or 1
        if many <= few or samples % many:
            return strategy, self.devices, None
        less = tuple(replace(one, degree=few) if isinstance(one, Data | Zero) else one for one in recipes)
        return Product(recipes=less), self.devices // many * few, samples // many * few

    def _fewer_layers(self, strategy: Strategy) -> tuple[int, int] | None:
        stack = self.prepared.stack
        if stack is None or not self._is_regular(strategy):
            return None
        stages = self._stages(recipes_of(strategy))
        if stages == 1:
            return LAYERS if sum(LAYERS) <= _WORTH * stack.layers else None
        few = stages
        while 2 * few + stages <= _WORTH * stack.layers:
            counts = (few, few + stages)
            if all(self._is_balanced(count, stages) for count in (*counts, None)):
                return counts
            few += stages
        return None

    def _is_regular(self, strategy: Strategy) -> bool:
        """Whether time and memory are linear in layers: unknown strategies may do what they like."""
        names = ("Data", "Zero", "Tensor", "Pipeline", "Dap", "Single", "Coshard")
        return all(type(one).__name__ in names for one in recipes_of(strategy) or (strategy,))

    def _stages(self, recipes: Sequence[Recipe]) -> int:
        for one in recipes:
            if isinstance(one, Pipeline):
                return (one.degree or 1) * (one.chunks if one.order == "interleaved" else 1)
        return 1

    def _is_balanced(self, layers: int | None, stages: int) -> bool:
        known = self._balances.get((layers, stages))
        if known is None:
            refined = self.prepared.sized(layers=layers)
            assert refined is not None
            costs = _stage_costs(refined, stages)
            known = self._balances[(layers, stages)] = max(costs) * stages <= _BALANCED * sum(costs)
        return known


def extrapolated(one: Measured, other: Measured, factor: float) -> Measured:
    """The line through both, so many times as far from the first as the second is."""

    def on(a: float, b: float) -> float:
        return max(0.0, a + factor * (b - a))

    waits = {key: on(one.waits.get(key, 0.0), other.waits.get(key, 0.0)) for key in {**one.waits, **other.waits}}
    return Measured(
        step_s=on(one.step_s, other.step_s),
        peak_bytes=tuple(map(on, one.peak_bytes, other.peak_bytes)),
        busy_s=on(one.busy_s, other.busy_s),
        most_busy_s=on(one.most_busy_s, other.most_busy_s),
        waits=waits,
        exact=False,
    )


def trained_bytes(program: Program) -> list[int]:
    """Of each device: the parameters that it stores and that are trained."""
    found = [0] * program.devices
    for name, layout in program.stored.items():
        tensor = program.refined.graph.tensors[name]
        if tensor.role is Role.PARAMETER and tensor.requires_grad:
            width = element_bytes(program.refined, name)
            for piece in layout:
                found[piece.device] += piece.box.size * width
    return found


def _refuse_cut(program: Program) -> None:
    for name, layout in program.stored.items():
        tensor = program.refined.graph.tensors[name]
        whole = Box.whole(program.refined.shape(name))
        if tensor.role is Role.PARAMETER and tensor.requires_grad and any(piece.box != whole for piece in layout):
            pieces = len({piece.box for piece in layout})
            raise InputError(f"the optimizer needs whole parameters, and {name} is stored in {pieces} pieces")


def _stage_costs(refined: Refined, stages: int) -> list[float]:
    plan = Plan(refined.graph, devices=1, refined=refined)
    of = stages_by_cost(plan, stages)
    found = [0.0] * stages
    for op in refined.graph.ops:
        found[of[op.name]] += op_cost(plan, op)
    return found


def _more_replicas_s(program: Program, simulation: Simulation, costs: Costs, few: int, many: int) -> float:
    """How much longer collectives among many replicas take than among few.

    What a device receives in an all-reduce, all-gather or reduce-scatter of so many bytes is (n - 1) / n of them, once
    or twice, for any n. Replicas are the outermost axis of the devices.
    """
    inner = program.devices // few
    more = (many - 1) / many * few / (few - 1) - 1
    extra = [0.0] * program.devices
    for node, start, end in zip(program.nodes, simulation.start_s, simulation.end_s, strict=True):
        if node.step is None or node.step.kind in (Kind.LOCAL, Kind.SEND):
            continue
        if len({device // inner for device in node.devices}) > 1:
            for device in node.devices:
                extra[device] += max(0.0, end - start - costs.link.latency_s) * more
    return max(extra)


def _waits(program: Program, simulation: Simulation) -> dict[str, float]:
    """What devices spend in each kind of communication, on average over them."""
    found: dict[str, float] = {}
    for node, start, end in zip(program.nodes, simulation.start_s, simulation.end_s, strict=True):
        if node.kind is NodeKind.EXCHANGE and node.step is not None:
            flow = program.flows[node.flow]
            role = program.refined.graph.tensors[flow.tensor].role
            what = "parameters" if role is Role.PARAMETER else "activations"
            if flow.backward:
                what = "gradients" if role is Role.PARAMETER else "gradients of activations"
            key = f"{_words(node.step.kind)} of {what}"
            found[key] = found.get(key, 0.0) + (end - start) * len(node.devices) / program.devices
    return found


def _words(kind: Kind) -> str:
    return {"local": "assembly", "send": "sends"}.get(kind.value, kind.value.replace("_", "-"))
