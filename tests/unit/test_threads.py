"""Threads have an owner, who ends them: at a safe point, and before the interpreter is torn down."""

import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F

from rota.balance.decide import Facts, Migrate, Standing
from rota.cluster import local
from rota.execute.backends.local import spawn
from rota.graph.capture import capture
from rota.memory.arbiter import Arbiter
from rota.memory.mover import Mover
from rota.memory.slab import Budget, Slab
from rota.memory.staging import Far, Staging
from rota.memory.store import Store
from rota.runtime import channel
from rota.runtime.balancing import Balancer
from rota.runtime.messages import Ready, Shutdown
from rota.schedule.child import Solving
from rota.schedule.problem import Node, Option, Problem
from rota.schedule.solve import Limit
from rota.state import checkpoint
from rota.state.writer import CheckpointWriter
from rota.strategies.base import find
from rota.testing.models import GPT
from rota.threads import OwnedThread, safe_point


def alive():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rota-")]


class Endless:
    """Work that only ends at a safe point."""

    def __init__(self):
        self.turns = 0

    def __call__(self):
        while True:
            self.turns += 1
            time.sleep(0.001)
            safe_point()


def test_it_ends_at_a_safe_point_when_its_owner_wants_that():
    work = Endless()
    thread = OwnedThread(work, name="endless")
    thread.end()  # one that was never started
    thread.start()
    while not work.turns:
        time.sleep(0.001)
    assert alive() == ["rota-endless"]
    thread.end()
    assert alive() == []
    turns = work.turns
    time.sleep(0.02)
    assert work.turns == turns
    thread.end()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_it_ends_with_its_owner_whatever_ends_that(error):
    with pytest.raises(error), OwnedThread(Endless(), name="endless"):
        raise error
    assert alive() == []


def test_what_it_waits_for_is_woken():
    woken = threading.Event()
    with OwnedThread(woken.wait, name="waiting", wake=woken.set):
        assert alive() == ["rota-waiting"]
    assert alive() == []


def test_it_is_no_daemon_also_in_the_thread_of_one():
    found = []
    other = threading.Thread(target=lambda: found.append(OwnedThread(Endless(), name="one")), daemon=True)
    other.start()
    other.join()
    assert not found[0].daemon


def test_safe_points_stop_no_other_thread():
    safe_point()


_ENDS = """
import sys, torch
from rota.threads import OwnedThread, safe_point

torch.set_num_threads(1)

def work():
    while True:  # most of the time it waits for the lock of the interpreter in the midst of C++
        x = torch.ones(8, 8, requires_grad=True)
        for _ in range(50):
            x = x * 1.0
        x.sum().backward()
        safe_point()

for number in range(3):
    OwnedThread(work, name=f"torch-{number}").start()
torch.ones(100).sum()
HOW
"""


@pytest.mark.parametrize(
    ("how", "code"), [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError", 1), ("raise KeyboardInterrupt", -2)]
)
def test_a_process_that_ends_while_a_thread_computes_does_not_abort(how, code):
    done = subprocess.run([sys.executable, "-c", _ENDS.replace("HOW", how)], capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr.decode()


_FORGETS = """
import socket, threading
from rota.memory.arbiter import Arbiter
from rota.schedule.child import Solving
from rota.schedule.problem import Node, Option, Problem
from rota.schedule.solve import Limit
from rota.threads import OwnedThread

def waits():
    woken = threading.Event()
    OwnedThread(woken.wait, name="waiting", wake=woken.set).start()

def arbiter():
    Arbiter({"a": socket.socketpair()[0]}, devices=1, memory_bytes=2**20)

def solving():
    options = [Option(tasks=(f"t{i}",), kind="cpu", devices=1, seconds=1.0 + i / 7, label="one") for i in range(40)]
    nodes = (Node(name="n", kind="cpu", devices=tuple("abcdefg")),)
    return Solving.start(Problem(options=tuple(options), nodes=nodes), limit=Limit(seconds=600.0))

kept = OWNER()
"""


@pytest.mark.parametrize("owner", ["waits", "arbiter", "solving"])
def test_a_process_ends_although_the_owner_of_a_thread_forgot_to_end_it(owner):
    """As where an error comes between: the interpreter waits for threads, and would wait for ever."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORGETS.replace("OWNER", owner)], check=True, timeout=60)


# ---- those that there are ----


def test_a_compile_stops_at_once():
    model = GPT(vocabulary=16, context=8, width=16, depth=2, heads=2)
    rows = torch.zeros(8, 9, dtype=torch.long)
    graph = capture(model, rows, lambda model, rows: F.cross_entropy(model(rows[:, :-1]).mT, rows[:, 1:]))
    compiled = []

    def work():
        while True:
            compiled.append(find("pipeline(2, microbatches=4)")(graph, 2).compile())

    thread = OwnedThread(work, name="compile")
    thread.start()
    while not compiled:
        time.sleep(0.01)
    begun_s = time.monotonic()
    thread.end()
    assert time.monotonic() - begun_s < 10
    assert alive() == []


def deciding(make, tell=lambda **what: None):
    """A balancer that has just decided to move work."""
    facts = Facts(mode="migrate", ranks=2, least=0.01)
    policy = lambda standing, seen, facts: (standing, Migrate(shares=(0.6, 0.4), why="it is slow"))  # noqa: E731
    made = Balancer(
        rank=0,
        facts=facts,
        standing=Standing.begin((0.5, 0.5), fixed=0.0),
        policy=policy,
        total_steps=100,
        cost_s=0.1,
        asked=(0.5, 0.5),
        make=lambda shares: make,
        tell=tell,
    )
    made.step_ended(1)
    return made


def test_a_move_that_is_being_prepared_is_given_up_when_the_task_leaves():
    told = []
    work = Endless()
    balancer = deciding(work, tell=lambda **what: told.append(what))
    while not work.turns:
        time.sleep(0.001)
    assert alive() == ["rota-balance"]
    balancer.close()
    assert alive() == []
    assert told == []
    assert balancer.numbers()[-1] == 0.0  # it did not fail


def test_who_writes_checkpoints_has_no_thread_when_nothing_is_written(tmp_path, monkeypatch):
    seen, real = [], checkpoint.write_flat
    monkeypatch.setattr(checkpoint, "write_flat", lambda *given: (seen.extend(alive()), real(*given))[1])
    writer = CheckpointWriter(tmp_path, done=lambda written: None)
    writer.submit({"w": torch.ones(3)}, step=1)
    writer.wait()
    assert seen == ["rota-checkpoint"]
    assert alive() == []


@pytest.mark.parametrize(
    "make", [Mover, lambda store: Staging(store, Far(device=torch.device("cpu"), host_bytes=2**20))]
)
def test_what_moves_shards_ends_its_threads(tmp_path, make):
    store, slab = Store(tmp_path), Slab(2**12, budget=Budget(2**20), what="a test")
    moves = make(store)
    moves.load("a", slab, after=moves.write("a", slab)).result()
    assert len(alive()) == 2
    moves.close()
    store.close()
    assert alive() == []


def test_who_waits_for_a_solver_ends_its_threads():
    option = Option(tasks=("t",), kind="cpu", devices=1, seconds=1.0, label="one")
    problem = Problem(options=(option,), nodes=(Node(name="n", kind="cpu", devices=("a",)),))
    with Solving.start(problem, limit=Limit(seconds=600.0)):
        assert "rota-solve-hear" in alive()
    assert alive() == []


def test_an_arbiter_ends_its_thread():
    ours, theirs = socket.socketpair()
    arbiter = Arbiter({"a": ours}, devices=1, memory_bytes=2**20)
    assert alive() == ["rota-arbiter"]
    arbiter.close()
    assert alive() == []
    theirs.close()


@pytest.mark.parametrize("when", ["at once", "when it is ready"])
def test_a_worker_that_is_let_go_ends_by_itself(tmp_path, when):
    (device,) = local(devices=1).devices
    ours, theirs = socket.socketpair()
    with ours, (tmp_path / "output").open("w+b") as output:
        with theirs:
            process = spawn(device, theirs, output)
        try:
            deframer = channel.Deframer()
            while when != "at once" and not any(isinstance(one, Ready) for one, _ in deframer.feed(ours.recv(2**16))):
                pass
            ours.sendall(channel.frame(Shutdown()))
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        assert output.read() == b""


@pytest.mark.parametrize(
    "what", ["schedule.child import main; main", "calibrate.links import link_process; link_process"]
)
def test_a_process_that_was_started_for_something_ends_with_its_parent(what, tmp_path):
    """Also where it waits for others that never come."""
    options = ["0", "2", str(tmp_path / "store"), "cpu", "1", "60"]
    command = [sys.executable, "-c", f"from rota.{what}()", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(1.0)
        process.stdin.close()
        assert process.wait(30) in (0, 1)
        assert process.stderr.read() == b""
