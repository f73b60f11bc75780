"""The controller on the virtual clock: what it does about faults, requests, interruptions and the end."""

from __future__ import annotations

import dataclasses

import pytest

from rota.errors import RunFolderError, TaskError
from rota.execute.backends.base import DeviceCame, DeviceGone, WorkerLost
from rota.execute.backends.simulated import Fault, SimulatedBackend, SimulatedTask
from rota.execute.events import Launched, Lost, RunEnded, Stopped
from rota.execute.record import RunRecord
from rota.execute.states import RunState, TaskState
from rota.runtime.messages import Beat, Began, Failed, Finished, Halted, Measured
from rota.store.journal import ask, read_events


def plan(steps=40, **changes):
    return SimulatedTask(steps=steps, **({"step_s": 0.5} | changes))


def states(run):
    return {name: task.state.value for name, task in run.record.tasks.items()}


def at(run, time_s, action):
    """An observer that acts once, as soon as the virtual clock has passed a time and nothing is being written."""
    done = []

    def observe(record, event):
        if event is None and not done and run.backend.now_s() >= time_s:
            done.append(True)
            action()

    return observe


# ---- the way it should go ----


def test_every_task_runs_once_and_the_run_is_finished(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(), "b": plan(20), "c": plan(30)}, devices=2)
    assert run.run() is RunState.FINISHED
    assert states(run) == {"a": "finished", "b": "finished", "c": "finished"}
    assert [task.attempt for task in run.record.tasks.values()] == [1, 1, 1]
    (ended,) = run.events(RunEnded)
    assert ended.state == "finished"


def test_the_longest_task_goes_first_and_equal_ones_as_listed(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(10), "b": plan(30), "c": plan(20), "d": plan(30)}, devices=1)
    run.run()
    assert [event.task for event in run.events(Launched)] == ["b", "d", "c", "a"]


def test_a_freed_device_is_used_at_once(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(40), "b": plan(20), "c": plan(20)}, devices=2, start_s=0.0)
    run.run()
    spans = {name: task.spans[0] for name, task in run.record.tasks.items()}
    assert spans["c"].device == spans["b"].device != spans["a"].device
    assert spans["c"].begin_s == spans["b"].end_s == 10.0


def test_the_observer_sees_every_event_after_it_is_in_the_record(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(20)}, devices=1)
    seen = []

    def observe(record, event):
        if isinstance(event, Launched):
            assert record.tasks["a"].state is TaskState.RUNNING
        if isinstance(event, Finished):
            assert record.tasks["a"].state is TaskState.FINISHED
        seen.append(event)

    run.run(observer=observe)
    assert [event for event in seen if event is not None] == run.events()[1:]
    assert None in seen


def test_the_observer_hears_what_the_leader_of_a_task_does_and_no_one_else(tmp_path, simulate):
    said = Beat(task="a", phase="the model factory", phase_s=7.0)

    class Beating(SimulatedBackend):
        def poll(self, timeout_s):
            others = [("cpu:1", said), ("cpu:0", Beat(task="", phase="")), ("cpu:0", Beat(task="b", phase="step 1"))]
            return [("cpu:0", said), *others, *super().poll(timeout_s)]

    run = simulate(tmp_path, {"a": plan(20)}, devices=1, backend=Beating)
    seen = []
    run.run(observer=lambda record, event: seen.append(event))
    beats = [event for event in seen if isinstance(event, Beat)]
    assert beats
    assert all(one is said for one in beats)
    assert not [event for event in run.events() if isinstance(event, Beat)]


def test_measurements_are_confirmed_once_they_are_in_the_journal(tmp_path, simulate):
    confirmed = []

    class Confirming(SimulatedBackend):
        def stored(self, devices):
            events = [event for _, event in read_events(tmp_path / "journal.db")]
            numbers = [event.number for event in events if isinstance(event, Measured)]
            confirmed.append((tuple(devices), max(numbers, default=0)))

    run = simulate(tmp_path, {"a": plan(40), "b": plan(40)}, devices=2, backend=Confirming)
    run.run()
    # The last report comes together with the end of the task, when nobody is left to tell.
    assert {(("cpu:0", "cpu:1"), number) for number in (1, 2, 3)} <= set(confirmed)
    assert confirmed[-1] == ((), 4)


def test_the_journal_replays_to_the_record_of_the_controller(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(), "b": plan(fails_at=7)}, devices=1, faults=[Fault(time_s=9, device="cpu:0")])
    run.run()
    assert vars(RunRecord.replay(read_events(tmp_path / "journal.db"))) == vars(run.record)


# ---- faults ----


def test_a_lost_task_goes_on_from_its_checkpoint(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(40)}, devices=1, faults=[Fault(time_s=13.2, device="cpu:0")])
    assert run.run() is RunState.FINISHED
    (lost,) = run.events(Lost)
    assert (lost.attempt, lost.device, lost.retried) == (1, "cpu:0", True)
    assert "killed by SIGKILL" in lost.reason
    assert [(event.attempt, event.from_step) for event in run.events(Began)] == [(1, 0), (2, 20)]
    assert [span.end for span in run.record.tasks["a"].spans] == ["lost", "finished"]
    assert "going on from step 20" in run.record.notices[0][2]


def test_a_lost_task_may_go_on_on_another_device(tmp_path, simulate):
    # When "a" is lost, "c" has more left to do than "a", and takes its device.
    plans = {"a": plan(40), "b": plan(39), "c": plan(38)}
    run = simulate(tmp_path, plans, devices=2, faults=[Fault(time_s=7, device="cpu:0")])
    assert run.run() is RunState.FINISHED
    assert [(span.device, span.end) for span in run.record.tasks["a"].spans] == [
        ("cpu:0", "lost"),
        ("cpu:1", "finished"),
    ]
    assert [event.from_step for event in run.events(Began) if event.task == "a"] == [0, 10]


@pytest.mark.parametrize("retries", [0, 1, 3])
@pytest.mark.parametrize("printed", [True, False])
def test_a_task_is_tried_again_so_many_times_and_then_failed(tmp_path, simulate, retries, printed):
    output = tmp_path / "tasks" / "a" / "output.log"
    if printed:
        output.parent.mkdir(parents=True)
        output.touch()
    faults = [Fault(time_s=3.0 * i + 2, device="cpu:0") for i in range(10)]
    run = simulate(tmp_path, {"a": plan(40)}, devices=1, faults=faults)
    assert run.run(retries=retries) is RunState.INCOMPLETE
    assert [event.retried for event in run.events(Lost)] == [True] * retries + [False]
    task = run.record.tasks["a"]
    assert task.state is TaskState.FAILED
    assert f"{retries + 1} times" in task.reason
    assert (f"see {output}" in task.reason) == printed  # only what there is


def test_a_loss_that_another_attempt_would_not_help_fails_the_task_at_once(tmp_path, simulate):
    class Hopeless(SimulatedBackend):
        def poll(self, timeout_s):
            return [
                (device, dataclasses.replace(sign, retry=False) if isinstance(sign, WorkerLost) else sign)
                for device, sign in super().poll(timeout_s)
            ]

    faults = [Fault(time_s=5, device="cpu:0")]
    run = simulate(tmp_path, {"a": plan(), "b": plan()}, devices=1, faults=faults, backend=Hopeless)
    assert run.run() is RunState.INCOMPLETE
    assert states(run) == {"a": "failed", "b": "finished"}
    assert run.record.tasks["a"].reason == "its worker was killed by SIGKILL"


def test_a_fault_of_an_idle_device_is_no_ones_loss(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan()}, devices=2, faults=[Fault(time_s=5, device="cpu:1")])
    assert run.run() is RunState.FINISHED
    assert run.events(Lost) == []


def test_losses_do_not_count_against_other_tasks(tmp_path, simulate):
    faults = [Fault(time_s=t, device="cpu:0") for t in (3, 6, 9)]
    run = simulate(tmp_path, {"a": plan(), "b": plan()}, devices=2, faults=faults)
    run.run(retries=2)
    assert states(run) == {"a": "failed", "b": "finished"}


def test_what_is_heard_of_an_attempt_that_is_over_is_ignored(tmp_path, simulate):
    class Echoing(SimulatedBackend):
        """Repeats everything of the first attempt during the second, as a slow network might."""

        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self.heard = []

        def poll(self, timeout_s):
            signs = super().poll(timeout_s)
            second = any(isinstance(sign, Measured) and sign.attempt == 2 for _, sign in signs)
            stale = [
                *self.heard,
                ("cpu:0", Finished(task="a", attempt=1, step=40, metrics={})),
                ("cpu:0", Finished(task="b", attempt=2, step=40, metrics={})),
                ("cpu:1", Finished(task="a", attempt=2, step=40, metrics={})),
            ]
            self.heard += [sign for sign in signs if getattr(sign[1], "attempt", 0) == 1]
            return stale + signs if second else signs

    faults = [Fault(time_s=13, device="cpu:0")]
    quiet = simulate(tmp_path / "quiet", {"a": plan()}, devices=1, faults=faults)
    loud = simulate(tmp_path / "loud", {"a": plan()}, devices=1, faults=faults, backend=Echoing)
    for run in (quiet, loud):
        run.folder.prepare()
        assert run.run() is RunState.FINISHED
    assert loud.events() == quiet.events()


# ---- errors of the user's code ----


def test_a_failing_task_is_not_tried_again_and_the_others_finish(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(fails_at=13), "b": plan(), "c": plan()}, devices=2)
    assert run.run() is RunState.INCOMPLETE
    assert states(run) == {"a": "failed", "b": "finished", "c": "finished"}
    task = run.record.tasks["a"]
    assert (task.attempt, task.step, task.reason) == (1, 13, "the loss function raised")


def test_a_task_that_cannot_be_sent_fails_and_the_others_finish(tmp_path, simulate):
    class Refusing(SimulatedBackend):
        def launch(self, devices, task, *, attempt, folder, storage=""):
            if task.name == "a":
                raise TaskError("task 'a' cannot be sent to its worker (TypeError: a lock)")
            super().launch(devices, task, attempt=attempt, folder=folder)

    run = simulate(tmp_path, {"a": plan(90), "b": plan(), "c": plan()}, devices=1, backend=Refusing)
    assert run.run() is RunState.INCOMPLETE
    assert states(run) == {"a": "failed", "b": "finished", "c": "finished"}
    assert "a lock" in run.record.tasks["a"].reason
    assert [event.task for event in run.events(Failed)] == ["a"]


def test_a_failed_task_can_be_tried_again_in_a_resume(tmp_path, simulate):
    plans = {"a": plan(fails_at=13), "b": plan()}
    run = simulate(tmp_path, plans, devices=2)
    run.run()
    plans["a"] = plan()
    assert run.run() is RunState.INCOMPLETE
    assert run.run(retried=("a",)) is RunState.FINISHED
    assert [event.from_step for event in run.events(Began) if event.task == "a"] == [0, 10]


# ---- interruption ----


def test_an_interrupt_saves_everything_and_the_rest_waits(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(), "b": plan(), "c": plan()}, devices=2)
    assert run.run(observer=at(run, 8, lambda: run.controller.interrupt())) is RunState.INTERRUPTED
    assert states(run) == {"a": "pending", "b": "pending", "c": "pending"}
    assert {event.task: event.step for event in run.events(Halted)} == {"a": 14, "b": 14}
    assert [event.task for event in run.events(Launched)] == ["a", "b"]
    assert all(span.end == "interrupted" for task in run.record.tasks.values() for span in task.spans)
    assert run.backend.now_s() < 9


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(), "b": plan(), "c": plan()}, devices=2)
    run.run(observer=at(run, 8, lambda: run.controller.interrupt()))
    assert run.run() is RunState.FINISHED
    assert [(event.task, event.from_step) for event in run.events(Began)] == [
        *[("a", 0), ("b", 0)],
        *[("c", 0), ("a", 14), ("b", 14)],
    ]


def test_an_interrupt_before_anything_runs_runs_nothing(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan()}, devices=1)

    class Interrupting:
        def decide(self, view):
            run.controller.interrupt()
            return []

    assert run.run(policy=Interrupting()) is RunState.INTERRUPTED
    assert run.events(Launched) == []
    assert states(run) == {"a": "pending"}
    assert run.run() is RunState.FINISHED


class Deaf(SimulatedBackend):
    """Tasks that do not hear that they should halt."""

    def halt(self, device):
        pass


def test_a_task_that_does_not_save_itself_in_time_is_ended_and_keeps_its_checkpoint(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(), "b": plan()}, devices=2, backend=Deaf)
    assert run.run(observer=at(run, 8, lambda: run.controller.interrupt())) is RunState.INTERRUPTED
    assert run.backend.now_s() < 8 + 5
    assert run.events(Halted) == []
    assert states(run) == {"a": "pending", "b": "pending"}
    assert run.backend._running == {}
    assert run.run() is RunState.FINISHED
    # Between the interrupt and its end the tasks went on, and saved step 20.
    assert [event.from_step for event in run.events(Began)] == [0, 0, 20, 20]


def test_a_worker_lost_while_halting_is_no_loss_of_the_task(tmp_path, simulate):
    faults = [Fault(time_s=9, device="cpu:0")]
    run = simulate(tmp_path, {"a": plan()}, devices=1, faults=faults, backend=Deaf)
    assert run.run(observer=at(run, 8, lambda: run.controller.interrupt())) is RunState.INTERRUPTED
    assert run.events(Lost) == []
    assert run.record.tasks["a"].losses == 0
    assert states(run) == {"a": "pending"}


def test_an_interrupt_is_safe_to_repeat(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan()}, devices=1)

    def observe(record, event):
        if run.backend.now_s() >= 8:
            run.controller.interrupt()

    assert run.run(observer=observe) is RunState.INTERRUPTED
    assert len(run.events(Halted)) == 1


def test_after_an_interrupted_run_every_task_waits(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(), "b": plan()}, devices=1)
    run.run(observer=at(run, 8, lambda: run.controller.interrupt()))
    assert run.record.counts() == {"pending": 2}


def test_an_interrupt_after_the_last_task_has_finished_leaves_a_finished_run(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(20)}, devices=1)

    def observe(record, event):
        if isinstance(event, Finished):
            run.controller.interrupt()

    assert run.run(observer=observe) is RunState.FINISHED


# ---- requests ----


def test_a_running_task_can_be_stopped_and_its_device_is_used_again(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(), "b": plan()}, devices=1)
    journal = tmp_path / "journal.db"
    assert run.run(observer=at(run, 8, lambda: ask(journal, verb="stop", task="a"))) is RunState.INCOMPLETE
    assert states(run) == {"a": "stopped", "b": "finished"}
    (stopped,) = run.events(Stopped)
    assert (stopped.task, stopped.attempt) == ("a", 1)
    assert stopped.step == run.events(Halted)[0].step >= 14
    assert run.record.tasks["b"].spans[0].begin_s == run.record.tasks["a"].spans[0].end_s


def test_a_pending_task_can_be_stopped_and_never_runs(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(), "b": plan()}, devices=1)
    journal = tmp_path / "journal.db"
    assert run.run(observer=at(run, 8, lambda: ask(journal, verb="stop", task="b"))) is RunState.INCOMPLETE
    assert states(run) == {"a": "finished", "b": "stopped"}
    assert [event.task for event in run.events(Launched)] == ["a"]
    assert run.record.tasks["b"].spans == []


def test_a_pending_task_that_was_lost_before_can_be_stopped(tmp_path, simulate):
    plans = {"a": plan(40), "b": plan(39)}
    run = simulate(tmp_path, plans, devices=1, faults=[Fault(time_s=8, device="cpu:0")])
    journal = tmp_path / "journal.db"
    assert run.run(observer=at(run, 9, lambda: ask(journal, verb="stop", task="a"))) is RunState.INCOMPLETE
    assert states(run) == {"a": "stopped", "b": "finished"}


def test_stopping_everything_interrupts_the_run(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(), "b": plan()}, devices=1)
    assert run.run(observer=at(run, 8, lambda: ask(tmp_path / "journal.db", verb="stop"))) is RunState.INTERRUPTED
    assert states(run) == {"a": "pending", "b": "pending"}
    assert run.run() is RunState.FINISHED


@pytest.mark.parametrize(("verb", "task"), [("stop", "ghost"), ("dance", "a"), ("dance", "")])
def test_a_request_that_makes_no_sense_is_ignored(tmp_path, simulate, verb, task):
    run = simulate(tmp_path, {"a": plan()}, devices=1)
    ended = run.run(observer=at(run, 3, lambda: ask(tmp_path / "journal.db", verb=verb, task=task)))
    assert ended is RunState.FINISHED


def test_stopping_a_task_that_has_ended_changes_nothing(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(40), "b": plan(10)}, devices=2)
    ended = run.run(observer=at(run, 15, lambda: ask(tmp_path / "journal.db", verb="stop", task="b")))
    assert ended is RunState.FINISHED


def test_stopping_a_task_twice_stops_it_once(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan()}, devices=1)
    journal = tmp_path / "journal.db"
    run.run(observer=at(run, 8, lambda: [ask(journal, verb="stop", task="a") for _ in range(3)]))
    assert len(run.events(Stopped)) == 1


def test_a_stopped_task_that_does_not_hear_is_ended_and_stands_at_its_checkpoint(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan(40), "b": plan(10)}, devices=1, backend=Deaf)
    journal = tmp_path / "journal.db"
    assert run.run(observer=at(run, 8, lambda: ask(journal, verb="stop", task="a"))) is RunState.INCOMPLETE
    assert states(run) == {"a": "stopped", "b": "finished"}
    assert run.events(Stopped)[0].step == run.record.tasks["a"].saved_step == 20


def test_a_worker_lost_while_its_task_is_being_stopped_leaves_it_stopped(tmp_path, simulate):
    faults = [Fault(time_s=9.5, device="cpu:0")]
    run = simulate(tmp_path, {"a": plan()}, devices=1, faults=faults, backend=Deaf)
    run.run(observer=at(run, 8, lambda: ask(tmp_path / "journal.db", verb="stop", task="a")))
    assert states(run) == {"a": "stopped"}
    assert run.events(Lost) == []


def test_a_stopped_task_can_be_tried_again_in_a_resume(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan()}, devices=1)
    run.run(observer=at(run, 8, lambda: ask(tmp_path / "journal.db", verb="stop", task="a")))
    saved = run.record.tasks["a"].saved_step
    assert run.run(retried=("a",)) is RunState.FINISHED
    assert run.events(Began)[-1].from_step == saved >= 14


def test_an_old_request_does_not_stop_a_resumed_run(tmp_path, simulate):
    run = simulate(tmp_path, {"a": plan()}, devices=1)
    run.run(observer=at(run, 8, lambda: run.controller.interrupt()))
    ask(tmp_path / "journal.db", verb="stop")
    assert run.run() is RunState.FINISHED


def test_stopping_a_task_that_has_already_halted_in_an_interrupt_is_harmless(tmp_path, simulate):
    class HalfDeaf(SimulatedBackend):
        """The task on cpu:1 does not halt, and the machine sleeps for a while before its patience ends."""

        def halt(self, device):
            if device == "cpu:0":
                super().halt(device)

        def poll(self, timeout_s):
            return super().poll(timeout_s + (6.0 if self._now_s > 10 else 0.0))

    plans = {"a": plan(400), "b": plan(400, report_every=400, save_every=400)}
    run = simulate(tmp_path, plans, devices=2, backend=HalfDeaf)
    interrupt, stop = (
        at(run, 8, lambda: run.controller.interrupt()),
        at(run, 8.5, lambda: ask(tmp_path / "journal.db", verb="stop", task="a")),
    )

    def observe(record, event):
        interrupt(record, event)
        stop(record, event)

    assert run.run(observer=observe) is RunState.INTERRUPTED


class Doubtful(SimulatedBackend):
    """The first device cannot be reached from 5 s on, and is there again at 20 s, or gone for good."""

    back = True

    def poll(self, timeout_s):
        before_s = self._now_s
        signs = super().poll(timeout_s)
        if before_s < 5 <= self._now_s:
            signs += [("cpu:0", WorkerLost(reason="its node is gone", retry=True))]
            signs += [("cpu:0", DeviceGone(reason="its node is gone", in_doubt=True))]
            self._running.clear()
        if before_s < 20 <= self._now_s:
            signs += [("cpu:0", DeviceCame(memory_bytes=1) if self.back else DeviceGone(reason="its node is lost"))]
        return signs


class NeverBack(Doubtful):
    """It does not come back."""

    back = False


@pytest.mark.parametrize(("backend", "width"), [(Doubtful, 2), (NeverBack, 1)])
def test_a_wide_task_waits_while_a_device_is_in_doubt_and_goes_on_with_what_there_is_then(
    tmp_path, simulate, backend, width
):
    run = simulate(tmp_path, {"a": plan(100)}, devices=2, backend=backend)
    assert run.run(widths={"a": 2}) is RunState.FINISHED
    first, second = run.events(Launched)
    assert len(first.devices) == 2
    assert len(second.devices) == width
    assert run.record.tasks["a"].spans[-1].begin_s >= 20
    assert run.controller._in_doubt == set()
    told = [text for _, _, text in run.record.notices if "cpu:0 is gone" in text]
    assert len(told) == 1


# ---- a run folder that goes away ----


def test_a_run_whose_folder_is_renamed_stops_and_does_not_make_it_again(tmp_path, simulate, refused):
    run = simulate(tmp_path / "a", {"a": plan(), "b": plan(), "c": plan()}, devices=1)
    run.folder.prepare()
    with run.folder.held():
        rename = at(run, 30, lambda: run.folder.path.rename(tmp_path / "moved"))
        sentence = refused(lambda: run.run(observer=rename), error=RunFolderError)
    assert "was moved or removed" in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    assert 0 < [task.state.value for task in run.record.tasks.values()].count("finished") < 3
