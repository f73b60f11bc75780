"""kill -9 of anything at any moment, Ctrl-C and SIGTERM: after a resume the result is bit for bit the same."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import rota
from rota.cli.sweep_file import load_source
from rota.cluster.discover import available_cores
from rota.runtime.messages import Began
from rota.store.journal import read_events
from rota.testing import plain

SLOWLY, VERY_SLOWLY = {"ROTA_TEST_BATCH_S": "0.05"}, {"ROTA_TEST_BATCH_S": "0.2"}
"""The environment of a run that is to be met while it trains: its batches take a while, and not the processor."""
KILLS = 21
TARGETS = ("worker", "controller", "group")


def trained_plainly(file, *, threads=1):
    """The weights and histories of the plain PyTorch loop, for each task of a sweep file."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plainly = {task.name: plain.train(task) for task in load_source(str(file)).sweep}
    finally:
        torch.set_num_threads(before)
    return {name: (result.model.state_dict(), result.history) for name, result in plainly.items()}


def assert_same(path, expected):
    """Every task of the run finished with exactly the expected weights and history."""
    result = rota.open_run(path)
    assert {task.state for task in result.tasks} == {"finished"}
    assert {task.name for task in result.tasks} == expected.keys()
    for task in result.tasks:
        weights, history = expected[task.name]
        found = load_file(task.model_path)
        assert result.history(task) == history
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights), task.name


def progress(path):
    """How many events a run has, 0 before it begins."""
    try:
        return sum(1 for _ in read_events(path / "journal.db"))
    except rota.RotaError:
        return 0


def wait_for_progress(path, process, since, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline_s:
        if progress(path) > since:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.deep  # test_chaos.py has a shorter storm
@pytest.mark.timeout(400)
def test_killing_anything_at_random_moments_loses_nothing(cli, sweep_file, tmp_path):
    # A checkpoint after each step: there is nearly always one being written when the blow falls.
    file = sweep_file(steps=160, save_every=1)
    expected = trained_plainly(file)
    dice = random.Random(20261115)
    kills = dict.fromkeys(TARGETS, 0)
    run, number = tmp_path / "storm-0", 0
    process = cli.start("run", file, "--out", run, "--retries", "1000")
    while sum(kills.values()) < KILLS:
        target = min(TARGETS, key=kills.__getitem__)
        if wait_for_progress(run, process, progress(run) + dice.randint(0, 3)):
            time.sleep(dice.uniform(0, 0.4))
        victims = cli.workers(process)
        if process.poll() is not None:
            # It came to its end between two blows; another run takes the next ones.
            process.communicate()
            assert process.returncode == 0
            assert_same(run, expected)
            number += 1
            run = tmp_path / f"storm-{number}"
            process = cli.start("run", file, "--out", run, "--retries", "1000")
            continue
        if target == "worker":
            if not victims:
                continue
            dice.choice(victims).kill()
        else:
            (os.kill if target == "controller" else os.killpg)(process.pid, signal.SIGKILL)
            process.communicate()
            command = (
                ("resume", run) if (run / "journal.db").exists() and progress(run) else ("run", file, "--out", run)
            )
            process = cli.start(*command, "--retries", "1000")
        kills[target] += 1
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert_same(run, expected)
    assert min(kills.values()) >= KILLS // len(TARGETS)


@pytest.mark.alone
def test_interrupting_saves_and_exits_within_five_seconds(cli, sweep_file, tmp_path):
    """By Ctrl-C, and what goes on from there by SIGTERM."""
    file = sweep_file(steps=40, save_every=10_000)
    run = tmp_path / "run"
    saved = 0
    for arguments, number in ((("run", file, "--out", run), signal.SIGINT), (("resume", run), signal.SIGTERM)):
        at = progress(run)
        process = cli.start(*arguments, env=SLOWLY)
        assert wait_for_progress(run, process, at + 6)
        began_s = time.monotonic()
        # The terminal sends Ctrl-C to every process of the group.
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=20)
        assert time.monotonic() - began_s < 5
        assert process.returncode == 130, err
        stopped = rota.open_run(run)
        assert stopped.state == "interrupted"
        before, saved = saved, sum(task.saved_step for task in stopped.record.tasks.values())
        assert saved > before
    assert cli.run("resume", run).returncode == 0
    assert_same(run, trained_plainly(file))


def test_rota_stop_ends_one_task_or_the_run_and_resume_goes_on(cli, sweep_file, tmp_path):
    """And a second controller is refused while there is one."""
    file = sweep_file(steps=60, save_every=10_000)
    run = tmp_path / "run"
    process = cli.start("run", file, "--out", run, env=VERY_SLOWLY)
    assert wait_for_progress(run, process, 6)
    second = cli.run("run", file, "--out", run)
    assert second.returncode == 2
    assert f"being run by process {process.pid}" in second.stderr
    running = [task.name for task in rota.open_run(run).record.tasks.values() if task.state == "running"]
    assert cli.run("stop", run, running[0]).returncode == 0
    assert rota.open_run(run).task(running[0]).state == "stopped"
    assert process.poll() is None
    again = cli.run("stop", run, running[0])
    assert again.returncode == 2
    assert "already ended" in again.stderr
    assert cli.run("stop", run).returncode == 0
    process.communicate(timeout=20)
    assert process.returncode == 130
    idle = cli.run("stop", run)
    assert idle.returncode == 2
    assert "not running" in idle.stderr
    assert cli.run("resume", run).returncode == 0
    assert_same(run, trained_plainly(file))


def test_of_two_that_begin_the_same_run_at_once_one_is_refused(cli, sweep_file, tmp_path):
    file = sweep_file(steps=30)
    both = [cli.start("run", file, "--out", "run") for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], errors
    assert sum("being run by process" in error for error in errors) == 1
    assert_same(tmp_path / "run", trained_plainly(file))


@pytest.mark.alone
def test_a_stopped_worker_is_noticed_within_ten_seconds_and_replaced(cli, sweep_file, tmp_path):
    file = sweep_file(steps=50, save_every=1)
    run = tmp_path / "run"
    process = cli.start("run", file, "--out", run, "--devices", "1")
    assert wait_for_progress(run, process, 6)
    (victim,) = cli.workers(process)
    victim.suspend()
    began_s = time.monotonic()
    while victim.is_running() and victim.status() != "zombie":
        assert time.monotonic() - began_s < 10
        time.sleep(0.1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "no sign of life" in err
    # One device has all the cores, and therefore as many threads.
    assert_same(run, trained_plainly(file, threads=len(available_cores())))


def test_a_task_whose_worker_always_dies_fails_after_its_retries(cli, sweep_file, tmp_path):
    text = """
import os, signal, torch, rota

def task(deadly):
    def loss(model, batch):
        if deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch).mean()
    return rota.Task(name=f"task-{deadly}", model=lambda: torch.nn.Linear(2, 1),
                     data=lambda: rota.Data(train=torch.ones(4, 2), batch_size=2), loss=loss,
                     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), steps=3)

sweep = rota.grid(task, deadly=[0, 1])
"""
    done = cli.run("run", sweep_file(text=text), "--out", "run", "--retries", "1")
    assert done.returncode == 1
    result = rota.open_run(tmp_path / "run")
    assert result.task("task-0").state == "finished"
    assert result.task("task-1").state == "failed"
    assert "killed by SIGKILL" in result.task("task-1").reason
    assert result.record.tasks["task-1"].attempt == 2


def test_storage_keeps_what_a_lost_machine_had(cli, sweep_file, tmp_path):
    file = sweep_file(steps=40, save_every=5)
    run, storage = tmp_path / "run", tmp_path / "storage"
    process = cli.start("run", file, "--out", run, "--storage", storage, env=SLOWLY)
    deadline_s = time.monotonic() + 40
    while not list(storage.glob("run-*/*/checkpoint-*/commit.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    wait_for_progress(run, process, progress(run) + 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    saved = {task.name: task.saved_step for task in rota.open_run(run).record.tasks.values()}
    assert max(saved.values()) > 0
    shutil.rmtree(run / "tasks")  # as on another machine, which has the journal only
    assert cli.run("resume", run).returncode == 0
    began = [event for _, event in read_events(run / "journal.db") if isinstance(event, Began) and event.attempt > 1]
    assert any(event.from_step > 0 for event in began)
    assert all(event.from_step >= saved[event.task] for event in began)
    expected = trained_plainly(file)
    assert_same(run, expected)
    shutil.rmtree(run / "tasks")
    assert cli.run("resume", run).returncode == 0  # what is trained is fetched again
    assert_same(run, expected)


def test_another_run_of_the_same_name_does_not_take_its_checkpoints(cli, sweep_file, tmp_path):
    file = sweep_file(steps=10, save_every=2)
    for place in ("one", "two"):
        where = ("--no-profile", "--storage", tmp_path / "storage")
        assert cli.run("run", file, "--out", tmp_path / place / "run", *where).returncode == 0
        events = [event for _, event in read_events(tmp_path / place / "run" / "journal.db")]
        assert {event.from_step for event in events if isinstance(event, Began)} == {0}
    assert len(list((tmp_path / "storage").iterdir())) == 2
    again = cli.run("resume", tmp_path / "two" / "run", "--storage", tmp_path / "storage")
    assert again.returncode == 0
    assert len(list((tmp_path / "storage").iterdir())) == 2


def test_storage_that_cannot_be_written_is_told_before_anything_starts(command, sweep_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "storage").write_text("a file")
    code, _, told = command("run", sweep_file(), "--out", "run", "--storage", tmp_path / "storage")
    assert code == 2
    assert "cannot be written" in told
    code, _, told = command("run", sweep_file(), "--out", "run", "--storage", "nowhere://bucket")
    assert code == 2
    assert "nowhere" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_run_whose_output_nobody_takes_trains_all(streams, sweep_file, tmp_path):
    file = sweep_file(steps=6)
    script = f'"$0" -m rota run "$1" --out "$2" --no-profile {streams}'
    command = ["sh", "-c", script, sys.executable, str(file), str(tmp_path / "run")]
    assert subprocess.run(command, timeout=100).returncode == 0
    assert rota.open_run(tmp_path / "run").state == "finished"
