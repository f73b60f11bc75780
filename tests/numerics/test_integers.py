"""Sums and products of small integers held in floats are exact, so every plan must give the same bits."""

import random

import pytest
import torch
from torch import nn

from rota.graph.capture import capture
from rota.graph.refine import refine
from rota.runtime.in_process import InProcess
from rota.testing.plans import random_plan, single_plan

SAMPLES, TOKENS, WIDTH = 6, 3, 4
PLANS = 4


class Integers(nn.Module):
    """Sums and matrix products over a pool of tensors; weights are used again."""

    def __init__(self, rng):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(integers(WIDTH, WIDTH)) for _ in range(2))
        self.bias = nn.Parameter(integers(WIDTH))
        kinds = rng.sample(["weigh", "weigh", "add", "add", "scalar", "mix", "bias"], 5)
        self.steps = [(kind, rng.randrange(2), rng.randrange(4), rng.randrange(4)) for kind in kinds]

    def forward(self, x):
        pool = [x]
        for kind, weight, first, second in self.steps:
            a, b = pool[-1 - first % len(pool)], pool[-1 - second % len(pool)]
            if kind == "weigh":
                pool.append(a @ self.weights[weight])
            elif kind == "add":
                pool.append(a + b)
            elif kind == "scalar":
                pool.append(2 * a)
            elif kind == "mix":
                pool.append(x @ b.transpose(1, 2) @ x)
            else:
                pool.append(a + self.bias)
        return torch.stack([one.sum() for one in pool[-2:]]).sum() + pool[-1].sum(0).sum()


def integers(*shape):
    return torch.randint(-1, 2, shape).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(8))
def test_every_plan_and_both_lowerings_give_the_same_bits(seed, dtype):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Integers(rng).to(dtype)
    batch = integers(SAMPLES, TOKENS, WIDTH).to(dtype)
    graph = capture(model, batch, lambda model, x: model(x))
    refined, state = refine(graph), dict(model.named_parameters())
    expected = InProcess(single_plan(graph, refined=refined).compile(), state).run(batch)
    assert max(float(one.abs().max()) for one in expected.gradients.values()) < 2**20, "too large to be exact"
    for _ in range(PLANS):
        devices, microbatches = rng.randint(1, 8), rng.randint(1, 4)
        plan = random_plan(graph, rng, devices=devices, microbatches=microbatches, cut_rate=0.8, refined=refined)
        for reference in (False, True):
            found = InProcess(plan.compile(reference=reference), state).run(batch)
            assert torch.equal(found.outputs["loss"], expected.outputs["loss"])
            for name, gradient in expected.gradients.items():
                assert torch.equal(found.gradients[name], gradient), name
