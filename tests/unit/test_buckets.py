"""Collectives that are joined are launched before what they read is let go of, and before anybody reads them."""

import pytest
import torch
import torch.nn.functional as F

from rota.graph.capture import capture
from rota.plan.ordering import read
from rota.runtime.buckets import buckets_of
from rota.strategies import find
from rota.testing import zoo


def detached_mean():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

    def loss(model, batch):
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + F.mse_loss(out, out.detach().mean(0, keepdim=True).expand_as(out))

    return capture(model, (torch.randn(8, 6), torch.randint(0, 4, (8,))), loss)


def gpt():
    made = zoo.make("gpt", batch=8)
    return capture(made.model, made.batch, made.loss)


@pytest.mark.parametrize("most_bytes", [1, 4096, 2**25])
@pytest.mark.parametrize("strategy", ["data", "zero", "zero(stage=1)", "tensor", "data(microbatches=2)"])
@pytest.mark.parametrize("graph", [detached_mean, gpt])
def test_a_bucket_comes_before_its_readers(graph, strategy, most_bytes):
    program = find(strategy)(graph(), 2).compile()
    buckets = buckets_of(program, most_bytes=most_bytes)
    launched = {index: at for at, bucket in buckets.items() for index in bucket.nodes}
    assert len(launched) == sum(len(bucket.nodes) for bucket in buckets.values())
    for index, at in launched.items():
        node = program.nodes[index]
        outputs = {(piece.device, value) for piece, value in zip(node.step.outputs, node.makes, strict=True)}
        for between in range(index + 1, at + 1):
            assert outputs.isdisjoint(read(program.nodes[between]))
