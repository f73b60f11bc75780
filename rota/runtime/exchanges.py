"""Moves the values of one device of a program to and from its peers.

Collectives are begun when they can be and waited for when somebody reads what they make. Small ones are joined.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rota.graph.refine import local_shape
from rota.plan.box import Box
from rota.plan.layout import Kind, Step
from rota.plan.program import Node, NodeKind, Program, Value
from rota.runtime import comm
from rota.runtime.buckets import Bucket, is_even
from rota.runtime.device_run import DeviceRun
from rota.runtime.pieces import assemble, cut, exchange

_RECEIVES_AHEAD = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """A node as this device sees it."""

    index: int
    node: Node
    bucket: Bucket | None
    """For a collective: those that it is launched with, where the last of them stands."""
    frees: tuple[Value, ...]


@dataclass(kw_only=True, slots=True)
class _Filling:
    """What a bucket sends, as far as it is there: one tensor behind the other, in a row for each receiver."""

    rows: torch.Tensor
    used: int = 0
    """Of each row."""
    whole: torch.Tensor | None = None
    """Instead, the only tensor of a collective that is not joined with others."""

    def put(self, tensor: torch.Tensor, *, row: int = 0, last: bool = True) -> None:
        """Add a tensor to a row; `last` if that was the last row that got something of it."""
        end = self.used + tensor.numel()
        self.rows[row, self.used : end].view(tensor.shape).copy_(tensor)
        if last:
            self.used = end


class Exchanges:
    """What is under way to and from one device."""

    def __init__(self, device: DeviceRun, groups: comm.Groups, instructions: Sequence[Instruction]) -> None:
        """`instructions` are all that this device does; values are put where it has its own."""
        self.program = device.program
        self.rank = device.device
        self.device = device
        self._graph = self.program.refined.graph
        self._factors = self.program.refined.factors
        self._groups = groups
        self._sends = comm.Sends()
        self._receives = [
            one
            for one in instructions
            if one.node.step is not None
            and one.node.step.kind is Kind.SEND
            and one.node.step.outputs[0].device == self.rank
        ]
        self._posted: dict[int, tuple[Any, torch.Tensor]] = {}
        self._next_receive = 0
        self._pending: dict[Value, tuple[comm.Pending, Callable[[], None]]] = {}
        self._filling: dict[Bucket, _Filling] = {}
        self.waited_s = 0.0
        """For others, so far."""

    def begin(self) -> None:
        """A step begins."""
        self._next_receive = 0
        self._filling.clear()

    def end(self) -> None:
        """Wait for all that is under way."""
        for value in list(self._pending):
            self.wait(value)
        began_s = time.perf_counter()
        self._sends.wait()
        self.waited_s += time.perf_counter() - began_s

    # ---- values under way ----

    def wait(self, value: Value) -> None:
        """Until a value is there, if it is under way."""
        waiting = self._pending.pop(value, None)
        if waiting is not None:
            pending, put = waiting
            began_s = time.perf_counter()
            pending.wait()
            self.waited_s += time.perf_counter() - began_s
            put()

    def settle(self, node: Node) -> None:
        """Wait for what a node reads."""
        if not self._pending:
            return
        for value in node.reads:
            if value is not None:
                self.wait(value)
        for values in node.gradients:
            for value in values:
                self.wait(value)

    # ---- exchanges ----

    def exchange(self, one: Instruction) -> None:
        """Begin what an instruction says."""
        step = one.node.step
        assert step is not None
        match step.kind:
            case Kind.LOCAL:
                self.settle(one.node)
                inputs = [self._held(value) for value in one.node.reads if value is not None]
                made = exchange(step, inputs, self._factors_of(one.node))
                self.device.values[one.node.makes[0]] = made[0]
            case Kind.SEND:
                self._send(one)
            case _:
                assert one.bucket is not None
                self._join(one.node, step, one.bucket)
                if one.index == one.bucket.nodes[-1]:
                    self._launch(one.bucket)

    def _held(self, value: Value) -> torch.Tensor:
        return self.device.values[value].detach()

    def _factors_of(self, node: Node) -> Any:
        return self._factors[self.program.flows[node.flow].tensor]

    def _send(self, one: Instruction) -> None:
        step = one.node.step
        assert step is not None
        source, target = step.inputs[0], step.outputs[0]
        if source.device == self.rank:
            value = one.node.reads[0]
            assert value is not None
            self.wait(value)
            self._sends.send(self._held(value), to=target.device, tag=one.index)
            return
        self.post_receives(one.index, at_least=one.index)
        work, tensor = self._posted.pop(one.index)
        made = one.node.makes[0]
        pending = comm.Pending(work, lambda: [tensor])
        self._pending[made] = (pending, lambda: self._put(made, tensor))

    def _put(self, value: Value, tensor: torch.Tensor) -> None:
        self.device.values[value] = tensor

    def post_receives(self, now: int, *, at_least: int = -1) -> None:
        """Tell the senders where to write, a few receives ahead of need."""
        while self._next_receive < len(self._receives):
            one = self._receives[self._next_receive]
            if len(self._posted) >= _RECEIVES_AHEAD and one.index > at_least:
                return
            step = one.node.step
            assert step is not None
            tensor_name = self.program.flows[one.node.flow].tensor
            box = step.outputs[0].box
            tensor = torch.empty(
                local_shape(self._factors[tensor_name], box.shape),
                dtype=getattr(torch, self._graph.tensors[tensor_name].dtype),
            )
            work = dist.irecv(tensor, src=step.inputs[0].device, tag=one.index)
            self._posted[one.index] = (work, tensor)
            self._next_receive += 1

    def _join(self, node: Node, step: Step, bucket: Bucket) -> None:
        """Put what a collective sends into its bucket."""
        value = node.reads[_position(step, self.rank)]
        assert value is not None
        self.wait(value)
        tensor = self._held(value)
        filling = self._filling.get(bucket)
        if filling is None:
            filling = self._filling[bucket] = self._empty(bucket, step, tensor)
        if filling.whole is not None:
            filling.whole = tensor
        elif step.kind is Kind.REDUCE_SCATTER:
            source = Box(ranges=step.inputs[0].box.ranges)
            factors = self._factors_of(node)
            for member, piece in enumerate(step.outputs):
                part = cut(tensor, factors, source, Box(ranges=piece.box.ranges))
                filling.put(part, row=member, last=member == len(step.outputs) - 1)
        else:
            filling.put(tensor)

    def _empty(self, bucket: Bucket, step: Step, like: torch.Tensor) -> _Filling:
        if step.kind is Kind.ALL_TO_ALL or (not is_even(step) and step.kind is not Kind.ALL_REDUCE):
            return _Filling(rows=like.new_empty((0, 0)), whole=like)
        steps = [self.program.nodes[index].step for index in bucket.nodes]
        sizes = [one.inputs[_position(one, self.rank)].box.size for one in steps if one is not None]
        members = len(step.outputs) if step.kind is Kind.REDUCE_SCATTER else 1
        return _Filling(rows=like.new_empty((members, sum(sizes) // members)))

    def _launch(self, bucket: Bucket) -> None:
        nodes = [self.program.nodes[index] for index in bucket.nodes]
        steps = [node.step for node in nodes if node.step is not None]
        kind, ranks = steps[0].kind, steps[0].group
        group, place = self._groups.of(ranks), ranks.index(self.rank)
        filling = self._filling.pop(bucket)
        made = [node.makes[place] for node in nodes]
        given = [
            local_shape(self._factors_of(node), step.inputs[_position(step, self.rank)].box.shape)
            for node, step in zip(nodes, steps, strict=True)
        ]
        if kind is Kind.ALL_REDUCE:
            pending = comm.all_reduce(filling.rows.view(-1), given, group)
            puts = [lambda i=i: self._put(made[i], pending.wait()[i]) for i in range(len(nodes))]
        elif kind is Kind.ALL_GATHER:
            pending, puts = self._all_gather(nodes, steps, filling, given, made, group)
        elif kind is Kind.REDUCE_SCATTER:
            pending, puts = self._reduce_scatter(nodes, steps, filling, made, group, place)
        else:
            pending, puts = self._all_to_all(nodes[0], steps[0], filling.whole, made[0], group, place)
        for value, put in zip(made, puts, strict=True):
            self._pending[value] = (pending, put)

    def _all_gather(self, nodes: Any, steps: Any, filling: _Filling, given: Any, made: Any, group: Any) -> Any:
        size = len(steps[0].outputs)
        shapes = [
            [local_shape(self._factors_of(node), piece.box.shape) for piece in step.inputs]
            for node, step in zip(nodes, steps, strict=True)
        ]
        if filling.whole is None:
            pending = comm.all_gather(filling.rows.view(-1), given, group, size)
        else:
            pending = comm.uneven_all_gather(filling.whole, shapes[0], group)

        def put(i: int) -> None:
            parts = pending.wait()[i * size : (i + 1) * size]
            pieces = [
                (piece.box, part.reshape(shape))
                for piece, part, shape in zip(steps[i].inputs, parts, shapes[i], strict=True)
            ]
            whole = Box(ranges=steps[i].outputs[0].box.ranges)
            self._put(made[i], assemble(pieces, self._factors_of(nodes[i]), whole))

        return pending, [lambda i=i: put(i) for i in range(len(nodes))]

    def _reduce_scatter(self, nodes: Any, steps: Any, filling: _Filling, made: Any, group: Any, place: int) -> Any:
        factors = [self._factors_of(node) for node in nodes]
        shapes = [local_shape(f, step.outputs[place].box.shape) for f, step in zip(factors, steps, strict=True)]
        if filling.whole is not None:  # uneven: as an all-reduce, of which each keeps its part
            tensor = filling.whole
            pending = comm.all_reduce(tensor.contiguous().clone().view(-1), [tensor.shape], group)

            def keep() -> None:
                whole = Box(ranges=steps[0].inputs[0].box.ranges)
                part = cut(pending.wait()[0], factors[0], whole, Box(ranges=steps[0].outputs[place].box.ranges))
                self._put(made[0], part.contiguous())

            return pending, [keep]
        pending = comm.reduce_scatter(filling.rows, shapes, group)
        return pending, [lambda i=i: self._put(made[i], pending.wait()[i]) for i in range(len(nodes))]

    def _all_to_all(self, node: Any, step: Any, tensor: Any, made: Any, group: Any, place: int) -> Any:
        factors = self._factors_of(node)
        mine = Box(ranges=step.inputs[place].box.ranges)
        target = Box(ranges=step.outputs[place].box.ranges)
        parts, boxes, shapes = [], [], []
        for source, sink in zip(step.inputs, step.outputs, strict=True):
            going = mine.intersect(Box(ranges=sink.box.ranges))
            coming = target.intersect(Box(ranges=source.box.ranges))
            parts.append(tensor.new_empty(0) if going is None else cut(tensor, factors, mine, going))
            boxes.append(coming)
            shapes.append((0,) if coming is None else local_shape(factors, coming.shape))
        pending = comm.all_to_all(parts, shapes, group)

        def put() -> None:
            pieces = [(box, part) for box, part in zip(boxes, pending.wait(), strict=True) if box is not None]
            self._put(made, assemble(pieces, factors, target))

        return pending, [put]


def _position(step: Step, rank: int) -> int:
    return next(i for i, piece in enumerate(step.inputs) if piece.device == rank)


def instructions_of(program: Program, rank: int, buckets: Mapping[int, Bucket]) -> list[Instruction]:
    """What a device does in a step, in order."""
    found = []
    unread: dict[Bucket, list[Value]] = {}
    of_node = {index: bucket for bucket in buckets.values() for index in bucket.nodes}
    for index in program.of(rank):
        node = program.nodes[index]
        bucket = of_node.get(index)
        if bucket is None and node.kind is NodeKind.EXCHANGE:
            bucket = Bucket(nodes=(index,))
        frees = [value for device, value in program.frees[index] if device == rank]
        if bucket is not None:
            if index != bucket.nodes[-1]:  # what nobody reads is there only when all is launched
                unread.setdefault(bucket, []).extend(value for value in frees if value in node.makes)
                frees = [value for value in frees if value not in node.makes]
            else:
                frees += unread.pop(bucket, [])
        found.append(Instruction(index=index, node=node, bucket=bucket, frees=tuple(frees)))
    return found
