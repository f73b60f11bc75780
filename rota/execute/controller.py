"""The only one that acts: launches what the policy decides, journals what happens, and answers what goes wrong."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from rota.errors import TaskError
from rota.execute.backends.base import Backend, WorkerLost
from rota.execute.events import Event, Launched, Lost, RunEnded, Stopped
from rota.execute.policy import LongestFirst, Policy, Waiting, waiting
from rota.execute.record import RunRecord, TaskRecord
from rota.execute.states import RunState, TaskState
from rota.runtime.messages import Beat, Began, Failed, Finished, Halted, Measured, Noticed, Saved
from rota.store.journal import Journal
from rota.store.run_folder import RunFolder
from rota.sweep import Sweep

_POLL_S = 0.25
_REQUESTS_EVERY_S = 0.5
# What a task gets to save itself. The whole run must be gone 5 s after Ctrl-C.
_HALT_S = 3.5

Observer = Callable[[RunRecord, Event | None], None]
"""Called after each event with the record that now holds it, and with None when time has passed."""


class Controller:
    """Carries out one run, from its journal's present state to its end."""

    def __init__(
        self,
        *,
        sweep: Sweep,
        record: RunRecord,
        journal: Journal,
        folder: RunFolder,
        backend: Backend,
        devices: Sequence[str],
        policy: Policy | None = None,
        retries: int = 2,
        observer: Observer | None = None,
    ) -> None:
        self._tasks = {task.name: task for task in sweep}
        self.record = record
        self._journal = journal
        self._folder = folder
        self._backend = backend
        self._policy = policy or LongestFirst()
        self._retries = retries
        self._observer = observer or (lambda record, event: None)
        self._order = {name: place for place, name in enumerate(devices)}
        self._free: list[str] = list(devices)
        self._busy: dict[str, str] = {}
        """device -> task"""
        self._halting: dict[str, float] = {}
        """device -> when its patience ends"""
        self._stopping: set[str] = set()
        """tasks that the user stopped"""
        self._unconfirmed: dict[str, Measured] = {}
        self._interrupted = False
        self._asked_s = float("-inf")
        self._waiting: list[Waiting] = []
        for task in record.tasks.values():
            if task.state is TaskState.PENDING:
                self._enqueue(task)

    def interrupt(self) -> None:
        """Save everything and leave, as soon as possible. Safe to call from a signal handler."""
        self._interrupted = True

    def run(self) -> RunState:
        """Work until nothing is left to do."""
        while True:
            self._take_requests()
            if self._interrupted:
                for device in self._busy:
                    self._halt(device)
            else:
                self._launch()
            self._commit()
            if not self._busy and (self._interrupted or not self._waiting):
                break
            for device, sign in self._backend.poll(_POLL_S):
                self._hear(device, sign)
            self._lose_patience()
            self._commit()
            self._observer(self.record, None)
        return self._end()

    # ---- deciding ----

    def _launch(self) -> None:
        if not self._free or not self._waiting:
            return
        for decision in self._policy.decide(self._waiting, self._free):
            task = self.record.tasks[decision.task]
            self._dequeue(task)
            self._free.remove(decision.device)
            self._busy[decision.device] = task.name
            self._note(Launched(task=task.name, attempt=task.attempt + 1, device=decision.device))
            try:
                self._backend.launch(
                    decision.device,
                    self._tasks[task.name],
                    attempt=task.attempt,
                    folder=self._folder.task(task.name),
                )
            except TaskError as error:
                self._note(Failed(task=task.name, attempt=task.attempt, step=task.step, reason=str(error)))
                self._release(decision.device)

    def _enqueue(self, task: TaskRecord) -> None:
        bisect.insort(self._waiting, waiting(task), key=lambda one: one.order)

    def _dequeue(self, task: TaskRecord) -> None:
        place = bisect.bisect_left(self._waiting, waiting(task).order, key=lambda one: one.order)
        assert self._waiting[place].name == task.name
        del self._waiting[place]

    # ---- hearing ----

    def _hear(self, device: str, sign: Any) -> None:
        name = self._busy.get(device)
        if name is None or isinstance(sign, Beat):
            return
        task = self.record.tasks[name]
        if isinstance(sign, WorkerLost):
            self._lose(device, task, sign)
            return
        if getattr(sign, "task", None) != name or sign.attempt != task.attempt:
            return  # of an attempt that is already over
        if isinstance(sign, Measured):
            self._note(sign)
            self._unconfirmed[device] = sign
        elif isinstance(sign, Began | Saved | Noticed):
            self._note(sign)
        elif isinstance(sign, Finished | Failed):
            self._note(sign)
            self._release(device)
        elif isinstance(sign, Halted):
            self._note(sign)
            self._release(device)
            self._after_halt(task)

    def _lose(self, device: str, task: TaskRecord, sign: WorkerLost) -> None:
        if task.name in self._stopping or self._interrupted:
            self._release(device)
            self._after_halt(task)
            return
        again = sign.retry and task.losses < self._retries
        reason = sign.reason
        if sign.retry and not again:
            reason += f", {task.losses + 1} times; see {self._folder.task(task.name)}/output.log"
        self._note(Lost(task=task.name, attempt=task.attempt, device=device, reason=reason, retried=again))
        self._release(device)
        if again:
            self._enqueue(task)

    def _after_halt(self, task: TaskRecord) -> None:
        """The task has left its device: for good if the user stopped it, else until the run is resumed."""
        if task.name in self._stopping:
            self._note(Stopped(task=task.name, attempt=task.attempt, step=task.saved_step))

    def _release(self, device: str) -> None:
        del self._busy[device]
        self._halting.pop(device, None)
        self._unconfirmed.pop(device, None)
        bisect.insort(self._free, device, key=self._order.__getitem__)

    # ---- stopping ----

    def _take_requests(self) -> None:
        now_s = self._backend.now_s()
        if now_s - self._asked_s < _REQUESTS_EVERY_S:
            return
        self._asked_s = now_s
        for request in self._journal.new_requests():
            if request.verb == "stop" and not request.task:
                self._interrupted = True
            elif request.verb == "stop" and request.task in self.record.tasks:
                self._stop(self.record.tasks[request.task])

    def _stop(self, task: TaskRecord) -> None:
        if task.state is TaskState.PENDING:
            self._dequeue(task)
            self._note(Stopped(task=task.name, attempt=task.attempt, step=task.saved_step))
        elif self._busy.get(task.device) == task.name:
            self._stopping.add(task.name)
            self._halt(task.device)

    def _halt(self, device: str) -> None:
        if device not in self._halting:
            self._halting[device] = self._backend.now_s() + _HALT_S
            self._backend.halt(device)

    def _lose_patience(self) -> None:
        """A task that cannot save itself in time is ended; its last checkpoint stands."""
        now_s = self._backend.now_s()
        for device, until_s in list(self._halting.items()):
            if now_s > until_s:
                self._backend.kill(device)
                task = self.record.tasks[self._busy[device]]
                self._release(device)
                self._after_halt(task)

    def _end(self) -> RunState:
        states = {task.state for task in self.record.tasks.values()}
        if states == {TaskState.FINISHED}:
            state = RunState.FINISHED
        elif all(one.ended for one in states):
            state = RunState.INCOMPLETE
        else:
            state = RunState.INTERRUPTED
        self._note(RunEnded(state=state.value))
        self._commit()
        return state

    # ---- the journal ----

    def _note(self, event: Event) -> None:
        time_s = self._backend.now_s()
        self.record.apply(event, time_s)
        self._journal.append(event, time_s=time_s)
        self._observer(self.record, event)

    def _commit(self) -> None:
        self._journal.commit()
        for device, measured in self._unconfirmed.items():
            self._backend.confirm(device, measured)
        self._unconfirmed.clear()
