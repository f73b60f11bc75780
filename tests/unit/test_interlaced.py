"""The interlaced pipeline computes what one device computes, moves no scores, and keeps its devices busy."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rota.graph.capture import capture
from rota.graph.graph import Role
from rota.graph.vocabulary import BLOCK_SCORES
from rota.plan.layout import Kind
from rota.plan.program import NodeKind
from rota.runtime.in_process import InProcess
from rota.strategies.base import find, names
from rota.strategies.interlaced import interlaced
from rota.testing import zoo
from rota.testing.models import GPT


class Untied(GPT):
    """A head of its own, with a bias."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.head = nn.Linear(sizes["width"], sizes["vocabulary"])


@functools.cache
def specimen(name, vocabulary=64):
    """A model in doubles, its batch with some targets left out, its graph, and what one device makes of it."""
    torch.manual_seed(0)
    if name == "t5":
        made = zoo.make("t5", batch=8)
        made.batch["labels"][:, -2:] = -100
        model, batch, loss = made.model, made.batch, made.loss
    else:
        kind = Untied if name == "untied" else GPT
        model = kind(vocabulary=vocabulary, context=16, width=16, depth=4, heads=2, dropout=0.1)
        batch = torch.randint(0, vocabulary, (8, 13))
        batch[:, -1] = 3

        def loss(model, rows):
            return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), ignore_index=3)

    model = model.double()
    graph = capture(model, batch, loss)
    return graph, batch, {name: one.detach().clone() for name, one in model.named_parameters()}


@functools.cache
def on_one_device(name, vocabulary=64):
    graph, batch, state = specimen(name, vocabulary)
    return InProcess(find("single")(graph, 1).compile(), state, seed=3).run(batch)


@functools.cache
def trained(name, strategy="single", devices=1, steps=10):
    """The losses and the weights of some steps of AdamW."""
    graph, batch, state = specimen(name)
    run = InProcess(
        find(strategy)(graph, devices).compile(), {name: one.clone() for name, one in state.items()}, seed=3
    )
    run.optimize(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    losses = [float(run.train(batch, step=step)["loss"]) for step in range(steps)]
    return losses, {one.name: run.whole(one.name) for one in graph.parameters}


def assert_same(program, name, vocabulary=64):
    _, batch, state = specimen(name, vocabulary)
    found, expected = InProcess(program, state, seed=3).run(batch), on_one_device(name, vocabulary)
    torch.testing.assert_close(found.outputs["loss"], expected.outputs["loss"], rtol=1e-10, atol=0)
    largest = max(float(one.abs().max()) for one in expected.gradients.values())
    for parameter, gradient in expected.gradients.items():
        assert float((found.gradients[parameter] - gradient).abs().max()) <= 1e-10 * largest, parameter


def moved(program):
    tensors = program.refined.graph.tensors
    return [tensors[flow.tensor] for flow in program.flows if any(step.kind is not Kind.LOCAL for step in flow.steps)]


@pytest.mark.parametrize("name", ["t5", "gpt", "untied"])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 1), (2, 4), (4, 1), (4, 4)])
def test_it_equals_one_device(name, devices, microbatches):
    graph, _, _ = specimen(name)
    program = interlaced(microbatches=microbatches)(graph, devices).compile()
    assert_same(program, name)
    for one in moved(program):  # neither scores nor tables
        assert one.shape[-1:] != (64,)
        assert one.role is not Role.PARAMETER or one.shape[0] != 64
    for parameter in graph.parameters:
        if parameter.shape[:1] == (64,) and len(parameter.shape) == 2 and "fc" not in parameter.name:
            sizes = [piece.box.size for piece in program.stored[parameter.name]]
            assert sizes == [math.prod(parameter.shape) // devices] * devices


@pytest.mark.parametrize(("name", "devices", "microbatches"), [("t5", 2, 4), ("gpt", 4, 4), ("untied", 2, 4)])
def test_ten_steps_of_training(name, devices, microbatches):
    losses, weights = trained(name, f"interlaced(microbatches={microbatches})", devices)
    expected, plain = trained(name)
    assert losses == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(weights, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gpt", "untied"])
def test_where_the_vocabulary_does_not_divide_the_embedding_alone_is_cut(name):
    graph, _, _ = specimen(name, 63)
    program = interlaced(microbatches=4)(graph, 2).compile()
    assert_same(program, name, 63)
    assert not list(program.refined.graph.find(kind=BLOCK_SCORES))
    assert not any(one.shape[-1:] == (63,) for one in moved(program))


@pytest.mark.parametrize("strategy", ["data(2) * interlaced(2, microbatches=2)", "interlaced(2) * tensor(2)"])
def test_in_a_product(strategy):
    graph, _, _ = specimen("gpt")
    assert_same(find(strategy)(graph, 4).compile(), "gpt")


def test_all_devices_take_a_part_of_the_scores_of_a_micro_batch_one_after_another():
    graph, _, _ = specimen("gpt")
    program = interlaced(microbatches=8)(graph, 2).compile()
    scores = {one.index for one in program.segments if any(call.op.endswith(".scores") for call in one.calls)}
    for device in range(2):
        mine = [program.nodes[index] for index in program.of(device)]
        steps = [(node.kind, node.microbatch) for node in mine if node.segment in scores]
        assert steps == [(kind, m) for m in range(8) for kind in (NodeKind.FORWARD, NodeKind.BACKWARD)]


def test_it_is_known_by_name():
    assert "interlaced" in names()
    assert str(find("interlaced(2, microbatches=4)")) == "interlaced(2, microbatches=4)"
    assert find("interlaced").default_microbatches(64, 4) == 8


def test_a_model_without_a_vocabulary_is_refused(refused):
    made = zoo.make("resnet", batch=4)
    graph = capture(made.model, made.batch, made.loss)
    assert "vocabulary can be cut into 3" in refused(interlaced(), graph, 3)


@pytest.mark.deep
def test_with_a_large_vocabulary_a_step_is_predicted_to_be_faster_than_with_a_pipeline_or_tensor_parallelism():
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32_768,
        d_model=64,
        d_kv=16,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model, tokens = transformers.T5ForConditionalGeneration(config), torch.randint(3, 30_000, (16, 32))
    graph = capture(model, {"input_ids": tokens, "labels": tokens}, lambda model, one: model(**one).loss)
    for devices in (2, 4):
        found = {
            name: find(name)(graph, devices).compile().simulate()
            for name in ("interlaced", "pipeline", f"pipeline(microbatches={2 * devices})", "tensor")
        }
        seconds = {name: one.makespan_s for name, one in found.items()}
        assert min(seconds, key=seconds.__getitem__) == "interlaced", (devices, seconds)
        assert max(found["interlaced"].peak_bytes) < min(max(one.peak_bytes) for one in list(found.values())[1:])
