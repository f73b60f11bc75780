"""Whatever tasks, devices and faults: every task ends, no device is shared, and no work is lost or done twice."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.execute.backends.simulated import Fault, SimulatedTask
from rota.execute.events import Lost, RunEnded
from rota.execute.record import RunRecord
from rota.execute.states import RunState, TaskState
from rota.runtime.messages import Began, Finished, Halted, Measured, Saved
from rota.store.journal import read_events, read_metrics, read_summary


@st.composite
def plans(draw: st.DrawFn, *, failing: bool = False) -> SimulatedTask:
    report_every = draw(st.integers(1, 8))
    steps = draw(st.integers(1, 50))
    return SimulatedTask(
        steps=steps,
        step_s=draw(st.sampled_from([0.1, 0.25, 0.3, 0.7])),
        report_every=report_every,
        # What was saved was also reported, as with real workers, whose checkpoints hold the metrics not yet reported.
        save_every=report_every * draw(st.integers(1, 3)),
        fails_at=draw(st.none() | st.integers(1, steps)) if failing else None,
    )


def sweeps(*, failing: bool = False, most: int = 6) -> st.SearchStrategy[dict[str, SimulatedTask]]:
    lists = st.lists(plans(failing=failing), min_size=1, max_size=most)
    return lists.map(lambda made: {f"t{i}": one for i, one in enumerate(made)})


DEVICES = st.integers(1, 4)
WIDTHS = st.lists(st.integers(1, 4), min_size=6, max_size=6)


def widths_of(planned: dict[str, SimulatedTask], widths: list[int], devices: int) -> dict[str, int]:
    return {name: min(width, devices) for name, width in zip(planned, widths, strict=False)}


FAULTS = st.lists(
    st.builds(
        Fault, time_s=st.floats(0, 60) | st.integers(0, 60), device=st.sampled_from([f"cpu:{i}" for i in range(4)])
    ),
    max_size=10,
)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as root:
        yield Path(root)


def assert_devices_are_not_shared(record: RunRecord) -> None:
    by_device: dict[str, list[Any]] = {}
    for task in record.tasks.values():
        for span in task.spans:
            assert span.end_s is not None
            assert span.end
            assert span.begin_s <= span.end_s
            by_device.setdefault(span.device, []).append(span)
        for earlier, later in itertools.pairwise(task.spans):  # nor is a task in two places, but for its own gang
            gang = earlier.attempt == later.attempt and earlier.begin_s == later.begin_s
            assert gang or earlier.end_s <= later.begin_s
    for spans in by_device.values():
        spans.sort(key=lambda span: (span.begin_s, span.end_s))
        for earlier, later in itertools.pairwise(spans):
            assert earlier.end_s <= later.begin_s


def assert_no_work_is_lost_or_counted_twice(run: Any, planned: dict[str, SimulatedTask]) -> None:
    saved = dict.fromkeys(planned, 0)
    reached = dict.fromkeys(planned, 0)
    for event in run.events():
        match event:
            case Began():
                assert event.from_step == saved[event.task]
                reached[event.task] = event.from_step
            case Measured():
                for step, _ in event.rows:
                    assert step == reached[event.task] + 1
                    reached[event.task] = step
            case Saved() | Halted():
                assert event.step >= saved[event.task]
                saved[event.task] = event.step
            case Finished():
                assert event.step == saved[event.task] == planned[event.task].steps
    for name in planned:
        steps = [row["step"] for row in read_metrics(run.folder.journal, name)]
        assert steps == sorted(set(steps))
        if not run.events(Halted) and run.record.tasks[name].state is TaskState.FINISHED:
            assert steps == list(range(1, planned[name].steps + 1))


def assert_the_journal_tells_the_same(run: Any) -> None:
    whole = RunRecord.replay(read_events(run.folder.journal))
    assert vars(whole) == vars(run.record)
    summary = RunRecord.replay(read_summary(run.folder.journal))
    for name, task in whole.tasks.items():
        other = summary.tasks[name]
        assert (other.state, other.spans, other.saved_step, other.reason) == (
            *(task.state, task.spans),
            *(task.saved_step, task.reason),
        )
    assert summary.counts() == whole.counts()


# ---- without faults ----


def longest_first_makespan(durations_s: list[float], devices: int) -> float:
    free_s = [0.0] * devices
    for duration_s in sorted(durations_s, reverse=True):
        place = free_s.index(min(free_s))
        free_s[place] += duration_s
    return max(free_s)


def best_makespan(durations_s: list[float], devices: int) -> float:
    def makespan(places: tuple[int, ...]) -> float:
        return max(sum(d for d, p in zip(durations_s, places, strict=True) if p == place) for place in range(devices))

    return min(map(makespan, itertools.product(range(devices), repeat=len(durations_s))))


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), devices=st.integers(1, 3))
def test_without_faults_the_makespan_is_within_the_bound_of_longest_first(lengths, devices, simulate):
    planned = {f"t{i}": SimulatedTask(steps=steps, step_s=0.5) for i, steps in enumerate(lengths)}
    with folder() as root:
        run = simulate(root, planned, devices=devices, start_s=1.0)
        assert run.run() is RunState.FINISHED
        makespan_s = max(span.end_s for task in run.record.tasks.values() for span in task.spans)
    durations_s = [1.0 + 0.5 * steps for steps in lengths]
    assert abs(makespan_s - longest_first_makespan(durations_s, devices)) < 1e-6
    assert makespan_s <= (4 / 3 - 1 / (3 * devices)) * best_makespan(durations_s, devices) + 1e-6


@given(planned=sweeps(), devices=DEVICES)
def test_without_faults_every_task_runs_exactly_once(planned, devices, simulate):
    with folder() as root:
        run = simulate(root, planned, devices=devices)
        assert run.run() is RunState.FINISHED
        assert all(len(task.spans) == task.attempt == 1 for task in run.record.tasks.values())
        assert len(run.events(Finished)) == len(planned)
        assert_devices_are_not_shared(run.record)
        assert_no_work_is_lost_or_counted_twice(run, planned)
        assert_the_journal_tells_the_same(run)


# ---- with faults ----


@settings(max_examples=100)
@given(planned=sweeps(failing=True), devices=DEVICES, faults=FAULTS, retries=st.integers(0, 3), widths=WIDTHS)
def test_with_any_faults_every_task_ends_and_nothing_is_lost(planned, devices, faults, retries, widths, simulate):
    wide = widths_of(planned, widths, devices)
    with folder() as root:
        run = simulate(root, planned, devices=devices, faults=faults)
        ended = run.run(retries=retries, widths=wide)
        for name, task in run.record.tasks.items():
            assert all(sum(span.attempt == n for span in task.spans) == wide[name] for n in range(1, task.attempt + 1))
        for name, task in run.record.tasks.items():
            losses = [event for event in run.events(Lost) if event.task == name]
            assert len(losses) == task.losses <= retries + 1
            assert task.attempt == len({span.attempt for span in task.spans})
            assert [event.retried for event in losses] == [i < retries for i in range(len(losses))]
            if task.losses == retries + 1:
                assert task.state is TaskState.FAILED
                assert "SIGKILL" in task.reason
            elif planned[name].fails_at is not None:
                assert task.state is TaskState.FAILED
                assert task.reason == "the loss function raised"
                assert task.step == planned[name].fails_at
            else:
                assert task.state is TaskState.FINISHED
        finished = all(task.state is TaskState.FINISHED for task in run.record.tasks.values())
        assert ended is (RunState.FINISHED if finished else RunState.INCOMPLETE)
        assert run.events(RunEnded)[0].state == run.record.state
        assert_devices_are_not_shared(run.record)
        assert_no_work_is_lost_or_counted_twice(run, planned)
        assert_the_journal_tells_the_same(run)


@settings(max_examples=25)
@given(planned=sweeps(failing=True), devices=DEVICES, faults=FAULTS)
def test_two_runs_of_the_same_plan_give_the_same_journal(planned, devices, faults, simulate):
    with folder() as one, folder() as other:
        journals = []
        for root in (one, other):
            run = simulate(root, planned, devices=devices, faults=faults)
            run.run()
            told = [(time_s, repr(event).replace(str(root), "")) for time_s, event in read_events(run.folder.journal)]
            journals.append(told)
        assert journals[0] == journals[1]


@settings(max_examples=25)
@given(planned=sweeps(), fails_at=st.integers(1, 60), devices=DEVICES)
def test_the_failure_of_one_task_changes_nothing_for_the_others(planned, fails_at, devices, simulate):
    planned = planned | {"bad": SimulatedTask(steps=60, step_s=0.2, fails_at=fails_at)}
    with folder() as root:
        run = simulate(root, planned, devices=devices)
        assert run.run() is RunState.INCOMPLETE
        for name, task in run.record.tasks.items():
            assert task.state is (TaskState.FAILED if name == "bad" else TaskState.FINISHED)
            assert task.attempt == 1
        assert_no_work_is_lost_or_counted_twice(run, planned)


# ---- with interruptions ----


@settings(max_examples=60)
@given(
    planned=sweeps(failing=True),
    devices=DEVICES,
    faults=FAULTS,
    after=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    widths=WIDTHS,
)
def test_a_run_interrupted_anywhere_goes_on_with_nothing_lost(planned, devices, faults, after, widths, simulate):
    wide = widths_of(planned, widths, devices)
    with folder() as root:
        run = simulate(root, planned, devices=devices, faults=faults)
        for events in after:
            left = [events]

            def observe(record, event, left=left):
                left[0] -= event is not None
                if left[0] == 0:
                    run.controller.interrupt()

            ended = run.run(observer=observe, retries=20, widths=wide)
            if left[0] > 0:
                assert ended is not RunState.INTERRUPTED
            else:
                assert ended in (RunState.INTERRUPTED, RunState.FINISHED, RunState.INCOMPLETE)
            assert not any(task.state is TaskState.RUNNING for task in run.record.tasks.values())
            assert run.backend._running == {}
            assert_the_journal_tells_the_same(run)
        run.run(retries=20, widths=wide)
        for name, task in run.record.tasks.items():
            assert task.state is (TaskState.FINISHED if planned[name].fails_at is None else TaskState.FAILED)
        # A halted task saves where it stands, so that only faults cost work.
        assert_devices_are_not_shared(run.record)
        assert_starts_are_where_it_was_saved(run)


def assert_starts_are_where_it_was_saved(run: Any) -> None:
    saved: dict[str, int] = {}
    for event in run.events():
        if isinstance(event, Began):
            assert event.from_step == saved.get(event.task, 0)
        elif isinstance(event, Saved | Halted):
            assert event.step >= saved.get(event.task, 0)
            saved[event.task] = event.step
