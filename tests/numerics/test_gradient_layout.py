"""Gradients have the layout of their parameters: fused optimizers read memory, not indices."""

import pytest
import torch

from rota.graph.capture import capture
from rota.runtime.in_process import InProcess
from rota.strategies import find
from rota.testing import zoo


@pytest.mark.parametrize("strategy", ["single", "coshard(2)", "pipeline(microbatches=2)"])
@pytest.mark.parametrize("fused", [True, False])
def test_steps_of_a_model_with_transposed_gradients_equal_plain_pytorch(strategy, fused):
    """Found by the matrix over processes: einsum's gradients are transposed views, and were updated in their order."""
    made = zoo.make("mixture", batch=8).in_doubles()

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6, fused=fused)

    devices = 2 if strategy.startswith("pipeline") else 1
    program = find(strategy)(capture(made.model, made.batch, made.loss), devices).compile()
    run = InProcess(program, {name: value.detach().clone() for name, value in made.model.named_parameters()})
    run.optimize(adamw)
    plain = adamw(made.model.parameters())
    for step in range(5):
        run.train(made.batch, step=step)
        plain.zero_grad()
        made.loss(made.model, made.batch).backward()
        plain.step()
    for name, value in made.model.named_parameters():
        torch.testing.assert_close(run.whole(name), value.detach(), rtol=1e-10, atol=1e-10, msg=name)
