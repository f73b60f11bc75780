"""Replays a compiled program without computing anything, and says in one sentence what is wrong with it.

What is checked is the program that devices will run, not the plan that it came from: that no device waits for ever,
that everything is there when it is read and whole where it must be, that gradients are read only after the last that
adds to them, that the parts of each op make up the op, and that nothing is left over.
"""

from __future__ import annotations

from collections.abc import Sequence

from rota.errors import FitError, ProgramError
from rota.graph.part import makes_of, reads_of
from rota.graph.rules import occurrences
from rota.plan.box import Box, Range, first_overlap, missing
from rota.plan.layout import Piece
from rota.plan.program import ONCE, Call, Exit, Node, NodeKind, Program, Segment, Source, Value
from rota.plan.step_check import check_step


def check(program: Program, sequences: Sequence[Sequence[int]] | None = None) -> None:
    """Raise ProgramError if a program is wrong. `sequences` are the nodes of each device, if not those it has."""
    for segment in program.segments:
        _check_segment(program, segment)
    _check_cover(program)
    _check_steps(program)
    if sequences is None:
        sequences = sequences_of(program)
    _Replay(program).run(sequences)


def check_fits(program: Program, memory_bytes: int) -> None:
    """Raise FitError if a device needs more memory than it has."""
    peaks = program.simulate().peak_bytes
    for device, peak in enumerate(peaks):
        if peak > memory_bytes:
            raise FitError(
                f"device {device} needs {_amount(peak)} and has {_amount(memory_bytes)}; cut the model further, use "
                "more micro-batches, or recompute"
            )


def _amount(size_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} bytes"


def sequences_of(program: Program) -> list[list[int]]:
    """The nodes of each device, in order."""
    found: list[list[int]] = [[] for _ in range(program.devices)]
    for index, node in enumerate(program.nodes):
        for device in node.devices:
            found[device].append(index)
    return found


# ---- segments ----


def _check_segment(program: Program, segment: Segment) -> None:
    """Each call reads the tensors that its op reads, in the boxes that its part needs."""
    refined = program.refined
    sums: set[int] = set()
    """The slots that hold partial sums."""
    slots: dict[int, tuple[str, Box]] = {entry.slot: (entry.tensor, entry.box) for entry in segment.entries}
    for call in segment.calls:
        case, frame = refined.cases.get(call.op), refined.frames.get(call.op)
        if case is None or frame is None:
            raise ProgramError(f"segment {segment.index} calls {call.op}, which is not an op of the graph")
        needed = [
            (name, box)
            for name, box in zip(occurrences(case.op), reads_of(frame, call.ranges), strict=True)
            if box is not None
        ]
        partial = _is_partial(program, segment, call)
        found = [slots.get(slot) for slot in call.reads]
        if any(slot in sums for slot in call.reads):
            raise ProgramError(f"{call.op} on device {segment.device} reads a partial sum")
        for want, have in zip(needed, found, strict=False):
            if have is None or have[0] != want[0] or have[1].ranges != want[1].ranges:
                raise ProgramError(
                    f"{call.op} on device {segment.device} reads {_text(have)} where it needs {_text(want)}"
                )
        if len(needed) != len(found):
            raise ProgramError(f"{call.op} on device {segment.device} reads {len(found)} tensors and not {len(needed)}")
        for slot, name, box in zip(call.makes, case.op.outputs, makes_of(frame, call.ranges), strict=True):
            if slot is not None and name is not None and box is not None:
                slots[slot] = (name, box)
                if partial:
                    sums.add(slot)
    for exit in segment.exits:
        have = slots.get(exit.slot)
        if have is None or have[0] != exit.tensor or have[1].ranges != exit.box.ranges:
            raise ProgramError(f"segment {segment.index} gives out {_text(have)} as {exit.tensor} {exit.box}")
        if exit.box.is_partial != (exit.slot in sums):
            kind = "a partial sum" if exit.slot in sums else "all"
            raise ProgramError(f"segment {segment.index} gives out {kind} of {exit.tensor} as {exit.box}")


def _is_partial(program: Program, segment: Segment, call: Call) -> bool:
    """Whether a call computes a part of what its op sums over."""
    frame = program.refined.frames[call.op]
    for name, (start, stop) in call.ranges.items():
        size = frame.dims[name].size
        if name == call.shifted:
            size = program.microbatches.distinct_widths[segment.context]
        if frame.dims[name].reduced and (start, stop) != (0, size):
            return True
    return False


def _text(pair: tuple[str, Box] | None) -> str:
    return "nothing" if pair is None else f"{pair[0]} {pair[1]}"


def _check_cover(program: Program) -> None:
    """The parts of each op are the whole op, once."""
    parts: dict[tuple[str, int], dict[tuple[tuple[str, Range], ...], set[int]]] = {}
    for segment in program.segments:
        for call in segment.calls:
            ranges = tuple(sorted(call.ranges.items()))
            found = parts.setdefault((call.op, segment.context), {}).setdefault(ranges, set())
            if segment.device in found:
                raise ProgramError(f"{call.op} is computed twice on device {segment.device}")
            found.add(segment.device)
    widths = program.microbatches.distinct_widths
    for op in program.refined.graph.ops:
        running = program.microbatches.running[op.name]
        contexts = [ONCE] if running.dim is None and (op.name, ONCE) in parts else list(range(len(widths)))
        for context in contexts:
            frame = program.refined.frames[op.name]
            sizes = {name: dim.size for name, dim in frame.dims.items()}
            if running.dim is not None and context != ONCE:
                sizes[running.dim] = widths[context]
            cuts = parts.get((op.name, context), {})
            whole = Box.whole(tuple(sizes.values()))
            boxes = [
                Box(ranges=tuple(dict(ranges).get(name, (0, size)) for name, size in sizes.items())) for ranges in cuts
            ]
            left = missing(whole, boxes)
            if left or not boxes:
                raise ProgramError(f"no part of {op.name} computes {left[0] if left else 'it'} of {list(sizes)}")
            overlap = first_overlap(boxes)
            if overlap is not None:
                raise ProgramError(f"two parts of {op.name} compute the same: {overlap[0]} and {overlap[1]}")


def _check_steps(program: Program) -> None:
    seen: set[int] = set()
    for node in program.nodes:
        step = node.step
        if step is None or id(step) in seen:
            continue
        seen.add(id(step))
        wrong = check_step(step)
        if wrong is not None:
            raise ProgramError(f"the {step.kind} of {program.flows[node.flow].name} is wrong: {wrong}")


# ---- the replay ----


class _Replay:
    """Goes through all devices' programs at once, each blocking at an exchange until its group is there."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.there: list[set[Value]] = [set() for _ in range(program.devices)]
        """What each device holds."""
        self.pending: dict[tuple[int, Value], int] = {}
        """How many nodes still add to a gradient."""
        self.ran: set[tuple[int, int]] = set()
        self._boxes_of_micro: dict[tuple[str, int, int], Box] = {}
        self._expected: dict[tuple[int, int], frozenset[str]] = {}
        self._flows: dict[str, list[int]] = {}
        for number, flow in enumerate(program.flows):
            if flow.backward:
                self._flows.setdefault(flow.tensor, []).append(number)
        self._tensor = {flow.name: flow.tensor for flow in program.flows}
        self._numbers = {box: number for number, box in enumerate(program.boxes)}
        self._fed = _fed(program)
        self._sources = {
            (flow.name, piece.device, self._numbers.get(piece.box))
            for flow in program.flows
            if flow.backward
            for piece in flow.source
        }

    def run(self, sequences: Sequence[Sequence[int]]) -> None:
        program = self.program
        for name, layout in program.stored.items():
            for piece in layout:
                self.there[piece.device].add(self._value(name, piece.box))
        self._stored = [set(held) for held in self.there]
        for node in program.nodes:
            if node.kind is NodeKind.BACKWARD:
                for value in node.adds:
                    if value is not None:
                        key = (node.devices[0], value)
                        self.pending[key] = self.pending.get(key, 0) + 1
        at = [0] * program.devices
        waiting = list(range(program.devices))
        arrived: dict[int, int] = {}
        done = 0
        while waiting:
            device = waiting.pop()
            while at[device] < len(sequences[device]):
                index = sequences[device][at[device]]
                node = program.nodes[index]
                if len(node.devices) > 1:
                    count = arrived.get(index, 0) + 1
                    arrived[index] = count
                    if count < len(node.devices):
                        break
                    self._do(index, node)
                    done += 1
                    for other in node.devices:
                        at[other] += 1
                        if other != device:
                            waiting.append(other)
                    continue
                self._do(index, node)
                done += 1
                at[device] += 1
        self._check_ended(sequences, at)
        self._check_left()

    def _check_ended(self, sequences: Sequence[Sequence[int]], at: list[int]) -> None:
        stuck = [device for device in range(self.program.devices) if at[device] < len(sequences[device])]
        if stuck:
            places = [
                f"device {device} at {self._name(self.program.nodes[sequences[device][at[device]]])}"
                for device in stuck[:4]
            ]
            raise ProgramError(f"devices wait for each other for ever: {', '.join(places)}")

    def _name(self, node: Node) -> str:
        if node.step is not None:
            return f"the {node.step.kind} of {self.program.flows[node.flow].name}"
        return f"the {node.kind} of segment {node.segment} (micro-batch {node.microbatch})"

    def _value(self, name: str, box: Box) -> Value:
        return Value(name, ONCE, self._numbers[box])

    # ---- nodes ----

    def _do(self, index: int, node: Node) -> None:
        if node.kind is NodeKind.EXCHANGE:
            self._exchange(node)
        elif node.kind is NodeKind.FORWARD:
            self._forward(node)
        else:
            self._backward(node)
        for device, value in self.program.frees[index]:
            if value not in self.there[device]:
                raise ProgramError(f"device {device} frees {value.name}, which it does not hold")
            self.there[device].remove(value)

    def _read(self, device: int, value: Value, node: Node) -> None:
        if value not in self.there[device]:
            raise ProgramError(f"device {device} has no {self._full(value)} when {self._name(node)} reads it")
        left = self.pending.get((device, value), 0)
        if left:
            raise ProgramError(
                f"device {device} reads {self._full(value)} before {left} more that add to it, at {self._name(node)}"
            )

    def _make(self, device: int, value: Value, node: Node) -> None:
        if value in self.there[device]:
            raise ProgramError(
                f"device {device} makes {self._full(value)} twice, the second time at {self._name(node)}"
            )
        self.there[device].add(value)

    def _full(self, value: Value) -> str:
        when = "" if value.microbatch == ONCE else f" of micro-batch {value.microbatch}"
        return f"{value.name} {self.program.boxes[value.box]}{when}"

    def _exchange(self, node: Node) -> None:
        step = node.step
        assert step is not None
        flow = self.program.flows[node.flow]
        for piece, value in zip(step.inputs, node.reads, strict=True):
            if value is None:
                raise ProgramError(f"{self._name(node)} has an input that is nothing")
            self._read(piece.device, value, node)
            self._check_piece(node, flow.tensor, flow.crossing, piece, value)
        for piece, value in zip(step.outputs, node.makes, strict=True):
            self._check_piece(node, flow.tensor, flow.crossing, piece, value)
            self._make(piece.device, value, node)

    def _check_piece(self, node: Node, tensor: str, crossing: bool, piece: Piece, value: Value) -> None:
        if self._tensor.get(value.name, value.name) != tensor:
            raise ProgramError(f"{self._name(node)} moves {value.name}")
        box = self.program.boxes[value.box]
        if box is piece.box or box == piece.box:
            return
        if not (crossing and value.microbatch != ONCE and self._global(tensor, value) == piece.box):
            raise ProgramError(f"{self._name(node)} takes {self._full(value)} for {piece}")

    def _global(self, tensor: str, value: Value) -> Box:
        key = (tensor, value.microbatch, value.box)
        if key not in self._boxes_of_micro:
            made = self.program.microbatches.made[tensor]
            box = self.program.boxes[value.box]
            self._boxes_of_micro[key] = self.program.microbatches.everywhere(box, made, value.microbatch)
        return self._boxes_of_micro[key]

    def _forward(self, node: Node) -> None:
        segment = self.program.segments[node.segment]
        device = segment.device
        for entry, value in zip(segment.entries, node.reads, strict=True):
            if value is None:
                if entry.source is not Source.FREE:
                    raise ProgramError(f"{self._name(node)} does not get {entry.tensor}")
                continue
            self._read(device, value, node)
            self._check_entry(node, entry.tensor, entry.box, entry.coordinate, value)
        for exit, value in zip(segment.exits, node.makes, strict=True):
            if value.name != exit.tensor or self.program.boxes[value.box] != exit.box:
                raise ProgramError(f"{self._name(node)} makes {self._full(value)} of {exit.tensor} {exit.box}")
            self._make(device, value, node)
        if segment.grad:
            self.ran.add((node.segment, node.microbatch))

    def _check_entry(self, node: Node, tensor: str, box: Box, coordinate: int | None, value: Value) -> None:
        if self._tensor.get(value.name, value.name) != tensor:
            raise ProgramError(f"{self._name(node)} reads {value.name} for {tensor}")
        have = self.program.boxes[value.box]
        if value.microbatch == node.microbatch and tensor not in self.program.stored:
            right = have == box  # both count within the micro-batch
        else:
            wanted = box
            if node.microbatch != ONCE:
                wanted = self.program.microbatches.shifted(box, coordinate, node.microbatch)
            right = (have if value.microbatch == ONCE else self._global(tensor, value)) == wanted
        if not right or have.is_partial:
            raise ProgramError(f"{self._name(node)} reads {self._full(value)} for {tensor} {box}")

    def _backward(self, node: Node) -> None:
        segment = self.program.segments[node.segment]
        device = segment.device
        if (node.segment, node.microbatch) not in self.ran:
            raise ProgramError(f"{self._name(node)} comes before its forward, or twice")
        self.ran.discard((node.segment, node.microbatch))
        for value in node.reads:
            if value is not None:
                self._read(device, value, node)
        loss = self.program.refined.graph.outputs["loss"]
        for i, (exit, values) in enumerate(zip(segment.exits, node.gradients, strict=True)):
            if (exit.tensor == loss) != (i in node.seeds):
                raise ProgramError(f"{self._name(node)} takes {exit.tensor} for the loss, or does not know the loss")
            self._check_gradients(node, segment, exit, values)
        for entry, added in zip(segment.entries, node.adds, strict=True):
            if added is None:
                if entry.grad:
                    raise ProgramError(f"{self._name(node)} does not return the gradient of {entry.tensor}")
                continue
            if self._tensor.get(added.name) != entry.tensor:
                raise ProgramError(f"{self._name(node)} adds the gradient of {entry.tensor} to {added.name}")
            if (added.name, device, added.box) not in self._sources:
                raise ProgramError(f"{self._name(node)} adds to {self._full(added)}, which is not its share")
            self.there[device].add(added)
            self.pending[(device, added)] -= 1

    def _check_gradients(self, node: Node, segment: Segment, exit: Exit, values: tuple[Value, ...]) -> None:
        expected = self._expected.get((segment.index, exit.slot))
        if expected is None:
            expected = self._flow_names(segment, exit)
            self._expected[(segment.index, exit.slot)] = expected
        if {value.name for value in values} != expected or len(values) != len(expected):
            raise ProgramError(
                f"{self._name(node)} sums {sorted(value.name for value in values)} for the gradient of {exit.tensor} "
                f"where it needs {sorted(expected)}"
            )
        for value in values:
            self._read(segment.device, value, node)
            have = self.program.boxes[value.box]
            wanted = Box(ranges=exit.box.ranges)
            if value.microbatch != node.microbatch:
                made = self.program.microbatches.made[exit.tensor]
                wanted = self.program.microbatches.shifted(wanted, made.coordinate, node.microbatch)
            if have != wanted:
                raise ProgramError(f"{self._name(node)} reads {self._full(value)} for the gradient of {wanted}")

    def _flow_names(self, segment: Segment, exit: Exit) -> frozenset[str]:
        """The gradients that come back to an exit: of each flow that ends there and begins or moves outside."""
        if not exit.grad:
            return frozenset()
        names = set()
        for number in self._flows.get(exit.tensor, ()):
            flow = self.program.flows[number]
            if not flow.crossing and flow.context != segment.context:
                continue
            if any(
                piece.device == segment.device
                and self._touches(flow.crossing, exit, segment, piece)
                and (flow.name, piece.device, self._numbers.get(piece.box)) in self._fed
                for piece in flow.target
            ):
                names.add(flow.name)
        return frozenset(names)

    def _touches(self, crossing: bool, exit: Exit, segment: Segment, piece: Piece) -> bool:
        if not crossing or segment.context == ONCE:
            return piece.box.ranges == exit.box.ranges
        made = self.program.microbatches.made[exit.tensor]
        contexts = self.program.microbatches.contexts
        return any(
            self.program.microbatches.shifted(Box(ranges=exit.box.ranges), made.coordinate, m).ranges
            == piece.box.ranges
            for m, context in enumerate(contexts)
            if context == segment.context
        )

    # ---- the end ----

    def _check_left(self) -> None:
        program = self.program
        if self.ran:
            segment, microbatch = min(self.ran)
            raise ProgramError(f"segment {segment} has no backward pass for micro-batch {microbatch}")
        kept = [set(stored) for stored in self._stored]
        for name, result in program.results.items():
            kept[result.device].add(result.value)
            if self._tensor.get(result.value.name, result.value.name) != name:
                raise ProgramError(f"the result {name} is {result.value.name}")
            self._must_hold(result.device, result.value, "the result")
        for name, pieces in program.gradients.items():
            flows = [program.flows[number] for number in self._flows.get(name, ())]
            for (device, box), values in pieces.items():
                names = {flow.name for flow in flows if (flow.name, device, self._numbers[box]) in self._fed}
                if flows and not names:
                    raise ProgramError(f"nothing comes back for the gradient of {name} {box} on device {device}")
                if {value.name for value in values} != names or len(values) != len(names):
                    raise ProgramError(f"the gradient of {name} {box} on device {device} is not summed up")
                for value in values:
                    kept[device].add(value)
                    self._must_hold(device, value, f"the gradient of {name}")
                    if program.boxes[value.box] != box:
                        raise ProgramError(f"the gradient of {name} {box} is {program.boxes[value.box]} in the end")
        for name, updates in program.updates.items():
            for (device, box), value in updates.items():
                kept[device].add(value)
                self._must_hold(device, value, f"the new {name}")
                if program.boxes[value.box] != box:
                    raise ProgramError(f"the new {name} {box} is {program.boxes[value.box]} in the end")
        for device, held in enumerate(self.there):
            for value in held:
                if value not in kept[device]:
                    raise ProgramError(f"device {device} never frees {self._full(value)}")

    def _must_hold(self, device: int, value: Value, what: str) -> None:
        if value not in self.there[device]:
            raise ProgramError(f"device {device} does not hold {what} {self._full(value)} in the end")
        if self.pending.get((device, value), 0):
            raise ProgramError(f"{what} {self._full(value)} on device {device} is not complete")
        if self.program.boxes[value.box].is_partial:
            raise ProgramError(f"{what} {self._full(value)} on device {device} is a partial sum")


def _fed(program: Program) -> set[tuple[str, int, int]]:
    """The gradients that come about as values, and not inside of a segment: name, device and number of the box."""
    found: set[tuple[str, int, int]] = set()
    for node in program.nodes:
        if node.step is not None:
            found |= {(v.name, piece.device, v.box) for piece, v in zip(node.step.outputs, node.makes, strict=True)}
        elif node.kind is NodeKind.BACKWARD:
            found |= {(value.name, node.devices[0], value.box) for value in node.adds if value is not None}
    return found
