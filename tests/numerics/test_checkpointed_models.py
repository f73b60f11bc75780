"""What a model runs inside of torch.utils.checkpoint is computed again by every plan, with the same numbers."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from rota.errors import CaptureError
from rota.graph.capture import capture
from rota.runtime.in_process import InProcess
from rota.runtime.ledger import Ledger
from rota.strategies.base import find
from rota.strategies.spill import cut
from rota.testing.models import Block

BATCH = (torch.randn(8, 16, 32), torch.randint(0, 5, (8, 16)))
HOW = {
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "nested": lambda block, x: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=False) * 1.0, x, use_reentrant=False
    ),
    "sequential": checkpoint_sequential,
    "plainly": lambda block, x: block(x),
}


class Blocks(nn.Module):
    """Blocks with dropout, each called by `call`."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 5)
        self.blocks = nn.ModuleList(Block(width=32, heads=2, dropout=0.1) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        if self.call is checkpoint_sequential:
            return self.last(checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False))
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def state_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@functools.cache
def captured(how):
    torch.manual_seed(0)
    model = Blocks(HOW[how])
    return model, capture(model, BATCH, loss)


@functools.cache
def compiled(how, strategy, devices):
    return find(strategy)(captured(how)[1], devices).compile()


def peaks(program, model):
    """Predicted and measured, of each device."""
    ledger = Ledger()
    with ledger:
        InProcess(program, state_of(model), ledger=ledger).execute(BATCH)
    return program.simulate().peak_bytes, [ledger.peak_bytes[device] for device in range(program.devices)]


@pytest.mark.parametrize("how", HOW)
def test_a_step_equals_the_plain_loop_with_its_random_numbers(how):
    model, _ = captured(how)
    program = compiled(how, "single", 1)
    torch.manual_seed(3)
    found = InProcess(program, state_of(model), plain_random=True).run(BATCH)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    expected = loss(model, BATCH)
    expected.backward()
    assert torch.equal(found.outputs["loss"], expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(found.gradients[name], parameter.grad), name
    assert torch.equal(drawn, torch.rand(1))


DEEP = pytest.mark.deep


@pytest.mark.parametrize(
    ("strategy", "devices", "how"),
    [
        ("single", 1, "not reentrant"),
        ("single", 1, "reentrant"),
        ("single", 1, "nested"),
        ("zero(stage=3)", 2, "not reentrant"),
        ("tensor", 2, "not reentrant"),
        ("pipeline", 2, "not reentrant"),
        pytest.param("single(microbatches=2)", 1, "reentrant", marks=DEEP),
        pytest.param("data", 2, "not reentrant", marks=DEEP),
        pytest.param("dap", 2, "not reentrant", marks=DEEP),
        pytest.param("pipeline", 2, "nested", marks=DEEP),
        pytest.param("data(2) * tensor(2)", 4, "reentrant", marks=DEEP),
    ],
)
def test_plans_save_the_memory_and_compute_the_same(strategy, devices, how):
    (model, _), (plain_model, _) = captured(how), captured("plainly")
    program, plain = compiled(how, strategy, devices), compiled("plainly", strategy, devices)
    (predicted, measured), (_, plain_measured) = peaks(program, model), peaks(plain, plain_model)
    assert predicted == pytest.approx(measured, rel=0.1)
    assert max(measured) < 0.8 * max(plain_measured)
    found, expected = (one.run_local(BATCH, state=state_of(model), seed=2) for one in (program, plain))
    assert torch.equal(found.outputs["loss"], expected.outputs["loss"])
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_a_reentrant_checkpoint_whose_arguments_have_no_gradient_gives_none():
    """As PyTorch has it, which warns of it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=True))

    model, x = Model(), torch.randn(4, 8)
    graph = capture(model, x, lambda model, x: model(x).square().mean())
    gradients = find("single")(graph, 1).compile().run_local(x, state=state_of(model)).gradients
    assert not gradients["first.weight"].any()
    assert gradients["last.weight"].any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_statistics_that_pytorch_updates_twice_are_refused(reentrant, refused):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x):
            return checkpoint(self.norm, self.first(x), use_reentrant=reentrant)

    def square(model, x):
        return model(x).square().mean()

    model, x = Model(), torch.randn(4, 8)
    sentence = refused(capture, model, x, square, error=CaptureError)
    assert "norm." in sentence
    assert "leave this module out of the checkpoint" in sentence
    capture(model.eval(), x, square)


def test_memory_that_is_saved_in_another_way_is_told():
    class Model(nn.Linear):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                return torch.tanh(super().forward(x))

    graph = capture(Model(8, 8), torch.randn(4, 8), lambda model, x: model(x).square().mean())
    assert any("saved_tensors_hooks" in note for note in graph.notes)
    assert not captured("plainly")[1].notes


def test_gradient_checkpointing_of_transformers_is_followed():
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).train()
    model.gradient_checkpointing_enable()
    tokens = torch.randint(0, 64, (2, 8))
    graph = capture(model, {"input_ids": tokens, "labels": tokens}, lambda model, batch: model(**batch).loss)
    assert {op.checkpoint for op in graph.ops if ".h.0." in op.name} == {1}
    assert {op.checkpoint for op in graph.ops if ".h.1." in op.name} == {2}


def test_of_a_model_in_shards_the_shards_say_what_is_computed_again():
    plans = [cut(captured(how)[1], 4, recomputed=()) for how in ("not reentrant", "plainly")]
    segments = [plan.compile().segments for plan in plans]
    assert len(segments[0]) == len(segments[1])
    assert not any(segment.recompute for segment in segments[0])
