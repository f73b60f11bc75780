"""A model that cannot even be made is told with the memory that its task needs, as one that can be made is."""

from __future__ import annotations

import re

import pytest
import torch
import torch._dynamo  # what modes import is not to be counted
from torch import nn

from rota.cluster.device import parse_bytes
from rota.errors import TaskError
from rota.memory.building import Building
from rota.runtime.limits import limited
from rota.runtime.loop import Loop
from rota.runtime.messages import Finished
from rota.strategies import spill
from rota.task import Data, Task
from tests.numerics.test_exact import Surroundings

MEMORY = 64 * 2**20
ROWS, WIDTH = 2**17, 128  # 64 MiB


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.table(x).mean(1))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, x):
        return self.wide(x[:, :1].float().expand(-1, WIDTH))


class Own(nn.Module):
    """Its parameter is not made by PyTorch's own layers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH) * 0.1)

    def forward(self, x):
        return self.weight[x[:, 0]]


class Asking(Table):
    """Its code needs numbers, which a model without memory does not have."""

    def __init__(self):
        super().__init__()
        self.first = float(self.head.weight[0, 0])


def task_of(model, **changes):
    x = torch.arange(32).view(8, 4)
    fields = {
        "name": "a",
        "model": model,
        "data": lambda: Data(train=x, batch_size=4),
        "optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.01),
        "loss": lambda module, batch: module(batch).square().mean(),
        "steps": 2,
        "strategy": spill(),
    }
    return Task(**(fields | changes))


def train(task, folder, memory_bytes=MEMORY):
    with limited(memory_bytes):
        return Loop(
            task,
            attempt=1,
            folder=folder,
            device=torch.device("cpu"),
            surroundings=Surroundings(),
            memory_bytes=memory_bytes,
        ).run()


def refusal(task, folder):
    with pytest.raises(TaskError) as caught:
        train(task, folder)
    return str(caught.value)


def least_of(sentence):
    (size,) = re.findall(r"the task needs a device with at least ([\d.]+ \w+), and this one has 64 MiB", sentence)
    return parse_bytes(size.replace(" ", ""))


@pytest.mark.parametrize("strategy", ["auto", spill()], ids=str)
@pytest.mark.parametrize("model", [Table, Wide, Own])
def test_what_cannot_be_made_is_told_with_the_least_that_would_do(model, strategy, tmp_path):
    told = refusal(task_of(model, strategy=strategy), tmp_path)
    assert "bytes at once" in told
    least = least_of(told)
    assert 2 * ROWS * WIDTH * 4 < least < 8 * ROWS * WIDTH * 4


def test_with_that_memory_the_task_runs(tmp_path):
    least = least_of(refusal(task_of(Table), tmp_path))
    assert isinstance(train(task_of(Table), tmp_path, memory_bytes=least), Finished)


def test_double_precision_needs_twice_as_much(tmp_path):
    single, double = (least_of(refusal(task_of(Table, precision=p), tmp_path)) for p in ("float32", "float64"))
    assert 1.5 * single < double < 2.1 * single


def test_where_it_cannot_be_known_the_factory_is_told_of(tmp_path):
    told = refusal(task_of(Asking), tmp_path)
    assert told.startswith("the model factory ran out of memory (test_sizing.py, line ")


def test_the_data_of_the_user_are_not_the_models(tmp_path):
    def data():
        return Data(train=torch.ones(2**26), batch_size=4)

    assert "the data factory ran out of memory" in refusal(task_of(lambda: nn.Linear(4, 4), data=data), tmp_path)


def test_a_parameter_leaves_memory_that_has_no_room_for_another_like_it(tmp_path):
    size_bytes = ROWS * WIDTH * 4
    with limited(size_bytes + size_bytes // 2), Building(tmp_path / "b", budget_bytes=size_bytes // 2) as building:
        made = nn.ParameterList([torch.arange(ROWS * WIDTH, dtype=torch.float32), torch.ones(2**16)])
        assert made[0].untyped_storage().nbytes() == 0
        building.release(made[0])
    assert torch.equal(made[0], torch.arange(ROWS * WIDTH, dtype=torch.float32))
    building.close()
