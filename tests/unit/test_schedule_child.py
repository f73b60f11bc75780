"""Solving in a child: the best so far, the end at the deadline, the death of the parent, and a child that fails."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rota.errors import InputError
from rota.schedule import child
from rota.schedule.child import Solving, solve_in_child
from rota.schedule.problem import Node, Option, Problem, check
from rota.schedule.solve import Limit, solve

pytestmark = pytest.mark.timeout(60)


def problem(tasks=14):
    """One that is not solved to the end for a long time."""
    options = tuple(
        Option(tasks=(f"t{task}",), kind="gpu", devices=width, seconds=(100 + 37.3 * task) / width**0.83)
        for task in range(tasks)
        for width in range(1, 9)
    )
    return Problem(options=options, nodes=(Node(name="n", kind="gpu", devices=tuple(f"n/{i}" for i in range(8))),))


def wait_for(condition, seconds=30.0):
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def test_a_child_solves_as_this_process_does():
    wanted = solve(problem(6), limit=Limit(steps=3), seed=2, clock=time.monotonic)
    assert solve_in_child(problem(6), limit=Limit(steps=3), seed=2) == wanted


def test_the_best_so_far_is_there_at_any_time():
    with Solving.start(problem(), limit=Limit(seconds=60)) as solving:
        assert solving.poll() is None or not solving.done
        wait_for(lambda: solving.poll() is not None)
        assert not solving.done
        first = solving.poll()
        check(problem(), first.schedule)
    assert solving.done
    assert solving.poll().value <= first.value
    assert not psutil.pid_exists(solving.pid)


def test_a_child_is_ended_at_its_deadline_and_its_best_answer_counts(monkeypatch):
    started_s = time.monotonic()
    # A child that does not keep to its limit: it is given a minute, and ended after four seconds.
    solved = solve_in_child(problem(), limit=Limit(seconds=60), grace_s=-56.0)
    assert 3.5 < time.monotonic() - started_s < 8
    check(problem(), solved.schedule)
    assert not [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]


def test_a_child_that_gives_nothing_is_no_reason_to_fail(monkeypatch):
    notices = []
    monkeypatch.setattr(child, "_START", "raise SystemExit('it rains')")
    solved = solve_in_child(problem(), limit=Limit(seconds=5), notice=notices.append)
    check(problem(), solved.schedule)
    assert solved.value == min(solved.heuristics.values())
    assert len(notices) == 1
    assert "it rains" in notices[0]


def test_a_child_that_is_killed_leaves_its_best():
    with Solving.start(problem(), limit=Limit(seconds=60)) as solving:
        wait_for(lambda: solving.poll() is not None)
        os.kill(solving.pid, signal.SIGKILL)
        assert solving.wait(10.0)
        check(problem(), solving.poll().schedule)


def test_closing_twice_and_early_is_fine():
    solving = Solving.start(problem(), limit=Limit(seconds=60))
    solving.close()
    solving.close()
    assert solving.done


def test_a_problem_that_cannot_be_is_refused_before_and_in_the_child():
    nowhere = Problem(options=(Option(tasks=("t",), kind="tpu", devices=1, seconds=1.0),), nodes=problem().nodes)
    with pytest.raises(InputError, match="fits nowhere"):
        Solving.start(nowhere, limit=Limit(seconds=1))
    held = tuple(Option(tasks=(task,), kind="gpu", devices=1, seconds=1.0, held=("n/0",)) for task in "tu")
    with pytest.raises(InputError, match="exclude each other"):
        solve_in_child(Problem(options=held, nodes=problem().nodes), limit=Limit(seconds=5))


def test_a_child_dies_with_its_parent():
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from test_schedule_child import problem;"
        "from rota.schedule.child import Solving; from rota.schedule.solve import Limit;"
        "one = Solving.start(problem(), limit=Limit(seconds=60)); print(one.pid, flush=True); time.sleep(60)"
    )
    folder = os.path.dirname(__file__)
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        time.sleep(1.5)
        parent.kill()
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
