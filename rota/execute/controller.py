"""The only one that acts: launches what the policy decides, journals what happens, and answers what goes wrong."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rota.errors import TaskError
from rota.execute.backends.base import Backend, DeviceCame, DeviceGone, WorkerLost
from rota.execute.events import Event, Launched, Lost, Requeued, RunEnded, RunNoted, Stopped
from rota.execute.policy import Launch, LongestFirst, OpenPool, Policy, Switch, View, Waiting, waiting
from rota.execute.record import RunRecord, TaskRecord
from rota.execute.states import RunState, TaskState
from rota.runtime.messages import Balanced, Beat, Began, Failed, Finished, Halted, Left, Measured, Noticed, Saved
from rota.store.journal import Journal
from rota.store.run_folder import RunFolder, output_file
from rota.sweep import Sweep
from rota.techniques import POOL, travelling

_POLL_S = 0.25
_REQUESTS_EVERY_S = 0.5
# What a task gets to save itself. The whole run must be gone 5 s after Ctrl-C.
_HALT_S = 3.5
# A switch is worth waiting for.
_SWITCH_S = 120.0

# How long the others of a gang may take to notice that their task has ended.
_LEAVE_S = 5.0
_LEAVE_INTERRUPTED_S = 1.0
# How long a process's own end may take to become known after another has noticed that it is gone.
_SUSPECT_S = 4.0

Observer = Callable[[RunRecord, Event | Beat | None], None]
"""Called after each event with the record that now holds it, and with None when time has passed.

What a task is doing now comes as the beats of the worker that leads it; the record does not hold these.
"""


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """An attempt at a task, as a device has it."""

    task: str
    attempt: int


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
        widths: Mapping[str, int] | None = None,
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
        self._in_doubt: set[str] = set()
        """devices that cannot be reached now"""
        self._widths = widths or {}
        """task -> how many devices it gets, if more than one"""
        self._busy: dict[str, _Seat] = {}
        """device -> what it works on"""
        self._pools: dict[str, tuple[str, ...]] = {}
        """a place in a pool -> the devices that its tasks share"""
        self._patience: dict[str, float] = {}
        """device -> until when it may take to save its task, or to leave it"""
        self._over: set[_Seat] = set()
        """attempts that have ended while some of their devices have yet to leave"""
        self._suspected: dict[_Seat, tuple[float, str]] = {}
        """attempts in which a process lost another: until when the other's own end is waited for, and the symptom"""
        self._stopping: set[str] = set()
        """tasks that the user stopped"""
        self._switching: dict[str, tuple[str, float]] = {}
        """tasks that leave their devices to go on in another way: why, and since when"""
        self._interrupted = False
        self._asked_s = float("-inf")
        self._waiting: list[Waiting] = []
        for task in record.tasks.values():
            if task.state is TaskState.PENDING:
                self._enqueue(task)
            elif task.state is TaskState.RUNNING:  # on workers of the controller before this one
                for device in task.devices:
                    self._free.remove(device)
                    self._busy[device] = _Seat(task=task.name, attempt=task.attempt)

    def follow(self, policy: Policy) -> None:
        """Let a policy decide from now on."""
        self._policy = policy

    def leaving(self) -> bool:
        """Whether the user has asked to stop; for what takes its time before the run."""
        self._folder.check_there()
        self._take_requests()
        return self._interrupted

    def note(self, text: str) -> None:
        """Journal something about the whole run."""
        self._note(RunNoted(text=text))
        self._commit()

    def interrupt(self) -> None:
        """Save everything and leave, as soon as possible. Safe to call from a signal handler."""
        self._interrupted = True

    def run(self) -> RunState:
        """Work until nothing is left to do."""
        while True:
            self._folder.check_there()
            self._take_requests()
            if self._interrupted:
                for seat in set(self._busy.values()) - self._over:
                    self._halt(self.record.tasks[seat.task])
            else:
                self._decide()
            self._commit()
            if not self._busy and not self._suspected and (self._interrupted or not self._waiting):
                break
            for device, sign in self._backend.poll(_POLL_S):
                self._hear(device, sign)
            self._lose_patience()
            self._commit()
            self._observer(self.record, None)
        return self._end()

    # ---- deciding ----

    def _decide(self) -> None:
        view = View(
            record=self.record,
            waiting=self._waiting,
            free=self._free,
            now_s=self._backend.now_s(),
            devices=list(self._order),
            in_doubt=len(self._in_doubt),
        )
        for decision in self._policy.decide(view):
            if isinstance(decision, Launch):
                self._launch(decision)
            elif isinstance(decision, OpenPool):
                self._open_pool(decision)
            elif isinstance(decision, Switch):
                self._switch(self.record.tasks[decision.task], decision.reason)
            else:
                self._note(RunNoted(text=decision.text))

    def _launch(self, decision: Launch) -> None:
        task = self.record.tasks[decision.task]
        self._dequeue(task)
        self._note(
            Launched(task=task.name, attempt=task.attempt + 1, devices=decision.devices, strategy=decision.strategy)
        )
        for device in decision.devices:
            self._free.remove(device)
            self._busy[device] = _Seat(task=task.name, attempt=task.attempt)
        wanted = self._tasks[task.name]
        try:
            self._backend.launch(
                decision.devices,
                replace(wanted, strategy=travelling(decision.strategy)) if decision.strategy else wanted,
                attempt=task.attempt,
                folder=self._folder.task(task.name),
                storage=f"{self.record.storage}/{task.name}" if self.record.storage else "",
            )
        except TaskError as error:
            self._note(Failed(task=task.name, attempt=task.attempt, step=task.step, reason=str(error)))
            for device in decision.devices:
                self._release(device)

    def _open_pool(self, decision: OpenPool) -> None:
        """Each task has a place of its own, which is like a device as long as the pool lasts."""
        places = self._backend.open_pool(decision.devices, len(decision.tasks))
        for device in decision.devices:
            self._free.remove(device)
        self._pools |= dict.fromkeys(places, decision.devices)
        for task, place in zip(decision.tasks, places, strict=True):
            self._free.append(place)
            self._launch(Launch(task=task, devices=(place,), strategy=POOL))

    def _switch(self, task: TaskRecord, reason: str) -> None:
        if task.state is TaskState.RUNNING and task.name not in self._stopping and task.name not in self._switching:
            self._switching[task.name] = (reason, self._backend.now_s())
            self._halt(task, patience_s=_SWITCH_S)

    def _enqueue(self, task: TaskRecord) -> None:
        one = waiting(task, self._widths.get(task.name, 1))
        bisect.insort(self._waiting, one, key=lambda one: one.order)

    def _dequeue(self, task: TaskRecord) -> None:
        place = bisect.bisect_left(self._waiting, waiting(task).order, key=lambda one: one.order)
        assert self._waiting[place].name == task.name
        del self._waiting[place]

    # ---- hearing ----

    def _hear(self, device: str, sign: Any) -> None:
        if isinstance(sign, DeviceGone):
            if device not in self._in_doubt:
                self._note(RunNoted(text=f"{device} is gone ({sign.reason})"))
            (self._in_doubt.add if sign.in_doubt else self._in_doubt.discard)(device)
            self._order.pop(device, None)
            if device in self._free:
                self._free.remove(device)
            return
        if isinstance(sign, DeviceCame):
            self._in_doubt.discard(device)
            self._note(RunNoted(text=f"{device} has come"))
            self._order[device] = max(self._order.values(), default=-1) + 1
            self._free.append(device)
            return
        seat = self._busy.get(device)
        if seat is None:
            return
        task = self.record.tasks[seat.task]
        if isinstance(sign, Beat):
            if sign.task == task.name and device in task.devices[:1] and seat not in self._over:
                self._observer(self.record, sign)
            return
        if isinstance(sign, WorkerLost):
            if seat not in self._over:
                self._lose(device, task, sign)
            self._leave(device, seat)
            return
        if getattr(sign, "task", None) != seat.task or sign.attempt != seat.attempt:
            return  # of an attempt that is already over
        if seat in self._over:
            if isinstance(sign, Finished | Failed | Halted | Left):
                self._release(device)
        elif isinstance(sign, Began) and task.began_s is not None:
            pass  # told again to this controller, and the one before had noted it
        elif isinstance(sign, Began | Measured | Saved | Noticed | Balanced):
            self._note(sign)
        elif isinstance(sign, Failed) and sign.way and (rest := self._policy.another_way(task)):
            how = task.strategy or "its strategy"
            reason = f"{sign.reason}; {how} is left out, and it goes on with {rest}"
            self._note(Requeued(task=task.name, attempt=task.attempt, reason=reason))
            self._enqueue(task)
            self._leave(device, seat)
        elif isinstance(sign, Finished | Failed):
            self._note(sign)
            self._leave(device, seat)
        elif isinstance(sign, Halted):
            self._note(sign)
            self._after_halt(task)
            self._leave(device, seat)
        elif isinstance(sign, Left):
            if sign.peer_gone:
                self._suspected.setdefault(seat, (self._backend.now_s() + _SUSPECT_S, sign.reason))
            self._release(device)

    def _leave(self, device: str, seat: _Seat) -> None:
        """A device is done with an attempt that has ended; the others of its gang have a moment to follow."""
        self._over.add(seat)
        self._suspected.pop(seat, None)
        self._release(device)
        until_s = self._backend.now_s() + (_LEAVE_INTERRUPTED_S if self._interrupted else _LEAVE_S)
        for other, its in self._busy.items():
            if its == seat:
                self._patience[other] = until_s

    def _lose(self, device: str, task: TaskRecord, sign: WorkerLost) -> None:
        if task.name in self._stopping or self._interrupted:
            self._after_halt(task)
            return
        self._switching.pop(task.name, None)
        again = sign.retry and task.losses < self._retries
        reason = sign.reason
        if sign.retry and not again:
            reason += f", {task.losses + 1} times"
            output = self._folder.task(task.name) / output_file(task.devices.index(device))
            if output.exists():  # a worker that dies before it begins the task leaves none
                reason += f"; see {output}"
        self._note(Lost(task=task.name, attempt=task.attempt, device=device, reason=reason, retried=again))
        if again:
            self._enqueue(task)

    def _after_halt(self, task: TaskRecord) -> None:
        """The task has left its devices: for good if the user stopped it, else until it, or the run, goes on."""
        switching = self._switching.pop(task.name, None)
        if task.name in self._stopping:
            self._note(Stopped(task=task.name, attempt=task.attempt, step=task.saved_step))
        elif switching is not None and not self._interrupted:
            reason, since_s = switching
            save_s = self._backend.now_s() - since_s
            self._note(Requeued(task=task.name, attempt=task.attempt, reason=reason, save_s=save_s))
            self._enqueue(task)

    def _release(self, device: str) -> None:
        seat = self._busy.pop(device)
        if seat not in self._busy.values() and seat not in self._suspected:
            self._over.discard(seat)
        self._patience.pop(device, None)
        freed: tuple[str, ...] = (device,)
        if device in self._pools:
            freed = self._pools.pop(device)
            self._backend.close_place(device)
            if freed in self._pools.values():
                return  # others are still there
        for one in freed:
            if one in self._order:  # not gone meanwhile
                bisect.insort(self._free, one, key=self._order.__getitem__)

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
        elif task.state is TaskState.RUNNING:
            self._stopping.add(task.name)
            self._halt(task)

    def _halt(self, task: TaskRecord, *, patience_s: float = _HALT_S) -> None:
        leader = task.devices[0]
        until_s = self._backend.now_s() + patience_s
        if leader not in self._patience:
            self._backend.halt(leader)
        self._patience[leader] = min(until_s, self._patience.get(leader, until_s))

    def _lose_patience(self) -> None:
        """What does not leave in time is ended; the last checkpoint stands."""
        now_s = self._backend.now_s()
        for seat, (until_s, reason) in list(self._suspected.items()):
            if now_s > until_s:  # nobody came forward: the process may have been too slow to die
                task = self.record.tasks[seat.task]
                del self._suspected[seat]
                if seat not in self._over and (task.state, task.attempt) == (TaskState.RUNNING, seat.attempt):
                    self._lose(task.devices[0], task, WorkerLost(reason=reason, retry=True))
                    self._over.add(seat)
                    self._end_all(seat)
        for device, until_s in list(self._patience.items()):
            if now_s > until_s and device in self._busy:
                seat = self._busy[device]
                halting = seat not in self._over
                self._over.add(seat)
                self._end_all(seat)
                if halting:
                    self._after_halt(self.record.tasks[seat.task])

    def _end_all(self, seat: _Seat) -> None:
        for device in [one for one, its in self._busy.items() if its == seat]:
            self._backend.kill(device)
            self._release(device)

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
        # What an attempt says after its end is not in the journal.
        self._backend.stored([device for device, seat in self._busy.items() if seat not in self._over])
