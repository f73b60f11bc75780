"""3F1B: a pipeline for models that run several times without gradient, each time on what they made, then once with it.

A layer is on one device in all passes, so what the last stage makes goes back to the first. While a micro-batch is in
one pass, others are in theirs: no device waits for a whole pass to end. AlphaFold2's recycling is such a model.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from rota.errors import InputError
from rota.graph.cost import element_bytes
from rota.graph.graph import Graph, Op, Ref, Role, trained_ops
from rota.graph.rewrite import rewrite
from rota.plan.box import even_widths
from rota.plan.microbatches import Mode, microbatches_of
from rota.plan.plan import At, Plan
from rota.strategies.base import register
from rota.strategies.mesh import Choice, Copy, Mesh, Pin, Recipe
from rota.strategies.pipeline import copied, op_cost, stages_by_cost
from rota.strategies.turns import turning_ops

Order = Literal["3f1b", "sequential"]

_BACKWARD = 2.0
"""What a backward pass costs, in forward passes."""
_SLACK = 0.1
"""By how much of a stage's cost a border may move to where less crosses it."""


@dataclass(frozen=True, kw_only=True)
class Recycled(Recipe):
    """Stages of about equal cost over all passes."""

    orders_microbatches: ClassVar[bool] = True
    order: Order = "3f1b"
    """With "sequential", all micro-batches end a pass before the next begins."""

    def default_microbatches(self, samples: int, degree: int) -> int:
        """Enough that filling and draining the stages is a small part of the step."""
        return max(1, min(samples, 4 * degree)) if degree > 1 else 1

    def prepare(self, graph: Graph, degree: int, *, whole: bool) -> Graph:
        """If passes follow each other, with what goes from one to the next brought together for all samples."""
        return gather_between_passes(graph) if self.order == "sequential" else graph

    def begin(self, plan: Plan, degree: int) -> _Stages:
        """Refused if no layer runs first without and then with gradient."""
        return _Stages(plan, degree, self.order)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Which pass each op belongs to, and who does the same in the pass with gradient."""

    count: int
    number: Mapping[str, int]
    """op -> its pass; the last is the one with gradient"""
    like: Mapping[str, str]
    """op of an earlier pass -> the op of the last one that does the same"""


def find_passes(graph: Graph) -> Passes:
    """The passes of a model; InputError if it has but one."""
    last: dict[tuple[str, str, tuple[str, ...]], list[Op]] = {}
    before: dict[tuple[str, str, tuple[str, ...]], list[Op]] = {}
    for op in graph.ops:
        weights = tuple(name for name in op.inputs if graph.tensors[name].role is Role.PARAMETER)
        (last if op.with_grad else before).setdefault((op.module, op.kind, weights), []).append(op)
    if not any(key[2] for key in last.keys() & before.keys()):
        raise InputError(
            "the model has no passes that repeat: none of its layers runs first without gradient and then with it;"
            " use pipeline"
        )
    like: dict[str, str] = {}
    turn: dict[str, int] = {}
    for key, ops in before.items():
        once = last.get(key, [])
        if once and len(ops) % len(once) == 0:
            for i, op in enumerate(ops):
                like[op.name] = once[i % len(once)].name
                turn[op.name] = i // len(once)
    count = max(turn.values()) + 2
    number: dict[str, int] = {}
    made: dict[str, int] = {}
    early = _needed_without_gradient(graph)
    for op in graph.ops:
        earliest = max((made[name] for name in op.inputs if name in made), default=0)
        last_one = op.with_grad and op.name not in early
        number[op.name] = count - 1 if last_one else max(earliest, turn.get(op.name, 0))
        made |= {name: number[op.name] for name in op.outputs if name is not None}
    return Passes(count=count, number=number, like=like)


@rewrite
def gather_between_passes(graph: Graph) -> Graph:
    """The same computation; what a pass makes for the next goes through an op that needs all samples at once."""
    number = find_passes(graph).number
    maker = {name: op for op in graph.ops if not op.with_grad for name in op.outputs if name is not None}
    later = {
        (op.name, name): f"{name}.gathered"
        for op in graph.ops
        for name in op.inputs
        if name in maker and number[maker[name].name] < number[op.name] and graph.tensors[name].shape
    }
    wanted = {name for _, name in later}
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:

        def renamed(name: str, op: Op = op) -> Ref:
            return Ref(name=later.get((op.name, name), name))

        args, kwargs = op.bind(renamed)
        inputs = tuple(renamed(name).name for name in op.inputs)
        ops.append(replace(op, args=tuple(args), kwargs=kwargs, inputs=inputs))
        for name in (name for name in op.outputs if name in wanted):
            made = f"{name}.gathered"
            tensors[made] = replace(graph.tensors[name], name=made)
            ops.append(_rolled_by_nothing(name, made, op))
    return replace(graph, ops=tuple(ops), tensors=tensors)


def _rolled_by_nothing(name: str, made: str, op: Op) -> Op:
    """What changes nothing, but cannot be cut along the samples."""
    return Op(
        name=made,
        kind="roll",
        target="aten.roll.default",
        args=(Ref(name=name), [0], [0]),
        inputs=(name,),
        outputs=(made,),
        module=op.module,
        with_grad=False,
    )


def _needed_without_gradient(graph: Graph) -> set[str]:
    """The ops that the passes without gradient depend on."""
    wanted: set[str] = set()
    found: set[str] = set()
    for op in reversed(graph.ops):
        if not op.with_grad or not wanted.isdisjoint(name for name in op.outputs if name is not None):
            found.add(op.name)
            wanted.update(op.inputs)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A pass of a micro-batch through a stage."""

    number: int
    microbatch: int
    backward: bool


class _Stages:
    def __init__(self, plan: Plan, degree: int, order: Order) -> None:
        self._plan = plan
        self._degree = degree
        self._order = order
        self._passes = find_passes(plan.graph)
        self.stage_of = _stages(plan, degree, self._passes)
        self._copied = copied(plan, self.stage_of)
        self._trained = trained_ops(plan.graph)

    def choose(self, op: Op) -> Choice:
        """To the stage of its layer; what depends on the batch alone is computed wherever it is needed."""
        stages = self._copied.get(op.name)
        if stages is not None:
            return Copy(places=tuple(sorted(stages)))
        return Pin(place=self.stage_of[op.name])

    def finish(self, mesh: Mesh) -> None:
        """Keep the passes apart, and say what each stage does after what."""
        plan, last = self._plan, self._passes.count - 1
        if plan.microbatches == 1 or self._degree == 1:
            return
        for number in range(last):
            plan.group([op for op in plan.graph.ops if not op.with_grad and self._passes.number[op.name] == number])
        if not turning_ops(plan) or not self._goes_round():  # then the data flow alone says what comes when
            return
        groups = [plan.microbatches] if self._order == "sequential" else _groups(plan.microbatches, self._degree)
        for stage in range(self._degree):
            todo = tasks(stage, stages=self._degree, passes=self._passes.count, groups=groups)
            moments = [ends for task in todo if (ends := self._ends(stage, task)) is not None]
            for (_, done), (begun, _) in itertools.pairwise(moments):
                self._follow(done, begun)

    def _goes_round(self) -> bool:
        """Whether no pass has data that goes from a later stage to an earlier one."""
        made = {name: op.name for op in self._plan.graph.ops for name in op.outputs if name is not None}
        number, stage = self._passes.number, self.stage_of
        for op in self._plan.graph.ops:
            for maker in {made[name] for name in op.inputs if name in made} - self._copied.keys():
                back = number[maker] > number[op.name] or (
                    number[maker] == number[op.name] and stage[maker] > stage[op.name]
                )
                if back and op.name not in self._copied:
                    return False
        return True

    def _ends(self, stage: int, task: Task) -> tuple[At, At] | None:
        """The first and the last that a stage does for a task; None if it has nothing to do."""
        trained = self._trained if task.backward else None
        ops = [
            op
            for op in self._each.get((stage, -1 if task.backward else task.number), ())
            if trained is None or op.name in trained
        ]
        if not ops:
            return None
        ends = [
            At(part=self._plan.parts(op)[0], microbatch=task.microbatch, backward=task.backward)
            for op in (ops[0], ops[-1])
        ]
        return (ends[1], ends[0]) if task.backward else (ends[0], ends[1])

    def _follow(self, done: At, begun: At) -> None:
        """On each device that has the stage."""
        plan = self._plan
        for one, other in itertools.product(plan.parts(done.part.op), plan.parts(begun.part.op)):
            if plan.device_of(one) == plan.device_of(other):
                plan.prefer(replace(done, part=one), before=replace(begun, part=other))

    @functools.cached_property
    def _each(self) -> dict[tuple[int, int], list[Op]]:
        """(stage, pass) -> its ops that run for each micro-batch; pass -1 has those of all passes with gradient"""
        running = microbatches_of(self._plan).running
        found: dict[tuple[int, int], list[Op]] = {}
        for op in self._plan.graph.ops:
            if op.name not in self._copied and running[op.name].mode is not Mode.ONCE:
                stage = self.stage_of[op.name]
                found.setdefault((stage, self._passes.number[op.name]), []).append(op)
                if op.with_grad:
                    found.setdefault((stage, -1), []).append(op)
        return found


def _groups(microbatches: int, stages: int) -> list[int]:
    """The micro-batches that go round together: enough that no stage waits for the first of them to come back."""
    return list(even_widths(microbatches, max(1, microbatches // (4 * stages))))


def tasks(stage: int, *, stages: int, passes: int, groups: Sequence[int]) -> list[Task]:
    """What a stage does in a step, in order.

    The micro-batches of a group go through each pass one after another. In the last pass forwards and backwards
    alternate, as in 1F1B: no stage keeps the activations of more micro-batches than there are stages from it to the
    end. While a stage waits for the first gradient, and between the last backwards, it begins the next group.
    """
    ahead = stages - stage
    starts = list(itertools.accumulate(groups, initial=0))
    members = [range(start, stop) for start, stop in itertools.pairwise(starts)]
    early = [
        deque(Task(number=p, microbatch=m, backward=False) for p in range(passes - 1) for m in group)
        for group in members
    ]
    found: list[Task] = []
    for number, group in enumerate(members):
        found += early[number]
        rest = deque(Task(number=passes - 1, microbatch=m, backward=False) for m in group)
        found += [rest.popleft() for _ in range(min(ahead, len(rest)))]
        following = early[number + 1] if number + 1 < len(members) else deque[Task]()
        first_pass = len(members[number + 1]) if following else 0
        filling = min(first_pass, int(_BACKWARD) * (ahead - 1))
        found += [following.popleft() for _ in range(filling)]
        spare = first_pass - filling
        for m in group:
            found.append(Task(number=passes - 1, microbatch=m, backward=True))
            if rest:
                found.append(rest.popleft())
            elif spare:
                found.append(following.popleft())
                spare -= 1
    return found


def _stages(plan: Plan, degree: int, passes: Passes) -> dict[str, int]:
    """The stage of each op: those of the last pass by cost, the others where the same is done in the last pass."""
    graph = plan.graph
    trained = trained_ops(graph)
    costs = {op.name: 0.0 for op in graph.ops}
    for op in graph.ops:
        home = op.name if op.with_grad else passes.like.get(op.name)
        if home is not None:
            costs[home] += op_cost(plan, op) * (1 + _BACKWARD if op.name in trained else 1)
    found = stages_by_cost(plan, degree, tuple(costs.values()), send=(0.0, 0.0))  # most ops have no cost of their own
    last = [op for op in graph.ops if op.with_grad]
    found |= _moved(plan, last, costs, [found[op.name] for op in last])
    if {found[op.name] for op in last} != set(range(degree)):
        raise InputError(f"a pass of {len(last)} ops cannot be cut into {degree} stages; use fewer")
    made: dict[str, int] = {}
    for op in graph.ops:
        if not op.with_grad:
            same = passes.like.get(op.name)
            inputs = [made[name] for name in op.inputs if name in made]
            found[op.name] = found[same] if same is not None else max(inputs, default=0)
        made |= {name: found[op.name] for name in op.outputs if name is not None}
    return found


def _moved(plan: Plan, ops: list[Op], costs: Mapping[str, float], stages: list[int]) -> dict[str, int]:
    """The stages with each border moved a little, to where the fewest bytes cross it."""
    crossing = _crossing_bytes(plan, ops)
    total = list(itertools.accumulate((costs[op.name] for op in ops), initial=0.0))
    slack = _SLACK * total[-1] / (max(stages) + 1)
    borders = [i for i in range(1, len(ops)) if stages[i] != stages[i - 1]]
    moved: list[int] = []
    for border in borders:
        near = [
            i
            for i in range(moved[-1] + 1 if moved else 1, len(ops))
            if abs(total[i] - total[border]) <= slack or i == border
        ]
        moved.append(min(near, key=lambda i: (crossing[i], abs(total[i] - total[border])), default=border))
    first = stages[0]
    return {op.name: first + sum(border <= i for border in moved) for i, op in enumerate(ops)}


def _crossing_bytes(plan: Plan, ops: list[Op]) -> list[int]:
    """For each place between two ops, what is made before it and read after it."""
    made: dict[str, int] = {}
    read: dict[str, int] = {}
    for i, op in enumerate(ops):
        for name in op.inputs:
            if name in made:
                read[name] = i
        made |= {name: i for name in op.outputs if name is not None}
    change = [0] * (len(ops) + 1)
    for name, end in read.items():
        size = element_bytes(plan.refined, name)
        for width in plan.graph.tensors[name].shape:
            size *= width
        change[made[name] + 1] += size
        change[end + 1] -= size
    return list(itertools.accumulate(change))


def recycled(stages: int | None = None, *, microbatches: int | None = None, order: Order = "3f1b") -> Recycled:
    """Stages on one device after another, in a ring; four micro-batches for each unless you say otherwise."""
    return Recycled(degree=stages, microbatches=microbatches, order=order)


register("recycled", recycled)
