"""Measures what a step of programs costs on this machine, as far as there is time: ops, optimizer, engine and links."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rota.calibrate.clocks import Clock, low, threads_set, timer_of
from rota.calibrate.fitting import fit_line, fit_rates
from rota.calibrate.known import Known, Links, Store
from rota.calibrate.links import measure_links
from rota.calibrate.windows import measure_parts, wanted_parts
from rota.cluster.discover import available_cores
from rota.plan.box import Box
from rota.plan.costs import Calibration, CallCost, Costs, NodeCost
from rota.plan.program import Program
from rota.runtime.fused import fuse
from rota.runtime.pieces import assemble
from rota.store.cache import cache_folder

Notice = Callable[[str], None]
_LINKS_S = 12.0
"""What it takes to start processes and to measure their links; with less time they are not measured."""
_DISTURBED = 1.3
"""Links that were measured while everything took so much longer because of others are not kept."""
_UPDATED_ELEMENTS = (64, 4096, 65536, 2**20)


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
    timer = timer or timer_of(kind, threads)
    programs = list(programs)
    # Larger groups are extrapolated from these; more processes than cores would measure each other.
    devices = min(max((program.devices for program in programs), default=1), 4 if len(available_cores()) >= 4 else 2)
    store = Store.open(cache or cache_folder(), threads=threads, kind=kind)
    # Whoever calibrates in the midst of a task draws no random number for it.
    with threads_set(threads), torch.random.fork_rng(devices=[]):
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
        wanted = wanted_parts(programs)
        missing = [one for one in wanted.values() if one.signature not in store.known.parts]
        if missing:
            notice(f"measuring {len(missing)} of {len(wanted)} parts of ops")
        measure_parts(missing, store.known, deadline_s=deadline_s, clock=clock, timer=timer, kind=kind)
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


def _measure_optimizer(name: str, clock: Clock, kind: str) -> tuple[tuple[int, float], ...]:
    """(bytes, seconds) to update one parameter, with its gradient dropped before the next step."""
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    points = []
    for elements in _UPDATED_ELEMENTS:
        count = max(4, min(48, 2**22 // elements))
        parameters = [torch.nn.Parameter(torch.randn(elements, device=kind)) for _ in range(count)]
        optimizer = fuse(make(parameters, lr=1e-3))
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
        points.append((4 * elements, max(0.0, low(times) / count)))
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
    return max(0.0, low(times[1:]))
