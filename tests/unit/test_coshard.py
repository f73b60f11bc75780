"""Coshard computes what one device computes, one part of a layer after another, in less memory."""

import copy
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rota.graph.capture import capture
from rota.graph.graph import trained_ops
from rota.plan.layout import Kind
from rota.plan.program import NodeKind
from rota.runtime.in_process import InProcess
from rota.runtime.ledger import Ledger
from rota.strategies.base import find
from rota.testing import zoo
from rota.testing.models import Evoformer


def state_of(model):
    model = copy.deepcopy(model)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def small(name):
    """Of the zoo, the Evoformer with fewer layers and passes."""
    made = zoo.make(name, batch=4)
    return replace(made, model=Evoformer(depth=1, recycles=2)) if name == "evoformer" else made


@pytest.fixture(scope="module", params=["evoformer", "gpt", "swin"])
def specimen(request):
    made = small(request.param).in_doubles()
    model, batch = made.model, made.batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, batch, capture(model, batch, made.loss)


@pytest.fixture(scope="module")
def alone(specimen):
    model, batch, graph = specimen
    return InProcess(find("single")(graph, 1).compile(), state_of(model), seed=3).run(batch)


@pytest.mark.parametrize("strategy", ["coshard(1)", "coshard(4)", "coshard(2, microbatches=2)"])
def test_gradients_equal_those_of_one_uncut_device(specimen, alone, strategy):
    model, batch, graph = specimen
    found = InProcess(find(strategy)(graph, 1).compile(), state_of(model), seed=3).run(batch)
    # Of a bias of keys the gradient is zero but for rounding.
    torch.testing.assert_close(found.gradients, alone.gradients, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(found.outputs, alone.outputs, rtol=1e-10, atol=0)


def test_several_steps_of_training_equal_those_of_one_uncut_device(specimen):
    model, batch, graph = specimen
    weights = []
    for strategy in ("single", "coshard(4)"):
        engine = InProcess(find(strategy)(graph, 1).compile(), state_of(model), seed=3)
        # A large eps: else the sign of gradients that are zero but for rounding decides.
        engine.optimize(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4))
        for step in range(3):
            engine.train(batch, step=step)
        weights.append({name: engine.whole(name) for name in engine.program.gradients})
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-10, atol=1e-10)


def parts_of(program):
    """For each cut op, the nodes that run its parts forward, in the order of the parts."""
    found = {}
    for i, node in enumerate(program.nodes):
        if node.kind is NodeKind.FORWARD:
            for call in program.segments[node.segment].calls:
                found.setdefault(call.op, []).append((call.ranges, i))
    return {op: [i for _, i in sorted(ones, key=str)] for op, ones in found.items() if len(ones) > 1}


def test_no_two_parts_of_an_op_are_computed_in_one_go(specimen):
    program = find("coshard(2)")(specimen[2], 1).compile()
    assert parts_of(program)
    for segment in program.segments:
        assert max(Counter(call.op for call in segment.calls).values()) == 1


def lanes(plan, op):
    """The groups of the parts of an op: those of a run are cut in as many and are in the same."""
    return tuple(plan.groups_of(part) for part in plan.parts(op))


def test_each_part_of_a_run_is_computed_in_one_go(specimen):
    """So that what one part makes inside is gone when the next part begins."""
    plan = find("coshard(2)")(specimen[2], 1)
    trained, nodes = trained_ops(plan.graph), parts_of(plan.compile())
    maker = {name: op.name for op in plan.graph.ops for name in op.outputs}
    inner = 0
    for op in plan.graph.ops:
        for name in op.inputs:
            one = maker.get(name)
            if (
                one in nodes
                and op.name in nodes
                and {one, op.name} <= trained
                and lanes(plan, one) == lanes(plan, op.name)
            ):
                assert nodes[one] == nodes[op.name]
                inner += 1
    assert inner > 5


def test_what_is_cut_is_recomputed_and_nothing_leaves_the_device(specimen):
    program = find("coshard(2)")(specimen[2], 2).compile()
    cut = parts_of(program)
    for segment in program.segments:
        if segment.grad and any(call.op in cut for call in segment.calls):
            assert segment.recompute
    assert {node.devices for node in program.nodes} == {(0,)}
    assert {step.kind for flow in program.flows for step in flow.steps} <= {Kind.LOCAL}


def test_a_layer_that_runs_several_times_is_cut_each_time_for_itself():
    made = small("evoformer")
    graph = capture(made.model, made.batch, made.loss)
    plan = find("coshard(2)")(graph, 1)
    products = [op for op in graph.ops if op.kind == "linear" and plan.is_recomputed(plan.parts(op)[0])]
    read = Counter((lanes(plan, op), op.inputs[1]) for op in products)
    assert max(read.values()) == 1


def test_recomputing_alone_takes_the_runs_that_would_be_cut(specimen):
    alone, cut = (find(strategy)(specimen[2], 1) for strategy in ("coshard(1)", "coshard(4)"))
    runs = [{op.name for op in plan.graph.ops if plan.is_recomputed(plan.parts(op)[0])} for plan in (alone, cut)]
    assert runs[0] == runs[1]
    assert not parts_of(alone.compile())


def large_swin():
    """With many windows and few features, so that activations take the memory."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"image_size": 112, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [4, 4]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.SwinConfig(**shape, window_size=7, num_labels=5)
        model = transformers.SwinForImageClassification(config).train()
    return model, {"pixel_values": torch.rand(1, 3, 112, 112), "labels": torch.zeros(1, dtype=torch.long)}


@pytest.mark.deep
def test_a_quarter_of_each_layer_at_a_time_takes_at_most_half_of_the_memory():
    model, batch = large_swin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(model, batch, lambda model, one: model(**one).loss)
    peaks = {}
    for strategy in ("single", "coshard(1)", "coshard(4)"):
        program = find(strategy)(graph, 1).compile()
        ledger = Ledger()
        with ledger:
            InProcess(program, state_of(model), ledger=ledger).execute(batch)
        peaks[strategy] = ledger.peak_bytes[0]
        assert program.simulate().peak_bytes[0] == pytest.approx(peaks[strategy], rel=0.1)
    assert peaks["coshard(4)"] <= 0.5 * peaks["single"]
    assert peaks["coshard(4)"] < 0.75 * peaks["coshard(1)"]
    assert peaks["coshard(1)"] < peaks["single"]


def test_knobs_that_make_no_sense_are_refused(specimen, refused):
    graph = specimen[2]
    for knob in ("0", "-1", "2.5", "'two'", "True"):
        assert "whole number of at least 1" in refused(find, f"coshard({knob})")
    sentence = refused(find("coshard(4096)"), graph, 1)
    assert "can be cut into 4096; use fewer parts" in sentence


# ---- in products ----


class Attention(torch.nn.Module):
    """Queries in groups that share keys and values; `mixes` makes each sample depend on all."""

    def __init__(self, *, mixes=False):
        super().__init__()
        self.norm, self.inner_norm = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)
        self.query, self.key, self.value = (torch.nn.Linear(16, width) for width in (16, 8, 8))
        self.output = torch.nn.Linear(16, 16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.mixes = mixes

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (one(h).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.query, self.key, self.value))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(found.transpose(1, 2).flatten(2))
        h = F.gelu(self.up(self.inner_norm(x)))
        return x + self.down(h - h.mean(0, keepdim=True) if self.mixes else h)


class Words(torch.nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.words, self.middle, self.head = torch.nn.Embedding(32, 16), middle, torch.nn.Linear(16, 32)

    def forward(self, x):
        return self.head(self.middle(self.words(x)))


class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Transformer(16, 4, 1, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.inner(x, x)


def shared_layers():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(layer, layer, layer)


MIDDLES = {
    "grouped queries": lambda: torch.nn.Sequential(*(Attention() for _ in range(3))),
    "samples that mix": lambda: torch.nn.Sequential(*(Attention(mixes=True) for _ in range(3))),
    "shared layers": shared_layers,
    "encoder-decoder": Both,
}
FACTORS = {
    "data(2)": 2,
    "zero(2)": 2,
    "tensor(2)": 2,
    "dap(2)": 2,
    "interlaced(2, microbatches=2)": 2,
    "pipeline(2, microbatches=4)": 2,
    "pipeline(2, microbatches=4, order='gpipe')": 2,
    "data(2) * pipeline(2, microbatches=2)": 4,
    "data(2, microbatches=2)": 2,
}


@pytest.mark.parametrize("name", MIDDLES)
def test_products_in_any_order_equal_plain_pytorch(name):
    torch.manual_seed(0)
    model = Words(MIDDLES[name]()).double()
    batch = torch.randint(0, 32, (8, 9))

    def loss(model, rows):
        return F.cross_entropy(model(rows).flatten(0, 1), rows.flatten())

    expected = loss(model, batch)
    expected.backward()
    graph = capture(model, batch, loss)
    for factor, devices in FACTORS.items():
        for text in (f"coshard(2) * {factor}", f"{factor} * coshard(2)"):
            program = find(text)(graph, devices).compile()
            found = InProcess(program, state_of(model)).run(batch)
            torch.testing.assert_close(found.outputs["loss"], expected.detach(), rtol=1e-10, atol=0)
            wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
            torch.testing.assert_close(found.gradients, wanted, rtol=1e-9, atol=1e-12)
            assert any(segment.recompute for segment in program.segments)


def test_every_device_computes_the_parts_of_a_layer_one_after_another(specimen):
    program = find("data(2) * coshard(2)")(specimen[2], 2).compile()
    for device in (0, 1):
        calls = [Counter(call.op for call in one.calls) for one in program.segments if one.device == device]
        assert max(max(one.values()) for one in calls) == 1
