"""What the engine must not spend time on."""

import torch

from rota.graph.capture import capture
from rota.graph.positional import is_random
from rota.runtime.in_process import InProcess
from rota.strategies import find
from rota.testing import zoo


def without_dropout():
    made = zoo.make("gpt", batch=2)
    for module in made.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return made


def test_attention_without_dropout_draws_no_random_numbers():
    made = without_dropout()
    program = find("single")(capture(made.model, made.batch, made.loss), 1).compile()
    attention = [op for op in program.refined.graph.ops if op.kind == "scaled_dot_product_attention"]
    assert attention
    assert not any(is_random(op) for op in attention)


def test_a_step_does_not_seed_every_kind_of_device(monkeypatch):
    made = zoo.make("gpt", batch=2)
    program = find("single")(capture(made.model, made.batch, made.loss), 1).compile()
    run = InProcess(program, {**dict(made.model.named_parameters()), **dict(made.model.named_buffers())})

    def refuse(seed):
        raise AssertionError("torch.manual_seed takes a millisecond")

    monkeypatch.setattr(torch, "manual_seed", refuse)
    run.execute(made.batch)
