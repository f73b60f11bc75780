"""Measures parts of ops: not alone but in windows, a few ops of a segment that follow each other.

They are run by the code that will run them, so that caches, memory and autograd are as they will be, and each op gets
its own share of the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rota.calibrate.clocks import Clock, low, pace_s
from rota.calibrate.known import Known, Part
from rota.graph.cost import work_of
from rota.graph.graph import Role
from rota.graph.part import PartCompute, Place, compute_part, makes_of, reads_of
from rota.graph.refine import Refined, local_shape
from rota.graph.rules import occurrences
from rota.plan.box import Box
from rota.plan.costs import Costs, call_seconds, signature
from rota.plan.program import Call, Entry, Exit, Program, Segment, Source
from rota.runtime.footprint import likeness
from rota.runtime.pieces import cut
from rota.runtime.segment import SegmentRunner

_WINDOW_CALLS = 48
_WINDOW_BYTES = 256 * 2**20
_FEWEST_REPEATS = 4
_MOST_REPEATS = 12
_ENOUGH_S = 0.4
"""A window that has run for so long is not run more often than it must be."""
_DISTURBED = 1.15
"""A window that was measured while everything took so much longer is measured again, later."""
_MOST_PASSES = 4


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A part of an op whose cost is asked for, and a place where it is."""

    signature: str
    refined: Refined
    segment: Segment
    position: int
    rough_s: float
    """In all programs."""


def wanted_parts(programs: Iterable[Program]) -> dict[str, Wanted]:
    """Every different part of an op."""
    found: dict[str, Wanted] = {}
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
                    else Wanted(
                        signature=name,
                        refined=program.refined,
                        segment=segment,
                        position=position,
                        rough_s=rough_s,
                    )
                )
    return found


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What was found in one window."""

    parts: Mapping[str, Part]
    overhead: tuple[int, float, float] | None
    pace_s: float
    """The machine's pace, before or after, whichever was slower."""


def measure_parts(
    missing: Sequence[Wanted], known: Known, *, deadline_s: float, clock: Clock, timer: Clock, kind: str
) -> None:
    """The most costly first, each with what is missing around it, until there is no time left.

    Others on the machine can slow everything for a second or two. What was measured then is measured again later.
    """
    watch = _Watch(deadline_s=deadline_s, clock=clock, timer=timer, kind=kind)
    before = dict(known.parts)
    windows: list[tuple[Segment, Refined]] = []
    found: list[_Measured] = []
    for one in sorted(missing, key=lambda one: -one.rough_s):
        if clock() >= deadline_s:
            break
        if one.signature in known.parts:
            continue
        window = _window(one, known)
        expected_s = 3 * sum(
            call_seconds(one.refined, window, i, Costs()) for i in range(len(window.calls))
        )  # forward and backward
        if clock() + expected_s * _FEWEST_REPEATS > deadline_s:
            continue
        with contextlib.suppress(RuntimeError, IndexError, ValueError, TypeError):  # an op that random data is not for
            measured = _measure_window(window, one.refined, watch)
            known.parts.update({name: part for name, part in measured.parts.items() if name not in known.parts})
            windows.append((window, one.refined))
            found.append(measured)
    if not found:
        return
    for _ in range(1, _MOST_PASSES):
        for number in _disturbed(found, known.pace_s):
            if clock() < deadline_s:
                again = _measure_window(*windows[number], watch)
                found[number] = min(again, found[number], key=lambda one: one.pace_s)
    if len(_disturbed(found, known.pace_s)) == len(found):  # that it has become slower for good is more likely
        known.pace_s = 0.0
    known.pace_s = min(one for one in (known.pace_s, *(one.pace_s for one in found)) if one > 0)
    for measured in reversed(found):  # the first window that an op was in is the one that it was measured for
        known.parts.update(measured.parts)
    known.parts.update(before)
    known.overheads += [one.overhead for one in found if one.overhead is not None]


def _disturbed(found: Sequence[_Measured], quiet_s: float) -> list[int]:
    """Which of the windows were measured while the machine was slow."""
    best_s = min((one.pace_s for one in found), default=0.0)
    limit_s = _DISTURBED * (min(best_s, quiet_s) if quiet_s > 0 else best_s)
    return [number for number, one in enumerate(found) if one.pace_s > limit_s]


def _window(one: Wanted, known: Known) -> Segment:
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
                    compute=compute_part(refined, call.op, call.ranges, shifted=call.shifted, offsets=call.offsets),
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


@dataclass(frozen=True, kw_only=True)
class _Watch:
    """What is measured with, and until when."""

    deadline_s: float
    clock: Clock
    timer: Clock
    kind: str


def _measure_window(window: Segment, refined: Refined, watch: _Watch) -> _Measured:
    """Run a window several times; each op's time is its median, as it is a median step that is predicted."""
    clock = watch.clock
    runner = _Timed(window, refined, watch.timer, watch.kind)
    values = _random_values(window, refined, watch.kind)
    before_s = pace_s(watch.timer)
    place = Place(key=1)
    forward: list[list[float]] = []
    backward: list[list[float]] = []
    overheads: list[tuple[float, float]] = []
    started_s = clock()
    for repeat in range(_MOST_REPEATS + 1):
        enough = len(forward) >= _FEWEST_REPEATS and (clock() - started_s > _ENOUGH_S or clock() > watch.deadline_s)
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
    overhead = None
    if window.grad and derived:
        overhead = (derived, low(a for a, _ in overheads), low(b for _, b in overheads))
    times: dict[str, list[tuple[float, float]]] = {}
    for i, call in enumerate(window.calls):
        seconds = (statistics.median(one[i] for one in forward), statistics.median(one[i] for one in backward))
        times.setdefault(signature(refined, window, call), []).append(seconds)
    positions = {signature(refined, window, call): call for call in window.calls}
    parts = {}
    for name, found_s in times.items():
        call = positions[name]
        work = work_of(refined, call.op, call.ranges)
        parts[name] = Part(
            kind=refined.cases[call.op].op.kind,
            flops=work.flops,
            touched_bytes=work.touched_bytes,
            forward_s=statistics.fmean(a for a, _ in found_s),
            backward_s=statistics.fmean(b for _, b in found_s),
        )
    return _Measured(parts=parts, overhead=overhead, pace_s=max(before_s, pace_s(watch.timer)))


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
