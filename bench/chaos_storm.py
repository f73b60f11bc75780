"""A run that faults befall: how it is started, resumed, watched, and judged at its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import rota
from bench.chaos_retrace import difference, retraced, stretches
from rota.execute.record import RunRecord
from rota.runtime.messages import Began, Measured, Saved
from rota.store.journal import read_events, read_summary

MARK = "ROTA_CHAOS"
"""In the environment of everything that a storm starts."""
KEEPER = "ray::Keeper"
CHECKPOINT_EVERY = 5
_STILL_S = 180.0
"""A run in whose journal nothing happens for so long does not go on; on a busy machine one may take long that does."""
_ENDS_S = 1200.0
_LEFT_S = 15.0

SWEEP = """
import torch, rota
import torch.nn.functional as F
from rota.testing.models import GPT

ROWS = torch.randint(0, 32, (64, 17), generator=torch.Generator().manual_seed(1))


def task(name, strategy, devices, lr):
    return rota.Task(
        name=name,
        model=lambda: GPT(vocabulary=32, context=16, width=32, depth=2, heads=4, dropout=0.1),
        data=lambda: rota.Data(train=ROWS[:56], valid=ROWS[56:], batch_size=8),
        loss=lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        steps={steps}, valid_every=10, strategy=strategy, devices=devices, checkpoint_every={every}, balance="off",
        clip_norm=1.0,
    )


sweep = rota.Sweep(tasks=[
    task("wide", "tensor", 2, 1e-3), task("one", "single", 1, 1e-3), task("two", "single", 1, 3e-3),
    task("three", "single", 1, 1e-2),
])
"""


@dataclass(kw_only=True)
class Verdict:
    """What became of a run."""

    wrong: list[str] = field(default_factory=list)
    lost_steps: int = 0
    """The most that one fault cost."""
    leaked: list[str] = field(default_factory=list)
    """Processes and files that were left behind."""


@dataclass(kw_only=True)
class Storm:
    """One run, from its beginning through faults to its end."""

    run: Path
    file: Path
    where: tuple[str, ...]
    """The options that say on what it runs."""
    mark: str
    process: subprocess.Popen[str] = field(init=False)
    damaged: bool = False
    """Whether checkpoints were damaged: then the one before may be used, or none."""
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start("run", str(self.file), "--out", str(self.run))

    def _start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "rota", *arguments, "--no-profile", "--retries", "1000", *self.where]
        with open(self.file.parent / f"{self.run.name}.log", "a") as log:  # not on the disk that will be full
            self.process = subprocess.Popen(
                command,
                env=os.environ | {MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def resume(self) -> None:
        """Another controller; a run that had not begun begins."""
        self.process.wait()
        begun = self.events() > 0
        again = ("resume", str(self.run), "--failed") if begun else ("run", str(self.file), "--out", str(self.run))
        self._start(*again)

    def alive(self) -> bool:
        """Whether the controller runs."""
        return self.process.poll() is None

    def kill_all(self) -> None:
        """The controller and what it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def events(self) -> int:
        """How many the journal has."""
        try:
            return sum(1 for _ in read_events(self.run / "journal.db"))
        except rota.RotaError:
            return 0

    def wait_for_progress(self, more: int, limit_s: float = 40.0) -> None:
        """Until so many more events are in the journal."""
        since, deadline_s = self.events(), time.monotonic() + limit_s
        while self.alive() and self.events() <= since + more and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def workers(self) -> list[psutil.Process]:
        """The workers of this run that live."""
        return [one for one in ours(self.mark) if "rota.runtime.worker" in command_of(one)]

    def end(self) -> bool:
        """Let it come to its end, by further controllers if need be; False if it does not."""
        deadline_s = time.monotonic() + _ENDS_S
        for _ in range(5):
            code = self._code(deadline_s)
            if code == 0:
                return True
            if code is None:
                break
            self.resume()
        self.kill_all()
        return False

    def _code(self, deadline_s: float) -> int | None:
        """How the controller ends; None if it goes on for too long, or stands still."""
        events, since_s = self.events(), time.monotonic()
        while time.monotonic() < min(deadline_s, since_s + _STILL_S):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(timeout=2.0)
            if (now := self.events()) != events:
                events, since_s = now, time.monotonic()
        return None

    def last_words(self) -> str:
        """What the journal and the log say, of a run that does not end."""
        events = [f"{time_s:.1f} {event}" for time_s, event in read_events(self.run / "journal.db")]
        log = (self.file.parent / f"{self.run.name}.log").read_text().splitlines()
        return "\n".join([*(line[:300] for line in events[-12:]), *log[-12:]])

    def judge(self, reference: Path) -> Verdict:
        """Compare with an undisturbed run, and look for what was left."""
        verdict = Verdict()
        result, expected = rota.open_run(self.run), rota.open_run(reference)
        for task in expected.tasks:
            mine = result.task(task.name)
            if mine.state != "finished":
                verdict.wrong.append(f"{task.name} is {mine.state}: {mine.reason}")
                continue
            way = stretches(self.run, task.name, task.steps)
            if {one.width for one in way} == {one.width for one in stretches(reference, task.name, task.steps)}:
                rights = [expected]
            else:  # devices were gone
                rights = retraced(way, task.name, file=self.file, run=self.run)
            other = difference(result, rights, task.name, way)
            if other:
                verdict.wrong.append(f"{task.name} has {other}; its way was {way}")
        whole = RunRecord.replay(read_events(self.run / "journal.db"))
        brief = RunRecord.replay(read_summary(self.run / "journal.db"))
        if [task.state for task in whole.tasks.values()] != [task.state for task in brief.tasks.values()]:
            verdict.wrong.append("the journal does not replay to one state")
        lost, repeated = self._lost_steps()
        verdict.lost_steps = lost
        if repeated and not self.damaged:
            verdict.wrong.append(f"{repeated} steps were repeated although they were committed")
        verdict.leaked += _left_processes(self.mark) + _left_files(self.run)
        return verdict

    def _lost_steps(self) -> tuple[int, int]:
        """The most steps that were taken again after a fault, and how many of those had been committed."""
        step: dict[str, int] = {}
        saved: dict[str, int] = {}
        most = repeated = 0
        for _, event in read_events(self.run / "journal.db"):
            if isinstance(event, Measured):
                step[event.task] = max(row[0] for row in event.rows)
            elif isinstance(event, Saved):
                saved[event.task] = event.step
            elif isinstance(event, Began):
                most = max(most, step.get(event.task, 0) - event.from_step)
                repeated = max(repeated, saved.get(event.task, 0) - event.from_step)
                step[event.task] = event.from_step
        return most, max(0, repeated)


def ours(mark: str) -> list[psutil.Process]:
    """The processes of rota that a storm has started, and those that they have started."""
    found = []
    for process in psutil.process_iter():
        command = command_of(process)
        try:
            # Ray's processes write their names over their environment.
            is_ours = KEEPER in command or (
                ("rota.runtime.worker" in command or " -m rota " in command) and process.environ().get(MARK) == mark
            )
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def command_of(process: psutil.Process) -> str:
    """What it was started as; nothing if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _left_processes(mark: str) -> list[str]:
    deadline_s = time.monotonic() + _LEFT_S
    while left := ours(mark):
        if time.monotonic() > deadline_s:
            return [f"process {one.pid} ({'actor' if KEEPER in command_of(one) else 'of rota'})" for one in left]
        time.sleep(0.1)
    return []


def _left_files(run: Path) -> list[str]:
    left = [path for pattern in (".writing-*", ".*.tmp", "gang-*", ".profile") for path in run.rglob(pattern)]
    return [str(path.relative_to(run)) for path in left]
