"""Runs tasks on a virtual clock: what takes weeks on a cluster takes a moment here, and faults come when told."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rota.execute.backends.base import Sign, WorkerLost
from rota.runtime.messages import Began, Failed, Finished, Halted, Left, Measured, Report, Saved
from rota.task import Task


@dataclass(frozen=True, kw_only=True)
class SimulatedTask:
    """How a task behaves."""

    steps: int
    step_s: float
    report_every: int = 10
    """Steps between reports of metrics."""
    save_every: int = 10
    """Steps between checkpoints."""
    start_s: float | None = None
    """What its start takes; None for what starts take in general."""
    fails_at: int | None = None
    """The step at which its own code raises."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A device's worker dies at a time, if it is busy then."""

    time_s: float
    device: str


@dataclass
class _Running:
    task: str
    attempt: int
    plan: SimulatedTask
    from_step: int
    begin_s: float
    devices: tuple[str, ...]
    reports: int = 0

    def time_of(self, step: int) -> float:
        return self.begin_s + (step - self.from_step) * self.plan.step_s

    def step_at(self, time_s: float) -> int:
        done = int((time_s - self.begin_s) / self.plan.step_s + 1e-9)
        return min(self.plan.steps, self.from_step + max(0, done))


class SimulatedBackend:
    """Devices that take the time they are said to take."""

    def __init__(
        self, plan_of: Callable[[Task, int], SimulatedTask], *, faults: Sequence[Fault] = (), start_s: float = 1.0
    ) -> None:
        self._plan_of = plan_of
        self._start_s = start_s
        self._now_s = 0.0
        self._running: dict[str, _Running] = {}
        self._saved: dict[str, int] = {}
        self._signs: list[Sign] = []
        # (time, number, device, run or None for a fault, step): the number keeps equal times in order.
        self._agenda: list[tuple[float, int, str, _Running | None, int]] = []
        self._number = 0
        for fault in faults:
            self._plan(fault.time_s, fault.device, None, 0)

    def now_s(self) -> float:
        """The virtual time."""
        return self._now_s

    def launch(self, devices: Sequence[str], task: Task, *, attempt: int, folder: Path, storage: str = "") -> None:
        """Begin the task after the time that starting takes, from its last checkpoint; the first device reports."""
        for device in devices:
            assert device not in self._running, f"{device} is busy"
        plan = self._plan_of(task, len(devices))
        run = _Running(
            task=task.name,
            attempt=attempt,
            plan=plan,
            from_step=self._saved.get(task.name, 0),
            begin_s=self._now_s + (self._start_s if plan.start_s is None else plan.start_s),
            devices=tuple(devices),
        )
        for device in devices:
            self._running[device] = run
        self._plan(run.begin_s, devices[0], run, run.from_step)

    def open_pool(self, devices: Sequence[str], count: int) -> tuple[str, ...]:
        """Pools are played by `rota.memory.sharp.play`."""
        raise NotImplementedError("there are no pools on this clock")

    def close_place(self, place: str) -> None:
        """There are none."""
        raise NotImplementedError("there are no pools on this clock")

    def halt(self, device: str) -> None:
        """Save at once and leave."""
        run = self._running.get(device)
        if run is not None:
            step = self._saved[run.task] = run.step_at(self._now_s)
            self._signs.append((device, Halted(task=run.task, attempt=run.attempt, step=step)))
            self._leave(run)

    def kill(self, device: str) -> None:
        """Forget what it was doing."""
        self._running.pop(device, None)

    def stored(self, devices: Sequence[str]) -> None:
        """Nothing is kept back here."""

    def poll(self, timeout_s: float) -> list[Sign]:
        """Go to the next thing that happens, or ahead by the timeout."""
        until_s = self._now_s + timeout_s
        while not self._signs and self._agenda and self._agenda[0][0] <= until_s:
            self._now_s = max(self._now_s, self._agenda[0][0])
            while self._agenda and self._agenda[0][0] <= self._now_s:
                _, _, device, run, step = heapq.heappop(self._agenda)
                self._happen(device, run, step)
        if not self._signs:
            self._now_s = until_s
        signs, self._signs = self._signs, []
        return signs

    def close(self) -> None:
        """Nothing to release."""

    def _plan(self, time_s: float, device: str, run: _Running | None, step: int) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (time_s, self._number, device, run, step))

    def _happen(self, device: str, run: _Running | None, step: int) -> None:
        if run is None:
            lost = self._running.get(device)
            if lost is not None:
                self._signs.append((device, WorkerLost(reason="its worker was killed by SIGKILL", retry=True)))
                for other in lost.devices:
                    if self._running.pop(other, None) is lost and other != device:
                        gone = Left(task=lost.task, attempt=lost.attempt, peer_gone=True)
                        self._signs.append((other, gone))
            return
        if self._running.get(device) is not run:
            return  # it was halted or lost meanwhile
        for report in self._reports(run, step):
            self._signs.append((device, report))
        if step >= run.plan.steps or step == run.plan.fails_at:
            self._leave(run)
            return
        self._plan(run.time_of(self._next_stop(run.plan, step)), device, run, self._next_stop(run.plan, step))

    def _leave(self, run: _Running) -> None:
        for device in run.devices:
            if self._running.pop(device, None) is run and device != run.devices[0]:
                self._signs.append((device, Left(task=run.task, attempt=run.attempt)))

    @staticmethod
    def _next_stop(plan: SimulatedTask, step: int) -> int:
        """The next step at which something is said."""
        stops = [step + every - step % every for every in (plan.report_every, plan.save_every)]
        if plan.fails_at is not None and plan.fails_at > step:
            stops.append(plan.fails_at)
        return min(plan.steps, *stops)

    def _reports(self, run: _Running, step: int) -> list[Report]:
        name, attempt, plan = run.task, run.attempt, run.plan
        reports: list[Report] = []
        if step == run.from_step:
            reports.append(Began(task=name, attempt=attempt, from_step=step, total_steps=plan.steps, parameters=0))
        elif step % plan.report_every == 0 or step == plan.steps:
            run.reports += 1
            first = max(run.from_step, (step - 1) // plan.report_every * plan.report_every) + 1
            rows = tuple((one, {"train/loss": 1.0 / one}) for one in range(first, step + 1))
            reports.append(
                Measured(
                    task=name,
                    attempt=attempt,
                    number=run.reports,
                    rows=rows,
                    latest=rows[-1][1],
                    step_s=plan.step_s,
                )
            )
        if step == plan.fails_at:
            return [*reports, Failed(task=name, attempt=attempt, step=step, reason="the loss function raised")]
        if step and step != run.from_step and (step % plan.save_every == 0 or step == plan.steps):
            self._saved[name] = step
            reports.append(Saved(task=name, attempt=attempt, step=step, write_s=0.0))
        if step >= plan.steps:
            metrics = {"train/loss": 1.0 / step}
            reports.append(Finished(task=name, attempt=attempt, step=step, metrics=metrics))
        return reports
