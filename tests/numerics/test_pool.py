"""A task in a pool is trained as the plain loop trains it, through halts and switches."""

import contextlib
import socket
from dataclasses import replace

import pytest
import torch

from rota.errors import FitError
from rota.memory import building, pooling
from rota.memory.arbiter import Arbiter
from rota.memory.arena import Arena, make_arena
from rota.memory.pooled import Seat
from rota.memory.turns import Turns
from rota.runtime.loop import Loop
from rota.runtime.messages import Finished, Halted
from rota.strategies import pool, spill
from tests.numerics.test_exact import TASKS, Surroundings, assert_equals_plain


@pytest.fixture(autouse=True)
def tight(monkeypatch, remembered):
    """Units that hardly fit, of models that would fit into any memory."""
    original = pooling.cut_to_fit

    def tightly(graph, training, *, room_bytes):
        try:
            return original(graph, training, room_bytes=1)
        except FitError as error:
            return original(graph, training, room_bytes=int(1.2 * error.needed_bytes))

    monkeypatch.setattr(pooling, "cut_to_fit", tightly)
    monkeypatch.setattr(building, "_LEAST_BYTES", 1)


@contextlib.contextmanager
def seated(devices=2):
    ours, theirs = socket.socketpair()
    memory_bytes = 2**30
    arbiter = Arbiter({"task": ours}, devices=devices, memory_bytes=memory_bytes)
    arenas = [Arena(make_arena(memory_bytes)) for _ in range(devices)]
    try:
        yield Seat(turns=Turns(theirs), cores=((),) * devices, arenas=arenas)
    finally:
        theirs.close()
        arbiter.close()


def train(task, folder, surroundings, attempt=1):
    with seated() as seat:
        return Loop(
            task,
            attempt=attempt,
            folder=folder,
            device=torch.device("cpu"),
            surroundings=surroundings,
            memory_bytes=2**30,
            seat=seat if str(task.strategy) == "pool" else None,
        ).run()


FEW = ("dropout, AdamW, schedule, clipping, validation", "epochs with accumulation", "BatchNorm and a dict of metrics")


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, id=name, marks=[] if name in FEW else [pytest.mark.deep]) for name, task in TASKS.items()],
)
def test_it_equals_the_plain_loop(task, tmp_path):
    surroundings = Surroundings()
    task = replace(task, strategy=pool())
    assert isinstance(train(task, tmp_path, surroundings), Finished)
    assert_equals_plain(task, tmp_path, surroundings.rows)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(TASKS["accumulation"], marks=pytest.mark.deep, id="parts"),
        pytest.param(TASKS["epochs, last batch smaller"], id="epochs"),
    ],
)
def test_it_goes_on_from_any_other_way_and_any_other_way_from_it(task, tmp_path):
    rows = {}
    for attempt in range(1, 100):
        surroundings = Surroundings(halt_after=2 + attempt * 2 % 7)
        strategy = ["single", pool(), spill(shards=3), pool()][attempt % 4]
        outcome = train(replace(task, strategy=strategy), tmp_path, surroundings, attempt)
        for step, row in surroundings.rows.items():
            rows.setdefault(step, {"step": step}).update(row)
        if isinstance(outcome, Finished):
            break
        assert isinstance(outcome, Halted)
    assert attempt >= 4
    assert_equals_plain(task, tmp_path, rows)
