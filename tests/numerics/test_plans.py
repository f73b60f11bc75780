"""Random plans of random graphs, and of the zoo, train as one device does: loss, gradients and weights, in float64.

ROTA_PLAN_CASES says how many plans are tried, ROTA_PLAN_SHARD=0/2 which part of them. A failure names the seeds;
``check_random(graph, plan)`` repeats it.
"""

import functools
import os
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from rota.graph.capture import capture
from rota.graph.refine import refine
from rota.plan.box import Box
from rota.runtime.in_process import InProcess
from rota.runtime.pieces import cut
from rota.testing import zoo
from rota.testing.plans import in_double, random_plan, single_plan

CASES = int(os.environ.get("ROTA_PLAN_CASES", "520"))
SHARD, SHARDS = (int(number) for number in os.environ.get("ROTA_PLAN_SHARD", "0/1").split("/"))
PLANS_PER_GRAPH = 12
ZOO_PLANS = max(1, CASES // 360)
"""Of each model; one takes as long as ten of the random graphs."""
GRAPHS = -(-max(1, CASES - len(zoo.names()) * ZOO_PLANS) // PLANS_PER_GRAPH)
TOLERANCE = 1e-10
SMALL = 1e-4
"""How much of the largest gradient of all counts for one that is zero but for rounding, as that of a key's bias."""
STEPS = 3


# ---- random graphs ----

WIDTH, VOCABULARY = 4, 7
EPSILON = 0.01
"""Of norms and of AdamW: what is zero but for rounding, as the gradient of a bias before a norm, is not blown up."""


class Scaled(nn.Module):
    """A layer with a weight that several others may share."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x * self.weight.mean(0)


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.causal = causal

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(x.shape)


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class WithoutGradient(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            return torch.tanh(super().forward(x))


class BatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 6, bias=False)
        self.down = nn.Linear(6, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Joined(nn.Module):
    """Two tensors side by side, and of the result only one half is used."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x, y):
        used, _ = self.linear(torch.cat([x, y], dim=-1)).chunk(2, dim=-1)
        return used


LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH, eps=EPSILON),
    "attention": lambda: Attention(causal=False),
    "causal": lambda: Attention(causal=True),
    "batch_norm": lambda: BatchNorm(WIDTH, eps=EPSILON),
    "dropout": lambda: nn.Dropout(0.3),
    "feed_forward": FeedForward,
    "frozen": Frozen,
    "without_gradient": WithoutGradient,
}

FUNCTIONS = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "over_tokens": lambda x: x.softmax(1),
    "detached": lambda x: x * x.detach(),
    "centred": lambda x: x - x.mean(0, keepdim=True),
    "pooled": lambda x: x + x.mean(1, keepdim=True),
    "shifted": lambda x: F.pad(x[:, 1:], (0, 0, 0, 1)),
}

PAIRS = {
    "add": torch.add,
    "mul": torch.mul,
    "mix": lambda x, y: torch.tanh(x @ y.transpose(1, 2)) @ y,
}

TERMS = {
    "mean": lambda model, x, batch: x.square().mean(),
    "sum": lambda model, x, batch: 0.01 * x.square().sum(),
    "tokens": lambda model, x, batch: F.cross_entropy(model.head(x).flatten(0, 1), batch["labels"].flatten()),
    "label_sum": lambda model, x, batch: (
        0.1 * F.cross_entropy(model.head(x).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    ),
    "regress": lambda model, x, batch: F.mse_loss(x, batch["x"].tanh()),
    "classes": lambda model, x, batch: F.cross_entropy(x.mean(1), batch["class"]) / 3,
}


class RandomModel(nn.Module):
    """Layers, functions and pairs drawn at random over a pool of tensors of one shape."""

    def __init__(self, rng):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if rng.random() < 0.5:
            self.head.weight = self.tokens.weight
        self.layers = nn.ModuleList()
        self.steps = []
        if rng.random() < 0.5:
            self._add(rng, 1, Scaled(self.tokens.weight))
        for _ in range(rng.randint(1, 5)):
            kind = rng.choice(["layer", "layer", "layer", "function", "pair", "pair", "again", "joined"])
            if kind == "layer":
                self._add(rng, 1, LAYERS[rng.choice(sorted(LAYERS))]())
            elif kind == "function":
                self.steps.append((FUNCTIONS[rng.choice(sorted(FUNCTIONS))], self._drawn(rng, 1)))
            elif kind == "pair":
                self.steps.append((PAIRS[rng.choice(sorted(PAIRS))], self._drawn(rng, 2)))
            elif kind == "joined":
                self._add(rng, 2, Joined())
            elif len(self.layers):
                layer = rng.choice(list(self.layers))
                self.steps.append((layer, self._drawn(rng, 2 if isinstance(layer, Joined) else 1)))
        self.with_tokens = rng.random() < 0.6
        self.terms = [TERMS[rng.choice(sorted(TERMS))] for _ in range(rng.choice([1, 1, 2, 3]))]
        self.metrics = rng.random() < 0.4

    def _add(self, rng, reads, layer):
        self.layers.append(layer)
        self.steps.append((layer, self._drawn(rng, reads)))

    def _drawn(self, rng, count):
        """Which of the tensors so far, the last ones more often; some are never read."""
        made = len(self.steps) + 1
        return [rng.choice([made - 1, made - 1, rng.randrange(made)]) for _ in range(count)]

    def forward(self, batch):
        pool = [batch["x"] + self.tokens(batch["tokens"]) if self.with_tokens else batch["x"]]
        for step, reads in self.steps:
            pool.append(step(*(pool[i] for i in reads)))
        return pool[-1], pool[len(pool) // 2]

    def loss(self, batch):
        last, middle = self(batch)
        terms = [term(self, x, batch) for term, x in zip(self.terms, [last, middle, last], strict=False)]
        found = {"loss": sum(terms[1:], terms[0]) + 0.1 * self.head(last).square().mean()}
        if self.metrics:
            found["largest"] = last.detach().amax(-1).mean()
            found["logits"] = middle
        return found


def make_graph(seed):
    rng = random.Random(f"graph {seed}")
    torch.manual_seed(seed)
    model = RandomModel(rng).double()
    size, length = rng.choice([4, 5, 6, 8]), rng.choice([2, 3])
    batch = {
        "x": torch.randn(size, length, WIDTH, dtype=torch.float64),
        "tokens": torch.randint(0, VOCABULARY, (size, length)),
        "labels": torch.randint(0, VOCABULARY, (size, length)),
        "class": torch.randint(0, WIDTH, (size,)),
    }
    batch["labels"][0, 0] = -100
    return model, batch, lambda model, batch: model.loss(batch)


# ---- one device against many ----


class Recording(torch.optim.AdamW):
    """Keeps the gradients of its first step."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2, eps=EPSILON)
        self.gradients = {}

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.gradients.setdefault(parameter, None if parameter.grad is None else parameter.grad.clone())
        super().step()


class Trained:
    """What a program makes of a model in a few steps of training."""

    def __init__(self, program, state, batch, *, max_norm, steps=STEPS):
        optimizers = []
        engine = InProcess(program, state, seed=3)
        engine.optimize(lambda parameters: optimizers.append(Recording(parameters)) or optimizers[-1])
        self.outputs = [engine.train(batch, step=step, max_norm=max_norm) for step in range(steps)]
        first = {parameter: grad for one in optimizers for parameter, grad in one.gradients.items()}
        self.gradients = {(name, piece): first[parameter] for name, piece, parameter in engine.parameters()}
        """Of each piece of each parameter, copies included."""
        self.state = {name: engine.whole(name) for name in program.stored}


def state_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(found, expected, where, refined):
    for step, (one, other) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        assert one.keys() == other.keys(), where
        for name, value in other.items():
            assert_close(one[name], value, f"{where}: {name} of step {step}")
    whole = {name: gradient for (name, _), gradient in expected.gradients.items()}
    extra = SMALL * largest(*whole.values())
    for (name, piece), gradient in found.gradients.items():
        what = f"{where}: the gradient of {name} {piece}"
        assert (gradient is None) == (whole[name] is None), what
        if gradient is not None:
            part = cut(whole[name], refined.factors[name], Box.whole(refined.shape(name)), piece.box)
            assert_close(gradient, part, what, scale=largest(whole[name]) + extra)
    for name, value in expected.state.items():
        what = f"{where}: {name} after {len(expected.outputs)} steps"
        assert_close(found.state[name], value, what, scale=largest(value) + 1.0)


def assert_close(found, expected, what, scale=None):
    """Relative to `scale`, or else to the largest number that is expected."""
    assert found.shape == expected.shape, what
    scale = largest(expected) if scale is None else scale
    error = largest(found.double() - expected.double())
    assert error <= TOLERANCE * scale, f"{what} is wrong by {error:.1e} of {scale:.1e}"


def largest(*tensors):
    """The largest absolute value; of no tensor, and of one without elements, zero."""
    return max(
        (float(one.detach().double().abs().max()) for one in tensors if one is not None and one.numel()), default=0.0
    )


def draw(graph, refined, seed, samples, cut_rates=(0.1, 0.25, 0.5)):
    """A plan drawn at random, and how it is to be compiled and trained."""
    rng = random.Random(f"plan {seed}")
    devices, microbatches = rng.randint(1, 8), rng.randint(1, min(4, samples))
    rate = rng.choice(cut_rates)
    plan = random_plan(graph, rng, devices=devices, microbatches=microbatches, cut_rate=rate, refined=refined)
    return plan, {"reference": rng.random() < 0.15}, rng.choice([None, None, 0.05])


def check_random(graph_seed, plan_seed=None):
    """Compare one plan, or as many as a graph gets."""
    model, batch, loss = make_graph(graph_seed)
    graph = capture(model, batch, loss)
    refined = refine(graph)
    state = state_of(model)
    expected = {}
    one = single_plan(graph, refined=refined).compile()
    seeds = range(PLANS_PER_GRAPH) if plan_seed is None else [plan_seed]
    for seed in seeds:
        where = f"graph {graph_seed}, plan {seed}"
        plan, options, max_norm = draw(graph, refined, f"{graph_seed} {seed}", batch["x"].shape[0])
        try:
            program = plan.compile(**options)
            if max_norm not in expected:
                expected[max_norm] = Trained(one, state, batch, max_norm=max_norm)
            found = Trained(program, state, batch, max_norm=max_norm)
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        assert_same(found, expected[max_norm], where, refined)


@pytest.mark.parametrize("seed", range(SHARD, GRAPHS, SHARDS))
def test_a_random_plan_of_a_random_graph_trains_as_one_device_does(seed):
    check_random(seed)


@pytest.mark.parametrize("seed", range(min(GRAPHS, 20)))
def test_one_device_trains_as_eager_pytorch_does(seed):
    model, batch, loss = make_graph(seed)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    program = single_plan(capture(model, batch, loss)).compile()
    found = Trained(program, state_of(model), batch, max_norm=None)
    optimizer = Recording(one for one in model.parameters() if one.requires_grad)
    for outputs in found.outputs:
        expected = loss(model, batch)
        assert outputs.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(outputs[name], value, name)
        optimizer.zero_grad()
        expected["loss"].backward()
        optimizer.step()
    extra = SMALL * largest(*optimizer.gradients.values())
    parameters = dict(model.named_parameters())
    for (name, _), gradient in found.gradients.items():
        wanted = optimizer.gradients[parameters[name]]
        assert (gradient is None) == (wanted is None), name
        if wanted is not None:
            assert_close(gradient, wanted, name, scale=largest(wanted) + extra)
    for name, value in found.state.items():
        assert_close(value, state_of(model)[name], name, scale=largest(value) + 1.0)


# ---- the zoo ----


@functools.lru_cache(maxsize=1)
def make_specimen(name):
    """A model of the zoo in float64: its graph, dims, parameters and batch, and what one device makes of it."""
    specimen = zoo.make(name, batch=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = in_double(capture(specimen.model, specimen.batch, specimen.loss))
    refined = refine(graph)
    state = state_of(specimen.model.double())
    batch = pytree.tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, specimen.batch
    )
    one = single_plan(graph, refined=refined).compile()
    return graph, refined, state, batch, Trained(one, state, batch, max_norm=1.0)


@pytest.mark.parametrize("seed", range(SHARD, max(ZOO_PLANS, SHARD + 1), SHARDS))
@pytest.mark.parametrize("name", zoo.names())
def test_a_random_plan_of_the_zoo_trains_as_one_device_does(name, seed):
    graph, refined, state, batch, expected = make_specimen(name)
    plan, options, _ = draw(graph, refined, f"{name} {seed}", 4, cut_rates=(0.05, 0.15))
    found = Trained(plan.compile(**options), state, batch, max_norm=1.0)
    assert_same(found, expected, f"{name}, plan {seed}", refined)
