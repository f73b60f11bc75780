"""Every loss of torch.nn.functional, alone and in sums, by every strategy and in micro-batches: equal to eager."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rota.errors import InputError
from rota.graph.capture import capture
from rota.runtime.in_process import InProcess
from rota.strategies.base import find
from rota.strategies.turns import turning_ops

SAMPLES, FEATURES, CLASSES = 8, 6, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [FEATURES, 16, 16, 8, CLASSES]
        self.layers = nn.ModuleList([nn.Linear(*pair) for pair in itertools.pairwise(widths)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


def make_batch():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        **{name: normal(SAMPLES, FEATURES) for name in ("x", "x2", "x3")},
        "y": normal(SAMPLES, CLASSES),
        "chances": normal(SAMPLES, CLASSES).softmax(-1),
        "classes": torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        "labels": torch.randint(0, CLASSES, (SAMPLES, CLASSES), generator=generator),
        "signs": torch.randint(0, 2, (SAMPLES, 1), generator=generator) * 2.0 - 1,
        "weights": normal(SAMPLES).square(),
    }


CLASS_WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def logs(model, b):
    return F.log_softmax(model(b["x"]), -1)


def ctc(model, b):
    scores = logs(model, b).view(1, SAMPLES, CLASSES).expand(5, -1, -1)
    lengths = torch.full((SAMPLES,), 5), torch.ones(SAMPLES, dtype=torch.long)
    return F.ctc_loss(scores, torch.ones(SAMPLES, 1, dtype=torch.long), *lengths)


def focal(model, b):
    terms = F.cross_entropy(model(b["x"]), b["classes"], reduction="none")
    return ((1 - torch.exp(-terms)) ** 2 * terms).mean()


def dice(model, b):
    found = torch.sigmoid(model(b["x"]))
    return 1 - (2 * (found * b["chances"]).sum() + 1) / (found.sum() + b["chances"].sum() + 1)


def variational(model, b):
    h = model(b["x"])
    return F.mse_loss(h, b["y"]) - (0.5 * (1 + h[:, :2] - h[:, 2:] ** 2 - h[:, :2].exp())).sum(1).mean()


ADDITIVE = {
    "mse": lambda m, b: F.mse_loss(m(b["x"]), b["y"]),
    "mse sum": lambda m, b: F.mse_loss(m(b["x"]), b["y"], reduction="sum"),
    "mse rows": lambda m, b: F.mse_loss(m(b["x"]), b["y"], reduction="none").mean(),
    "mse weighted": lambda m, b: F.mse_loss(m(b["x"]), b["y"], weight=b["chances"]),
    "l1": lambda m, b: F.l1_loss(m(b["x"]), b["y"]),
    "smooth l1": lambda m, b: F.smooth_l1_loss(m(b["x"]), b["y"]),
    "huber": lambda m, b: F.huber_loss(m(b["x"]), b["y"]),
    "cross-entropy": lambda m, b: F.cross_entropy(m(b["x"]), b["classes"]),
    "cross-entropy, some ignored": lambda m, b: F.cross_entropy(m(b["x"]), b["classes"], ignore_index=1),
    "cross-entropy, weighted": lambda m, b: F.cross_entropy(m(b["x"]), b["classes"], weight=CLASS_WEIGHTS),
    "cross-entropy, smooth": lambda m, b: F.cross_entropy(m(b["x"]), b["classes"], label_smoothing=0.1),
    "cross-entropy of chances": lambda m, b: F.cross_entropy(m(b["x"]), b["chances"]),
    "linear cross-entropy": lambda m, b: F.linear_cross_entropy(m(b["x"]), m.layers[-1].weight[:, :4], b["classes"]),
    "nll": lambda m, b: F.nll_loss(logs(m, b), b["classes"]),
    "nll weighted": lambda m, b: F.nll_loss(logs(m, b), b["classes"], weight=CLASS_WEIGHTS),
    "bce": lambda m, b: F.binary_cross_entropy(torch.sigmoid(m(b["x"])), b["chances"]),
    "bce logits": lambda m, b: F.binary_cross_entropy_with_logits(m(b["x"]), b["chances"], pos_weight=CLASS_WEIGHTS),
    "kl sum": lambda m, b: F.kl_div(logs(m, b), b["chances"], reduction="sum"),
    "kl batchmean": lambda m, b: F.kl_div(logs(m, b), b["chances"], reduction="batchmean"),
    "poisson": lambda m, b: F.poisson_nll_loss(m(b["x"]), b["chances"], full=True),
    "gaussian": lambda m, b: F.gaussian_nll_loss(m(b["x"]), b["y"], b["chances"]),
    "gaussian, learned": lambda m, b: F.gaussian_nll_loss(m(b["x"]), b["y"], F.softplus(m(b["x2"])), full=True),
    "hinge": lambda m, b: F.hinge_embedding_loss(m(b["x"]), b["signs"].expand(-1, CLASSES)),
    "soft margin": lambda m, b: F.soft_margin_loss(m(b["x"]), b["signs"].expand(-1, CLASSES)),
    "margin ranking": lambda m, b: F.margin_ranking_loss(m(b["x"]), m(b["x2"]), b["signs"]),
    "multi margin": lambda m, b: F.multi_margin_loss(m(b["x"]), b["classes"], weight=CLASS_WEIGHTS),
    "multilabel margin": lambda m, b: F.multilabel_margin_loss(m(b["x"]), b["labels"]),
    "multilabel soft margin": lambda m, b: F.multilabel_soft_margin_loss(m(b["x"]), b["chances"].round()),
    "cosine embedding": lambda m, b: F.cosine_embedding_loss(m(b["x"]), m(b["x2"]), b["signs"][:, 0]),
    "triplet": lambda m, b: F.triplet_margin_loss(m(b["x"]), m(b["x2"]), m(b["x3"]), swap=True),
    "triplet distance": lambda m, b: F.triplet_margin_with_distance_loss(m(b["x"]), m(b["x2"]), m(b["x3"])),
    "ctc": ctc,
    "cosine": lambda m, b: (1 - F.cosine_similarity(m(b["x"]), b["y"])).mean(),
    "focal": focal,
    "vae": variational,
    "weighted mean": lambda m, b: (
        (b["weights"] * F.cross_entropy(m(b["x"]), b["classes"], reduction="none")).sum() / b["weights"].sum()
    ),
}
"""Sums over samples, up to factors that no gradient depends on: micro-batches can take turns."""

MEETING = {
    "norm": lambda m, b: (m(b["x"]) - b["y"]).norm(),
    "root": lambda m, b: F.mse_loss(m(b["x"]), b["y"]).sqrt(),
    "log": lambda m, b: torch.log(F.mse_loss(m(b["x"]), b["y"])),
    "dice": dice,
    "logsumexp": lambda m, b: torch.logsumexp(m(b["x"]).flatten(), 0),
    "contrastive": lambda m, b: F.cross_entropy(m(b["x"]) @ m(b["x2"]).T, torch.arange(SAMPLES)),
    "variance": lambda m, b: m(b["x"]).var(),
    "worst": lambda m, b: (m(b["x"]) - b["y"]).abs().max(),
    "scaled by itself": lambda m, b: (lambda loss: loss * loss.detach())(F.mse_loss(m(b["x"]), b["y"])),
}
"""The gradient of one sample depends on all others."""

LOSSES = ADDITIVE | MEETING


def penalty(model):
    return 0.01 * sum(parameter.square().sum() for parameter in model.parameters())


VARIANTS = {
    "alone": lambda loss: loss,
    "penalty": lambda loss: lambda m, b: loss(m, b) + penalty(m),
    "norm of weights": lambda loss: (
        lambda m, b: loss(m, b) + 0.01 * torch.cat([one.flatten() for one in m.parameters()]).norm()
    ),
    "constant": lambda loss: lambda m, b: 3.0 - 0.5 * loss(m, b) / 3,
    "second": lambda loss: lambda m, b: loss(m, b) + 0.3 * F.mse_loss(m(b["x2"]), b["chances"]),
    "stacked": lambda loss: (
        lambda m, b: torch.stack([loss(m, b), penalty(m), F.cross_entropy(m(b["x3"]), b["classes"])]).mean()
    ),
    "with metrics": lambda loss: (
        lambda m, b: {
            "loss": loss(m, b),
            "right": (m(b["x"]).argmax(-1) == b["classes"]).double().mean(),
            "other": F.l1_loss(m(b["x"]), b["y"]),
        }
    ),
}

STRATEGIES = {
    "single(microbatches=3)": 1,
    "coshard(2, microbatches=2)": 1,
    "data": 2,
    "data(microbatches=2)": 2,
    "zero(stage=1, microbatches=2)": 2,
    "zero(stage=3, microbatches=2)": 2,
    "tensor(microbatches=2)": 2,
    "dap(microbatches=2)": 2,
    "interlaced(microbatches=2)": 2,
    "pipeline(microbatches=4)": 2,
    "pipeline(microbatches=4, order='gpipe')": 2,
    "pipeline(microbatches=4, order='interleaved')": 2,
    "pipeline(2, microbatches=2) * coshard(2)": 2,
    "data(2) * pipeline(2, microbatches=2)": 4,
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Net().double()


def check(model, loss, strategies):
    batch = make_batch()
    model.zero_grad()
    result = loss(model, batch)
    expected = result["loss"] if isinstance(result, dict) else result
    expected.backward()
    graph = capture(model, batch, loss)
    ran = 0
    for strategy in strategies:
        try:
            plan = find(strategy)(graph, STRATEGIES[strategy])
        except InputError:  # nothing of this graph can be cut in that way, which is said
            continue
        found = InProcess(plan.compile(), dict(model.named_parameters())).run(batch)
        torch.testing.assert_close(found.outputs["loss"], expected.detach(), rtol=1e-10, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                found.gradients[name],
                parameter.grad,
                rtol=1e-9,
                atol=1e-12,
                msg=lambda m, s=strategy, n=name: f"{s} {n} {m}",
            )
        ran += 1
    assert ran >= len(strategies) - 4


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_alone_by_every_strategy(model, name):
    check(model, LOSSES[name], STRATEGIES)


COMBINATIONS = [(name, variant) for name in LOSSES for variant in VARIANTS if variant != "alone"]


@pytest.mark.parametrize(("number", "name", "variant"), [(i, *one) for i, one in enumerate(COMBINATIONS)])
def test_a_loss_in_a_sum_by_some_strategies(model, number, name, variant):
    names = list(STRATEGIES)
    check(model, VARIANTS[variant](LOSSES[name]), [names[(number + 5 * i) % len(names)] for i in range(3)])


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_loss_in_every_sum_by_every_strategy(model, variant):
    for loss in LOSSES.values():
        check(model, VARIANTS[variant](loss), STRATEGIES)


@pytest.mark.parametrize("variant", ["alone", "stacked"])
def test_micro_batches_take_turns_unless_the_loss_needs_all_of_them_at_once(model, variant):
    for name, loss in LOSSES.items():
        graph = capture(model, make_batch(), VARIANTS[variant](loss))
        turning = turning_ops(find("single(microbatches=2)")(graph, 1))
        assert bool(turning) == (name in ADDITIVE), name


def test_sums_of_losses_keep_the_activations_of_one_micro_batch_only():
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    batch = torch.randn(256, 8)
    for loss in (
        lambda m, x: F.mse_loss(m(x), x) + 1.0,
        lambda m, x: F.mse_loss(m(x), x) + 0.1 * sum(one.square().sum() for one in m.parameters()),
        lambda m, x: sum([F.l1_loss(m(x), x), F.huber_loss(m(x), x)]),
    ):
        graph = capture(wide, batch, loss)
        whole, parts = (
            find(f"single(microbatches={count})")(graph, 1).compile().simulate().peak_bytes[0] for count in (1, 8)
        )
        assert parts < 0.4 * whole


@pytest.mark.parametrize("name", ["mse", "l1", "huber", "cross-entropy", "nll", "triplet", "vae"])
def test_data_parallelism_exchanges_no_predictions(model, name):
    program = find("data")(capture(model, make_batch(), LOSSES[name]), 2).compile()
    steps = [step for flow in program.flows if not flow.backward for step in flow.steps]
    assert all(piece.box.size == 1 for step in steps for piece in step.outputs)
