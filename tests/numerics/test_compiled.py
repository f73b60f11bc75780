"""Segments that go through torch.compile compute what they compute without it."""

import pytest
import torch

from rota.graph.capture import capture
from rota.runtime import trial
from rota.runtime.device_run import DeviceRun
from rota.runtime.generate import is_random_segment
from rota.strategies import find
from rota.testing import zoo


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")  # of what the compiler imports and looks at
def test_a_compiled_step_equals_a_plain_one(monkeypatch):
    monkeypatch.setattr(trial, "_WARM_UP", 1)
    monkeypatch.setattr(trial, "_RUNS", 1)
    made = zoo.make("mixture", batch=4).in_doubles()
    program = find("single")(capture(made.model, made.batch, made.loss), 1).compile()
    state = {**dict(made.model.named_parameters()), **dict(made.model.named_buffers())}
    gradients = []
    runs = [DeviceRun(program, 0, compiled=compiled) for compiled in (False, True)]
    for run in runs:
        for name in program.stored:
            run.load(name, state[name].detach())
        for _ in range(3):  # twice plain, and once compiled
            run.clear()
            run.begin(made.batch, step=0)
            for node in program.nodes:
                (run.forward if node.kind.value == "forward" else run.backward)(node)
        gradients.append({name: run.gradient(name, piece.box) for name, piece, _ in run.parameters()})
    trials = [one._trial for one in runs[1]._runners.values() if one._trial is not None]
    assert trials
    assert all(one.choice != one._module.forward for one in trials), "the compiler failed"
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-10, atol=1e-12)


def test_what_draws_random_numbers_is_not_compiled():
    made = zoo.make("gpt2", batch=2)
    program = find("single")(capture(made.model, made.batch, made.loss), 1).compile()
    assert any(is_random_segment(segment, program.refined) for segment in program.segments)
