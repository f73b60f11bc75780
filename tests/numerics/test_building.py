"""A model that is made in too little memory has the values that it would have with enough."""

import pytest
import torch
from torch import nn

from rota.memory.building import Building
from rota.testing.models import GPT


class Initialised(nn.Module):
    """Everything is initialised once more when all of it is there, as many models do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.table = nn.Embedding(50, 64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(64, 64))
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)))
        self.apply(self._again)
        for name, parameter in self.named_parameters():
            if name.endswith("11.weight"):
                nn.init.normal_(parameter, std=0.02 / 12**0.5)
        with torch.no_grad():
            self.scale.copy_(self.layers[0].weight @ self.layers[5].weight)

    def _again(self, module):
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@pytest.mark.parametrize("pieces", [2, 3, 5, 100])
@pytest.mark.parametrize(
    "make", [Initialised, lambda: GPT(vocabulary=64, context=16, width=64, depth=3, heads=2)], ids=["again", "gpt"]
)
def test_a_model_is_made_as_if_there_were_room(tmp_path, make, pieces):
    torch.manual_seed(5)
    plain = make()
    torch.manual_seed(5)
    largest = max(one.untyped_storage().nbytes() for one in plain.parameters())
    with Building(tmp_path / "b", budget_bytes=pieces * largest, least_bytes=1024) as building:
        made = make()
    after = torch.rand(3)
    assert building.peak_bytes <= (pieces + 1) * largest
    away = sum(one.untyped_storage().nbytes() == 0 for one in made.parameters())
    assert (away > 0) is (pieces < 100)
    for (name, expected), (same, found) in zip(plain.named_parameters(), made.named_parameters(), strict=True):
        assert name == same
        assert found.shape == expected.shape
        building.release(found)
        assert torch.equal(found, expected), name
    torch.manual_seed(5)
    make()
    assert torch.equal(torch.rand(3), after), "it draws as many random numbers"
    building.close()
    assert not (tmp_path / "b").exists()


def test_tied_parameters_stay_tied(tmp_path):
    with Building(tmp_path / "b", budget_bytes=2**15, least_bytes=1024) as building:
        made = Initialised()
    assert made.head.weight is made.table.weight
    building.release(made.head.weight)
    assert made.table.weight.untyped_storage().nbytes() > 0
    building.release(made.table.weight)
    building.close()


def test_when_the_code_raises_nothing_stays_behind(tmp_path):
    building = Building(tmp_path / "b", budget_bytes=2**15, least_bytes=1024)

    def make():
        with building:
            Initialised()
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        make()
    building.close()
    nn.Linear(100, 100)
    assert not (tmp_path / "b").exists()
