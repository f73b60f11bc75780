"""Work that moves between devices while a task trains changes nothing of what is trained, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rota
from rota.cli.sweep_file import load_source
from rota.execute.record import RunRecord
from rota.store.journal import read_events
from rota.testing import plain

SWEEP = """
import dataclasses, random
import torch
import torch.nn.functional as F
import rota
from rota.balance.decide import Migrate
from rota.testing.models import GPT

ROWS = torch.randint(0, 32, (64, 17), generator=torch.Generator().manual_seed(1))


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def restless(every, seed):
    def policy(standing, seen, facts):
        draw = random.Random(seed * 1000 + seen.step)
        if standing.under_way is None and seen.step % every == every // 2:
            raw = [draw.uniform(0.1, 1) ** 3 for _ in range(facts.ranks)]
            shares = tuple(one / sum(raw) for one in raw)
            return dataclasses.replace(standing, under_way=shares), Migrate(shares=shares, why="a test")
        return standing, None

    return policy


def task(name, strategy, *, steps, every, precision="float64", balance=None, **other):
    return rota.Task(
        name=name,
        model=lambda: GPT(vocabulary=32, context=16, width=48, depth=2, heads=6, dropout=0.0),
        data=lambda: rota.Data(train=ROWS[:57], valid=ROWS[57:], batch_size=8),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=30),
        steps=steps, valid_every=steps // 3, clip_norm=0.5, precision=precision, strategy=strategy,
        balance=balance or restless(every, len(name)), **other,
    )


sweep = rota.Sweep(tasks=[TASKS])
"""


def _text(tasks: str) -> str:
    return SWEEP.replace("TASKS", tasks)


def _moves(run: Path, task: str) -> Any:
    return RunRecord.replay(read_events(run / "journal.db")).tasks[task].balance


def _assert_plain(file: Path, run: Path, *, within: float = 1e-10) -> None:
    result = rota.open_run(run)
    assert {task.state for task in result.tasks} == {"finished"}, [task.reason for task in result.tasks]
    expected = {task.name: plain.train(task) for task in load_source(str(file)).sweep}
    for task in result.tasks:
        found = load_file(task.model_path)
        for name, value in expected[task.name].model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=within, atol=within, msg=f"{task.name}: {name}")
        for ours, theirs in zip(result.history(task), expected[task.name].history, strict=True):
            for key, value in theirs.items():
                assert abs(ours[key] - value) < within * max(1.0, abs(value)), (task.name, key, ours, theirs)


@pytest.mark.timeout(300)
def test_moves_at_random_moments_train_what_plain_pytorch_trains(cli: Any, sweep_file: Any, tmp_path: Path) -> None:
    file = sweep_file(
        text=_text(
            """
    task("tensor", "tensor", steps=300, every=30),
    task("data", "data", steps=45, every=10, accumulate=2),
    task("pipeline", "pipeline(2, microbatches=4)", steps=45, every=15),
    task("zero", "zero", steps=45, every=10),
    """
        )
    )
    run = tmp_path / "run"
    done = cli.run("run", file, "--devices", "2", "--out", run, timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout[-3000:]
    _assert_plain(file, run)
    for task, least in (("tensor", 3), ("data", 2), ("pipeline", 1), ("zero", 2)):
        assert len({move.shares for move in _moves(run, task)}) >= least, task
    assert "of the work" in done.stderr + done.stdout


def _step(run: Path) -> int:
    try:
        return max((task.step for task in rota.open_run(run).record.tasks.values()), default=0)
    except rota.RotaError:
        return 0


def _wait(condition: Any, process: Any, timeout_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.deep
@pytest.mark.timeout(250)
def test_who_dies_while_work_moves_leaves_the_old_or_the_new_and_never_a_mixture(
    cli: Any, sweep_file: Any, tmp_path: Path
) -> None:
    """Work moves all the time, so that ranks are killed before, within and after moves."""
    file = sweep_file(text=_text('task("moved", "tensor", steps=160, every=4, checkpoint_every=7)'))
    run = tmp_path / "run"
    process = cli.start("run", file, "--devices", "2", "--retries", "5", "--out", run)
    for victim, after in ((1, 20), (0, 60), (1, 100)):
        _wait(lambda after=after: _step(run) > after, process)
        workers = sorted(cli.workers(process), key=lambda one: one.pid)
        os.kill(workers[victim].pid, signal.SIGKILL)
        _wait(lambda: rota.open_run(run).record.tasks["moved"].attempt > 1, process)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err + out
    assert rota.open_run(run).record.tasks["moved"].attempt >= 3
    _assert_plain(file, run)


@pytest.mark.deep
@pytest.mark.timeout(250)
def test_a_checkpoint_of_other_widths_goes_on_with_another_number_of_ranks(
    cli: Any, sweep_file: Any, tmp_path: Path
) -> None:
    file = sweep_file(text=_text('task("moved", "tensor", steps=120, every=6)'))
    run = tmp_path / "run"
    process = cli.start("run", file, "--devices", "2", "--out", run)
    _wait(lambda: _step(run) > 20, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    first = _moves(run, "moved")
    assert first
    assert max(first[-1].shares) > 0.5
    done = cli.run("resume", run, "--devices", "1", timeout=150)
    assert done.returncode == 0, done.stderr + done.stdout
    _assert_plain(file, run)


@pytest.mark.deep
@pytest.mark.timeout(250)
def test_a_rank_that_stands_still_is_slow_first_and_lost_after_the_deadline(
    cli: Any, sweep_file: Any, tmp_path: Path
) -> None:
    file = sweep_file(text=_text('task("still", "tensor", steps=400, every=1000, checkpoint_every=20)'))
    run = tmp_path / "run"
    process = cli.start("run", file, "--devices", "2", "--out", run)
    _wait(lambda: _step(run) > 5, process)
    first = sorted(cli.workers(process), key=lambda one: one.pid)
    os.kill(first[1].pid, signal.SIGSTOP)
    time.sleep(2)
    os.kill(first[1].pid, signal.SIGCONT)
    at = _step(run)
    _wait(lambda: _step(run) > at + 10, process)
    assert rota.open_run(run).record.tasks["still"].attempt == 1  # it was only slow
    os.kill(first[1].pid, signal.SIGSTOP)
    _wait(lambda: rota.open_run(run).record.tasks["still"].attempt == 2, process, timeout_s=30)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err + out
    _assert_plain(file, run)


SLOWED = """
import os, subprocess, sys
import torch.distributed as dist
from rota.balance.decide import after_step

BUSY = "import os\\nwhile os.getppid() == {}: sum(range(9999))"
busy = []


def slowed(standing, seen, facts):
    if seen.step == 20 and dist.get_rank() == 1:  # on this process's core, which children inherit
        busy.extend(subprocess.Popen([sys.executable, "-c", BUSY.format(os.getpid())]) for _ in range(4))
    if seen.step == 60:
        while busy:
            one = busy.pop()
            one.kill()
            one.wait()
    return after_step(standing, seen, facts)


"""


@pytest.mark.timeout(200)
@pytest.mark.alone
def test_a_busy_core_is_answered_by_moving_work_and_forgiven(cli: Any, sweep_file: Any, tmp_path: Path) -> None:
    """A real straggler, and the policy that tasks have."""
    text = _text('task("slow", "tensor", steps=160, every=1, balance=slowed)').replace("sweep = ", SLOWED + "sweep = ")
    text = text.replace("width=48, depth=2, heads=6", "width=256, depth=1, heads=8")
    file = sweep_file(text=text.replace("batch_size=8", "batch_size=57"))
    run = tmp_path / "run"
    done = cli.run("run", file, "--devices", "2", "--out", run, timeout=180)
    assert done.returncode == 0, done.stderr + done.stdout
    moves = _moves(run, "slow")
    first = next(move for move in moves if move.step > 20)
    assert first.step <= 50
    assert first.shares[1] < 0.45
    assert "device 1 is" in first.why
    assert max(move.shares[1] for move in moves if 20 < move.step <= 60) < 0.3
    # Whoever else uses the machine slows either device for a second: what this one has on average counts.
    afterwards = [next(move.shares[1] for move in reversed(moves) if move.step <= step) for step in range(80, 160)]
    assert abs(sum(afterwards) / len(afterwards) - 0.5) < 0.2, moves
    _assert_plain(file, run, within=1e-9)


POLICIES = """
from rota.balance.decide import Resize


class once:
    def __init__(self, decision, mode="migrate"):
        self.decision, self.mode = decision, mode

    def __call__(self, standing, seen, facts):
        return standing, self.decision if seen.step == 3 else None


def raises(standing, seen, facts):
    raise ValueError("boom")


def differs(standing, seen, facts):
    import torch.distributed as dist

    if seen.step == 3:
        return standing, Migrate(shares=(0.8, 0.2) if dist.get_rank() == 0 else (0.2, 0.8), why="differs")
    return standing, None


"""
BAD = {
    "raises": ("tensor", "raises", "the balance policy raised ValueError: boom"),
    "nothing": ("tensor", "lambda *_: None", "the balance policy: it must return (standing, decision)"),
    "word": ("tensor", "once('migrate')", "the balance policy: a decision is Migrate, Resize or None"),
    "negative": ("data", "once(Migrate(shares=(1.5, -0.5), why=''))", "shares must be 2 positive numbers"),
    "short": ("data", "once(Migrate(shares=(1.0,), why=''))", "shares must be 2 positive numbers"),
    "copies": ("data", "once(Resize(left_out=(0.5, 0.0), why=''), mode='semi')", "nothing can be left out"),
    "cut": ("zero", "once(Resize(left_out=(0.5, 0.0), why=''), mode='semi')", "nothing can be left out"),
    "exact": ("tensor", "once(Resize(left_out=(0.5, 0.0), why=''))", "nothing can be left out"),
    "much": ("tensor", "once(Resize(left_out=(1.5, -3.0), why=''), mode='semi')", "left_out must be 2 numbers from 0"),
    "differs": ("data", "differs", "decided differently in the processes"),
}
GOOD = """
    task("semi-pipeline", "pipeline(2, microbatches=2)", steps=30, every=1, balance="semi"),
    task("resize-zero", "zero", steps=30, every=1, balance="resize"),
    task("resize-data", "data", steps=30, every=1, balance="resize"),
    task("forgets", "data", steps=30, every=1, balance=once(Migrate(shares=(0.99, 0.01), why="forgets under_way"))),
"""


@pytest.mark.timeout(200)
def test_bad_policies_end_their_task_with_one_sentence_and_nothing_is_left_out_where_copies_would_drift(
    cli: Any, sweep_file: Any, tmp_path: Path
) -> None:
    tasks = "".join(
        f"task({name!r}, {strategy!r}, steps=12, every=1, balance={policy}),\n"
        for name, (strategy, policy, _) in BAD.items()
    )
    text = _text(tasks + GOOD).replace("sweep = ", POLICIES + "sweep = ")
    file = sweep_file(text=text)
    run = tmp_path / "run"
    done = cli.run("run", file, "--devices", "2", "--no-profile", "--out", run, timeout=180)
    found = {task.name: task for task in rota.open_run(run).tasks}
    for name, (_, _, sentence) in BAD.items():
        assert found[name].state == "failed", name
        assert sentence in found[name].reason, (name, found[name].reason)
    expected = {task.name: plain.train(task) for task in load_source(str(file)).sweep if task.name not in BAD}
    for name, trained in expected.items():
        assert found[name].state == "finished", (name, found[name].reason)
        weights = load_file(found[name].model_path)
        for key, value in trained.model.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-10, msg=f"{name}: {key}")
    assert _moves(run, "forgets")[0].shares == pytest.approx((7 / 8, 1 / 8), abs=0.01)
    assert done.returncode == 1
