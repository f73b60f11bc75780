"""A sweep on a Ray cluster of three nodes is the sweep on one machine, whatever happens to the nodes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rota
from rota.execute.events import Launched, RunResumed
from rota.runtime.messages import Began
from rota.store.journal import read_events

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rota[ray]'")

pytestmark = pytest.mark.alone

SWEEP = """
import torch, rota
import torch.nn.functional as F
from helper import loss
from rota.testing.models import GPT

ROWS = torch.randint(0, 32, (64, 17), generator=torch.Generator().manual_seed(1))


def task(name, strategy, devices, *, lr=1e-3, steps=30, precision="float32"):
    return rota.Task(
        name=name,
        model=lambda: GPT(vocabulary=32, context=16, width=32, depth=2, heads=4, dropout=0.1),
        data=lambda: rota.Data(train=ROWS[:56], valid=ROWS[56:], batch_size=8),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        steps=steps, valid_every=10, strategy=strategy, devices=devices, checkpoint_every=5, precision=precision,
        balance="off",
    )


sweep = rota.Sweep(tasks=[TASKS])
"""
HELPER = """
import torch.nn.functional as F


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
"""
SMALL = """
    task("one", "single", 1),
    task("two", "single", 1, lr=2e-3),
    task("wide", "tensor", 2),
    task("last", "single", 1, lr=3e-3),
"""


@contextlib.contextmanager
def _three_nodes() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        cluster.workers = [cluster.add_node(num_cpus=1) for _ in range(3)]
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head without devices, and three nodes with one each."""
    with _three_nodes() as cluster:
        yield cluster


@pytest.fixture
def mortal_nodes() -> Iterator[Any]:
    """Likewise, for a test that takes some away."""
    with _three_nodes() as cluster:
        yield cluster


def _files(folder: Path, tasks: str) -> Path:
    (folder / "helper.py").write_text(HELPER)
    file = folder / "sweep.py"
    file.write_text(SWEEP.replace("TASKS", tasks))
    return file


def _assert_equal(run: Path, other: Path) -> None:
    left, right = rota.open_run(run), rota.open_run(other)
    assert {task.state for task in left.tasks} == {"finished"}, [task.reason for task in left.tasks]
    for mine, theirs in zip(left.tasks, right.tasks, strict=True):
        found, expected = load_file(mine.model_path), load_file(theirs.model_path)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), mine.name
        assert left.history(mine) == right.history(theirs)


@pytest.mark.timeout(150)
def test_it_equals_the_local_run_bit_for_bit(cli: Any, nodes: Any, tmp_path: Path) -> None:
    file = _files(tmp_path, SMALL)
    arguments = ("run", file, "--no-profile", "--memory", "1GiB")
    where = ("--cluster", f"ray={nodes.address}", "--out", tmp_path / "ray", "--json")
    done = cli.run(*arguments, *where, timeout=90)
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout)["counts"]["finished"] == 4  # and Ray wrote nothing there
    assert cli.run(*arguments, "--devices", "2", "--out", tmp_path / "local", timeout=90).returncode == 0
    _assert_equal(tmp_path / "ray", tmp_path / "local")
    used = {device for task in rota.open_run(tmp_path / "ray").record.tasks.values() for device in _devices(task)}
    assert len(used) == 3
    assert _no_worker_is_left()


def _devices(task: Any) -> set[str]:
    return {span.device for span in task.spans}


def _no_worker_is_left(timeout_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        if "from rota.runtime.worker import main; main()" not in listed:
            return True
        time.sleep(0.2)
    return False


def _started(cli: Any, file: Path, cluster: Any, run: Path, *, saved: int, tasks: int = 1) -> Any:
    """A run on a cluster, when so many of its tasks have saved so many steps."""
    where = ("--memory", "1GiB", "--cluster", f"ray={cluster.address}")
    process = cli.start("run", file, "--no-profile", *where, "--out", run)
    deadline_s = time.monotonic() + 90.0
    while True:
        with contextlib.suppress(rota.RotaError):  # before it has begun
            if sum(task.saved_step >= saved for task in rota.open_run(run).record.tasks.values()) >= tasks:
                return process
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.deep
@pytest.mark.timeout(200)
def test_a_lost_node_costs_the_steps_since_the_last_commit_and_a_new_one_is_used(
    cli: Any, mortal_nodes: Any, tmp_path: Path
) -> None:
    tasks = ", ".join(f'task("t{i}", "single", 1, steps=200, lr={1e-3 * (i + 1)})' for i in range(4))
    file = _files(tmp_path, tasks)
    run = tmp_path / "ray"
    process = _started(cli, file, mortal_nodes, run, saved=10)
    mortal_nodes.remove_node(mortal_nodes.workers[0], allow_graceful=False)
    mortal_nodes.add_node(num_cpus=1)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err + out
    assert "is gone" in err + out
    assert "has come" in err + out
    local = ("run", file, "--no-profile", "--memory", "1GiB", "--devices", "2", "--out", tmp_path / "local")
    assert cli.run(*local, timeout=120).returncode == 0
    _assert_equal(run, tmp_path / "local")


@pytest.mark.deep
@pytest.mark.timeout(250)
def test_a_task_that_spanned_a_lost_node_goes_on_with_fewer_devices(
    cli: Any, mortal_nodes: Any, tmp_path: Path
) -> None:
    file = _files(tmp_path, 'task("wide", "data", None, steps=300, precision="float64")')
    run = tmp_path / "ray"
    process = _started(cli, file, mortal_nodes, run, saved=10)
    before = rota.open_run(run).record.tasks["wide"].devices
    assert len(before) == 3
    lost = next(node for node in mortal_nodes.workers if any(node.node_id[:4] in device for device in before))
    mortal_nodes.remove_node(lost, allow_graceful=False)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err + out
    widths = [len(event.devices) for _, event in read_events(run / "journal.db") if isinstance(event, Launched)]
    assert widths[0] == 3
    assert widths[-1] in (1, 2)
    began = [event.from_step for _, event in read_events(run / "journal.db") if isinstance(event, Began)]
    assert began[-1] >= 10


@pytest.mark.timeout(200)
def test_workers_outlive_their_controller_and_the_next_one_takes_them_over(
    cli: Any, nodes: Any, tmp_path: Path
) -> None:
    tasks = 'task("wide", "tensor", 2, steps=400), task("one", "single", 1, steps=400), task("last", "single", 1)'
    file = _files(tmp_path, tasks)
    run = tmp_path / "ray"
    process = _started(cli, file, nodes, run, saved=5, tasks=2)
    process.kill()
    process.communicate()
    before = {task.name: task.step for task in rota.open_run(run).record.tasks.values()}
    time.sleep(2)
    done = cli.run("resume", run, "--no-profile", "--cluster", f"ray={nodes.address}", timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    events = [event for _, event in read_events(run / "journal.db")]
    (resumed,) = [event for event in events if isinstance(event, RunResumed)]
    assert set(resumed.kept) == {"wide", "one"}, before
    assert [event.attempt for event in events if isinstance(event, Launched)] == [1, 1, 1]
    local = ("run", file, "--no-profile", "--memory", "1GiB", "--devices", "2", "--out", tmp_path / "local")
    assert cli.run(*local, timeout=120).returncode == 0
    _assert_equal(run, tmp_path / "local")
    assert _no_worker_is_left()


@pytest.mark.timeout(100)
def test_who_does_not_know_the_key_is_sent_away(nodes: Any, tmp_path: Path) -> None:
    code = f"""
import os, resource, socket, sys, time
import rota
from rota.execute.backends.ray import RayBackend
backend = RayBackend(rota.ray({nodes.address!r}))
guests = [socket.create_connection(backend._address) for _ in range(3)]
guests[0].sendall(b"x" * 48)
guests[1].sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
for _ in range(20):
    assert backend.poll(0.05) == []
guests[0].settimeout(2)
challenge = guests[0].recv(100)
assert len(challenge) == 16, challenge
assert guests[0].recv(100) == b""

# Many of them: the oldest go, and nothing else happens.
many = []
for _ in range(150):
    many.append(socket.create_connection(backend._address))
    assert backend.poll(0) == []
for one, is_here in ((many[0], False), (many[-1], True)):
    one.settimeout(5)
    assert len(one.recv(100)) == 16
    if not is_here:
        assert one.recv(100) == b""

# More than there may be files: they wait.
resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
late, taken = socket.socket(), []
try:
    while True:
        taken.append(open(os.devnull))
except OSError:
    late.connect(backend._address)
for _ in range(5):
    assert backend.poll(0.05) == []
for one in taken:
    one.close()
for _ in range(5):
    assert backend.poll(0.05) == []
late.settimeout(5)
assert len(late.recv(100)) == 16
backend.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "no worker of this run" in done.stderr


def test_another_version_on_a_node_is_told(monkeypatch: pytest.MonkeyPatch, nodes: Any) -> None:
    code = f"""
import rota.execute.backends.ray_nodes as backend
ours = backend.versions()
backend.versions = lambda: {{**ours, "torch": "1.0"}}
import rota
try:
    rota.ray({nodes.address!r})
except rota.InputError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert "and this machine has 1.0; install the same on all" in done.stdout, done.stderr


def test_without_a_cluster_at_the_address_it_is_said(cli: Any, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = _files(tmp_path, SMALL)
    done = cli.run("run", file, "--cluster", f"ray=127.0.0.1:{port}", timeout=60)
    assert done.returncode == 2
    assert "there is no Ray cluster at" in done.stderr
    done = cli.run("run", file, "--cluster", "slurm", timeout=60)
    assert done.returncode == 2
    assert "--cluster can be ray" in done.stderr


@contextlib.contextmanager
def _head_with_a_token(home: Path) -> Iterator[str]:
    """What `ray start --head` starts for one who has a token at home; it ends with the command."""
    token = home / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text("a1b2" * 16)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = ("start", "--head", "--block", "--port", str(port), "--num-cpus", "1", "--include-dashboard=false")
    command = [sys.executable, "-m", "ray.scripts.scripts", *start, "--disable-usage-stats"]
    head = subprocess.Popen(command, env={**os.environ, "HOME": str(home)}, stdout=subprocess.PIPE, text=True)
    try:
        assert head.stdout is not None
        assert any("Ray runtime started" in line for line in head.stdout)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.communicate(timeout=30)


@pytest.mark.timeout(120)
def test_a_cluster_that_asks_for_a_token_gets_it_or_a_sentence_at_once(tmp_path: Path) -> None:
    """`ray start` asks for a token as soon as there is one at home, and who names the address showed none."""

    def connected(home: Path, **env: str) -> subprocess.CompletedProcess[str]:
        code = f"""
import rota
try:
    print(len(rota.ray({address!r}).devices), "device")
except rota.InputError as error:
    print(error)
"""
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "HOME": str(home), **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    with _head_with_a_token(tmp_path / "home") as address:
        done = connected(tmp_path / "home")
        assert done.stdout == "1 device\n", done.stderr
        for home, env in [(tmp_path / "other", {}), (tmp_path / "home", {"RAY_AUTH_TOKEN": "another"})]:
            since_s = time.monotonic()
            done = connected(home, **env)
            assert "~/.ray/auth_token (or RAY_AUTH_TOKEN) must be the same on all machines" in done.stdout, done.stderr
            assert "InvalidAuthToken" not in done.stderr
            assert time.monotonic() - since_s < 15


def test_meeting_files_of_killed_processes_go_before_the_next_attempt(tmp_path):
    """One device meets itself in a file of the task's folder."""
    from rota.execute.backends.ray import RayBackend

    folder = tmp_path / "tasks" / "wide"
    folder.mkdir(parents=True)
    (folder / "gang-3").write_text("")
    assert RayBackend._meeting(object.__new__(RayBackend), ["cpu:0"], folder, 4) == ""
    assert list(folder.iterdir()) == []
