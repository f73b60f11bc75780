"""Finds out, in a worker, what a task costs: some steps on this device, predictions for more, or steps of a gang."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rota.errors import RotaError, TaskError
from rota.profile.estimate import Estimate
from rota.profile.signature import signature_of
from rota.profile.store import Known
from rota.runtime.executor import Closes, Room, Watch, unwatched
from rota.runtime.gang import Gang
from rota.runtime.limits import lifted
from rota.runtime.one_device import TIGHT, choose_alone, room_of, spills, state_bytes
from rota.runtime.one_device import alone_bytes as needed_alone
from rota.runtime.training import Training
from rota.runtime.user_code import calling, is_out_of_memory
from rota.state import inside
from rota.store.run_folder import STORE_FOLDER
from rota.task import Task
from rota.techniques import Technique, checked, label_of

if TYPE_CHECKING:
    from rota.graph.graph import Graph

TOLD_SPREAD = 0.5
"""By how much a step may differ from what a technique says,"""
MEASURED_SPREAD = 0.05
"""and from what was measured for a moment."""
_WARM_UP = 2
_SLOW_S = 0.2
"""A step that takes as long as this is warm after one."""
_LEAST, _MOST = 3, 30
"""Steps that are timed."""
_TICK_S = 1e-9
"""What a step takes at least, also on a machine whose clocks cannot be trusted."""
_TIMED_S = 0.7
_ENOUGH_S = 1.5
"""That is enough, however few steps it were."""
_TOO_SLOW_S = 10.0
"""Where the first step takes so long, it is the only one; elsewhere it does not count: it makes what others use,"""
_DEAR_S, _DEAR = 2.0, 0.05
"""unless it took so long, and another one would be so large a part of all that the tasks alike take."""
_SHARE, _LEAST_S, _MOST_S = 0.03, 2.0, 30.0
"""Of what one device takes for the tasks alike: so much may be spent on looking, in these bounds."""

Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What timed steps took."""

    step_s: float
    spread: float
    start_s: float


def timed(
    training: Training,
    *,
    begun_s: float,
    watch: Watch,
    alike: int | None = None,
    more: Callable[[bool], bool] = lambda wish: wish,
) -> Steps:
    """The median of some steps, after the first few; `more` is asked before each, so that a gang agrees.

    `alike` is for how many tasks it is measured, if that matters.
    """
    dear = alike is not None and _DEAR * training.total_steps * alike < 1
    too_slow_s = _DEAR_S if dear else _TOO_SLOW_S
    enough_s = _ENOUGH_S
    times: list[float] = []
    start_s = 0.0
    number = 0
    while True:
        spent_s = sum(times)
        wish = not times or not (
            len(times) >= _MOST or (len(times) >= _LEAST and spent_s >= _TIMED_S) or spent_s >= enough_s
        )
        if not more(wish):
            break
        watch("step 1 of a trial" if number else "the first step of a trial")
        step_begun_s = time.perf_counter()
        while training.train_batch() is None:
            pass
        if training.device.type == "cuda":
            torch.cuda.synchronize()
        took_s = max(_TICK_S, time.perf_counter() - step_begun_s)
        if number == 0:
            start_s = max(0.0, time.perf_counter() - begun_s)
            if took_s >= too_slow_s:
                enough_s = 0.0  # it is the only one: no other is like it
        if number >= (_WARM_UP if took_s < _SLOW_S else 1) or took_s >= too_slow_s:
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
    counts: tuple[int, ...]
    """The numbers of devices that were looked at."""


def look(
    task: Task,
    *,
    device: torch.device,
    counts: Sequence[int],
    memory_bytes: int,
    folder: Path,
    known: Callable[[], dict[str, Known]],
    alike: int = 1,
    search: bool = True,
    strategies: Mapping[str, Any] | None = None,
    techniques: Sequence[Technique] = (),
    watch: Watch = unwatched,
) -> Sight:
    """Make the task; unless its signature is known, time it here and predict how it runs on several devices."""
    begun_s = time.perf_counter()
    room = room_of(task, device=device, folder=folder, memory_bytes=memory_bytes)
    training = Training(task, device=device, watch=watch, room=room)
    watch("reading the first batch")
    with calling("reading the training data"):
        batch, _ = training.cursor.next()
    lifting = contextlib.ExitStack()
    if room is not None:
        room.building.finish(training.model)
        if room.building.away:  # what it takes to look at it is not what it takes to train it
            lifting.enter_context(lifted())
    signature = signature_of(training, batch, besides=(strategies or {}, techniques))
    notices: list[str] = []
    before = known().get(signature)
    found: tuple[Estimate, ...] = ()
    looked = tuple(counts)
    if before is not None:
        found = tuple(one for one in before.estimates if one.devices in counts)
        looked = before.counts
    needed = set(counts) if search else {1} & set(counts) or set(counts)
    is_known = before is not None and set(before.counts) >= needed
    if not is_known:
        wishes = Wishes(
            counts=tuple(counts),
            memory_bytes=memory_bytes,
            alike=alike,
            search=search or 1 not in counts,
            alone=next((one for one in found if one.label == "single" and one.measured), None),
            strategies=strategies or {},
        )
        found, searched = _estimates(training, batch, wishes, begun_s, notices.append, watch)
        looked = tuple(counts) if searched else (1,)
        found += tuple(_of_techniques(task, techniques, wishes, device.type, notices.append, watch))
    lifting.close()
    if room is not None:
        room.building.close()
    return Sight(
        signature=signature,
        total_steps=training.total_steps,
        estimates=found,
        known=is_known,
        notices=tuple(notices),
        counts=looked,
    )


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a look is for."""

    counts: tuple[int, ...]
    memory_bytes: int
    alike: int
    search: bool
    """Whether one device alone does not answer it."""
    alone: Estimate | None
    """What is known of one device."""
    strategies: Mapping[str, Any]
    """The user's own, by name."""


def _captured(training: Training, batch: Any, notice: Notice) -> Graph | None:
    """The graph of a step, if there can be one."""
    # Loading all that searches takes a second, which short tasks need not wait for.
    from rota.runtime import candidates

    return candidates.captured(training, batch, notice)


def _of_techniques(
    task: Task, techniques: Sequence[Technique], wishes: Wishes, kind: str, notice: Notice, watch: Watch
) -> Iterator[Estimate]:
    """What techniques say of a task; one that raises or says what cannot be is left out."""
    if task.strategy != "auto":
        return
    for technique in techniques:
        for count in wishes.counts:
            watch(f"the search of the technique {technique.name}")  # a hang has its name
            try:
                found = checked(technique.search(task, count), technique.name)
            except (Exception, SystemExit) as error:  # it is not ours
                reason = str(error) or type(error).__name__
                notice(f"the technique {technique.name} is left out on {count} devices: {reason}")
                continue
            if found is None:
                continue
            if found.memory_bytes > wishes.memory_bytes:
                notice(f"the technique {technique.name} needs more memory than {count} devices have")
                continue
            yield Estimate(
                label=label_of(technique.name, found.knobs),
                kind=kind,
                devices=count,
                step_s=float(found.step_s),
                spread=TOLD_SPREAD,
                memory_bytes=found.memory_bytes,
                measured=False,
                technique=technique.name,
            )


def _estimates(
    training: Training, batch: Any, wishes: Wishes, begun_s: float, notice: Notice, watch: Watch
) -> tuple[tuple[Estimate, ...], bool]:
    """The ways in which it can run, and whether those on several devices were searched for."""
    counts, memory_bytes = wishes.counts, wishes.memory_bytes
    graph: Graph | None = None
    steps: Steps | None = None
    several = [count for count in counts if count > 1]
    alone_bytes = 0
    strategy = training.task.strategy
    planned, spilling = not hasattr(strategy, "execute"), spills(strategy)
    away = training.parts.room is not None and training.parts.room.building.away
    if planned and (spilling or state_bytes(training.model) > TIGHT * memory_bytes):
        graph = _captured(training, batch, notice)
        if graph is not None:
            alone_bytes = needed_alone(graph, training.parts)
    if wishes.alone is not None:
        steps = Steps(step_s=wishes.alone.step_s, spread=wishes.alone.spread, start_s=wishes.alone.start_s)
    elif alone_bytes <= memory_bytes and not away and not (spilling and graph is not None):
        try:
            steps = timed(training, begun_s=begun_s, watch=watch, alike=wishes.alike)
        except TaskError as error:
            if not is_out_of_memory(error.__cause__ or error):
                raise
            # It was thought to fit. The ways that need less are looked at.
            notice(f"single: {error}")
            alone_bytes = memory_bytes + 1
            training.optimizer.zero_grad()
            training.optimizer.state.clear()
            graph = _captured(training, batch, notice) if planned else None
    single_s = None if steps is None else steps.step_s * training.total_steps
    found: list[Estimate] = []
    searched = single_s is None or wishes.search
    if several and not planned:
        from rota.runtime import candidates

        found += candidates.without_plan(training, several, steps)
    elif several and searched and not spilling:
        from rota.runtime import candidates

        graph = graph or _captured(training, batch, notice)
        if graph is None and steps is not None and 1 not in counts:
            found += candidates.alone_in_gang(training, several, steps)
        if graph is not None:
            alone_bytes = alone_bytes or needed_alone(graph, training.parts)
            budget_s = min(_MOST_S, max(_LEAST_S, _SHARE * wishes.alike * (single_s or 0.0)))
            watch("the search for ways on several devices", ours=True)
            with lifted():  # what it takes to search is not what it takes to train
                found += candidates.predicted(
                    graph, training, several, memory_bytes, steps, budget_s, notice, strategies=wishes.strategies
                )
    if steps is not None and 1 in counts:
        found.insert(0, _measured(training, wishes, "single", steps, alone_bytes))
    elif steps is None and graph is not None and training.parts.room is not None:
        with lifted():  # it counts its own bytes
            found[:0] = _spilled(training, batch, graph, wishes, begun_s, notice, watch)
    return tuple(found), searched


def _measured(training: Training, wishes: Wishes, label: str, steps: Steps, memory_bytes: int) -> Estimate:
    """What one device takes."""
    return Estimate(
        label=label,
        kind=training.device.type,
        devices=1,
        step_s=steps.step_s,
        spread=max(steps.spread, MEASURED_SPREAD),
        memory_bytes=memory_bytes,
        measured=True,
        start_s=max(0.0, steps.start_s - steps.step_s) if wishes.alone is None else steps.start_s,
    )


def _spilled(
    training: Training, batch: Any, graph: Graph, wishes: Wishes, begun_s: float, notice: Notice, watch: Watch
) -> list[Estimate]:
    """Some steps of a task that does not fit on this device, and with them what several take that share its samples."""
    from rota.memory.spilling import Spilling
    from rota.runtime import candidates
    from rota.strategies.spill import Spill, spill

    room, own = training.parts.room, training.task.strategy
    assert room is not None
    strategy = own if isinstance(own, Spill) else spill()
    found: list[Estimate] = []
    steps: Steps | None = None
    if 1 in wishes.counts:
        try:
            executor = Spilling(training.parts, batch, spill=strategy, graph=graph)
            training.adopt(executor)
            with _ending([executor], room.folder):
                steps = timed(training, begun_s=begun_s, watch=watch, alike=wishes.alike)
                compute_s, moves_s = executor.in_pool()
        except RotaError as error:
            notice(f"{strategy}: {error}")
            return []
        alone = _measured(training, wishes, str(strategy), steps, wishes.memory_bytes)
        found.append(replace(alone, compute_s=compute_s, moves_s=moves_s))
    several = [count for count in wishes.counts if count > 1]
    return found + candidates.spilled(graph, training, batch, strategy, several, steps, notice)


def try_out(
    task: Task, *, device: torch.device, gang: Gang | None, memory_bytes: int, folder: Path, watch: Watch = unwatched
) -> Steps:
    """Time steps of a task on the devices of a gang, or on this one."""
    begun_s = time.perf_counter()
    made: list[Any] = []

    def choice(parts: Any, batch: Any) -> Any:
        if gang is None:
            made.append(choose_alone(parts, batch, notice=lambda text: None))
            return made[0]
        from rota.runtime.choose import choose

        made.append(
            choose(parts, batch, gang=gang, step=0, total_steps=0, memory_bytes=memory_bytes, notice=lambda text: None)
        )
        return made[0]

    if gang is None:
        room = room_of(task, device=device, folder=folder, memory_bytes=memory_bytes)
        training = Training(task, device=device, choose=choice, watch=watch, room=room)
        with _roomy(task, room), _ending(made, folder):
            return timed(training, begun_s=begun_s, watch=watch)
    room = room_of(task, device=device, folder=folder, memory_bytes=memory_bytes, gang=gang)
    training = Training(task, device=device, choose=choice, watch=watch, room=room)
    watch("waiting for the other devices of the task")
    gang.meet(timeout_s=task.setup_timeout_s)
    with _roomy(task, room), _ending(made, folder):
        return timed(training, begun_s=begun_s, watch=watch, more=lambda wish: gang.agree(wish)[0])


def _roomy(task: Task, room: Room | None) -> contextlib.AbstractContextManager[None]:
    """What is larger than memory counts its own bytes."""
    larger = room is not None and (room.building.away or spills(task.strategy))
    return lifted() if larger else contextlib.nullcontext()


@contextlib.contextmanager
def _ending(made: Sequence[Any], folder: Path) -> Iterator[None]:
    """Leave nothing behind of an executor that has threads or files of its own."""
    try:
        yield
    finally:
        if made and isinstance(made[0], Closes):
            made[0].close()
            inside.remove(folder / STORE_FOLDER, inside.SHARDS)
