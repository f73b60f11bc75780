"""Measures what a step costs on this machine: parts of ops, the optimizer, the engine itself and the links.

Parts of ops are not measured alone but in windows: a few ops of a segment that follow each other, run by the code that
will run them, so that caches, memory and autograd are as they will be. Each op gets its own share of the time. What was
measured is kept in the user's cache; what there is no time for is estimated from what was measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rota.cluster.discover import available_cores, cpu_label
from rota.graph.cost import work_of
from rota.graph.graph import Role
from rota.graph.part import PartCompute, Place, compute_part, makes_of, reads_of
from rota.graph.refine import Refined, local_shape
from rota.graph.rules import occurrences
from rota.plan.box import Box
from rota.plan.layout import Kind
from rota.plan.program import Call, Entry, Exit, Program, Segment, Source
from rota.plan.simulate import Calibration, CallCost, Costs, LinkCost, NodeCost, Rate, call_seconds, signature
from rota.runtime import comm
from rota.runtime.footprint import likeness
from rota.runtime.pieces import assemble, cut
from rota.runtime.segment import SegmentRunner
from rota.state.files import make_private_folder, replacing

FORMAT = 1
"""Of what is kept. Another number makes everything be measured again."""

Clock = Callable[[], float]
Notice = Callable[[str], None]

_WINDOW_CALLS = 48
_WINDOW_BYTES = 256 * 2**20
_FEWEST_REPEATS = 4
_MOST_REPEATS = 12
_ENOUGH_S = 0.4
"""A window that has run for so long is not run more often than it must be."""
_LINKS_S = 12.0
"""What it takes to start processes and to measure their links; with less time they are not measured."""
_DISTURBED = 1.3
"""Links that were measured while everything took so much longer because of others are not kept."""
_UPDATED_ELEMENTS = (64, 4096, 65536, 2**20)
_PAYLOAD_BYTES = (2**12, 2**16, 2**19, 2**21, 2**23)
_COLLECTIVES = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)


def calibrate(
    programs: Iterable[Program],
    *,
    budget_s: float,
    cache: Path | None = None,
    notice: Notice = lambda text: None,
    threads: int = 1,
    optimizer: str = "adamw",
    kind: str = "cpu",
    links: Links | None = None,
    clock: Clock = time.perf_counter,
    timer: Clock | None = None,
) -> Costs:
    """What these programs cost on a device with so many threads, as far as it can be measured in the time.

    `cache` is a folder, by default the user's own. `links` are those that workers have measured between themselves.
    """
    deadline_s = clock() + budget_s
    timer = timer or _timer(kind, threads)
    programs = list(programs)
    # Larger groups are extrapolated from these; more processes than cores would measure each other.
    devices = min(max((program.devices for program in programs), default=1), 4 if len(available_cores()) >= 4 else 2)
    store = Store.open(cache or cache_folder(), threads=threads, kind=kind)
    # Whoever calibrates in the midst of a task draws no random number for it.
    with _threads(threads), torch.random.fork_rng(devices=[]):
        if not store.known.updates.get(optimizer) and clock() < deadline_s:
            store.known.updates[optimizer] = _measure_optimizer(optimizer, timer, kind)
        if not store.known.copies and clock() < deadline_s:
            store.known.copies.update(_measure_copies(timer))
        links = links or store.known.links.get(str(devices))
        if links is None and devices > 1:
            links = _own_links(devices, left_s=deadline_s - clock(), kind=kind, threads=threads, notice=notice)
        if links is not None and links.disturbance <= _DISTURBED:
            store.known.links[str(devices)] = links
        store.save()
        wanted = _wanted(programs)
        missing = [one for one in wanted.values() if one.signature not in store.known.parts]
        if missing:
            notice(f"measuring {len(missing)} of {len(wanted)} parts of ops")
        _measure_parts(missing, store.known, deadline_s=deadline_s, clock=clock, timer=timer, kind=kind)
        store.save()
    measured = sum(name in store.known.parts for name in wanted)
    if measured < len(wanted):
        notice(
            f"{len(wanted) - measured} of {len(wanted)} parts of ops are estimated; there was no time to measure them"
        )
    return Costs(
        calibration=_calibration(
            store.known, links=links, optimizer=optimizer, measured=measured, estimated=len(wanted) - measured
        )
    )


def _own_links(devices: int, *, left_s: float, kind: str, threads: int, notice: Notice) -> Links | None:
    """Measured with processes of its own; None if there is no time, or if they fail: then rough rates must do."""
    if left_s < _LINKS_S:
        notice(f"the links between {devices} devices are not measured: that takes {_LINKS_S:.0f} s")
        return None
    notice(f"measuring the links between {devices} devices")
    try:
        links = measure_links(devices, kind=kind, threads=threads, timeout_s=left_s)
    except RuntimeError as error:
        notice(f"{error}; rough rates are used instead")
        return None
    if links.disturbance > _DISTURBED:
        notice("others use this machine; the links that were measured are rough and will be measured again")
    return links


def _timer(kind: str, threads: int) -> Clock:
    """What a device of one thread does is timed by its own use of the processor: others do not count, then."""
    return time.thread_time if kind == "cpu" and threads == 1 else time.perf_counter


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- what is known, and where it is kept ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A measured part of an op."""

    kind: str
    flops: float
    touched_bytes: float
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class Links:
    """What was measured between the devices of this machine."""

    costs: Mapping[Kind, tuple[LinkCost, ...]]
    overlap_share: float
    crowding: tuple[tuple[int, float], ...]
    disturbance: float = 1.0
    """How much longer things took because of others on the machine."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "costs": {kind.value: [dataclasses.asdict(one) for one in found] for kind, found in self.costs.items()},
            "overlap_share": self.overlap_share,
            "crowding": [list(one) for one in self.crowding],
            "disturbance": self.disturbance,
        }

    @classmethod
    def from_json(cls, plain: Any) -> Links:
        """From plain values; ValueError, KeyError or TypeError if they are not what `to_json` makes."""
        return cls(
            costs={
                Kind(kind): tuple(
                    LinkCost(group=int(one["group"]), **{key: _seconds(one[key]) for key in _LINK_FIELDS})
                    for one in found
                )
                for kind, found in plain["costs"].items()
            },
            overlap_share=_seconds(plain["overlap_share"]),
            crowding=tuple((int(count), _seconds(factor)) for count, factor in plain["crowding"]),
            disturbance=_seconds(plain["disturbance"]),
        )


_LINK_FIELDS = ("launch_s", "launch_byte_s", "latency_s", "byte_s")


@dataclass(kw_only=True)
class Known:
    """Everything that was measured on one kind of device."""

    parts: dict[str, Part] = field(default_factory=dict)
    """signature -> seconds"""
    overheads: list[tuple[int, float, float]] = field(default_factory=list)
    """(entries that return a gradient, seconds forward, seconds backward) beyond the ops, of windows"""
    updates: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """optimizer -> (bytes of a parameter, seconds)"""
    copies: dict[str, float] = field(default_factory=dict)
    links: dict[str, Links] = field(default_factory=dict)
    """number of devices -> between them"""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "parts": {name: dataclasses.asdict(part) for name, part in self.parts.items()},
            "overheads": self.overheads[-_KEPT_OVERHEADS:],
            "updates": self.updates,
            "copies": self.copies,
            "links": {count: links.to_json() for count, links in self.links.items()},
        }

    @classmethod
    def from_json(cls, plain: Any) -> Known:
        """From plain values; ValueError, KeyError or TypeError if they are not what `to_json` makes."""
        return cls(
            parts={
                str(name): Part(kind=str(one["kind"]), **{key: _seconds(one[key]) for key in _PART_FIELDS})
                for name, one in plain["parts"].items()
            },
            overheads=[(int(count), _seconds(a), _seconds(b)) for count, a, b in plain["overheads"]],
            updates={
                str(name): tuple((int(size), _seconds(s)) for size, s in points)
                for name, points in plain["updates"].items()
            },
            copies={str(name): _seconds(s) for name, s in plain["copies"].items()},
            links={str(count): Links.from_json(one) for count, one in plain["links"].items()},
        )


_PART_FIELDS = ("flops", "touched_bytes", "forward_s", "backward_s")
_KEPT_OVERHEADS = 200


def _seconds(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{value!r} is not a time")
    return number


def cache_folder() -> Path:
    """Where what was measured is kept: $ROTA_CACHE, or rota's folder among the user's caches."""
    own = os.environ.get("ROTA_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rota"


@dataclass(kw_only=True)
class Store:
    """What is known of one kind of device, and its file."""

    path: Path
    machine: Mapping[str, Any]
    known: Known

    @classmethod
    def open(cls, folder: Path, *, threads: int, kind: str = "cpu") -> Store:
        """Read what is there; what cannot be read is measured again."""
        label = cpu_label() if kind == "cpu" else torch.cuda.get_device_name()
        machine = {
            "format": FORMAT,
            "torch": torch.__version__,
            "kind": kind,
            "label": label,
            "threads": threads,
            "cores": os.cpu_count() or 1,
        }
        name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
        store = cls(path=folder / f"costs-{name}.json", machine=machine, known=Known())
        store.known = store._read() or Known()
        return store

    def _read(self) -> Known | None:
        try:
            plain = json.loads(self.path.read_text(encoding="utf-8"))
            return Known.from_json(plain) if plain["machine"] == dict(self.machine) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self) -> None:
        """Replace the file; what others have measured meanwhile stays. Without a place to write, nothing is kept."""
        others = self._read()
        if others is not None:
            self.known.parts = {**others.parts, **self.known.parts}
            self.known.links = {**others.links, **self.known.links}
            self.known.updates = {**others.updates, **self.known.updates}
        text = json.dumps({"machine": dict(self.machine), **self.known.to_json()})
        with contextlib.suppress(OSError):
            make_private_folder(self.path.parent)
            with replacing(self.path) as side:
                handle = os.open(side, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)


# ---- from what is known to costs ----


def _calibration(known: Known, *, links: Links | None, optimizer: str, measured: int, estimated: int) -> Calibration:
    rates, rest = fit_rates(known.parts.values())
    extra: dict[str, Any] = {}
    if links is not None:
        extra = {"links": links.costs, "overlap_share": links.overlap_share, "crowding": links.crowding}
    if optimizer in known.updates:
        extra["optimizer"] = known.updates[optimizer]
    copies = known.copies
    return Calibration(
        calls={
            name: CallCost(forward_s=part.forward_s, backward_s=part.backward_s) for name, part in known.parts.items()
        },
        rates=rates,
        rest=rest,
        node=_node_cost(known.overheads, copies),
        copy_byte_s=copies.get("copy_byte_s", 0.0),
        assemble_s=copies.get("assemble_s", 0.0),
        assemble_byte_s=copies.get("assemble_byte_s", 0.0),
        measured=measured,
        estimated=estimated,
        **extra,
    )


def _node_cost(overheads: Sequence[tuple[int, float, float]], copies: Mapping[str, float]) -> NodeCost:
    if not overheads:
        return NodeCost()
    counts = [float(count) for count, _, _ in overheads]
    forward = fit_line(counts, [forward_s for _, forward_s, _ in overheads])
    backward = fit_line(counts, [backward_s for _, _, backward_s in overheads])
    return NodeCost(
        forward_s=forward[0],
        entry_forward_s=forward[1],
        backward_s=backward[0],
        entry_backward_s=backward[1],
        exchange_s=copies.get("exchange_s", 0.0),
    )


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Base and slope, neither less than nothing; small values count as much as large ones."""
    weights = [1 / max(y, 1e-9) ** 2 for y in ys]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = 0.0
    if spread > 0:
        slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    if slope < 0:
        return mean_y, 0.0
    base = mean_y - slope * mean_x
    if base < 0:
        squares = sum(w * x * x for w, x in zip(weights, xs, strict=True))
        return 0.0, sum(w * x * y for w, x, y in zip(weights, xs, ys, strict=True)) / squares
    return base, slope


def fit_rates(parts: Iterable[Part]) -> tuple[dict[str, Rate], Rate]:
    """For each kind of op what a part costs that was not measured, and for all others."""
    parts = list(parts)
    free = [part.forward_s for part in parts if not part.touched_bytes and not part.flops]
    op_s = statistics.median(free) if free else min((part.forward_s for part in parts), default=1e-5)
    of_kind: dict[str, list[Part]] = {}
    for part in parts:
        of_kind.setdefault(part.kind, []).append(part)
    rates = {kind: _fit_rate(found, op_s) for kind, found in of_kind.items()}
    return rates, _fit_rate([part for part in parts if part.touched_bytes], op_s)


def _fit_rate(parts: Sequence[Part], op_s: float) -> Rate:
    """The better of: so much for a product, and so much for a byte. An op without work costs as much as it did."""
    if not parts:
        return Rate(op_s=op_s, flop_s=5e-11, byte_s=2e-10, backward=2.0)
    forward_s = sum(part.forward_s for part in parts)
    backward = sum(part.backward_s for part in parts) / forward_s if forward_s > 0 else 2.0
    worked = [part for part in parts if part.flops or part.touched_bytes]
    if not worked:
        base_s = statistics.median(part.forward_s for part in parts)
        return Rate(op_s=base_s, flop_s=0.0, byte_s=0.0, backward=backward)
    ys = [max(part.forward_s, 1e-9) for part in worked]
    best: tuple[float, Rate] | None = None
    for name, xs in (("flop_s", [p.flops for p in worked]), ("byte_s", [p.touched_bytes for p in worked])):
        if not all(xs):
            continue
        base_s, slope = fit_line(xs, ys)
        if slope == 0.0:  # of one size only, or nearly so
            base_s, slope = 0.0, statistics.median(y / x for x, y in zip(xs, ys, strict=True))
        error = sum(abs(base_s + slope * x - y) / y for x, y in zip(xs, ys, strict=True))
        if best is None or error < best[0]:
            given = {"flop_s": 0.0, "byte_s": 0.0, name: slope}
            best = (error, Rate(op_s=max(base_s, min(op_s, *ys)), backward=backward, **given))
    if best is None:
        return Rate(op_s=statistics.median(ys), flop_s=0.0, byte_s=0.0, backward=backward)
    return best[1]


# ---- parts of ops ----


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A part of an op whose cost is asked for, and a place where it is."""

    signature: str
    refined: Refined
    segment: Segment
    position: int
    rough_s: float
    """In all programs."""


def _wanted(programs: Iterable[Program]) -> dict[str, _Wanted]:
    """Every different part of an op."""
    found: dict[str, _Wanted] = {}
    rough = Costs()
    for program in programs:
        of_segment: dict[Any, list[tuple[str, float]]] = {}
        for segment in program.segments:
            key = likeness(program.refined, segment)
            if key not in of_segment:
                of_segment[key] = [
                    (signature(program.refined, segment, call), call_seconds(program.refined, segment, i, rough))
                    for i, call in enumerate(segment.calls)
                ]
            for position, (name, rough_s) in enumerate(of_segment[key]):
                before = found.get(name)
                found[name] = (
                    dataclasses.replace(before, rough_s=before.rough_s + rough_s)
                    if before is not None
                    else _Wanted(
                        signature=name,
                        refined=program.refined,
                        segment=segment,
                        position=position,
                        rough_s=rough_s,
                    )
                )
    return found


def _measure_parts(
    missing: Sequence[_Wanted], known: Known, *, deadline_s: float, clock: Clock, timer: Clock, kind: str
) -> None:
    """The most costly first, each with what is missing around it, until there is no time left."""
    for one in sorted(missing, key=lambda one: -one.rough_s):
        if clock() >= deadline_s:
            return
        if one.signature in known.parts:
            continue
        window = _window(one, known)
        expected_s = 3 * sum(
            call_seconds(one.refined, window, i, Costs()) for i in range(len(window.calls))
        )  # forward and backward
        if clock() + expected_s * _FEWEST_REPEATS > deadline_s:
            continue
        with contextlib.suppress(RuntimeError, IndexError, ValueError, TypeError):  # an op that random data is not for
            _measure_window(window, one.refined, known, deadline_s=deadline_s, clock=clock, timer=timer, kind=kind)


def _window(one: _Wanted, known: Known) -> Segment:
    """The ops around one that are not measured, either, as far as they fit, as a segment of their own."""
    refined, segment = one.refined, one.segment
    sizes = [work_of(refined, call.op, call.ranges).touched_bytes for call in segment.calls]
    unknown = [signature(refined, segment, call) not in known.parts for call in segment.calls]
    start = stop = one.position
    stop += 1
    held = sizes[one.position]
    grown = True
    while grown and stop - start < _WINDOW_CALLS:
        grown = False
        # One known op on the way to an unknown one is run with them: a chain is more like a step than its links.
        for side, reach in ((start - 1, (start - 1, start - 2)), (stop, (stop, stop + 1))):
            inside = [i for i in reach if 0 <= i < len(sizes)]
            if not any(unknown[i] for i in inside) or held + sizes[side] > _WINDOW_BYTES:
                continue
            held += sizes[side]
            start, stop = min(start, side), max(stop, side + 1)
            grown = True
    return _as_segment(refined, segment, start, stop)


def _as_segment(refined: Refined, segment: Segment, start: int, stop: int) -> Segment:
    calls = segment.calls[start:stop]
    tensors = refined.graph.tensors
    entries: dict[int, Entry] = {}
    made: dict[int, Exit] = {}
    last: dict[int, int] = {}
    for number, call in enumerate(calls):
        for slot, name, box in _reads(refined, call):
            last[slot] = number
            if slot not in made and slot not in entries:
                grad = segment.grad and tensors[name].requires_grad
                entries[slot] = Entry(slot=slot, tensor=name, box=box, source=Source.VALUE, coordinate=None, grad=grad)
        op, frame = refined.cases[call.op].op, refined.frames[call.op]
        for made_slot, made_name, made_box in zip(call.makes, op.outputs, makes_of(frame, call.ranges), strict=True):
            if made_slot is not None and made_name is not None and made_box is not None:
                grad = segment.grad and tensors[made_name].requires_grad
                made[made_slot] = Exit(slot=made_slot, tensor=made_name, box=made_box, grad=grad)
    exits = tuple(exit for slot, exit in made.items() if slot not in last)
    drops: list[list[int]] = [[] for _ in calls]
    for slot, number in last.items():
        drops[number].append(slot)
    return Segment(
        index=0,
        device=0,
        context=segment.context,
        grad=segment.grad,
        recompute=False,
        calls=calls,
        entries=tuple(entries.values()),
        exits=exits,
        slots=segment.slots,
        drops=tuple(tuple(one) for one in drops),
    )


def _reads(refined: Refined, call: Call) -> Iterator[tuple[int, str, Box]]:
    """The slot, tensor and box of each tensor that a call takes."""
    op, frame = refined.cases[call.op].op, refined.frames[call.op]
    slots = iter(call.reads)
    for name, box in zip(occurrences(op), reads_of(frame, call.ranges), strict=True):
        if box is not None:
            yield next(slots), name, box


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    compute: PartCompute
    reads: tuple[int, ...]
    makes: tuple[int | None, ...]
    drops: tuple[int, ...]
    with_grad: bool
    autocast: torch.dtype | None


class _Timed(SegmentRunner):
    """Runs a segment op by op and notes when each one began and ended, forward and backward."""

    def __init__(self, segment: Segment, refined: Refined, timer: Clock, kind: str) -> None:
        super().__init__(segment, refined)
        self._ops: list[_Step] = []
        for call, drops in zip(segment.calls, segment.drops, strict=True):
            op = refined.cases[call.op].op
            self._ops.append(
                _Step(
                    compute=compute_part(refined, call.op, call.ranges, shifted=call.shifted),
                    reads=call.reads,
                    makes=call.makes,
                    drops=drops,
                    with_grad=op.with_grad,
                    autocast=getattr(torch, op.autocast) if op.autocast else None,
                )
            )
        self._timer = timer
        self._kind = kind
        self.forward_s: list[float] = []
        """Of each op, in the last run."""
        self.aside_s = 0.0
        """What measuring itself took."""
        self.marks: list[tuple[int, float]] = []
        """(op, when a node of its backward graph began)"""

    def now(self) -> float:
        """The time, when all that was asked of the device is done. On CUDA: written with care, never run."""
        if self._kind == "cuda":
            torch.cuda.synchronize()
        return self._timer()

    def _run(self, inputs: list[torch.Tensor], place: Place) -> list[torch.Tensor]:
        slots: list[Any] = [None] * self.segment.slots
        seen: set[Any] = set()
        for entry, value in zip(self.segment.entries, inputs, strict=True):
            slots[entry.slot] = value
            if value.grad_fn is not None:
                seen.add(value.grad_fn)
        inputs.clear()
        self.forward_s, self.marks, self.aside_s = [], [], 0.0
        for number, step in enumerate(self._ops):
            began_s = self.now()
            values = [slots[slot] for slot in step.reads]
            with _modes(step):
                made = step.compute(values, place)
            for slot, value in zip(step.makes, made, strict=True):
                if slot is not None:
                    slots[slot] = value
            del values
            for slot in step.drops:
                slots[slot] = None
            ended_s = self.now()
            self.forward_s.append(ended_s - began_s)
            self._hook(made, number, seen)
            del made
            self.aside_s += self.now() - ended_s
        return [slots[exit.slot] for exit in self.segment.exits]

    def _hook(self, made: Sequence[Any], number: int, seen: set[Any]) -> None:
        """Have every node that an op added to the backward graph say when it begins."""
        waiting = [one.grad_fn for one in made if isinstance(one, torch.Tensor) and one.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            node.register_prehook(lambda gradients: self.marks.append((number, self.now())))
            waiting.extend(following for following, _ in node.next_functions if following is not None)

    def backward_s(self, began_s: float, ended_s: float) -> tuple[list[float], float]:
        """Of each op, and what came before the first of them."""
        found = [0.0] * len(self._ops)
        if not self.marks:
            return found, ended_s - began_s
        times = [when for _, when in self.marks] + [ended_s]
        for i, (number, _) in enumerate(self.marks):
            found[number] += times[i + 1] - times[i]
        return found, times[0] - began_s


def _modes(step: _Step) -> contextlib.AbstractContextManager[Any]:
    if step.with_grad and step.autocast is None:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    if not step.with_grad:
        stack.enter_context(torch.no_grad())
    if step.autocast is not None:
        stack.enter_context(torch.autocast("cpu", dtype=step.autocast))
    return stack


def _measure_window(
    window: Segment, refined: Refined, known: Known, *, deadline_s: float, clock: Clock, timer: Clock, kind: str
) -> None:
    """Run a window several times; each op's time is its median, as it is a median step that is predicted."""
    runner = _Timed(window, refined, timer, kind)
    values = _random_values(window, refined, kind)
    place = Place(key=1)
    forward: list[list[float]] = []
    backward: list[list[float]] = []
    overheads: list[tuple[float, float]] = []
    started_s = clock()
    for repeat in range(_MOST_REPEATS + 1):
        enough = len(forward) >= _FEWEST_REPEATS and (clock() - started_s > _ENOUGH_S or clock() > deadline_s)
        if enough:
            break
        began_s = runner.now()
        outputs, tape = runner.forward(list(values), place)
        ended_s = runner.now()
        own_s = ended_s - began_s - sum(runner.forward_s) - runner.aside_s
        ops_s, first_s = [0.0] * len(window.calls), 0.0
        if tape is not None:
            gradients = [torch.randn_like(one) if exit.grad and one.is_floating_point() else None
                         for one, exit in zip(outputs, window.exits, strict=True)]  # fmt: skip
            del outputs
            began_s = runner.now()
            found = runner.backward(tape, gradients)
            ended_s = runner.now()
            ops_s, first_s = runner.backward_s(began_s, ended_s)
            del found, gradients
        if repeat > 0:  # the first run allocates and compiles
            forward.append(runner.forward_s)
            backward.append(ops_s)
            overheads.append((max(0.0, own_s), max(0.0, first_s)))
    derived = sum(entry.grad for entry in window.entries)
    if window.grad and derived:
        known.overheads.append((derived, _low(a for a, _ in overheads), _low(b for _, b in overheads)))
    times: dict[str, list[tuple[float, float]]] = {}
    for i, call in enumerate(window.calls):
        seconds = (statistics.median(one[i] for one in forward), statistics.median(one[i] for one in backward))
        times.setdefault(signature(refined, window, call), []).append(seconds)
    positions = {signature(refined, window, call): call for call in window.calls}
    for name, found_s in times.items():
        if name not in known.parts:
            call = positions[name]
            work = work_of(refined, call.op, call.ranges)
            known.parts[name] = Part(
                kind=refined.cases[call.op].op.kind,
                flops=work.flops,
                touched_bytes=work.touched_bytes,
                forward_s=statistics.fmean(a for a, _ in found_s),
                backward_s=statistics.fmean(b for _, b in found_s),
            )


def _low(values: Iterable[float]) -> float:
    """The lower quartile: what it takes if nobody disturbs, without the luck of the very best."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def _random_values(window: Segment, refined: Refined, kind: str) -> list[torch.Tensor]:
    """Data for what comes into a window: constants as they are, all else random; indices that are within."""
    graph = refined.graph
    limit = _smallest_index(window, refined)
    found = []
    for entry in window.entries:
        tensor = graph.tensors[entry.tensor]
        shape = local_shape(refined.factors[entry.tensor], entry.box.shape)
        dtype = getattr(torch, tensor.dtype)
        if tensor.role is Role.CONSTANT and entry.tensor in graph.constants:
            whole = Box.whole(refined.shape(entry.tensor))
            value = cut(graph.constants[entry.tensor], refined.factors[entry.tensor], whole, entry.box).clone()
        elif dtype == torch.bool:
            value = torch.ones(shape, dtype=dtype)
        elif not dtype.is_floating_point and not dtype.is_complex:
            value = torch.randint(0, limit, shape, dtype=dtype)
        else:
            value = torch.randn(shape).to(dtype)
        found.append(value.to(kind))
    return found


def _smallest_index(window: Segment, refined: Refined) -> int:
    """An index below this is within every table that the window looks things up in."""
    found = [2**15]
    for call in window.calls:
        kind = refined.cases[call.op].op.kind
        if kind == "embedding" or "loss" in kind or "cross_entropy" in kind or kind in ("gather", "index_select"):
            shapes = [local_shape(refined.factors[name], box.shape) for _, name, box in _reads(refined, call)]
            found += [min(shape, default=1) for shape in shapes if len(shape) > 1 or kind != "embedding"]
    return max(1, min(found))


# ---- the rest of a step ----


def _measure_optimizer(name: str, clock: Clock, kind: str) -> tuple[tuple[int, float], ...]:
    """(bytes, seconds) to update one parameter, with its gradient dropped before the next step."""
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    points = []
    for elements in _UPDATED_ELEMENTS:
        count = max(4, min(48, 2**22 // elements))
        parameters = [torch.nn.Parameter(torch.randn(elements, device=kind)) for _ in range(count)]
        optimizer = make(parameters, lr=1e-3)
        times = []
        for repeat in range(6):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            began_s = clock()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if kind == "cuda":
                torch.cuda.synchronize()
            if repeat > 0:
                times.append(clock() - began_s)
        points.append((4 * elements, max(0.0, _low(times) / count)))
    return tuple(points)


def _measure_copies(clock: Clock) -> dict[str, float]:
    """Of gradients that are summed, and of tensors that are put together from halves."""
    sizes = (2**10, 2**16, 2**20)
    adds = [_repeated(torch.Tensor.add_, list(torch.randn(_pairs(size), 2, size)), clock) for size in sizes]
    joined = [_repeated(_assemble_halves, list(torch.randn(_pairs(size), 2, size // 2)), clock) for size in sizes]
    sizes_bytes = [4.0 * size for size in sizes]
    assemble_s, assemble_byte_s = fit_line(sizes_bytes, joined)
    add_s, add_byte_s = fit_line(sizes_bytes, adds)
    return {
        "copy_byte_s": add_byte_s,
        "assemble_s": assemble_s,
        "assemble_byte_s": assemble_byte_s,
        "exchange_s": add_s,
    }


def _pairs(elements: int) -> int:
    """So many that the caches do not hold them: gradients that are summed have not been touched for a while."""
    return max(4, min(64, 2**23 // elements))


def _assemble_halves(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    (columns,) = one.shape
    parts = [(Box(ranges=((row, row + 1), (0, columns))), half) for row, half in enumerate((one, other))]
    return assemble(parts, ((2,), (columns,)), Box(ranges=((0, 2), (0, columns))))


def _repeated(run: Callable[[Any, Any], Any], pairs: Sequence[Any], clock: Clock, *, repeats: int = 6) -> float:
    """Seconds of one run, one pair after another."""
    times = []
    for _ in range(repeats):
        began_s = clock()
        for one, other in pairs:
            run(one, other)
        times.append((clock() - began_s) / len(pairs))
    return max(0.0, _low(times[1:]))


# ---- links ----


def measure_links(devices: int, *, kind: str = "cpu", threads: int = 1, timeout_s: float = 60.0) -> Links:
    """Between so many devices of this machine, with processes of its own; RuntimeError if they do not answer."""
    with tempfile.TemporaryDirectory(prefix="rota-links-") as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([_root(), os.environ.get("PYTHONPATH", "")])}
        code = "from rota.runtime.calibrate import _link_process; _link_process()"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, *map(str, (rank, devices, f"{folder}/store", kind, threads, timeout_s))],
                stdin=subprocess.PIPE,  # a process whose parent is gone reads its end
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(devices)
        ]
        deadline_s = time.monotonic() + timeout_s
        try:
            for process in processes:
                process.wait(timeout=max(0.1, deadline_s - time.monotonic()))
            errors = [process.stderr.read() for process in processes if process.returncode and process.stderr]
            if errors:
                raise RuntimeError(f"the links could not be measured: {errors[0][-500:]}")
            assert processes[0].stdout is not None
            return Links.from_json(json.loads(processes[0].stdout.read().splitlines()[-1]))
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the links between {devices} devices were not measured within {timeout_s:.0f} s"
            ) from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()


def _root() -> str:
    return str(Path(__file__).parents[2])


def _link_process() -> None:
    """One of the processes of `measure_links`; the first one writes what was found."""
    rank, size, store, kind, threads, timeout_s = sys.argv[1:]
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(int(threads))
    if kind == "cuda":
        torch.cuda.set_device(int(rank))
    made = dist.FileStore(store, int(size))  # type: ignore[attr-defined]
    comm.connect(rank=int(rank), size=int(size), store=made, kind=kind, timeout_s=float(timeout_s))
    found = measure_links_within(kind=kind)
    comm.disconnect()
    if rank == "0":
        sys.stdout.write(json.dumps(found.to_json()) + "\n")
        sys.stdout.flush()


def _die_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def measure_links_within(*, kind: str = "cpu", clock: Clock = time.perf_counter) -> Links:
    """Between the processes of a gang that is connected; all of them call it, and all get the same."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = comm.Groups()
    sizes = sorted({count for count in (2, 4) if count <= size})
    found: list[float] = []
    for count in sizes:
        ranks = tuple(range(count))
        groups.add(ranks)
        for what in _COLLECTIVES:
            figures = [0.0] * 4
            if rank in ranks:
                figures = _measure_collective(what, groups.of(ranks), count, clock, kind)
            dist.barrier()
            found += figures
    sends = _measure_sends(clock, kind) if rank < 2 else [0.0] * 4
    dist.barrier()
    share = _measure_overlap(clock, kind)
    crowding, disturbance = _measure_crowding(_timer(kind, torch.get_num_threads()), clock, kind)
    agreed = torch.tensor([*found, *sends, share, crowding, disturbance], dtype=torch.float64).to(kind)
    dist.broadcast(agreed, src=0)
    numbers = iter(agreed.tolist())
    costs: dict[Kind, list[LinkCost]] = {}
    for count in sizes:
        for what in _COLLECTIVES:
            costs.setdefault(what, []).append(_link_cost(count, numbers))
    costs[Kind.SEND] = [_link_cost(2, numbers)]
    return Links(
        costs={what: tuple(ones) for what, ones in costs.items()},
        overlap_share=next(numbers),
        crowding=((1, 1.0), (size, max(1.0, next(numbers)))),
        disturbance=next(numbers),
    )


def _link_cost(count: int, numbers: Iterator[float]) -> LinkCost:
    return LinkCost(group=count, **{key: next(numbers) for key in _LINK_FIELDS})


def _measure_collective(kind: Kind, group: Any, count: int, clock: Clock, device: str) -> list[float]:
    """A fit over several sizes: of what a device does itself by what it gives, and of the rest by what it receives."""
    given, received, launches, transfers = [], [], [], []
    for payload in _PAYLOAD_BYTES:
        part = payload // 4 // count
        begin, gives, arrives = _collective(kind, group, count, part, device)
        launch_s, transfer_s = _rounds(begin, clock, device)
        given.append(4.0 * gives)
        received.append(4.0 * arrives)
        launches.append(launch_s)
        transfers.append(transfer_s)
    return [*fit_line(given, launches), *fit_line(received, transfers)]


def _collective(
    kind: Kind, group: Any, count: int, part: int, device: str
) -> tuple[Callable[[], comm.Pending], int, int]:
    """What begins it, and how many elements a member gives and receives."""
    parts = list(torch.randn(count, part, device=device))
    match kind:
        case Kind.ALL_REDUCE:
            whole = torch.cat(parts)
            return lambda: comm.all_reduce([whole], group), count * part, 2 * (count - 1) * part
        case Kind.ALL_GATHER:
            return lambda: comm.all_gather(parts[:1], group, count), part, (count - 1) * part
        case Kind.REDUCE_SCATTER:
            split = [[one] for one in parts]
            return lambda: comm.reduce_scatter(split, group, [(part,)]), count * part, (count - 1) * part
        case _:
            return lambda: comm.all_to_all(parts, [(part,)] * count, group), count * part, (count - 1) * part


def _rounds(begin: Callable[[], comm.Pending], clock: Clock, device: str) -> tuple[float, float]:
    """Seconds until a collective is launched, and from there until it is there, one right after another."""
    times = []
    for _ in range(24):
        began_s = clock()
        pending = begin()
        launched_s = clock()
        pending.wait()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((launched_s - began_s, clock() - began_s))
    # Not the quantile of the rest: a device that was held up while it launched finds everything there.
    launch_s, whole_s = _low_pairs(times)
    return launch_s, max(1e-7, whole_s - launch_s)


def _measure_sends(clock: Clock, device: str) -> list[float]:
    """There and back between the first two."""
    sizes, launches, transfers = [], [], []
    for payload in _PAYLOAD_BYTES:
        tensor = torch.randn(payload // 4, device=device)
        launch_s, round_s = _low_pairs(_send_and_back(tensor, turn, clock) for turn in range(20))
        sizes.append(float(payload))
        launches.append(launch_s)
        transfers.append(max(1e-7, round_s / 2 - launch_s))
    return [*fit_line(sizes, launches), *fit_line(sizes, transfers)]


def _send_and_back(tensor: torch.Tensor, turn: int, clock: Clock) -> tuple[float, float]:
    """Seconds to begin sending, and until it is back."""
    rank = dist.get_rank()
    sends = comm.Sends()
    back = torch.empty_like(tensor)
    began_s = clock()
    work: Any = dist.irecv(back, src=1 - rank, tag=turn)
    if rank == 1:
        work.wait()
    before_s = clock()
    sends.send(tensor, to=1 - rank, tag=turn)
    launch_s = clock() - before_s
    if rank == 0:
        work.wait()
    sends.wait()
    return launch_s, clock() - began_s


def _low_pairs(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    found = list(pairs)[4:]
    return _low(one for one, _ in found), _low(other for _, other in found)


def _measure_overlap(clock: Clock, device: str) -> float:
    """How much of a device's time an all-reduce takes that runs beside its computation.

    Gloo's threads run on the device's own cores, so it is what they use of the processor. NCCL's kernels take a few of
    a GPU's many cores, which is left out.
    """
    if device == "cuda":
        return 0.0
    tensor = torch.randn(2**21)
    taken, used = [], []
    for _ in range(12):
        dist.barrier()
        others_s, began_s = time.process_time() - time.thread_time(), clock()
        comm.all_reduce([tensor], None).wait()
        taken.append(clock() - began_s)
        used.append(time.process_time() - time.thread_time() - others_s)
    return min(1.0, max(0.0, _low(used[2:]) / _low(taken[2:])))


def _measure_crowding(timer: Clock, clock: Clock, device: str) -> tuple[float, float]:
    """How much longer a computation takes if all devices compute, since they share caches; and because of others."""
    alone, together, taken = [], [], []
    for _ in range(3):  # in turns, and the best of each
        dist.barrier()
        if dist.get_rank() == 0:
            alone.append(_workload_s(timer, device))
        dist.barrier()
        began_s, used_s = clock(), timer()
        together.append(_workload_s(timer, device))
        taken.append((clock() - began_s) / max(1e-9, timer() - used_s))
    return statistics.median(together) / statistics.median(alone) if alone else 1.0, min(taken)


def _workload_s(clock: Clock, device: str) -> float:
    """A little of what training is made of, too large for a cache."""
    x = torch.randn(1024, 512, device=device, requires_grad=True)
    weight = torch.randn(2048, 512, device=device, requires_grad=True)
    times = []
    for _ in range(3):
        began_s = clock()
        y = F.gelu(F.linear(F.layer_norm(x, (512,)), weight))
        torch.autograd.grad((y * y).sum(), (x, weight))
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - began_s)
    return statistics.median(times)


__all__ = ["Known", "Links", "Part", "Store", "cache_folder", "calibrate", "measure_links", "measure_links_within"]
