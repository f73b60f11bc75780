"""A model that cannot be captured runs by what needs no graph; what is known of it is what was measured."""

import pytest
import torch

import rota
from rota.errors import TaskError
from rota.runtime import probe
from rota.runtime.executor import Eager
from rota.runtime.one_device import choose_alone, room_of
from rota.runtime.training import Training
from rota.strategies.base import find

CPU = torch.device("cpu")
GIB = 2**30


class Stubborn(torch.nn.Linear):
    """Asks for a number in the middle, which no graph has."""

    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum().item() > 0 else y


def task_of(strategy, **changes):
    fields = {
        "name": "odd",
        "model": lambda: Stubborn(4, 4),
        "data": lambda: rota.Data(train=torch.rand(16, 4), batch_size=8),
        "loss": lambda model, rows: model(rows).square().mean(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "steps": 3,
        "strategy": find(strategy) if strategy != "auto" else strategy,
    }
    return rota.Task(**(fields | changes))


def look(task, *counts, folder):
    return probe.look(task, device=CPU, counts=counts, memory_bytes=GIB, folder=folder, known=dict)


@pytest.mark.parametrize("strategy", ["torch_ddp", "torch_ddp(find_unused=True)", "torch_fsdp2"])
def test_pytorchs_own_strategies_are_estimated_without_a_graph(tmp_path, strategy):
    sight = look(task_of(strategy), 2, folder=tmp_path)
    (found,) = sight.estimates
    assert (found.label, found.devices, found.measured) == (strategy, 2, False)
    assert found.step_s > 0
    assert sight.notices == ()


def test_auto_on_several_devices_is_estimated_as_what_it_does_there(tmp_path):
    """One of them trains it, and the others wait."""
    sight = look(task_of("auto", devices=2), 2, folder=tmp_path)
    (found,) = sight.estimates
    assert (found.label, found.devices) == ("auto", 2)
    assert "cannot be captured" in sight.notices[0]


def test_spill_is_estimated_as_plain_pytorch(tmp_path):
    sight = look(task_of("spill"), 1, folder=tmp_path)
    (found,) = sight.estimates
    assert (found.label, found.devices, found.measured) == ("single", 1, True)


def chosen(task, folder):
    told = []
    room = room_of(task, device=CPU, folder=folder, memory_bytes=GIB)
    training = Training(task, device=CPU, room=room)
    return choose_alone(training.parts, training.cursor.next()[0], notice=told.append), told


def test_spill_runs_what_cannot_be_captured_as_plain_pytorch_and_says_so(tmp_path):
    executor, (told,) = chosen(task_of("spill"), tmp_path)
    assert isinstance(executor, Eager)
    assert told.startswith("spill: the model cannot be captured")
    assert "runs as plain PyTorch" in told


def test_what_had_to_leave_memory_while_it_was_made_cannot_run_plainly(tmp_path, monkeypatch):
    task = task_of("spill")
    room = room_of(task, device=CPU, folder=tmp_path, memory_bytes=GIB)
    training = Training(task, device=CPU, room=room)
    monkeypatch.setattr(type(room.building), "away", True)
    with pytest.raises(TaskError, match=r"does not fit .* spill cannot run it: the model cannot be captured"):
        choose_alone(training.parts, training.cursor.next()[0], notice=print)
