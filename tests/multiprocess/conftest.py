"""Runs the real command line in processes of its own, and sees that none is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

SWEEP = """
import os, time
import torch
import torch.nn.functional as F
import rota
from rota.testing.models import GPT

ROWS = torch.randint(0, 32, (64, 17), generator=torch.Generator().manual_seed(1))


def loss(model, rows):
    time.sleep(float(os.environ.get("ROTA_TEST_BATCH_S", "0")))
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def task(lr, steps):
    return rota.Task(
        name=f"gpt-lr{{lr:g}}",
        model=lambda: GPT(vocabulary=32, context=16, width=32, depth=2, heads=2, dropout=0.1),
        data=lambda: rota.Data(train=ROWS, valid=ROWS[:20], batch_size=8),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20),
        steps=steps, valid_every=7, clip_norm=1.0, accumulate=2, checkpoint_every={save_every},
    )


sweep = rota.grid(task, lr=[1e-3, 3e-3, 1e-2], steps=[{steps}])
"""


@pytest.fixture
def sweep_file(tmp_path):
    """Writes the sweep file that these tests train; returns a function of its length."""

    def write(*, steps=30, save_every=5, text=None):
        path = tmp_path / "sweep.py"
        path.write_text(text or SWEEP.format(steps=steps, save_every=save_every))
        return path

    return write


class Cli:
    """Starts rota in a process group of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []

    def start(self, *arguments, env=None):
        process = subprocess.Popen(
            [sys.executable, "-m", "rota", *map(str, arguments)],
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments, timeout=100, env=None):
        process = self.start(*arguments, env=env)
        out, err = process.communicate(timeout=timeout)
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    @staticmethod
    def workers(process):
        """The worker processes of a controller."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children()
            return [child for child in children if "rota.runtime.worker" in " ".join(child.cmdline())]
        return []


@pytest.fixture
def cli(tmp_path):
    """The command line, run in an empty folder; afterwards no process of it may be alive."""
    runner = Cli(tmp_path)
    yield runner
    for process in runner.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    deadline_s = time.monotonic() + 5
    while left := _workers_in(tmp_path):
        assert time.monotonic() < deadline_s, f"left behind: {left}"
        time.sleep(0.05)


def _workers_in(folder):
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if "rota.runtime.worker" in " ".join(process.info["cmdline"] or ()) and process.info["cwd"] == str(folder):
            found.append(process.pid)
    return found
