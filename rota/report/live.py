"""Progress while a run goes: a live table on a terminal or in a notebook, plain lines elsewhere. Written to stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO, cast

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from rota.execute.controller import Observer
from rota.execute.events import Event, Launched, Lost, Requeued, RunNoted, Stopped
from rota.execute.record import Balance, RunRecord, TaskRecord
from rota.execute.states import TaskState
from rota.report.display import Display, display_on
from rota.report.format import duration, metric, one_line, steps
from rota.runtime.messages import Balanced, Beat, Began, Failed, Finished, Noticed
from rota.streams import Droppable

_LINES_EVERY_S = 10.0
_DRAW_EVERY_S = 0.25
_LONG_S = 5.0
"""What a task does for so long is told."""
_STYLES = {
    TaskState.RUNNING: "cyan",
    TaskState.FINISHED: "green",
    TaskState.FAILED: "red",
    TaskState.DIVERGED: "red",
    TaskState.STOPPED: "yellow",
    TaskState.INTERRUPTED: "yellow",
    TaskState.PENDING: "dim",
}
# What is happening first, then what went wrong, then what is done, then what is still to come.
_ORDER = (
    TaskState.RUNNING,
    TaskState.FAILED,
    TaskState.DIVERGED,
    TaskState.STOPPED,
    TaskState.INTERRUPTED,
    TaskState.FINISHED,
    TaskState.PENDING,
)


def _standard_error() -> Console:
    """Where progress is shown; training does not end because nobody takes it."""
    return Console(file=cast(TextIO, Droppable(sys.stderr)), emoji=False)


@contextlib.contextmanager
def progress_observer(console: Console | None = None, *, now_s: Callable[[], float] = time.time) -> Iterator[Observer]:
    """An observer for the controller that shows what happens on `console` (standard error by default).

    `now_s` is the clock of the run.
    """
    console = console or _standard_error()
    display = display_on(console)
    if display is None:
        yield PlainProgress(console)
        return
    live = LiveProgress(console, display, now_s=now_s)
    try:
        yield live
        live.draw()
    finally:
        display.close()


@contextlib.contextmanager
def profile_progress(console: Console | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Shows what is being found out before a run: (what, how many are done, of how many)."""
    console = console or _standard_error()
    if console.is_jupyter:
        line = display_on(console)
        assert line is not None
        yield lambda what, done, total: line.show(Text(one_line(f"before the run: {what} ({done} of {total})")))
        return
    if not console.is_terminal:

        def say(what: str, done: int, total: int) -> None:
            if done < total:
                console.print(one_line(f"before the run: {what}"), highlight=False, markup=False)

        yield say
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        bar = shown.add_task("looking at the tasks", total=None)

        def show(what: str, done: int, total: int) -> None:
            shown.update(bar, description=escape(one_line(what)), completed=done, total=max(total, 1))

        yield show


class LiveProgress:
    """A table that is drawn anew a few times a second; what the user should know scrolls by above it."""

    def __init__(self, console: Console, display: Display, *, now_s: Callable[[], float] = time.time) -> None:
        self._console = console
        self._display = display
        self._now_s = now_s
        self._record: RunRecord | None = None
        self._phases = Phases()
        self._drawn_s = 0.0

    def __call__(self, record: RunRecord, event: Event | Beat | None) -> None:
        """Take note, and draw when it is time."""
        self._record = record
        if isinstance(event, Beat):
            self._phases.take(event)
        elif event is not None and (line := _remark(record, event)):
            self._console.print(one_line(line), highlight=False, markup=False)
        if time.monotonic() - self._drawn_s > _DRAW_EVERY_S:
            self.draw()

    def draw(self) -> None:
        """Draw the table now."""
        self._drawn_s = time.monotonic()
        if self._record is not None:
            rows = max(4, self._console.size.height - 6)
            table = progress_table(self._record, now_s=self._now_s(), max_rows=rows, phases=self._phases)
            self._display.show(table)


class PlainProgress:
    """A line for each thing that happens, and one for each running task every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phases = Phases()
        self._said_s = time.monotonic()

    def __call__(self, record: RunRecord, event: Event | Beat | None) -> None:
        """Say what happened."""
        if isinstance(event, Beat):
            self._phases.take(event)
        elif event is not None:
            if line := _remark(record, event) or _plain_line(record, event):
                self._say(record, line)
        elif time.monotonic() - self._said_s > _LINES_EVERY_S:
            self._said_s = time.monotonic()
            for task in record.tasks.values():
                doing = self._phases.words(task)
                if task.state is TaskState.RUNNING and (task.step or doing):
                    self._say(record, f"{task.name}: {', '.join(filter(None, [_progress_words(task), doing]))}")

    def _say(self, record: RunRecord, line: str) -> None:
        done = sum(task.state.ended for task in record.tasks.values())
        self._console.print(
            one_line(f"[{done}/{len(record.tasks)}] {line}"), highlight=False, markup=False, soft_wrap=True
        )


class Phases:
    """What each task is doing now, by the beats of its worker."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[str, float]] = {}
        """task -> what, and since when"""

    def take(self, beat: Beat) -> None:
        """Note what a worker says."""
        self._now[beat.task] = (beat.phase, time.monotonic() - beat.phase_s)

    def words(self, task: TaskRecord) -> str:
        """What a running task does for so long that somebody may ask; else nothing."""
        phase, since_s = self._now.get(task.name, ("", 0.0))
        busy_s = time.monotonic() - since_s
        if not phase or busy_s < _LONG_S or task.state is not TaskState.RUNNING:
            return ""
        return f"{phase} for {duration(busy_s)}"


def progress_table(record: RunRecord, *, now_s: float, max_rows: int, phases: Phases | None = None) -> Group:
    """The live table: at most `max_rows` tasks, the most interesting ones."""
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in (
        ("task", "left"),
        ("state", "left"),
        ("device", "left"),
        ("step", "right"),
        ("loss", "right"),
        ("valid", "right"),
        ("speed", "right"),
        ("left", "right"),
    ):
        table.add_column(name, justify=justify, style="", header_style="bold")  # type: ignore[arg-type]
    tasks = sorted(record.tasks.values(), key=lambda task: (_ORDER.index(task.state), task.index))
    for task in tasks[:max_rows]:
        table.add_row(*_row(task, "" if phases is None else phases.words(task)))
    hidden = len(tasks) - max_rows
    more = Text(f"... and {hidden} more\n" if hidden > 0 else "", style="dim", end="")
    return Group(table, more, _foot(record, now_s))


def _row(task: TaskRecord, doing: str) -> list[Text]:
    running = task.state is TaskState.RUNNING
    left_s = _left_s(task)
    speed = f"{1 / task.step_s:.3g}/s" if running and task.step_s else ""
    cells = [
        task.name,
        f"{task.state.value}: {doing}" if doing else task.state.value,
        ", ".join(task.devices),
        steps(task),
        metric(task.metrics.get("train/loss")),
        metric(task.metrics.get("valid/loss")),
        " ".join([speed, *pace(task)]) if running else "",
        duration(left_s) if running and left_s is not None else "",
    ]
    return [Text(one_line(cell), style=_STYLES[task.state]) for cell in cells]


def _foot(record: RunRecord, now_s: float) -> Text:
    counts = record.counts()
    done = ", ".join(f"{counts[state.value]} {state.value}" for state in _ORDER if state.value in counts)
    left_s = _run_left_s(record)
    left = f", about {duration(left_s)} left" if left_s else ""
    return Text(f"{done}; {duration(max(0.0, now_s - record.begin_s))} so far{left}", style="bold")


def _left_s(task: TaskRecord) -> float | None:
    if task.total_steps is None or task.step_s is None:
        return None
    return (task.total_steps - task.step) * task.step_s


def _run_left_s(record: RunRecord) -> float | None:
    """A forecast: tasks that have not run take the mean time of those that have."""
    known = [task.step_s for task in record.tasks.values() if task.step_s is not None]
    if not known or not record.devices:
        return None
    mean_s = sum(known) / len(known)
    lefts_s = [
        (task.total_steps - task.step) * (task.step_s or mean_s)
        for task in record.tasks.values()
        if not task.state.ended and task.total_steps is not None
    ]
    return max(sum(lefts_s) / len(record.devices), max(lefts_s, default=0.0))


def _remark(record: RunRecord, event: Event) -> str:
    """What the user should read even where a table shows the rest."""
    if isinstance(event, Noticed):
        return f"{event.task}: {event.text}"
    if isinstance(event, Failed):
        return f"{event.task} {'diverged' if event.diverged else 'failed'}: {event.reason}"
    if isinstance(event, Lost):
        end = f"going on from step {record.tasks[event.task].saved_step}" if event.retried else "giving up"
        return f"{event.task}: {event.reason}; {end}"
    if isinstance(event, Stopped):
        return f"{event.task}: stopped at step {event.step}"
    if isinstance(event, Requeued):
        return f"{event.task}: {event.reason}"
    if isinstance(event, RunNoted):
        return event.text
    if isinstance(event, Balanced):
        return f"{event.task}: after step {event.step} {balance_words(event)}"
    return ""


def balance_words(event: Balanced | Balance) -> str:
    """What was done about slow devices, and why."""
    if any(event.left_out):
        gone = ", ".join(f"device {i} {part:.0%}" for i, part in enumerate(event.left_out) if part)
        return f"products leave out ({gone}): {event.why}"
    shares = ", ".join(f"{share:.0%}" for share in event.shares)
    paused = f", in {event.pause_s:.2f} s" if event.pause_s else ""
    return f"devices have {shares} of the work{paused}: {event.why}"


def pace(task: TaskRecord) -> list[str]:
    """How fast each device is against the fastest, where they differ."""
    speeds = task.speeds
    return [" ".join(f"{speed:.0%}" for speed in speeds)] if speeds and min(speeds) < _UNEQUAL else []


_UNEQUAL = 0.9


def _plain_line(record: RunRecord, event: Event) -> str:
    if isinstance(event, Launched):
        how = f" as {event.strategy}" if event.strategy and len(event.devices) > 1 else ""
        return f"{event.task}: started on {', '.join(event.devices)}{how}"
    if isinstance(event, Began) and event.from_step:
        return f"{event.task}: going on from step {event.from_step}"
    if isinstance(event, Finished):
        return f"{event.task}: finished, {_progress_words(record.tasks[event.task])}"
    return ""


def _progress_words(task: TaskRecord) -> str:
    words = [f"step {steps(task)}"]
    for name in ("train/loss", "valid/loss"):
        if name in task.metrics:
            words.append(f"{name} {metric(task.metrics[name])}")
    if task.step_s:
        words.append(f"{1 / task.step_s:.3g} steps/s")
    words += [f"devices at {one}" for one in pace(task)]
    if task.state is TaskState.RUNNING and (left_s := _left_s(task)):
        words.append(f"{duration(left_s)} left")
    return ", ".join(words)
