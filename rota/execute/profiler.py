"""Finds out what each task costs in each way that it can run, on the devices that it will run on, in little time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rota.cluster.device import Device
from rota.execute.backends.base import Sign, WorkerLost
from rota.profile.estimate import WORTH_S, Estimate
from rota.profile.likeness import code_key
from rota.profile.store import EstimateStore, Known
from rota.profile.worth import Alike, Trial, next_trial, worth_searching
from rota.runtime.messages import Beat, Failed, Left, Looked, Tried
from rota.schedule.problem import Node, Objective
from rota.task import Task
from rota.techniques import travelling

_POLL_S = 0.25
_SHARE = 0.04
"""Of what the tasks take in all: so much may be spent on trials."""
_LEAST_S = 5.0
_TRIAL_STEPS = 3
_LONG_S = 10.0
"""What a worker does for so long is told."""


class Prober(Protocol):
    """What a profile needs of the place where tasks run."""

    def look(
        self,
        device: str,
        task: Task,
        *,
        number: int,
        folder: Path,
        counts: Sequence[int],
        known: Path,
        alike: int,
        search: bool,
    ) -> None:
        """Have a worker look at a task; it reports Looked or Failed."""
        ...

    def try_out(self, devices: Sequence[str], task: Task, *, number: int, folder: Path) -> None:
        """Have workers time a task together; the first reports Tried or Failed."""
        ...

    def kill(self, device: str) -> None:
        """End the device's worker at once."""
        ...

    def poll(self, timeout_s: float) -> list[Sign]:
        """What was heard."""
        ...

    def now_s(self) -> float:
        """The time."""
        ...


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What is known of the tasks before they run."""

    estimates: Mapping[str, tuple[Estimate, ...]]
    """task -> the ways in which it can run; a task of which nothing could be found out is not there"""
    steps: Mapping[str, int]
    classes: Mapping[str, str]
    """task -> the first one that costs the same"""
    failures: Mapping[str, str]
    """task -> why nothing is known of it"""
    unfit: Mapping[str, str]
    """task -> why there is no way to run it on these devices"""
    notices: tuple[tuple[str, str], ...]
    """(task, text)"""
    spent_s: float
    looked: int
    """How many classes of tasks were looked at, and not known from earlier runs."""
    tried: int
    """How many ways were timed on several devices."""


Progress = Callable[[str, int, int], None]
"""(what is being done, how many are done, of how many)"""


@dataclass(kw_only=True)
class _Class:
    name: str
    tasks: list[Task]
    counts: tuple[int, ...]
    signature: str = ""
    known: bool = False
    changed: bool = False
    looked: tuple[int, ...] = ()
    steps: int = 0
    estimates: tuple[Estimate, ...] = ()
    failure: str = ""
    unfit: str = ""
    notices: list[str] = field(default_factory=list)

    def alone_s(self) -> float:
        """What one device takes for one of them; nothing if it does not do."""
        alone = [one.step_s for one in self.estimates if one.devices == 1]
        return min(alone) * self.steps if alone else 0.0

    def alike(self, *, instead_of: _Class | None = None) -> Alike:
        """As `worth` sees it, or another one of which nothing is known yet."""
        one = instead_of or self
        return Alike(
            name=one.name, steps={task.name: self.steps_of(task) for task in one.tasks}, estimates=self.estimates
        )

    def steps_of(self, task: Task) -> int:
        first = self.tasks[0]
        if task.steps is not None:
            return task.steps
        if task.epochs is not None and first.epochs is not None:
            return max(1, self.steps * task.epochs // first.epochs)
        return self.steps


class Profiler:
    """Asks workers, one class of equal tasks after another."""

    def __init__(
        self,
        *,
        backend: Prober,
        devices: Sequence[Device],
        nodes: Sequence[Node],
        folder: Path,
        store: EstimateStore,
        objective: Objective = "makespan",
        thorough: bool = False,
        worth_s: float = WORTH_S,
        progress: Progress = lambda what, done, total: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._backend = backend
        self._free = [device.name for device in devices]
        self._order = {name: place for place, name in enumerate(self._free)}
        self._nodes = nodes
        self._folder = folder
        self._store = store
        self._objective: Objective = objective
        self._thorough = thorough
        self._worth_s = worth_s
        self._progress = progress
        self._place = (0, 0)
        """How many were done, of how many, when that was last told."""
        self._told_s = backend.now_s()
        self._interrupted = interrupted
        self._number = 0
        self._busy: dict[str, tuple[int, tuple[str, ...]]] = {}
        """device -> (what it was asked, and with which others)"""
        self._tried = 0
        self._classes: list[_Class] = []
        self._spent_s = 0.0

    def run(self, tasks: Sequence[Task], counts: Callable[[Task], tuple[int, ...]]) -> Profile:
        """Look at each kind of task, and then try what matters on several devices."""
        begun_s = self._backend.now_s()
        classes = self._classes = _grouped(tasks, counts)
        self._look_at(classes)
        self._try_out([one for one in classes if not one.known], classes)
        self._spent_s += self._backend.now_s() - begun_s
        return self._profile()

    def try_chosen(self, chosen: Collection[tuple[str, str, int]]) -> Profile | None:
        """Time the ways (task, label, devices) that a schedule rests on and nobody has timed; None without any.

        A way that could not save what it takes to time it is not gone.
        """
        begun_s = self._backend.now_s()
        trials = {
            Trial(alike=one.name, estimate=estimate)
            for one in self._classes
            for task in one.tasks
            for estimate in one.estimates
            if not estimate.measured and (task.name, estimate.label, estimate.devices) in chosen
        }
        by_name = {one.name: one for one in self._classes}
        for trial in sorted(trials, key=lambda trial: (trial.alike, trial.estimate.label, trial.estimate.devices)):
            if self._interrupted() or trial.estimate.devices > len(self._free):
                return None
            one = by_name[trial.alike]
            if _trial_s(one, trial) > _most_saved_s(one, trial):
                one.estimates = tuple(estimate for estimate in one.estimates if estimate != trial.estimate)
                continue
            number = self._start(one, trial)
            answers: list[Any] = []
            while not answers and not self._interrupted():
                answers = [sign for its, sign in self._hear() if its == number]
            for sign in answers[:1]:
                _take_trial(by_name[trial.alike], trial, sign)
        self._spent_s += self._backend.now_s() - begun_s
        return self._profile() if trials else None

    def _profile(self) -> Profile:
        """What is known now; it is kept for later runs, too."""
        classes = self._classes
        self._keep(classes)
        return Profile(
            estimates={task.name: one.estimates for one in classes for task in one.tasks if one.estimates},
            steps={task.name: one.steps_of(task) for one in classes for task in one.tasks if one.steps},
            classes={task.name: one.name for one in classes for task in one.tasks},
            failures={task.name: one.failure for one in classes for task in one.tasks if one.failure},
            unfit={task.name: one.unfit for one in classes for task in one.tasks if one.unfit},
            notices=tuple((one.name, text) for one in classes for text in one.notices),
            spent_s=self._spent_s,
            looked=sum(not one.known for one in classes),
            tried=self._tried,
        )

    def _keep(self, classes: Sequence[_Class]) -> None:
        """For later runs, and for those who look again."""
        self._store.add(
            {
                one.signature: Known(counts=one.looked, estimates=one.estimates)
                for one in classes
                if one.changed and one.estimates
            }
        )

    # ---- looking ----

    def _look_at(self, classes: Sequence[_Class]) -> None:
        """At each on one device, and at those for which several may do better.

        A device that finds nothing else to do searches by what is known so far, while others still look.
        """
        waiting = list(classes)
        asked: dict[int, _Class] = {}
        searched: set[str] = set()
        done = 0
        while not self._interrupted():
            while self._free:
                one = waiting.pop(0) if waiting else self._worth_searching(classes, besides=searched)
                if one is None:
                    break
                search = one.steps > 0
                if search:
                    searched.add(one.name)
                self._say(f"looking at {one.name}", done, len(classes) + len(searched))
                self._ask(one, asked, search=search)
            if not asked:
                break
            for number, sign in self._hear():
                found = asked.pop(number, None)
                if found is not None:
                    done += 1
                    _take_sight(found, sign)
                    self._keep([found])
        self._say("looking", done, done)

    def _ask(self, one: _Class, asked: dict[int, _Class], *, search: bool) -> None:
        """Have a device look at a class."""
        device = self._free[0]
        number = self._take((device,))
        try:
            self._backend.look(
                device,
                one.tasks[0],
                number=number,
                folder=self._folder / str(number),
                counts=one.counts,
                known=self._store.path,
                alike=len(one.tasks),
                search=search,
            )
            asked[number] = one
        except Exception as error:  # it cannot be sent; its own launch will say so
            one.failure = str(error)
            self._release(device)

    def _worth_searching(self, classes: Sequence[_Class], *, besides: Collection[str]) -> _Class | None:
        """One that a device would take long for, and that may do better on several.

        Those that are still looked at are thought to be like the others.
        """
        known = [one for one in classes if one.estimates]
        open_ = {one.name: one for one in known if set(one.counts) - set(one.looked) and one.alone_s() > self._worth_s}
        ours = [one for name, one in open_.items() if name not in besides]
        if not ours or self._thorough:
            return ours[0] if ours else None
        middle = sorted(known, key=_Class.alone_s)[len(known) // 2]
        unknown = [one for one in classes if not one.estimates and not one.failure]
        found = worth_searching(
            [one.alike() for one in known] + [middle.alike(instead_of=one) for one in unknown],
            self._nodes,
            {one.name: one.counts if one.name in open_ else () for one in classes},
            objective=self._objective,
        )
        return next((open_[name] for name in found if name in open_ and name not in besides), None)

    # ---- trying ----

    def _try_out(self, new: Sequence[_Class], classes: Sequence[_Class]) -> None:
        """What was known before has been tried before, or was not worth it."""
        under_way: dict[int, tuple[_Class, Trial]] = {}
        too_long: list[Trial] = []
        by_name = {one.name: one for one in new}
        until_s = self._backend.now_s() + self._budget_s(classes)
        while new and not self._interrupted():
            trial = None
            if self._backend.now_s() < until_s:
                trial = next_trial(
                    [one.alike() for one in classes if one.estimates],
                    self._nodes,
                    objective=self._objective,
                    besides=[*too_long, *(trial for _, trial in under_way.values())],
                    among=by_name,
                )
                if trial is not None and self._backend.now_s() + _trial_s(by_name[trial.alike], trial) > until_s:
                    too_long.append(trial)  # it would take longer than it is worth
                    continue
            if trial is not None and trial.estimate.devices <= len(self._free):
                one = by_name[trial.alike]
                number = self._start(one, trial)
                under_way[number] = (one, trial)
                continue
            if not under_way:
                break
            for number, sign in self._hear():
                if number in under_way:
                    _take_trial(*under_way.pop(number), sign)
        for device in list(self._busy):
            self._backend.kill(device)

    def _start(self, one: _Class, trial: Trial) -> int:
        estimate = trial.estimate
        self._tried += 1
        self._say(f"trying {one.name} as {estimate.label}", self._tried - 1, self._tried)
        devices = tuple(self._free[: estimate.devices])
        number = self._take(devices)
        task = one.tasks[0]
        if task.strategy == "auto":
            task = replace(task, strategy=travelling(estimate.label))
        self._backend.try_out(devices, task, number=number, folder=self._folder / str(number))
        return number

    def _budget_s(self, classes: Sequence[_Class]) -> float:
        total_s = sum(
            one.steps_of(task) * min(estimate.step_s for estimate in one.estimates)
            for one in classes
            for task in one.tasks
            if one.estimates
        )
        return max(_LEAST_S, _SHARE * total_s / max(1, len(self._order)))

    def _say(self, what: str, done: int, total: int) -> None:
        self._place, self._told_s = (done, total), self._backend.now_s()
        self._progress(what, done, total)

    def _say_long(self, beat: Beat) -> None:
        """What takes so long that somebody may ask, every few seconds."""
        if beat.phase and min(beat.phase_s, self._backend.now_s() - self._told_s) >= _LONG_S:
            self._say(f"{beat.task}: {beat.phase}, for {beat.phase_s:.0f} s", *self._place)

    # ---- devices ----

    def _take(self, devices: tuple[str, ...]) -> int:
        self._number += 1
        for device in devices:
            self._free.remove(device)
            self._busy[device] = (self._number, devices)
        return self._number

    def _release(self, device: str) -> None:
        if self._busy.pop(device, None) is not None:
            self._free.append(device)
            self._free.sort(key=self._order.__getitem__)

    def _hear(self) -> list[tuple[int, Any]]:
        """(number, answer) of what has ended; a device whose gang has failed is ended with it."""
        answers: list[tuple[int, Any]] = []
        for device, sign in self._backend.poll(_POLL_S):
            number, others = self._busy.get(device, (0, ()))
            if isinstance(sign, Beat) and number and device == others[0]:
                self._say_long(sign)
            if isinstance(sign, WorkerLost):
                if not number:
                    continue
                answers.append((number, sign))
                self._release(device)
                for other in others:
                    if self._busy.get(other, (0,))[0] == number:
                        self._backend.kill(other)
                        self._release(other)
            elif isinstance(sign, Looked | Tried | Failed | Left) and sign.attempt == number:
                self._release(device)
                if not isinstance(sign, Left):
                    answers.append((number, sign))
        return answers


def _grouped(tasks: Sequence[Task], counts: Callable[[Task], tuple[int, ...]]) -> list[_Class]:
    found: dict[Any, _Class] = {}
    for task in tasks:
        wanted = counts(task)
        group = (code_key(task, width=task.devices), wanted)
        one = found.get(group)
        if one is None:
            found[group] = _Class(name=task.name, tasks=[task], counts=wanted)
        else:
            one.tasks.append(task)
    return list(found.values())


def _take_sight(one: _Class, sign: Any) -> None:
    if isinstance(sign, Looked):
        one.signature, one.known, one.steps = sign.signature, sign.known and not one.changed, sign.total_steps
        one.estimates = tuple(Estimate.from_json(plain) for plain in sign.estimates)
        one.changed, one.looked = one.changed or not sign.known, sign.counts
        one.notices += sign.notices
        one.unfit = "" if one.estimates else "; ".join(sign.notices)
        one.failure = f"it fits nowhere: {one.unfit}" if one.unfit else ""
    else:
        one.failure = sign.reason


def _most_saved_s(one: _Class, trial: Trial) -> float:
    """No schedule is better by more than that because tasks go a way that was not timed."""
    others = [estimate.step_s for estimate in one.estimates if estimate.measured]
    return sum(map(one.steps_of, one.tasks)) * max(0.0, min(others) - trial.estimate.step_s) if others else math.inf


def _trial_s(one: _Class, trial: Trial) -> float:
    """About what it takes to time a way."""
    start_s = max((estimate.start_s for estimate in one.estimates), default=0.0)
    return start_s + _TRIAL_STEPS * trial.estimate.step_s


def _take_trial(one: _Class, trial: Trial, sign: Any) -> None:
    old = trial.estimate
    if isinstance(sign, Tried):
        spread = max(sign.spread / 2, 0.02)
        new = replace(old, step_s=sign.step_s, spread=spread, start_s=sign.start_s, measured=True)
        one.estimates = tuple(new if other == old else other for other in one.estimates)
    else:
        one.estimates = tuple(other for other in one.estimates if other != old)
        one.notices.append(f"{old.label} on {old.devices} devices is left out: {sign.reason}")
    one.changed = True
