"""Strategies make plans that compute what one device computes, and refuse what cannot be planned."""

import copy

import pytest
import torch

from rota.errors import InputError
from rota.graph.capture import capture
from rota.plan.layout import Kind
from rota.runtime.in_process import InProcess
from rota.strategies.base import find, names, register
from rota.testing import zoo

SAMPLES = 7


@pytest.fixture(scope="module", params=["gpt", "resnet"])
def specimen(request):
    made = zoo.make(request.param, batch=SAMPLES).in_doubles()
    return made.model, made.batch, capture(made.model, made.batch, made.loss)


@pytest.fixture(scope="module")
def on_one_device(specimen):
    return outcome(specimen, "single", 1, 1)


def outcome(specimen, strategy, devices, microbatches):
    model, batch, graph = specimen
    program = find(f"{strategy}(microbatches={microbatches})")(graph, devices).compile()
    model = copy.deepcopy(model)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return InProcess(program, state, seed=3).run(batch)


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 1), (3, 1), (7, 1), (2, 3), (3, 2)])
def test_data_parallelism_equals_one_device_where_the_batch_does_not_divide(
    specimen, on_one_device, devices, microbatches
):
    one = on_one_device
    found = outcome(specimen, "data", devices, microbatches)
    assert found.gradients.keys() == one.gradients.keys()
    for name, gradient in one.gradients.items():
        # Of a bias before a batch norm the gradient is zero but for rounding.
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-13)
    for name, value in one.buffers.items():
        torch.testing.assert_close(found.buffers[name], value, rtol=1e-10, atol=1e-13)
    for name, value in one.outputs.items():
        torch.testing.assert_close(found.outputs[name], value, rtol=1e-10, atol=0)


def test_data_parallelism_reduces_each_gradient_once_and_nothing_else_but_the_loss():
    made = zoo.make("gpt", batch=SAMPLES)
    graph = capture(made.model, made.batch, made.loss)
    program = find("data")(graph, 2).compile()
    moved = [(flow, step) for flow in program.flows for step in flow.steps if step.kind is not Kind.LOCAL]
    assert {step.kind for flow, step in moved if flow.backward} == {Kind.ALL_REDUCE}
    forward = [flow.tensor for flow, _ in moved if not flow.backward]
    assert set(forward) == {"cross_entropy_loss"}  # to be told; nobody waits for it
    backward = [flow.tensor for flow, _ in moved if flow.backward]
    assert len(backward) == len(set(backward))
    # The positions are looked up once, not for each sample: what is reduced is the gradient of what was looked up.
    assert set(backward) == {one.name for one in graph.parameters} - {"positions.weight"} | {"positions.embedding"}


class OverSamples(torch.nn.Module):
    """Sums over the samples, once with a bias and once without."""

    def __init__(self):
        super().__init__()
        self.biased = torch.nn.Linear(SAMPLES, 2)
        self.plain = torch.nn.Linear(SAMPLES, 2, bias=False)

    def forward(self, x):
        return self.biased(x.t()) + self.plain(x.t())


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 1), (3, 1), (2, 2)])
def test_what_is_added_once_to_a_sum_over_samples_is_added_once(devices, microbatches):
    torch.manual_seed(0)
    model, batch = OverSamples().double(), torch.randn(SAMPLES, 4, dtype=torch.float64)
    graph = capture(model, batch, lambda model, batch: model(batch).square().sum())
    one, found = (outcome((model, batch, graph), *how) for how in (("single", 1, 1), ("data", devices, microbatches)))
    torch.testing.assert_close(found.outputs, one.outputs, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.gradients, one.gradients, rtol=1e-10, atol=1e-13)


def test_single_leaves_other_devices_idle(specimen):
    program = find("single")(specimen[2], 3).compile()
    assert {node.devices for node in program.nodes} == {(0,)}
    assert not any(step.kind is not Kind.LOCAL for flow in program.flows for step in flow.steps)


def test_what_cannot_be_shared_is_refused(specimen, refused):
    sentence = refused(find("data(microbatches=1)"), specimen[2], 8)
    assert sentence == "a batch of 7 samples cannot be shared by 8 devices; use fewer devices"
    sentence = refused(find("data(microbatches=2)"), specimen[2], 4)
    assert "7 samples in 2 micro-batches cannot be shared by 4 devices" in sentence
    assert "at least 1" in refused(find("data(microbatches=1)"), specimen[2], 0)
    assert "8 micro-batches" in refused(find("single(microbatches=8)"), specimen[2], 1)


def test_an_unknown_strategy_is_refused_with_the_known_ones(refused):
    assert {"data", "single"} <= set(names())
    sentence = refused(find, "magic")
    assert "'magic'" in sentence
    assert all(name in sentence for name in names())


@pytest.mark.parametrize(
    "text",
    [
        "tensor(sequence='x')",
        "tensor(vocabulary=5)",
        "tensor(sequence=None)",
        "zero(stage=True)",
        "zero(stage=4)",
        "zero(stage='3')",
        "data(True)",
        "data(2.0)",
        "data(microbatches=0)",
        "single(microbatches='2')",
        "pipeline(order='x')",
        "pipeline(order=[])",
        "pipeline(chunks=0)",
        "pipeline(seconds='12')",
        "pipeline(seconds=(1.0, 'x'))",
        "pipeline(seconds=(-1.0,))",
        "recycled(order=1)",
        "coshard(1.5)",
        "spill(shards=True)",
        "spill(activations='x')",
        "torch_ddp(find_unused=1)",
        "auto(memory='x')",
        "auto(memory=True)",
    ],
)
def test_a_knob_of_another_type_or_range_is_refused_when_the_strategy_is_made(text, refused):
    sentence = refused(find, text)
    assert "must be" in sentence or "is not a size" in sentence
    assert len(sentence) < 200


def test_a_long_text_is_quoted_in_part(refused):
    for text in ("(" * 500, "x" * 500, "tensor(" + "a" * 500 + ")", f"tensor(sequence={'y' * 300!r})"):
        assert len(refused(find, text)) < 400


def test_a_name_is_registered_once():
    with pytest.raises(InputError, match="already a strategy named 'data'"):
        register("data", lambda: None)


def test_a_pipeline_of_a_model_with_batch_norm_and_micro_batches_compiles():
    made = zoo.make("resnet", batch=8)
    graph = capture(made.model, made.batch, made.loss)
    program = find("pipeline(microbatches=4)")(graph, 2).compile()
    assert {node.step.kind for node in program.nodes if node.step} <= {Kind.SEND, Kind.LOCAL}


def test_tied_parameters_come_under_any_of_their_names():
    made = zoo.make("gpt", batch=4)
    graph = capture(made.model, made.batch, made.loss)
    state = {**dict(made.model.named_parameters()), **dict(made.model.named_buffers())}
    state["head.weight"] = state.pop("tokens.weight")
    outcome = InProcess(find("single")(graph, 1).compile(), state).run(made.batch)
    assert torch.isfinite(outcome.outputs["loss"])
