"""Predicts what a task would cost on devices that need not be there, by rota's own search with a kind's figures.

Nothing here looks at a clock: the same graph and the same kinds give the same estimates everywhere. Not predicted are
validation, checkpoints and reading data. An accumulated step counts its batches, each with its update.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rota.cluster.file import NodeLink, Site
from rota.cluster.kinds import Arithmetic, DeviceKind, costs_of, usable_bytes
from rota.errors import FitError, InputError, RotaError
from rota.graph.graph import Graph
from rota.plan.costs import Costs
from rota.profile.estimate import PREDICTED_SPREAD, Estimate
from rota.runtime.footprint import plain
from rota.search.measure import Meter
from rota.search.prepared import Prepared
from rota.search.search import ADAM, search
from rota.search.space import recipes_of
from rota.strategies.base import Strategy, describe, find
from rota.strategies.coshard import Coshard
from rota.strategies.wrapper import Wrapper

START_S, LOADED_BYTES_PER_S = 8.0, 1.5e9
"""A worker starts, imports torch and finds its devices; then weights are made or read, and moved to devices."""

KEPT = 3
"""The best few of each count."""

_GAIN = 0.95
_ALL_UP_TO = 8
_MOST_SPANNED = 64
"""Devices: beyond them a search takes long, and few models gain."""

Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the cost of a task depends on: tasks with equal subjects cost the same."""

    graph: Graph = field(repr=False, compare=False)
    digest: str
    """Of the graph: its ops and shapes, not its names."""
    arithmetic: Arithmetic = "float32"
    moments: float = ADAM
    """Bytes of the optimizer's state for each byte of a trained parameter."""
    whole_parameters: bool = False
    """Whether the optimizer looks at whole parameters."""
    replicas_only: bool = False
    """Whether it may look at all of them at once."""
    accumulate: int = 1
    strategy: str = "auto"
    """As text; auto searches."""
    devices: int | None = None
    """How many, if the user said so."""
    made: Strategy | None = field(default=None, repr=False, compare=False)
    """The strategy itself, where the user gave one."""

    @property
    def start_s(self) -> float:
        """From the launch to the first step: a worker's start, and weights that are made and moved."""
        return START_S + parameter_bytes(self.graph) / LOADED_BYTES_PER_S


class Predictor:
    """Predicts for subjects, each way once."""

    def __init__(self, *, kept: int = KEPT, notice: Notice = lambda sentence: None) -> None:
        self._kept = kept
        self._notice = notice
        self._known: dict[Any, tuple[Estimate, ...] | RotaError] = {}

    def estimates(self, subject: Subject, site: Site, *, steps: float = math.inf) -> list[Estimate]:
        """On each kind of a cluster, for each number of devices, the best few; InputError if nothing fits anywhere.

        More devices are not looked at where they cannot matter: for a task of so few steps that it trains in less time
        than it starts, and once twice as many were not faster by 5%.
        """
        found: list[Estimate] = []
        refused: list[tuple[DeviceKind, RotaError]] = []
        for kind in site.used_kinds:
            best: dict[int, float] = {}
            """count -> seconds of a step"""
            for count, link in _asked(subject, site, kind):
                if best and (min(best.values()) * steps < subject.start_s or not _gains(best, count)):
                    continue
                try:
                    ways = self.of(subject, kind, count, link=link)
                except RotaError as error:
                    refused.append((kind, error))
                    continue
                best[count] = ways[0].step_s
                found += ways
        if found:
            return found
        if not refused:
            raise InputError(f"it needs {subject.devices} devices of a kind, and the cluster has {site.words()}")
        short = [one for one in refused if isinstance(one[1], FitError)]
        on, why = (short or refused)[-1]
        raise InputError(f"nothing fits; of {on.name}, {why}")

    def of(
        self, subject: Subject, kind: DeviceKind, count: int, *, link: NodeLink | None = None
    ) -> tuple[Estimate, ...]:
        """On so many devices of a kind, the fastest first; over several nodes if a link is given."""
        key = (subject, kind, count, link)
        if key not in self._known:
            self._notice(f"predicting {subject.strategy} on {count} x {kind.name}")
            try:
                self._known[key] = predict(subject, kind, count, link=link, kept=self._kept)
            except RotaError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, RotaError):
            raise known
        return known


def predict(
    subject: Subject,
    kind: DeviceKind,
    count: int,
    *,
    link: NodeLink | None = None,
    kept: int = KEPT,
    within: Callable[[Strategy], bool] = lambda strategy: True,
) -> tuple[Estimate, ...]:
    """The fastest ways on so many devices of a kind; FitError if none fits. `within` keeps strategies.

    With a link between nodes everything that is communicated goes over it, which is what the slowest part of a ring
    does, and more than what strategies need whose inner axis stays inside of a node.
    """
    costs = costs_of(
        kind,
        arithmetic=subject.arithmetic,
        link_bytes_per_s=None if link is None else min(link.bytes_per_s, kind.link_bytes_per_s),
        latency_s=None if link is None else link.latency_s,
        moments=subject.moments,
    )
    if subject.strategy == "auto":
        found = _searched(subject, count, costs, usable_bytes(kind), within)
    else:
        found = [_given(subject, count, costs, usable_bytes(kind))]
    return tuple(
        Estimate(
            label=label,
            kind=kind.name,
            devices=count,
            step_s=step_s * subject.accumulate,
            spread=PREDICTED_SPREAD,
            memory_bytes=peak_bytes,
            measured=False,
            start_s=subject.start_s,
            spans=link is not None,
        )
        for label, step_s, peak_bytes in found[:kept]
    )


def counts_within(size: int) -> list[int]:
    """The numbers of devices that are looked at in a node: all up to 8, then 12, 16, 24, 32, ... and all of them."""
    found = set(range(1, min(size, _ALL_UP_TO) + 1)) | {size}
    power = _ALL_UP_TO
    while power < size:
        found |= {count for count in (power * 3 // 2, power * 2) if count < size}
        power *= 2
    return sorted(found)


def counts_across(sizes: Sequence[int]) -> list[int]:
    """Those over several nodes: more than any node has, in steps of whole nodes, doubling, and all of them."""
    largest, total = max(sizes), sum(sizes)
    found = {total} if largest < total <= _MOST_SPANNED else set()
    count = 2 * largest
    while count <= min(total, _MOST_SPANNED):
        found.add(count)
        count *= 2
    return sorted(found)


def digest_of(graph: Graph) -> str:
    """The same for graphs that compute the same on the same shapes, whatever their tensors are called."""
    places = {name: place for place, name in enumerate(graph.tensors)}
    total = hashlib.sha256()
    for tensor in graph.tensors.values():
        total.update(repr((tensor.shape, tensor.dtype, tensor.role.value, tensor.requires_grad)).encode())
    for op in graph.ops:
        reads = tuple(places[name] for name in op.inputs)
        makes = tuple(None if name is None else places[name] for name in op.outputs)
        args = (plain(op.args), plain(tuple(sorted(op.kwargs.items()))))
        total.update(repr((op.target, args, reads, makes, op.with_grad, op.autocast)).encode())
    return total.hexdigest()


def parameter_bytes(graph: Graph) -> int:
    """Of all parameters, once."""
    return sum(math.prod(one.shape) * getattr(torch, one.dtype).itemsize for one in graph.parameters)


def _asked(subject: Subject, site: Site, kind: DeviceKind) -> list[tuple[int, NodeLink | None]]:
    """The numbers of devices to look at, within a node and, with its link, over several."""
    sizes = [len(node.devices) for node in site.nodes if node.kind == kind.name]
    if subject.devices is not None:
        if subject.devices > sum(sizes):
            return []
        return [(subject.devices, None if subject.devices <= max(sizes) else site.link)]
    within: list[tuple[int, NodeLink | None]] = [(count, None) for count in counts_within(max(sizes))]
    return within + [(count, site.link) for count in counts_across(sizes)]


def _gains(best: Mapping[int, float], count: int) -> bool:
    """Whether so many devices may be worth it: of those before, twice as many were faster."""
    most = max(best)
    half = [step_s for one, step_s in best.items() if 2 * one <= most]
    return not half or min(best.values()) < _GAIN * min(half) or count <= most


# ---- ways ----

_Way = tuple[str, float, int]
"""Label, seconds of a batch, bytes of the device that needs the most."""


def _searched(
    subject: Subject, count: int, costs: Costs, memory_bytes: int, within: Callable[[Strategy], bool]
) -> list[_Way]:
    found = search(
        subject.graph,
        count,
        memory_bytes=memory_bytes,
        costs=costs,
        optimizer_bytes_per_parameter_byte=subject.moments,
        whole_parameters=subject.whole_parameters,
        within=lambda strategy: _suits(subject, strategy, count) and within(strategy),
    )
    fitting = [one for one in found.candidates if one.measured and one.fits]
    # What is told from fewer layers ranks candidates, and may be far off for pipelines.
    sure = [one for one in fitting if one.exact] or fitting
    return sorted(
        ((one.text, one.step_s or 0.0, one.peak_bytes or 0) for one in sure), key=lambda way: (way[1], way[2], way[0])
    )


def _suits(subject: Subject, strategy: Strategy, count: int) -> bool:
    """Whether it uses all devices, and gives the optimizer what it looks at."""
    alone = not recipes_of(strategy) or isinstance(strategy, Coshard)
    if count == 1:
        return alone
    if type(strategy).__name__ == "Single" or isinstance(strategy, Coshard):
        return False
    return not subject.replicas_only or type(strategy).__name__ == "Data"


def _given(subject: Subject, count: int, costs: Costs, memory_bytes: int) -> _Way:
    """The user's own strategy. PyTorch's wrappers are predicted as what they do."""
    made = subject.made if subject.made is not None else find(subject.strategy)
    if isinstance(made, Wrapper):
        made = find("data" if made.kind == "ddp" else "zero(stage=3)")
    if (fixed := getattr(made, "fixed_devices", None)) is not None and fixed != count:
        raise InputError(f"{subject.strategy} is for {fixed} devices, not for {count}")
    if type(made).__name__ == "Single" and count > 1:
        raise InputError(f"{subject.strategy} uses one device, not {count}")
    meter = Meter(
        prepared=Prepared(subject.graph),
        devices=count,
        costs=costs,
        moments=subject.moments,
        whole_parameters=subject.whole_parameters,
    )
    measured = meter.exact(made)
    peak = round(max(measured.peak_bytes))
    if peak > memory_bytes:
        raise FitError(
            f"{describe(made)} on {count} devices needs {peak / 2**30:.3g} GiB on one of them, and they have "
            f"{memory_bytes / 2**30:.3g} GiB that tensors can use"
        )
    return subject.strategy, measured.step_s, peak
