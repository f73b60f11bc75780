"""Which communication comes out of boxes alone: the textbook collectives of each parallelism, and no other."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rota.graph.capture import capture
from rota.plan.box import Box
from rota.plan.layout import Kind
from rota.plan.plan import Plan
from rota.testing.models import GPT, Block
from rota.testing.plans import cuttable, data_plan, pipeline_plan, tensor_plan

WIDTH, HEADS, TOKENS, SAMPLES, VOCABULARY = 8, 4, 8, 4, 32


def moved(plan):
    """How often each (kind, tensor, direction) happens; what a device does by itself is left out."""
    program = plan.compile()
    return Counter(
        (str(node.step.kind), flow.tensor, "backward" if flow.backward else "forward")
        for node in program.nodes
        if node.step is not None and node.step.kind is not Kind.LOCAL
        for flow in [program.flows[node.flow]]
    )


def forward(kind, *tensors):
    return Counter((kind, tensor, "forward") for tensor in tensors)


def backward(kind, *tensors):
    return Counter((kind, tensor, "backward") for tensor in tensors)


def again(*tensors):
    """Gathered a second time, for the backward pass."""
    return forward("all_gather", *tensors)


def capture_gpt(depth=1):
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, context=TOKENS, width=WIDTH, heads=HEADS, depth=depth, dropout=0.1)
    return capture(
        model,
        torch.randint(0, VOCABULARY, (SAMPLES, TOKENS + 1)),
        lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()),
    )


class OneBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = Block(width=WIDTH, heads=HEADS, dropout=0.1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(self.block(self.first(x)))


def capture_block():
    return capture(OneBlock(), torch.randn(SAMPLES, TOKENS, WIDTH), lambda model, x: model(x).square().sum())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.tokens(tokens))))


def capture_tied():
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS))
    return capture(Tied(), tokens, lambda model, tokens: model(tokens).square().sum())


class FanOut(nn.Module):
    """Queries, keys and values from one tensor by three layers, and a residual."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            layer(y).view(SAMPLES, TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def place(plan, *families):
    """Cut each op along the first of these families that it has, else copy it."""
    for op in plan.graph.ops:
        dims = [dim for family in families for dim in cuttable(plan, op, {family})]
        parts = plan.split(op, dims[0].name, plan.devices) if dims else plan.replicate(op, plan.devices)
        for device, part in enumerate(parts):
            plan.assign(part, device)
    return plan


def of_block(layer):
    return [f"block.{layer}.weight", f"block.{layer}.bias"]


# ---- data ----


def test_data_parallelism_reduces_each_gradient_once_and_the_loss():
    graph = capture_gpt()
    names = [tensor.name for tensor in graph.parameters if tensor.name != "positions.weight"]
    assert moved(data_plan(graph, 4)) == (
        forward("all_reduce", "cross_entropy_loss.sum", "cross_entropy_loss.count")
        + backward("all_reduce", *names)
        # Positions are looked up once for all samples, so it is the gradient of what was found that is reduced.
        + backward("all_reduce", "positions.embedding")
    )


def test_micro_batches_do_not_reduce_a_gradient_more_than_once():
    graph = capture_gpt()
    found = moved(data_plan(graph, 2, microbatches=2))
    parameters = {tensor.name for tensor in graph.parameters}
    reduced = {key: count for key, count in found.items() if key[1] in parameters}
    assert reduced == backward("all_reduce", *(parameters - {"positions.weight"}))


@pytest.mark.parametrize("gather", ["step", "use"])
def test_parameters_stored_in_pieces_are_gathered_and_their_gradients_scattered(gather):
    graph = capture_block()
    plan = data_plan(graph, 4)
    for parameter in graph.parameters:
        shape = plan.refined.shape(parameter.name)
        dim = max(range(len(shape)), key=lambda i: shape[i] % 4 == 0)
        boxes = Box.whole(shape).split(dim, [shape[dim] // 4] * 4)
        plan.store(parameter.name, dict(enumerate(boxes)), gather=gather)
    names = [tensor.name for tensor in graph.parameters]
    gathered = forward("all_gather", *names) + (again(*names) if gather == "use" else Counter())
    to_the_first = Counter({("send", "sum", "forward"): 3})  # the loss, which is only reported
    assert moved(plan) == gathered + backward("reduce_scatter", *names) + to_the_first


# ---- tensor and sequence ----


@pytest.mark.parametrize("degree", [2, 4])
def test_megatron_reduces_once_forward_and_once_backward_in_each_half_of_a_block(degree):
    assert moved(tensor_plan(capture_gpt(depth=2), degree)) == sum(
        (
            forward("all_reduce", f"blocks.{i}.projection.linear", f"blocks.{i}.fc2.linear")
            + backward("all_reduce", f"blocks.{i}.norm1.layer_norm", f"blocks.{i}.norm2.layer_norm")
            for i in range(2)
        ),
        Counter(),
    )


def test_norms_cut_along_the_sequence_turn_each_all_reduce_into_a_gather_and_a_scatter():
    graph = capture_block()
    plan = Plan(graph, devices=2)
    heads = plan.dims("block.scaled_dot_product_attention")["h"].family
    inner = plan.dims("block.fc1.linear")["n"].family
    sequence = plan.refined.families["first.linear"][1]
    norms, halves = (
        ("block.norm1.layer_norm", "block.norm2.layer_norm"),
        ("block.projection.linear", "block.fc2.linear"),
    )
    whole = ["first.weight", "first.bias", *of_block("norm1"), *of_block("norm2"), "norm.weight", "norm.bias"]
    assert moved(place(plan, heads, inner, sequence)) == (
        forward("all_gather", *norms)
        + forward("reduce_scatter", *halves)
        + backward("all_gather", *halves)
        + backward("reduce_scatter", *norms)
        + backward("all_reduce", *whole)  # of what reads only some of the tokens
        + forward("send", "sum")
    )


def test_layers_that_read_one_tensor_reduce_its_gradient_once():
    graph = capture(FanOut(), torch.randn(SAMPLES, TOKENS, WIDTH), lambda model, x: model(x).square().sum())
    assert moved(tensor_plan(graph, 2)) == (
        forward("all_reduce", "o.linear") + backward("all_reduce", "norm.layer_norm")
    )


# ---- tied ----


def test_a_tied_weight_cut_by_vocabulary_needs_no_communication_of_its_own():
    plan = Plan(capture_tied(), devices=2)
    vocabulary = plan.refined.families["tokens.weight"][0]
    assert moved(place(plan, vocabulary)) == (
        forward("all_reduce", "tokens.embedding") + backward("all_reduce", "tanh") + forward("send", "sum")
    )


def test_a_tied_weight_is_reduced_once_for_both_of_its_uses():
    assert moved(data_plan(capture_tied(), 2)) == (
        backward("all_reduce", "tokens.weight", "middle.weight", "middle.bias") + forward("send", "sum")
    )


def test_stages_that_share_a_weight_send_each_other_their_gradients():
    assert moved(pipeline_plan(capture_tied(), 2)) == (
        forward("send", "tanh")
        + backward("send", "tanh")
        + Counter({("send", "tokens.weight", "backward"): 2})  # one each way
    )


# ---- pipeline ----


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_pipeline_only_sends_what_crosses_its_border(microbatches):
    graph = capture_block()
    plan = Plan(graph, devices=2, microbatches=microbatches)
    late = False
    for op in graph.ops:
        plan.assign(op, int(late))
        late = late or op.name == "block.add"
    expected = forward("send", "block.add") + backward("send", "block.add")
    assert moved(plan) == Counter(dict.fromkeys(expected, microbatches))
