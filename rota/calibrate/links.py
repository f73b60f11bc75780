"""Measures what it costs the processes of this machine to communicate, and to compute beside each other."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rota.calibrate.clocks import Clock, low, timer_of
from rota.calibrate.fitting import fit_line
from rota.calibrate.known import LINK_FIELDS, Links
from rota.plan.costs import LinkCost
from rota.plan.layout import Kind
from rota.runtime import comm
from rota.scratch import scratch
from rota.threads import ending_with_parent

_PAYLOAD_BYTES = (2**12, 2**16, 2**19, 2**21, 2**23)
_COLLECTIVES = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)


def measure_links(devices: int, *, kind: str = "cpu", threads: int = 1, timeout_s: float = 60.0) -> Links:
    """Between so many devices of this machine, with processes of its own; RuntimeError if they do not answer."""
    with scratch("links") as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([_root(), os.environ.get("PYTHONPATH", "")])}
        code = "from rota.calibrate.links import link_process; link_process()"
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


def link_process() -> None:
    """One of the processes of `measure_links`; the first one writes what was found."""
    rank, size, store, kind, threads, timeout_s = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if kind == "cuda":
        torch.cuda.set_device(int(rank))
    with ending_with_parent():
        made = dist.FileStore(store, int(size))  # type: ignore[attr-defined]
        comm.connect(rank=int(rank), size=int(size), store=made, kind=kind, timeout_s=float(timeout_s))
        found = measure_links_within(kind=kind)
        comm.disconnect()
    if rank == "0":
        sys.stdout.write(json.dumps(found.to_json()) + "\n")
        sys.stdout.flush()


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
    crowding, disturbance = _measure_crowding(timer_of(kind, torch.get_num_threads()), clock, kind)
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
    return LinkCost(group=count, **{key: next(numbers) for key in LINK_FIELDS})


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
    """What begins it, with the copy into a bucket, and how many elements a member gives and receives."""
    parts = list(torch.randn(count, part, device=device))
    match kind:
        case Kind.ALL_REDUCE:
            whole = torch.cat(parts)
            return lambda: comm.all_reduce(whole.clone(), [whole.shape], group), count * part, 2 * (count - 1) * part
        case Kind.ALL_GATHER:
            return lambda: comm.all_gather(parts[0].clone(), [(part,)], group, count), part, (count - 1) * part
        case Kind.REDUCE_SCATTER:
            return lambda: comm.reduce_scatter(torch.stack(parts), [(part,)], group), count * part, (count - 1) * part
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
    return low(one for one, _ in found), low(other for _, other in found)


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
        comm.all_reduce(tensor.clone(), [tensor.shape], None).wait()
        taken.append(clock() - began_s)
        used.append(time.process_time() - time.thread_time() - others_s)
    return min(1.0, max(0.0, low(used[2:]) / low(taken[2:])))


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
