"""The fold of a journal: which states may follow which, and what is known of a task after each event."""

from __future__ import annotations

import math

import pytest

from rota.errors import StoreError
from rota.execute.events import Launched, Lost, RunBegan, RunEnded, RunResumed, Stopped
from rota.execute.record import RunRecord
from rota.execute.states import RUN_TRANSITIONS, TASK_TRANSITIONS, RunState, TaskState
from rota.runtime.messages import Began, Failed, Finished, Halted, Measured, Noticed, Saved

PENDING, RUNNING, FINISHED, FAILED, DIVERGED, STOPPED, INTERRUPTED = TaskState
IN_JOURNALS = [state for state in TaskState if state is not INTERRUPTED]

BEGAN = RunBegan(
    name="night",
    source="sweep.py",
    source_digest="d1",
    sweep_digest="d2",
    tasks=(
        {"name": "a", "steps": 100, "seed": 3, "settings": {"lr": 0.1}},
        {"name": "b", "steps": None},
    ),
    devices=({"name": "cpu:0"}, {"name": "cpu:1"}),
)
LAUNCH = Launched(task="a", attempt=1, devices=("cpu:0",))
BEGIN = Began(task="a", attempt=1, from_step=0, total_steps=100, parameters=7)
FINISH = Finished(task="a", attempt=1, step=100, metrics={"valid/loss": 0.5})
FAIL = Failed(task="a", attempt=1, step=4, reason="the loss function raised", traceback="File ...")
DIVERGE = Failed(task="a", attempt=1, step=4, reason="the loss became nan", diverged=True)
STOP = Stopped(task="a", attempt=1, step=4)
HALT = Halted(task="a", attempt=1, step=6)


def lost(*, retried=True, attempt=1):
    return Lost(task="a", attempt=attempt, device="cpu:0", reason="killed", retried=retried)


def measured(*rows, step_s=1.0, latest=None):
    latest = latest or {name: value for _, metrics in rows for name, value in metrics.items()}
    return Measured(task="a", attempt=1, number=1, rows=rows, latest=latest, step_s=step_s)


def record_of(*events):
    """The record after the run began and these events, one a second from 1 s on."""
    record = RunRecord()
    for time_s, event in enumerate((BEGAN, *events)):
        record.apply(event, float(time_s))
    return record


def task_after(*events):
    return record_of(*events).tasks["a"]


# ---- states ----

REACH = {
    PENDING: [],
    RUNNING: [LAUNCH],
    FINISHED: [LAUNCH, FINISH],
    FAILED: [LAUNCH, FAIL],
    DIVERGED: [LAUNCH, DIVERGE],
    STOPPED: [LAUNCH, STOP],
}
LEGAL = {
    (PENDING, RUNNING),
    (PENDING, STOPPED),
    (RUNNING, PENDING),
    (RUNNING, FINISHED),
    (RUNNING, FAILED),
    (RUNNING, DIVERGED),
    (RUNNING, STOPPED),
    (FAILED, PENDING),
    (STOPPED, PENDING),
}
LEAD = {
    RUNNING: LAUNCH,
    FINISHED: FINISH,
    FAILED: FAIL,
    DIVERGED: DIVERGE,
    STOPPED: STOP,
}


def event_to(state, before):
    if state is PENDING:
        return lost() if before is RUNNING else RunResumed(retried=("a",))
    return LEAD[state]


@pytest.mark.parametrize("after", IN_JOURNALS)
@pytest.mark.parametrize("before", IN_JOURNALS)
def test_a_task_moves_only_as_the_table_says(before, after):
    record = record_of(*REACH[before])
    assert record.tasks["a"].state is before
    if (before, after) in LEGAL:
        record.apply(event_to(after, before), 9.0)
        assert record.tasks["a"].state is after
    else:
        with pytest.raises(StoreError, match=f"from {before} to {after}"):
            record.apply(event_to(after, before), 9.0)


def test_the_table_of_task_states_says_what_is_tested_here():
    assert {(before, after) for before, allowed in TASK_TRANSITIONS.items() for after in allowed} == LEGAL


@pytest.mark.parametrize("after", RunState)
@pytest.mark.parametrize("before", RunState)
def test_a_run_moves_only_as_its_table_says(before, after):
    record = record_of(*([] if before is RunState.RUNNING else [RunEnded(state=before.value)]))
    assert record.state is before
    event = RunResumed() if after is RunState.RUNNING else RunEnded(state=after.value)
    if before is RunState.RUNNING or after is RunState.RUNNING:
        record.apply(event, 9.0)
        assert record.state is after
    else:
        with pytest.raises(StoreError, match=f"from {before} to {after}"):
            record.apply(event, 9.0)
    assert (after in RUN_TRANSITIONS[before]) is (RunState.RUNNING in (before, after))


@pytest.mark.parametrize("state", TaskState)
def test_a_task_has_ended_unless_it_waits_or_runs(state):
    assert state.ended is (state not in (PENDING, RUNNING, INTERRUPTED))


@pytest.mark.parametrize("event", [LAUNCH, BEGIN, FINISH, FAIL, STOP, HALT, lost()])
def test_an_event_of_a_task_that_the_run_does_not_have_is_refused(event, refused):
    record = RunRecord()
    assert "'a'" in refused(record.apply, event, 1.0, error=StoreError)


def test_a_run_begins_once(refused):
    assert "begins twice" in refused(record_of().apply, BEGAN, 1.0, error=StoreError)


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ([], lost()),
        ([], HALT),
        ([LAUNCH, FAIL], RunResumed(retried=("ghost",))),
        ([], RunEnded(state="nonsense")),
    ],
    ids=["lost-before-launch", "halted-before-launch", "unknown-task-retried", "unknown-state"],
)
def test_an_event_that_cannot_have_happened_is_a_store_error(before, event, refused):
    refused(record_of(*before).apply, event, 9.0, error=StoreError)


# ---- what is known ----


def test_the_beginning_tells_the_run_its_devices_and_its_tasks():
    record = record_of()
    assert (record.name, record.source, record.source_digest, record.sweep_digest) == ("night", "sweep.py", "d1", "d2")
    assert [device["name"] for device in record.devices] == ["cpu:0", "cpu:1"]
    assert list(record.tasks) == ["a", "b"]
    a, b = record.tasks.values()
    assert (a.index, a.settings, a.facts, a.total_steps) == (0, {"lr": 0.1}, {"steps": 100, "seed": 3}, 100)
    assert (b.index, b.settings, b.total_steps, b.remaining_steps) == (1, {}, None, None)
    assert record.state is RunState.RUNNING


def test_a_launch_opens_a_span():
    task = task_after(LAUNCH)
    assert (task.attempt, task.devices) == (1, ("cpu:0",))
    (span,) = task.spans
    assert (span.device, span.attempt, span.begin_s, span.end_s) == ("cpu:0", 1, 1.0, None)


@pytest.mark.parametrize(
    ("event", "end"),
    [
        (FINISH, "finished"),
        (FAIL, "failed"),
        (DIVERGE, "diverged"),
        (STOP, "stopped"),
        (lost(retried=True), "lost"),
        (lost(retried=False), "lost"),
        (RunEnded(state="interrupted"), "interrupted"),
    ],
)
def test_whatever_ends_an_attempt_closes_its_span(event, end):
    (span,) = task_after(LAUNCH, event).spans
    assert (span.begin_s, span.end_s, span.end) == (1.0, 2.0, end)


@pytest.mark.parametrize("event", [FINISH, FAIL, DIVERGE, STOP, lost(retried=True), lost(retried=False)])
def test_a_task_that_left_its_device_is_on_none(event):
    assert task_after(LAUNCH, event).devices == ()


@pytest.mark.parametrize("event", [RunEnded(state="interrupted"), RunResumed()])
def test_a_task_that_waits_again_after_an_interruption_is_on_no_device(event):
    assert task_after(LAUNCH, event).devices == ()


def test_training_tells_length_size_steps_metrics_and_speed():
    task = task_after(
        LAUNCH,
        BEGIN,
        measured((1, {"train/loss": 2.0}), (2, {"train/loss": 1.0}), (2, {"valid/loss": 3.0}), step_s=5.0),
        Saved(task="a", attempt=1, step=2, write_s=0.1),
        measured((3, {"train/loss": 0.5}), step_s=1.5, latest={"train/loss": 0.5, "valid/loss": 3.0}),
    )
    assert (task.total_steps, task.parameters) == (100, 7)
    assert (task.step, task.saved_step, task.remaining_steps) == (3, 2, 98)
    assert task.metrics == {"train/loss": 0.5, "valid/loss": 3.0}
    assert task.step_s == 1.5


@pytest.mark.parametrize("step_s", [-3.0, 0.0, math.nan, math.inf])
def test_a_time_of_a_step_that_cannot_be_is_no_speed(step_s):
    task = task_after(LAUNCH, BEGIN, measured((1, {"train/loss": 2.0})), measured((2, {}), step_s=step_s))
    assert task.step_s is None


def test_a_clock_that_goes_back_makes_no_time_negative():
    record = RunRecord()
    for time_s, event in ((100.0, BEGAN), (101.0, LAUNCH), (2.0, BEGIN), (3.0, FINISH)):
        record.apply(event, time_s)
    (span,) = record.tasks["a"].spans
    assert (span.begin_s, span.end_s) == (101.0, 101.0)
    assert record.tasks["a"].busy_s(now_s=0.0) == record.elapsed_s == 0.0


def test_a_report_of_validation_alone_keeps_the_speed():
    validation = measured((1, {"valid/loss": 1.0}), step_s=None, latest={"train/loss": 2.0, "valid/loss": 1.0})
    task = task_after(LAUNCH, measured((1, {"train/loss": 2.0}), step_s=5.0), validation)
    assert task.step_s == 5.0
    assert task.metrics == {"train/loss": 2.0, "valid/loss": 1.0}


def test_an_empty_report_changes_nothing():
    assert task_after(LAUNCH, BEGIN, measured(step_s=None)) == task_after(
        LAUNCH, BEGIN, Saved(task="a", attempt=1, step=0, write_s=0)
    )


def test_a_finish_adds_its_metrics():
    task = task_after(LAUNCH, measured((1, {"train/loss": 2.0})), FINISH)
    assert task.metrics == {"train/loss": 2.0, "valid/loss": 0.5}
    assert task.step == 100


def test_a_failure_keeps_its_reason_and_traceback():
    task = task_after(LAUNCH, FAIL)
    assert (task.reason, task.traceback, task.step) == ("the loss function raised", "File ...", 4)


def test_notices_are_kept_with_their_time_and_task():
    record = record_of(LAUNCH, Noticed(task="a", attempt=1, text="disk is full"))
    assert record.notices == [(2.0, "a", "disk is full")]
    assert record.tasks["a"].notices == ["disk is full"]


def test_a_lost_task_goes_back_to_its_checkpoint_and_that_is_said():
    record = record_of(
        LAUNCH,
        BEGIN,
        Saved(task="a", attempt=1, step=5, write_s=0.1),
        measured((8, {"train/loss": 1.0})),
        lost(),
    )
    task = record.tasks["a"]
    assert (task.state, task.step, task.losses) == (PENDING, 5, 1)
    assert record.notices == [(5.0, "a", "killed; going on from step 5")]


def test_losses_are_counted_until_the_run_is_resumed():
    again = Launched(task="a", attempt=2, devices=("cpu:0",))
    assert task_after(LAUNCH, lost(), again, lost(attempt=2)).losses == 2
    assert task_after(LAUNCH, lost(), again, lost(attempt=2), RunResumed()).losses == 0
    task = task_after(LAUNCH, lost(), again, lost(attempt=2, retried=False))
    assert (task.state, task.losses, task.reason) == (FAILED, 2, "killed")
    assert [span.attempt for span in task.spans] == [1, 2]


def test_a_halted_task_stands_at_what_it_saved_and_leaves_its_device_then():
    task = task_after(LAUNCH, BEGIN, HALT, RunEnded(state="interrupted"))
    assert (task.state, task.step, task.saved_step) == (PENDING, 6, 6)
    assert (task.spans[0].end_s, task.spans[0].end) == (3.0, "interrupted")
    task = task_after(LAUNCH, BEGIN, HALT, STOP)
    assert (task.spans[0].end_s, task.spans[0].end) == (3.0, "stopped")


def test_a_pending_task_can_be_stopped_without_ever_having_run():
    task = task_after(STOP)
    assert (task.state, task.spans, task.reason) == (STOPPED, [], "stopped by the user")


def test_stopping_a_pending_task_leaves_its_earlier_span_as_it_was():
    task = task_after(LAUNCH, lost(), STOP)
    assert (task.spans[0].end_s, task.spans[0].end) == (2.0, "lost")


def test_after_a_crash_running_tasks_wait_again_and_ran_until_the_last_thing_heard():
    record = record_of(LAUNCH, BEGIN, Saved(task="a", attempt=1, step=3, write_s=0.1))
    record.apply(RunResumed(), 1000.0)
    task = record.tasks["a"]
    assert (task.state, task.saved_step) == (PENDING, 3)
    assert (task.spans[0].end_s, task.spans[0].end) == (3.0, "interrupted")
    assert task.busy_s(now_s=1000.0) == 2.0


def test_a_resume_may_bring_other_devices():
    assert record_of(RunResumed(devices=({"name": "cuda:0"},))).devices == [{"name": "cuda:0"}]
    assert record_of(RunResumed()).devices == list(BEGAN.devices)


def test_what_outlived_its_controller_goes_on_running_and_the_rest_waits():
    task = task_after(LAUNCH, BEGIN, RunResumed(kept=("a",), session="s"))
    assert (task.state, task.attempt, task.devices) == (TaskState.RUNNING, 1, LAUNCH.devices)
    assert task.spans[-1].end_s is None
    assert task_after(LAUNCH, BEGIN, RunResumed(session="s")).state is PENDING
    assert record_of(RunResumed(session="s")).session == "s"


def test_a_retried_task_starts_without_its_old_reason():
    task = task_after(LAUNCH, FAIL, RunEnded(state="incomplete"), RunResumed(retried=("a",)))
    assert (task.state, task.reason, task.traceback, task.losses) == (PENDING, "", "", 0)


def test_a_diverged_task_is_not_retried(refused):
    record = record_of(LAUNCH, DIVERGE)
    refused(record.apply, RunResumed(retried=("a",)), 9.0, error=StoreError)


def test_tasks_are_counted_by_state():
    assert record_of(LAUNCH).counts() == {"running": 1, "pending": 1}
    assert record_of(LAUNCH, FINISH).counts() == {"finished": 1, "pending": 1}


def test_remaining_steps_never_go_below_nothing():
    task = task_after(LAUNCH, BEGIN, Saved(task="a", attempt=1, step=150, write_s=0.1))
    assert task.remaining_steps == 0


def test_replaying_is_applying_one_by_one():
    events = [
        (float(i), event) for i, event in enumerate([BEGAN, LAUNCH, BEGIN, lost(), RunEnded(state="interrupted")])
    ]
    replayed, applied = RunRecord.replay(events), RunRecord()
    for time_s, event in events:
        applied.apply(event, time_s)
    assert vars(replayed) == vars(applied)
    assert replayed.last_s == 4.0
