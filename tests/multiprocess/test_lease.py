"""A real worker with a short lease: it begins when it is answered, and writes no more once it was cut off too long."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import rota
from rota.pickling import pickle_task
from rota.runtime import channel
from rota.runtime.messages import Beat, Began, Finished, Here, Ready, Saved, Train
from rota.state import checkpoint

LEASE_S = 2.0
START = f"from rota.runtime import link; link.LEASE_S = {LEASE_S}; from rota.runtime.worker import main; main()"
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


class Far:
    """A worker as on a node, and its controller, which answers as long as it should."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._line, keeper = socket.socketpair()
        settings = {
            "socket": theirs.fileno(),
            "kind": "cpu",
            "cores": [],
            "memory_bytes": 2**30,
            "parent": psutil.Process().pid,
            "keeper": keeper.fileno(),
            "pool_socket": -1,
            "pool_cores": [],
            "pool_arenas": [],
        }
        command = [sys.executable, "-P", "-c", START, json.dumps(settings)]
        with theirs, keeper:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), keeper.fileno()]
            )
        self._stream = ours
        self.answers = True
        self.said: list[Any] = []
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        deframer = channel.Deframer()
        with contextlib.suppress(OSError):
            while data := self._stream.recv(1 << 16):
                for message, _ in deframer.feed(data):
                    if not isinstance(message, Beat):
                        self.said.append(message)
                    elif self.answers:
                        self._stream.sendall(channel.frame(Here(at_s=message.at_s)))

    def train(self, folder: Path, *, steps: int) -> None:
        task = rota.Task(
            name="a",
            model=lambda: nn.Linear(4, 2),
            data=lambda: rota.Data(train=X, batch_size=3),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
            loss=lambda model, batch: model(batch).pow(2).mean(),
            steps=steps,
            checkpoint_every=1,
        )
        command = Train(
            task="a",
            attempt=1,
            folder=str(folder),
            import_path=tuple(sys.path),
            rank=0,
            size=1,
            meeting="",
            key="",
            storage="",
        )
        self._stream.sendall(channel.frame(command, pickle_task(task)))

    def has_said(self, kind: type) -> bool:
        return any(isinstance(one, kind) for one in self.said)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._listening.join(5)
        self._stream.close()
        self._line.close()


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far()
    yield made
    made.close()


def until(done: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_worker_that_was_stopped_for_longer_than_its_lease_writes_no_more(far: Far, tmp_path: Path) -> None:
    until(lambda: far.has_said(Ready))
    far.train(tmp_path, steps=10**6)
    until(lambda: far.has_said(Saved))
    far.process.send_signal(signal.SIGSTOP)
    far.answers = False
    time.sleep(LEASE_S + 0.5)
    before = [path.name for path in checkpoint.committed(tmp_path / "checkpoints")]
    far.process.send_signal(signal.SIGCONT)
    assert far.process.wait(20) == 0
    assert [path.name for path in checkpoint.committed(tmp_path / "checkpoints")] == before


def test_a_task_that_nobody_answers_for_is_not_begun(far: Far, tmp_path: Path) -> None:
    until(lambda: far.has_said(Ready))
    far.train(tmp_path / "first", steps=1)  # from then on it would begin another at once
    until(lambda: far.has_said(Finished))
    far.said.clear()
    far.answers = False
    far.train(tmp_path / "second", steps=1)
    assert far.process.wait(20) == 0
    assert not far.has_said(Began)
    assert not (tmp_path / "second").exists()


def test_one_that_has_done_its_task_has_none_of_its_files_and_no_lease(far: Far, tmp_path: Path) -> None:
    until(lambda: far.has_said(Ready))
    far.train(tmp_path, steps=3)
    until(lambda: far.has_said(Finished))
    far.answers = False

    def open_ones() -> list[str]:
        found = psutil.Process(far.process.pid).open_files()
        return [one.path for one in found if one.path.startswith(str(tmp_path))]

    until(lambda: not open_ones(), 5.0)
    time.sleep(LEASE_S + 1.0)
    assert far.process.poll() is None
