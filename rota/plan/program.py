"""A compiled plan: the nodes of one step in one order over all devices, readable and serialisable.

A node is the run of a segment (ops that a device computes in one go) or one step of communication. The nodes are in an
order in which each needs only what those before it made; what one device does is its projection of that order, so that
blocking calls cannot wait for each other in a circle.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rota.graph.part import Offsets, Ranges
from rota.graph.refine import Refined
from rota.plan.box import Box
from rota.plan.layout import Layout, Step
from rota.plan.microbatches import Microbatches
from rota.whole import at_least

if TYPE_CHECKING:
    from rota.plan.costs import Costs
    from rota.plan.plan import Plan
    from rota.plan.simulate import Simulation

ONCE = -1
"""The micro-batch of what happens once in a step."""


class Value(NamedTuple):
    """A tensor on a device during a step."""

    name: str
    """The tensor of the graph; ``x #1`` for another layout of it, ``grad x`` for a gradient."""
    microbatch: int
    box: int
    """The number of its box in the program's table."""


class Source(enum.StrEnum):
    """Where a segment's read comes from."""

    VALUE = "value"
    STORED = "stored"
    """A parameter or buffer, or what was gathered from one."""
    FREE = "free"
    """The batch or a constant, which every device has: it is sliced on the spot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A part of an op inside of a segment."""

    op: str
    ranges: Ranges
    reads: tuple[int, ...]
    """The slots of its tensors, without those that it leaves to another part."""
    makes: tuple[int | None, ...]
    """The slots of its outputs."""
    shifted: str | None
    """The dim that counts samples within a micro-batch."""
    offsets: Offsets | None = None
    """What each micro-batch adds an equal part of, where its outputs are shares of sums over micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor that comes into a segment, into its slot."""

    slot: int
    tensor: str
    box: Box
    source: Source
    coordinate: int | None
    """For a free tensor: which factor counts samples within the micro-batch."""
    grad: bool
    """Whether the segment returns a gradient of it."""
    again: bool = False
    """It is dropped after the forward pass and comes back for the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """A tensor that goes out of a segment."""

    slot: int
    tensor: str
    box: Box
    grad: bool
    """Whether a gradient of it comes back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Ops that a device computes in one go; autograd differentiates it as one."""

    index: int
    device: int
    context: int
    """Of the micro-batches that it runs for; ONCE if it runs once in a step."""
    grad: bool
    recompute: bool
    calls: tuple[Call, ...]
    entries: tuple[Entry, ...]
    exits: tuple[Exit, ...]
    slots: int
    drops: tuple[tuple[int, ...], ...] = ()
    """For each call the slots that nobody needs after it."""


class NodeKind(enum.StrEnum):
    """What a node does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EXCHANGE = "exchange"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One thing that happens in a step."""

    kind: NodeKind
    microbatch: int
    devices: tuple[int, ...]
    segment: int = -1
    flow: int = -1
    step: Step | None = None
    reads: tuple[Value | None, ...] = ()
    """Forward: of each entry (None for free ones). Backward: of the entries that it needs again. Exchange: of each
    input of the step."""
    makes: tuple[Value, ...] = ()
    """Forward: of each exit. Exchange: of each output of the step."""
    gradients: tuple[tuple[Value, ...], ...] = ()
    """Backward: for each exit, the values that its gradient is the sum of."""
    adds: tuple[Value | None, ...] = ()
    """Backward: for each entry, the value that its gradient is added to."""
    seeds: tuple[int, ...] = ()
    """Backward: the exits that are the loss, whose gradient is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowInfo:
    """What a flow is for, to be told to people."""

    tensor: str
    name: str
    """What its values are called."""
    backward: bool
    source: Layout
    target: Layout
    context: int
    crossing: bool
    """Between values of micro-batches and of the whole step; its boxes count in the whole tensor."""
    steps: tuple[Step, ...]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Where a tensor that a step returns ends up."""

    device: int
    value: Value


@dataclass(frozen=True, kw_only=True)
class Program:
    """What all devices do in one step."""

    refined: Refined = field(repr=False)
    plan: Plan = field(repr=False, compare=False)
    """What it was compiled from, as it was then."""
    reference: bool = field(default=False, repr=False)
    """Whether it uses only slices, sends and sums."""
    devices: int
    microbatches: Microbatches = field(repr=False)
    segments: tuple[Segment, ...] = field(repr=False)
    nodes: tuple[Node, ...] = field(repr=False)
    """In an order in which each has what it needs."""
    frees: tuple[tuple[tuple[int, Value], ...], ...] = field(repr=False)
    """For each node: what (device, value) nobody needs after it."""
    boxes: tuple[Box, ...] = field(repr=False)
    flows: tuple[FlowInfo, ...] = field(repr=False)
    stored: Mapping[str, Layout] = field(repr=False)
    """parameter or buffer -> its pieces between steps"""
    gradients: Mapping[str, Mapping[tuple[int, Box], tuple[Value, ...]]] = field(repr=False)
    """parameter -> piece -> the values that its gradient is the sum of"""
    results: Mapping[str, Result] = field(repr=False)
    updates: Mapping[str, Mapping[tuple[int, Box], Value]] = field(repr=False)
    """buffer -> piece -> the value that replaces it after the step"""
    notes: tuple[str, ...] = ()
    """What the user should know about how it was compiled."""

    def of(self, device: int) -> tuple[int, ...]:
        """The nodes in which a device takes part, in order: its own program."""
        return tuple(i for i, node in enumerate(self.nodes) if device in node.devices)

    def run_local(self, batch: Any, *, state: Mapping[str, Any], seed: int = 0, step: int = 0) -> Any:
        """Run one step of all devices in this process; the outcome has outputs, gradients and buffers, whole."""
        from rota.runtime.device_run import check_values
        from rota.runtime.in_process import InProcess

        seed, step = (at_least(value, 0, name) for name, value in (("seed", seed), ("step", step)))
        check_values(self, state, batch)
        return InProcess(self, state, seed=seed).run(batch, step=step)

    def simulate(self, costs: Costs | None = None) -> Simulation:
        """Predict the step: when each node runs, and how much memory each device needs."""
        from rota.plan.simulate import simulate

        return simulate(self, costs)

    def to_json(self) -> str:
        """The plan and the program as text, without the graph; `rota.plan.serial.from_json` reads it."""
        from rota.plan.serial import to_json

        return to_json(self)

    def explain(self) -> str:
        """Which op is cut how, where it sits, and each communication with its reason."""
        from rota.plan.explain import explain

        return explain(self)
