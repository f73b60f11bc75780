"""Shards add up the gradients of what many ops read in the order of plain PyTorch, and draw as it draws."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rota.graph.capture import capture
from rota.memory.spilled_run import SpilledRun
from rota.plan.program import NodeKind
from rota.strategies import spill
from rota.testing import zoo


def sharded(model, batch, loss, strategy):
    """The loss and the gradients by name, shard by shard."""
    program = strategy(capture(model, batch, loss), 1).compile()
    stored = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    run = SpilledRun(program, 0, seed=0, plain_random=True, shares=1, stored=stored)
    torch.manual_seed(5)
    run.begin(batch, step=0)
    for node in program.nodes:
        assert node.kind in (NodeKind.FORWARD, NodeKind.BACKWARD)
        (run.forward if node.kind is NodeKind.FORWARD else run.backward)(node)
    name = program.refined.graph.outputs["loss"]
    found = run.values[program.results[name].value].clone()
    run.hand_over(name for name, pieces in program.gradients.items() if all(pieces.values()))
    return found, gradients_of(model)


def plainly(model, batch, loss):
    torch.manual_seed(5)
    found = loss(model, batch)
    found.backward()
    return found.detach(), gradients_of(model)


def gradients_of(model):
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_equal(model, batch, loss, strategy):
    expected, wanted = plainly(copy.deepcopy(model), batch, loss)
    found, gradients = sharded(model, batch, loss, strategy)
    assert torch.equal(found, expected)
    assert gradients.keys() == wanted.keys()
    apart = {name: float((one - wanted[name]).abs().max()) for name, one in gradients.items()}
    assert not any(apart.values()), apart


def t5(dropout, *, masked):
    """Four layers each, which read one position bias, and four that read what the encoder made."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=128,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=4,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 120, (8, 19), generator=generator)
    labels = torch.randint(3, 120, (8, 13), generator=generator)

    def loss(model, batch):
        mask = {"attention_mask": (batch[0] > 20).long()} if masked else {}
        return model(input_ids=batch[0], labels=batch[1], use_cache=False, **mask).loss

    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config).train(), [tokens, labels], loss


@pytest.mark.parametrize("shards", [3, 7, 40])
@pytest.mark.parametrize(("dropout", "masked"), [(0.0, False), (0.1, True)])
def test_an_encoder_that_every_layer_of_a_decoder_reads(dropout, masked, shards):
    assert_equal(*t5(dropout, masked=masked), spill(shards=shards))


def test_an_encoder_whose_activations_are_made_again():
    assert_equal(*t5(0.1, masked=True), spill(shards=7, activations="recompute"))


def test_a_row_of_ops_is_one_segment_though_its_ops_do_not_depend_on_each_other():
    """Random numbers and what encoders hand over split shards before, so that there were four times as many."""
    model, batch, loss = t5(0.1, masked=False)
    program = spill(shards=6)(capture(model, batch, loss), 1).compile()
    assert sum(segment.grad for segment in program.segments) <= 16


@pytest.mark.parametrize("name", ["gpt", "resnet", "mixture", "evoformer", "bert", "mbart", "vit", "swin"])
def test_families_of_models(name):
    specimen = zoo.make(name)
    specimen.model.eval()  # in train mode mbart branches on values
    assert_equal(specimen.model, specimen.batch, specimen.loss, spill(shards=5))


class Woven(nn.Module):
    """Ops read any tensors that came before, some often; their order says little of what depends on what."""

    def __init__(self, seed):
        super().__init__()
        self.draw = random.Random(seed)
        self.plan = []
        widths = 3
        self.layers = nn.ModuleList()
        for place in range(24):
            kind = self.draw.choice(["linear", "linear", "tied", "add", "mul", "dropout", "noise", "detach", "cat"])
            reads = [self.draw.choice([0, 0, 1, max(0, place // 2), place]) for _ in range(widths)]
            self.plan.append((kind, reads))
            self.layers.append(nn.Linear(24, 24, bias=self.draw.random() < 0.5) if kind == "linear" else nn.Identity())
        self.first, self.tied, self.wide = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(48, 24)

    def forward(self, inputs):
        made = [self.first(inputs)]
        for (kind, reads), layer in zip(self.plan, self.layers, strict=True):
            one, other, third = (made[min(place, len(made) - 1)] for place in reads)
            if kind == "linear":
                found = torch.tanh(layer(one)) + other
            elif kind == "tied":
                found = torch.tanh(self.tied(one))
            elif kind == "add":
                found = (one + other + third) / 3
            elif kind == "mul":
                found = one * torch.sigmoid(other)
            elif kind == "dropout":
                found = F.dropout(one, 0.2, self.training)
            elif kind == "noise":
                found = one + 0.1 * torch.randn_like(inputs)
            elif kind == "detach":
                found = one + other.detach() * 0.5
            else:
                found = torch.tanh(self.wide(torch.cat([one, other], dim=-1)))
            made.append(found)
        return sum(made[-6:]) + made[0]


@pytest.mark.parametrize("seed", range(8))
def test_any_weave_of_ops(seed):
    torch.manual_seed(seed)
    model, batch = Woven(seed), torch.randn(16, 24)
    draw = random.Random(seed)
    activations = draw.choice(["keep", "spill", "recompute"])
    strategy = spill(shards=draw.choice([2, 5, 30]), activations=activations)
    assert_equal(model, batch, lambda one, inputs: one(inputs).square().mean(), strategy)
