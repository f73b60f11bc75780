"""The policy that follows a schedule, corrects it by what is seen, and changes it where that pays."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from rota.execute.policy import Decision, Launch, Switch, Tell, View
from rota.execute.record import TaskRecord
from rota.execute.states import TaskState
from rota.profile.estimate import Estimate
from rota.report.format import duration
from rota.schedule.problem import Node, Objective, Problem, Schedule, value_of
from rota.schedule.replan import Intent, Left, Verdict, continued, corrected, intents_of, judge, problem_of
from rota.schedule.solve import Solved

_MOVED = 0.1
"""By so much of itself an estimate must have been wrong to think again."""
_SEEN_STEPS = 3
"""Steps before a live time counts."""
_SOON_STEPS = 20
"""A task that has begun is waited for as long as so many of its steps should take,"""
_MOMENT = 0.02
"""or this part of the time that the run has taken."""
_SHARE, _MOST_S = 0.01, 10.0
"""Of the whole run: so long may solvers think in the background, on processors that the tasks use; and at one time."""
_EVERY_S, _EVERY_SHARE = 2.0, 0.01
"""Plans are not made oftener, the second of the time that the run has taken."""
_ENOUGH, _RECENT = 3, 5
"""After so many times that were told of a way its estimate is judged; the median of the last so many counts."""
SWITCH_S = 3.0
"""What leaving devices takes, until it was seen."""


class Solver(Protocol):
    """Finds schedules while others work."""

    def ask(self, problem: Problem, *, hints: Sequence[Schedule], seconds: float) -> None:
        """Begin; whatever was asked before is forgotten."""
        ...

    def answer(self) -> Solved | None:
        """The schedule, once it is there."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Scheduled:
    """Launches tasks as planned; tasks of which nothing is known go first, on as many devices as they want."""

    def __init__(
        self,
        *,
        estimates: Mapping[str, tuple[Estimate, ...]],
        classes: Mapping[str, str],
        nodes: Sequence[Node],
        solver: Solver,
        objective: Objective = "makespan",
        deadlines: Mapping[str, float] | None = None,
        own: Collection[str] = (),
        aside: Collection[str] = (),
        intents: Sequence[Intent] = (),
        replan: bool = True,
        improve: bool = False,
    ) -> None:
        """`own` are tasks whose strategy is the user's choice, `aside` those of which another policy takes care;
        deadlines are times of the backend's clock.

        With `improve`, a better schedule is searched for at once; without `replan`, the first one is kept to its end.
        """
        self._estimates = dict(estimates)
        self._classes = classes
        self._nodes = nodes
        self._solver = solver
        self._objective: Objective = objective
        self._deadlines = dict(deadlines or {})
        self._own = frozenset(own)
        self._aside = aside
        self._intents: dict[str, Intent] = {one.task: one for one in intents}
        self._replan = replan
        self._asked: Problem | None = None
        self._asked_s = float("-inf")
        self._used: dict[tuple[str, str, int], float] = {}
        """(class, label, devices) -> the step that the present plan assumes"""
        self._wrong: dict[tuple[str, str, int], float] = {}
        """the same -> by how much its estimate was wrong when it was first seen"""
        self._first: dict[tuple[str, str, int], float] = {}
        """the same -> what it was thought to take"""
        self._recent: dict[tuple[str, str, int], collections.deque[float]] = {}
        """the same -> what a step took lately"""
        self._told: dict[str, tuple[int, int]] = {}
        """task -> the attempt and step of what was last taken note of"""
        self._thought_s = 0.0
        """How long solvers have thought."""
        self._thinking_s = 0.0
        """How long one may, now."""
        self._ended = -1
        self._due = improve or not intents
        self._leaving: dict[str, tuple[int, float]] = {}
        """task -> the attempt that is to leave its devices, and when it was told so"""
        self._switch_s = SWITCH_S
        self.switches = 0
        self.plans = 0

    def decide(self, view: View) -> Sequence[Decision]:
        """Look at what has changed, think again if it matters, and launch what is due."""
        decisions: list[Decision] = []
        self._see_devices(view)
        if self._replan or self._due:
            self._observe(view)
            decisions += self._hear(view)
            self._ask(view)
        decisions += self._launches(view)
        return decisions

    # ---- seeing ----

    def _observe(self, view: View) -> None:
        ended = 0
        for task in view.record.tasks.values():
            if task.state is TaskState.RUNNING:
                self._see(task)
            elif task.state.ended:
                ended += 1
            if task.name in self._leaving:
                self._see_leaving(task, view.now_s)
        if ended != self._ended:
            self._due = self._due or self._ended >= 0
            self._ended = ended

    def _see_devices(self, view: View) -> None:
        """Devices may go, with what was planned for them, and come."""
        known = {device for node in self._nodes for device in node.devices}
        there = set(view.devices)
        if not there or known == there:
            return
        if view.in_doubt and there < known:
            return  # what was planned for them waits: it is known in a moment whether they are gone
        self._nodes = _with_devices(self._nodes, sorted(there))
        self._intents = {name: one for name, one in self._intents.items() if there.issuperset(one.devices)}
        self._asked = None  # the answer would be to another question
        self._due = True

    def _see_leaving(self, task: TaskRecord, now_s: float) -> None:
        attempt, told_s = self._leaving[task.name]
        if task.state is not TaskState.RUNNING or task.attempt != attempt:
            del self._leaving[task.name]
            if not task.state.ended:
                self._switch_s = (self._switch_s + now_s - told_s) / 2

    def _see(self, task: TaskRecord) -> None:
        if not task.step_s or task.step - task.began_step < _SEEN_STEPS:
            return
        label, count = self._way(task), len(task.devices)
        kind = self._classes.get(task.name, task.name)
        known = self._estimates.get(task.name, ())
        way = next((one for one in known if one.label == label and one.devices == count), None)
        if way is None:
            live = Estimate(
                label=label,
                kind=self._nodes[0].kind,
                devices=count,
                step_s=task.step_s,
                spread=0.05,
                memory_bytes=0,
                measured=True,
            )
            self._estimates[task.name] = (*known, live)
            self._due = True
            return
        key = (kind, label, count)
        live_s = self._recently(key, task)
        believed_s = self._used.setdefault(key, way.step_s)
        first_s = self._first.setdefault(key, way.step_s)
        if len(self._recent[key]) >= _ENOUGH:  # the first steps of a task may take many times as long as others
            self._wrong.setdefault(key, abs(math.log(live_s / first_s)))
        if abs(live_s / believed_s - 1) <= _MOVED:
            return
        self._used[key] = live_s
        self._due = True
        for name, estimates in self._estimates.items():
            if self._classes.get(name, name) == kind:
                self._estimates[name] = corrected(estimates, label=label, devices=count, live_s=live_s)

    def _recently(self, key: tuple[str, str, int], task: TaskRecord) -> float:
        """What a step of a way takes, whatever befell a single one."""
        assert task.step_s is not None
        recent = self._recent.setdefault(key, collections.deque(maxlen=_RECENT))
        if self._told.get(task.name) != (task.attempt, task.step):
            self._told[task.name] = (task.attempt, task.step)
            recent.append(task.step_s)
        return statistics.median(recent)

    def _way(self, task: TaskRecord) -> str:
        """How a task runs, by the name that its estimates have for it."""
        if task.strategy:
            return task.strategy
        count = len(task.devices)
        known = [one.label for one in self._estimates.get(task.name, ()) if one.devices == count]
        return known[0] if known else "its own"

    # ---- thinking ----

    def _ask(self, view: View) -> None:
        elapsed_s = view.now_s - view.record.begin_s
        every_s = max(_EVERY_S, _EVERY_SHARE * elapsed_s)
        if not self._due or self._asked is not None or self._leaving or view.now_s - self._asked_s < every_s:
            return
        left = list(self._remaining(view))
        if self._intents and self._soon(view):
            return
        held = [device for one in left for device in one.devices]
        if len(held) > len(set(held)):
            return  # a gang is ending: a device that it has left is in use again before its last process has told
        self._due, self._asked_s = False, view.now_s
        if not left:
            return
        problem = problem_of(
            left,
            self._nodes,
            objective=self._objective,
            deadlines={task: at_s - view.now_s for task, at_s in self._deadlines.items()},
        )
        present = continued(problem, list(self._intents.values()))
        self._thinking_s = _MOST_S
        if present is not None:
            allowed_s = _SHARE * (elapsed_s + value_of(problem, present).makespan_s) - self._thought_s
            self._thinking_s = max(0.0, min(_MOST_S, allowed_s))
        self._asked = problem
        self._solver.ask(problem, hints=() if present is None else (present,), seconds=self._thinking_s)

    def _soon(self, view: View) -> bool:
        """Whether more will be known in a moment, of tasks that have only just begun."""
        for task in view.record.tasks.values():
            if task.state is not TaskState.RUNNING or task.step_s is not None or not task.spans:
                continue
            if any(one.label == self._way(task) for one in self._estimates.get(task.name, ())):
                patience_s = max(_EVERY_S, _MOMENT * (view.now_s - view.record.begin_s))
                if view.now_s - task.spans[-1].begin_s < max(patience_s, _SOON_STEPS * self._expected_s(task)):
                    return True
        return False

    def _expected_s(self, task: TaskRecord) -> float:
        """What a step of a task is thought to take."""
        ways = [one for one in self._estimates[task.name] if one.label == self._way(task)]
        return ways[0].step_s + ways[0].start_s / _SOON_STEPS

    def _remaining(self, view: View) -> Iterator[Left]:
        for task in view.record.tasks.values():
            estimates = self._estimates.get(task.name, ())
            if task.state.ended or not estimates or task.total_steps is None or task.name in self._aside:
                continue
            running = task.state is TaskState.RUNNING
            yield Left(
                task=task.name,
                steps=float(task.total_steps - (task.step if running else task.saved_step)),
                estimates=estimates,
                label=self._way(task) if running else "",
                devices=task.devices if running else (),
                switch_s=self._switch_s,
            )

    def _hear(self, view: View) -> Iterator[Decision]:
        if self._asked is None:
            return
        solved = self._solver.answer()
        if solved is None:
            return
        problem, self._asked = self._asked, None
        if self._thinking_s > 0:
            self._thought_s += view.now_s - self._asked_s
        running = {task.name for task in view.record.tasks.values() if task.state is TaskState.RUNNING}
        held = {option.tasks[0] for option in problem.options if option.held}
        if not held <= running or any(task not in held for task in running & set(problem.tasks)):
            self._due = True  # something ended or began meanwhile: the answer is to another question
            return
        present = continued(problem, list(self._intents.values()))
        switch_s = dict.fromkeys(problem.tasks, self._switch_s)
        doubt = statistics.median(self._wrong.values()) if self._wrong else 0.0
        verdict = judge(problem, present, solved.schedule, switch_s=switch_s, doubt=doubt)
        if verdict.adopt:
            yield from self._adopt(problem, solved, verdict, view)

    def _adopt(self, problem: Problem, solved: Solved, verdict: Verdict, view: View) -> Iterator[Decision]:
        self.plans += 1
        intents = intents_of(problem, solved.schedule, now_s=view.now_s)
        self._intents = {one.task: one for one in intents}
        if verdict.switched:
            gain = f"{verdict.gain:.4g}" if self._objective == "cost" else duration(verdict.gain)
            yield Tell(text=f"a new schedule saves {gain}; {', '.join(verdict.switched)} changes its devices")
        for name in verdict.switched:
            task, intent = view.record.tasks[name], self._intents[name]
            self.switches += 1
            self._leaving[name] = (task.attempt, view.now_s)
            old, new = (self._way(task), task.devices), (intent.label, intent.devices)
            reason = (
                "makes room, and goes on later" if old == new else f"goes on as {_told(*new)} instead of {_told(*old)}"
            )
            yield Switch(task=name, reason=reason)

    def another_way(self, task: TaskRecord) -> str:
        """The way in which a task runs has failed: drop it for all that cost the same, and say what is left."""
        if task.name in self._own:
            return ""
        label, kind = self._way(task), self._classes.get(task.name, task.name)
        for name, estimates in self._estimates.items():
            if self._classes.get(name, name) == kind:
                self._estimates[name] = tuple(one for one in estimates if one.label != label)
                if self._intents.get(name) is not None and self._intents[name].label == label:
                    del self._intents[name]
        self._due = True
        return ", ".join(one.label for one in self._estimates.get(task.name, ()))

    # ---- launching ----

    def _launches(self, view: View) -> Iterator[Decision]:
        free = list(view.free)
        if not free or not view.waiting:
            return
        unplanned = [one for one in view.waiting if one.name not in self._intents]
        thinking = self._replan and (self._asked is not None or self._due)
        for one in unplanned:
            if one.name in self._estimates and thinking:
                continue  # its place will be known in a moment
            if one.width <= len(free):
                yield Launch(task=one.name, devices=tuple(free[: one.width]))
                del free[: one.width]
        waiting = {one.name for one in view.waiting}
        wanted = sorted((one for one in self._intents.values() if one.task in waiting), key=lambda one: one.start_s)
        taken: set[str] = set()
        for intent in wanted:
            if taken.isdisjoint(intent.devices) and all(device in free for device in intent.devices):
                strategy = "" if intent.task in self._own else intent.label
                yield Launch(task=intent.task, devices=intent.devices, strategy=strategy)
                free = [device for device in free if device not in intent.devices]
            taken |= set(intent.devices)


def _with_devices(nodes: Sequence[Node], there: Sequence[str]) -> tuple[Node, ...]:
    """The nodes as they are now; what is new joins those of its machine, or is like the first."""
    found = {node.name: [device for device in node.devices if device in there] for node in nodes}
    homes = {device.rpartition("/")[0]: node for node in nodes for device in node.devices}
    kinds = {node.name: node for node in nodes}
    known = {device for node in nodes for device in node.devices}
    for device in there:
        if device not in known:
            home = device.rpartition("/")[0]
            node = homes.setdefault(home, replace(nodes[0], name=home or device))
            kinds.setdefault(node.name, node)
            found.setdefault(node.name, []).append(device)
    return tuple(replace(kinds[name], devices=tuple(devices)) for name, devices in found.items() if devices)


def _told(label: str, devices: Sequence[str]) -> str:
    return f"{label} on {', '.join(devices)}"
