"""Moves tensors between the processes of a program, over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rota.plan.layout import Kind
from rota.plan.program import NodeKind, Program

# Renamed in PyTorch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def connect(*, rank: int, size: int, store: Any, kind: str = "cpu", timeout_s: float = 60.0) -> None:
    """Join the other processes; each process of a gang calls it once."""
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend, rank=rank, world_size=size, store=store, timeout=datetime.timedelta(seconds=timeout_s)
    )


def disconnect() -> None:
    """Leave; nothing may be under way."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Groups:
    """The process groups of programs, each made once; all processes make them in the same order."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def prepare(self, program: Program) -> None:
        """Make the groups that a program needs and that are not there yet."""
        wanted = {
            node.step.group
            for node in program.nodes
            if node.kind is NodeKind.EXCHANGE
            and node.step is not None
            and node.step.kind not in (Kind.LOCAL, Kind.SEND)
        }
        for ranks in sorted(wanted):
            self.add(ranks)

    def add(self, ranks: tuple[int, ...]) -> None:
        """Make one group; every process calls it, also those that are not in it."""
        if ranks not in self._made:
            whole = ranks == tuple(range(dist.get_world_size()))
            self._made[ranks] = dist.group.WORLD if whole else dist.new_group(list(ranks), sort_ranks=False)

    def of(self, ranks: tuple[int, ...]) -> Any:
        """The group of these ranks, in their order."""
        return self._made[ranks]


class Sends:
    """Sends under way, with the tensors that they read."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, *, to: int, tag: int) -> None:
        """Begin to send; the tensor must not change until `wait`."""
        whole = tensor.contiguous()
        self._waiting.append((dist.isend(whole, dst=to, tag=tag), whole))
        if len(self._waiting) > 64:
            self._waiting = [one for one in self._waiting if not one[0].is_completed()]

    def wait(self) -> None:
        """Until all have arrived."""
        for work, _ in self._waiting:
            work.wait()
        self._waiting.clear()


class Pending:
    """A collective under way; `wait` gives what it makes for this process."""

    def __init__(self, work: Any, finish: Any) -> None:
        self._work = work
        self._finish = finish
        self._result: list[torch.Tensor] | None = None

    def wait(self) -> list[torch.Tensor]:
        """What it makes, once it is there."""
        if self._result is None:
            if self._work is not None:
                self._work.wait()
            self._result = self._finish()
            self._finish = self._work = None
        return self._result


def all_reduce(flat: torch.Tensor, shapes: Sequence[Any], group: Any) -> Pending:
    """The sum over the group of several tensors that lie one behind the other."""
    work = dist.all_reduce(flat, group=group, async_op=True)
    return Pending(work, lambda: _parts(flat, shapes))


def all_gather(flat: torch.Tensor, shapes: Sequence[Any], group: Any, size: int) -> Pending:
    """For each of several tensors, those of all members one after the other: results[i * size + member]."""
    whole = torch.empty(size * flat.numel(), dtype=flat.dtype, device=flat.device)
    work = _all_gather(whole, flat, group=group, async_op=True)

    def finish() -> list[torch.Tensor]:
        members = [_parts(one, shapes) for one in whole.view(size, -1)]
        return [members[i][t] for t in range(len(shapes)) for i in range(size)]

    return Pending(work, finish)


def reduce_scatter(rows: torch.Tensor, shapes: Sequence[Any], group: Any) -> Pending:
    """The sum over the group of this member's row; in each row lie a member's parts of several tensors."""
    result = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
    work = _reduce_scatter(result, rows.view(-1), group=group, async_op=True)
    return Pending(work, lambda: _parts(result, list(shapes)))


def all_to_all(parts: Sequence[torch.Tensor], shapes: Sequence[Any], group: Any) -> Pending:
    """Each member's part to it, and theirs for us: results[member]."""
    flat = torch.cat([one.reshape(-1) for one in parts])
    counts = [_count(shape) for shape in shapes]
    result = torch.empty(sum(counts), dtype=flat.dtype, device=flat.device)
    work = dist.all_to_all_single(
        result,
        flat,
        output_split_sizes=counts,
        input_split_sizes=[one.numel() for one in parts],
        group=group,
        async_op=True,
    )
    return Pending(work, lambda: _parts(result, list(shapes)))


def uneven_all_gather(tensor: torch.Tensor, shapes: Sequence[Any], group: Any) -> Pending:
    """As all_gather of one tensor whose size differs between members: all are filled up to the largest."""
    most = max(_count(shape) for shape in shapes)
    filled = torch.zeros(most, dtype=tensor.dtype, device=tensor.device)
    filled[: tensor.numel()] = tensor.reshape(-1)
    whole = torch.empty(len(shapes) * most, dtype=tensor.dtype, device=tensor.device)
    work = _all_gather(whole, filled, group=group, async_op=True)
    rows = whole.view(len(shapes), most)
    return Pending(work, lambda: [rows[i, : _count(shape)].reshape(shape) for i, shape in enumerate(shapes)])


def _parts(flat: torch.Tensor, shapes: Iterable[Any]) -> list[torch.Tensor]:
    found = []
    start = 0
    for shape in shapes:
        count = _count(shape)
        found.append(flat[start : start + count].view(shape))
        start += count
    return found


def _count(shape: Any) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
