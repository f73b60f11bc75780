"""Finds out, in a worker, what a task costs: some steps on this device, predictions for more, or steps of a gang."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rota.calibrate.calibrate import calibrate
from rota.errors import CaptureError, RotaError
from rota.graph.graph import Graph
from rota.plan.costs import Costs
from rota.profile.estimate import Estimate
from rota.profile.signature import signature_of
from rota.runtime.choose import choose, graph_of
from rota.runtime.executor import Eager
from rota.runtime.gang import Gang
from rota.runtime.planned import needs_of
from rota.runtime.training import Training, Watch
from rota.runtime.user_code import calling
from rota.search.search import Search, search
from rota.strategies.base import find
from rota.strategies.single import single
from rota.task import Task

PREDICTED_SPREAD, MEASURED_SPREAD = 0.25, 0.05
"""By how much a step may differ from what was predicted, or measured for a moment."""
_WARM_UP = 2
_LEAST, _MOST = 3, 30
"""Steps that are timed."""
_TIMED_S = 0.7
_ENOUGH_S = 5.0
"""One step is enough where a step takes as long as this."""
# Not worth cutting: a task that one device trains while one looks at others.
WORTH_S = 20.0
_SHARE, _LEAST_S, _MOST_S = 0.03, 2.0, 30.0
"""Of what one device takes for the tasks alike: so much may be spent on looking, in these bounds."""
_LIKELY = 3
_KEPT = 2
_TIGHT = 0.5
"""Of a device's memory: where a model with gradients and moments takes more than that, one looks before one runs."""

Notice = Callable[[str], None]


def _unwatched(what: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What timed steps took."""

    step_s: float
    spread: float
    start_s: float


def timed(
    training: Training, *, begun_s: float, watch: Watch, more: Callable[[bool], bool] = lambda wish: wish
) -> Steps:
    """The median of some steps, after the first few; `more` is asked before each, so that a gang agrees."""
    times: list[float] = []
    start_s = 0.0
    number = 0
    while True:
        wish = number < _WARM_UP or not (
            len(times) >= _MOST
            or (len(times) >= _LEAST and sum(times) >= _TIMED_S)
            or (times and sum(times) >= _ENOUGH_S)
        )
        if not more(wish):
            break
        watch("step 1 of a trial" if number else "the first step of a trial")
        step_begun_s = time.perf_counter()
        while training.train_batch() is None:
            pass
        if training.device.type == "cuda":
            torch.cuda.synchronize()
        took_s = time.perf_counter() - step_begun_s
        if number == 0:
            start_s = time.perf_counter() - begun_s
        if number >= _WARM_UP or took_s >= _ENOUGH_S:
            times.append(took_s)
        number += 1
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    middle_s = statistics.median(times)
    return Steps(step_s=middle_s, spread=(high - low) / middle_s if middle_s else 0.0, start_s=start_s)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a look has shown."""

    signature: str
    total_steps: int
    estimates: tuple[Estimate, ...]
    known: bool
    notices: tuple[str, ...]


def look(
    task: Task,
    *,
    device: torch.device,
    counts: Sequence[int],
    memory_bytes: int,
    known: Callable[[], dict[str, tuple[Estimate, ...]]],
    alike: int = 1,
    watch: Watch = _unwatched,
) -> Sight:
    """Make the task; unless its signature is known, time it here and predict how it runs on several devices."""
    begun_s = time.perf_counter()
    training = Training(task, device=device, watch=watch)
    with calling("reading the training data"):
        batch, _ = training.cursor.next()
    signature = signature_of(training, batch)
    notices: list[str] = []
    found = tuple(one for one in known().get(signature, ()) if one.devices in counts)
    is_known = {one.devices for one in found} >= set(counts)
    if not is_known:
        found = _estimates(training, batch, counts, memory_bytes, alike, begun_s, notices.append, watch)
    return Sight(
        signature=signature,
        total_steps=training.total_steps,
        estimates=found,
        known=is_known,
        notices=tuple(notices),
    )


def _estimates(
    training: Training,
    batch: Any,
    counts: Sequence[int],
    memory_bytes: int,
    alike: int,
    begun_s: float,
    notice: Notice,
    watch: Watch,
) -> tuple[Estimate, ...]:
    kind = training.device.type
    graph: Graph | None = None
    steps: Steps | None = None
    state_bytes = sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in training.model.parameters())
    several = [count for count in counts if count > 1]
    alone_bytes = 0
    if state_bytes > _TIGHT * memory_bytes:
        graph = _captured(training, batch, notice)
        if graph is not None:
            alone_bytes = _peak_bytes(graph)
    if alone_bytes <= memory_bytes:
        steps = timed(training, begun_s=begun_s, watch=watch)
    watch("")
    single_s = None if steps is None else steps.step_s * training.total_steps
    found: list[Estimate] = []
    if several and (single_s is None or single_s > WORTH_S):
        graph = graph or _captured(training, batch, notice)
        if graph is not None:
            alone_bytes = alone_bytes or _peak_bytes(graph)
            budget_s = min(_MOST_S, max(_LEAST_S, _SHARE * alike * (single_s or 0.0)))
            found += predicted(graph, training, several, memory_bytes, steps, budget_s, notice)
    if steps is not None and 1 in counts:
        alone = Estimate(
            label=str(single()),
            kind=kind,
            devices=1,
            step_s=steps.step_s,
            spread=max(steps.spread, MEASURED_SPREAD),
            memory_bytes=alone_bytes,
            measured=True,
            start_s=max(0.0, steps.start_s - steps.step_s),
        )
        found.insert(0, alone)
    return tuple(found)


def _captured(training: Training, batch: Any, notice: Notice) -> Graph | None:
    try:
        return graph_of(training.parts, batch)
    except CaptureError as error:
        notice(f"auto: {error}; one device runs it (strategy='torch_ddp' would take more)")
        return None


def _peak_bytes(graph: Graph) -> int:
    alone = single()(graph, 1).compile().simulate()
    return alone.peak_bytes[0] + 2 * alone.stored_bytes[0]


def predicted(
    graph: Graph,
    training: Training,
    counts: Sequence[int],
    memory_bytes: int,
    steps: Steps | None,
    budget_s: float,
    notice: Notice,
) -> list[Estimate]:
    """The best few strategies for each number of devices, with what is measured of their ops, and of this device."""
    until_s = time.perf_counter() + budget_s
    rough: dict[int, Search] = {}
    for place, count in enumerate(counts):
        left_s = max(0.5, (until_s - time.perf_counter()) / 2 / (len(counts) - place))
        try:
            rough[count] = _searched(graph, training, count, memory_bytes, budget_s=left_s)
        except RotaError as error:
            notice(f"auto on {count} devices: {error}")
    likely = {
        count: [one.text for one in found.candidates if one.measured and one.fits and one.devices == count][:_LIKELY]
        for count, found in rough.items()
    }
    programs = [find(text)(graph, count).compile() for count, texts in likely.items() for text in texts]
    programs.append(single()(graph, 1).compile())
    costs = calibrate(
        programs,
        budget_s=max(0.5, until_s - time.perf_counter()),
        threads=torch.get_num_threads(),
        notice=lambda t: None,
    )
    anchor = 1.0
    if steps is not None:
        anchor = steps.step_s / max(1e-9, programs[-1].simulate(costs=costs).makespan_s)
    estimates = []
    for count, texts in likely.items():
        if not texts:
            continue
        names = set(texts)
        found = _searched(graph, training, count, memory_bytes, costs=costs, within=lambda one: str(one) in names)  # noqa: B023
        for one in [one for one in found.candidates if one.measured and one.fits][:_KEPT]:
            assert one.step_s is not None
            assert one.peak_bytes is not None
            estimates.append(
                Estimate(
                    label=one.text,
                    kind=training.device.type,
                    devices=count,
                    step_s=one.step_s * anchor,
                    spread=PREDICTED_SPREAD,
                    memory_bytes=one.peak_bytes,
                    measured=False,
                    start_s=2 * steps.start_s if steps is not None else 0.0,
                )
            )
    return estimates


def _searched(graph: Graph, training: Training, count: int, memory_bytes: int, **more: Any) -> Search:
    needs = needs_of(training.optimizer)
    within = more.pop("within", lambda strategy: True)
    costs: Costs | None = more.pop("costs", None)
    return search(
        graph,
        count,
        memory_bytes=memory_bytes,
        whole_parameters=needs != "elements",
        within=lambda one: within(one) and (needs != "everything" or type(one).__name__ in ("Data", "Single")),
        costs=costs,
        **more,
    )


def try_out(
    task: Task, *, device: torch.device, gang: Gang | None, memory_bytes: int, watch: Watch = _unwatched
) -> Steps:
    """Time steps of a task on the devices of a gang, or on this one."""
    begun_s = time.perf_counter()

    def choice(parts: Any, batch: Any) -> Any:
        if gang is None:
            return Eager(parts)
        return choose(parts, batch, gang=gang, steps=0, memory_bytes=memory_bytes, notice=lambda text: None)

    training = Training(task, device=device, choose=choice, watch=watch)
    if gang is None:
        return timed(training, begun_s=begun_s, watch=watch)
    watch("waiting for the other devices of the task")
    gang.meet(timeout_s=task.setup_timeout_s)
    return timed(training, begun_s=begun_s, watch=watch, more=lambda wish: gang.agree(wish)[0])
