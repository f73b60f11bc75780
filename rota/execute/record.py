"""What a journal says when it is read from the start: the state of the run and of each task.

The controller and every reader (status, report, result) fold the same events by the same function, so that what is
shown is what the controller believed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rota.errors import StoreError
from rota.execute.asked import Asked
from rota.execute.events import Event, Launched, Lost, Requeued, RunBegan, RunEnded, RunNoted, RunResumed, Stopped
from rota.execute.states import RUN_TRANSITIONS, TASK_TRANSITIONS, RunState, TaskState
from rota.runtime.messages import Balanced, Began, Failed, Finished, Halted, Measured, Noticed, Saved
from rota.store.journal import read_summary
from rota.store.run_folder import RunFolder


@dataclass(kw_only=True)
class Span:
    """A stretch of time that a task spent on a device."""

    device: str
    attempt: int
    begin_s: float
    end_s: float | None = None
    end: str = ""
    """How it ended: finished, failed, lost, ..."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How the work of a task was divided from a step on."""

    attempt: int
    step: int
    shares: tuple[float, ...]
    left_out: tuple[float, ...]
    pause_s: float
    why: str


@dataclass(kw_only=True)
class TaskRecord:
    """What is known of one task."""

    name: str
    index: int
    settings: dict[str, Any]
    facts: dict[str, Any]
    """The numbers that describe the task: steps, seed, precision, ..."""
    state: TaskState = TaskState.PENDING
    attempt: int = 0
    losses: int = 0
    """Workers lost since the run was begun or resumed."""
    devices: tuple[str, ...] = ()
    """Where it runs now."""
    strategy: str = ""
    """How it runs, or ran, if that was decided for it."""
    began_s: float | None = None
    """When its present attempt began to train."""
    began_step: int = 0
    switches: int = 0
    """How often it went on in another way."""
    switch_s: float = 0.0
    """What that took: saving, and starting again."""
    step: int = 0
    saved_step: int = 0
    total_steps: int | None = None
    parameters: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest value of each metric."""
    step_s: float | None = None
    """Seconds per step, lately."""
    pace: tuple[float, ...] = ()
    """Of several devices, the seconds that each computed in the latest step."""
    balance: list[Balance] = field(default_factory=list)
    """How work was moved between its devices, in order."""
    spans: list[Span] = field(default_factory=list)
    reason: str = ""
    """Why it did not finish."""
    traceback: str = ""
    notices: list[str] = field(default_factory=list)

    @property
    def remaining_steps(self) -> int | None:
        """Steps left from the last checkpoint, if the length is known."""
        return None if self.total_steps is None else max(0, self.total_steps - self.saved_step)

    @property
    def speeds(self) -> tuple[float, ...]:
        """How fast each of its devices works, 1 for the fastest; empty if it has one, or nothing is known yet."""
        if len(self.pace) < 2 or len(self.pace) != len(self.devices) or min(self.pace) <= 0:
            return ()
        latest = self.balance[-1] if self.balance and self.balance[-1].attempt == self.attempt else None
        shares = latest.shares if latest is not None else (1.0,) * len(self.pace)
        if len(shares) != len(self.pace) or not any(shares):
            return ()
        rates = [share / seconds for share, seconds in zip(shares, self.pace, strict=True)]
        return tuple(rate / max(rates) for rate in rates)

    def busy_s(self, *, now_s: float) -> float:
        """Time spent on devices, over all attempts; on several at once it counts once."""
        attempts = {span.attempt: span for span in self.spans}
        ends = ((max(now_s, one.begin_s) if one.end_s is None else one.end_s, one.begin_s) for one in attempts.values())
        return sum(end_s - begin_s for end_s, begin_s in ends)


class RunRecord:
    """The fold of a journal. `apply` takes the events one by one."""

    def __init__(self) -> None:
        self.name = ""
        self.source = ""
        self.source_digest = ""
        self.sweep_digest = ""
        self.storage = ""
        """Where checkpoints and models go beside the run folder."""
        self.shards: tuple[str, ...] = ()
        """Where what leaves memory lies, if not in the run folder; behind the first, where it lay before."""
        self.seal = ""
        self.asked: dict[str, Any] = {}
        """What the user said of how to run, the latest of each."""
        self.session = ""
        """Of the latest controller: by it, workers that outlive theirs are found again."""
        self.state = RunState.RUNNING
        self.tasks: dict[str, TaskRecord] = {}
        self.devices: list[dict[str, Any]] = []
        self.begin_s = 0.0
        self.last_s = 0.0
        """When the last event happened."""
        self.notices: list[tuple[float, str, str]] = []
        """(time, task, text) of everything the user should know."""

    @classmethod
    def replay(cls, events: Iterable[tuple[float, Event]]) -> RunRecord:
        """The record that a journal amounts to."""
        record = cls()
        for time_s, event in events:
            record.apply(event, time_s)
        return record

    @classmethod
    def as_it_stands(cls, folder: RunFolder) -> RunRecord:
        """For whoever looks at a run. Of one whose controller was killed, nothing runs, whatever the journal says."""
        record = cls.replay(read_summary(folder.journal))
        if record.state is RunState.RUNNING and not folder.is_held():
            record = cls.replay(read_summary(folder.journal))  # it may have ended between the two
            if record.state is RunState.RUNNING:
                record._leave_behind()
        return record

    def _leave_behind(self) -> None:
        self._move_run(RunState.INTERRUPTED)
        for task in self.tasks.values():
            if task.state is TaskState.RUNNING:
                _close(task, time_s=self.last_s, end="interrupted")
                task.state, task.devices = TaskState.INTERRUPTED, ()

    @property
    def elapsed_s(self) -> float:
        """From the beginning to the last event."""
        return max(0.0, self.last_s - self.begin_s)

    def counts(self) -> dict[str, int]:
        """How many tasks are in each state."""
        counts: dict[str, int] = {}
        for task in self.tasks.values():
            counts[task.state.value] = counts.get(task.state.value, 0) + 1
        return counts

    def apply(self, event: Event, time_s: float) -> None:
        """Take note of one event. StoreError if it cannot have happened now."""
        before_s, self.last_s = self.last_s, time_s
        if isinstance(event, RunBegan):
            self._begin(event, time_s)
        elif isinstance(event, RunResumed):
            self._resume(event, before_s)
        elif isinstance(event, RunEnded):
            self._end(event, time_s)
        elif isinstance(event, RunNoted):
            self.notices.append((time_s, "", event.text))
        elif isinstance(event, Event):
            self._apply_to(self._find(event.task), event, time_s)
        else:
            raise StoreError(f"the journal has a {type(event).__name__}, which is no event of a run")

    def _begin(self, event: RunBegan, time_s: float) -> None:
        if self.tasks:
            raise StoreError("the journal begins twice")
        self.name, self.source, self.begin_s = event.name, event.source, time_s
        self.source_digest, self.sweep_digest = event.source_digest, event.sweep_digest
        self.devices, self.session = list(event.devices), event.session
        self._take_places(event)
        for index, fields in enumerate(event.tasks):
            name = fields["name"]
            if name in self.tasks:
                raise StoreError(f"the journal has two tasks named {name!r}")
            facts = {key: value for key, value in fields.items() if key not in ("name", "settings")}
            self.tasks[name] = TaskRecord(
                name=name,
                index=index,
                settings=dict(fields.get("settings", {})),
                facts=facts,
                total_steps=facts.get("steps"),
            )

    def _take_places(self, event: RunBegan | RunResumed) -> None:
        self.storage, self.shards, self.seal = event.storage, event.shards, event.seal
        self.asked = Asked.of(event.asked).plain()

    def _resume(self, event: RunResumed, before_s: float) -> None:
        """Tasks that were running when the controller died ran until the last thing that was heard."""
        self._move_run(RunState.RUNNING)
        self.devices = list(event.devices) or self.devices
        self.session = event.session
        self._take_places(event)
        for task in self.tasks.values():
            task.losses = 0
            if task.state is TaskState.RUNNING and task.name not in event.kept:
                _interrupt(task, time_s=before_s)
        for name in event.retried:
            task = self._find(name)
            _move(task, TaskState.PENDING)
            task.reason = task.traceback = ""

    def _end(self, event: RunEnded, time_s: float) -> None:
        if event.state not in set(RunState):
            raise StoreError(f"the journal ends the run in an unknown state {event.state[:40]!r}")
        self._move_run(RunState(event.state))
        for task in self.tasks.values():
            if task.state is TaskState.RUNNING:
                _interrupt(task, time_s=time_s)

    def _apply_to(self, task: TaskRecord, event: Any, time_s: float) -> None:
        if isinstance(event, Launched):
            _move(task, TaskState.RUNNING)
            task.attempt, task.devices = event.attempt, tuple(event.devices)
            task.strategy, task.began_s, task.pace = event.strategy, None, ()
            task.step_s = None  # of another way to run
            task.spans += [Span(device=one, attempt=event.attempt, begin_s=time_s) for one in event.devices]
        elif isinstance(event, Began):
            task.step = task.saved_step = task.began_step = event.from_step
            task.began_s = time_s
            if task.switches and task.spans and _was_switched(task):
                task.switch_s += max(0.0, time_s - task.spans[-1].begin_s)
            task.total_steps, task.parameters = event.total_steps, event.parameters
        elif isinstance(event, Measured):
            task.step = max(step for step, _ in event.rows) if event.rows else task.step
            task.metrics = dict(event.latest)
            if event.step_s is not None:
                task.step_s = event.step_s if 0 < event.step_s < math.inf else None
            task.pace = tuple(event.pace) or task.pace
        elif isinstance(event, Saved):
            task.saved_step = event.step
        elif isinstance(event, Balanced):
            task.balance.append(
                Balance(
                    attempt=event.attempt,
                    step=event.step,
                    shares=tuple(event.shares),
                    left_out=tuple(event.left_out),
                    pause_s=event.pause_s,
                    why=event.why,
                )
            )
        elif isinstance(event, Noticed):
            task.notices.append(event.text)
            self.notices.append((time_s, task.name, event.text))
        elif isinstance(event, Halted):
            _close(task, time_s=time_s, end="")  # what follows tells why
            task.step = task.saved_step = event.step
        elif isinstance(event, Requeued):
            self.notices.append((time_s, task.name, event.reason))
            task.switches += 1
            task.switch_s += event.save_s
            _close(task, time_s=time_s, end="switched")
            _move(task, TaskState.PENDING)
            task.devices = ()
        elif isinstance(event, Finished):
            task.step, task.metrics = event.step, task.metrics | event.metrics
            _leave(task, TaskState.FINISHED, time_s)
        elif isinstance(event, Failed):
            task.step, task.reason, task.traceback = event.step, event.reason, event.traceback
            _leave(task, TaskState.DIVERGED if event.diverged else TaskState.FAILED, time_s)
        elif isinstance(event, Lost):
            self._lose(task, event, time_s)
        elif isinstance(event, Stopped):
            task.step = event.step
            task.reason = "stopped by the user"
            _leave(task, TaskState.STOPPED, time_s)

    def _lose(self, task: TaskRecord, event: Lost, time_s: float) -> None:
        _close(task, time_s=time_s, end="lost")
        task.losses += 1
        task.step = task.saved_step
        if event.retried:
            self.notices.append((time_s, task.name, f"{event.reason}; going on from step {task.saved_step}"))
            _move(task, TaskState.PENDING)
        else:
            task.reason = event.reason
            _move(task, TaskState.FAILED)
        task.devices = ()

    def _find(self, name: str) -> TaskRecord:
        if name not in self.tasks:
            raise StoreError(f"the journal tells of a task {name[:40]!r} that the run does not have")
        return self.tasks[name]

    def _move_run(self, state: RunState) -> None:
        if state not in RUN_TRANSITIONS[self.state]:
            raise StoreError(f"the journal moves the run from {self.state} to {state}, which cannot be")
        self.state = state


def _was_switched(task: TaskRecord) -> bool:
    """Whether the attempt before this one ended by a switch."""
    return any(span.end == "switched" for span in task.spans if span.attempt == task.attempt - 1)


def _interrupt(task: TaskRecord, *, time_s: float) -> None:
    """It waits again, on no device."""
    _close(task, time_s=time_s, end="interrupted")
    _move(task, TaskState.PENDING)
    task.devices = ()


def _leave(task: TaskRecord, state: TaskState, time_s: float) -> None:
    if task.state is TaskState.RUNNING:
        _close(task, time_s=time_s, end=state.value)
    _move(task, state)
    task.devices = ()


def _move(task: TaskRecord, state: TaskState) -> None:
    if state not in TASK_TRANSITIONS[task.state]:
        raise StoreError(f"the journal moves task {task.name!r} from {task.state} to {state}, which cannot be")
    task.state = state


def _close(task: TaskRecord, *, time_s: float, end: str) -> None:
    if task.state is not TaskState.RUNNING:
        raise StoreError(f"the journal ends task {task.name!r} on a device while it is {task.state}, which cannot be")
    for span in task.spans[-len(task.devices) :]:
        span.end = end
        if span.end_s is None:
            span.end_s = max(time_s, span.begin_s)  # the clock may have been set back between two controllers
