"""A cross-entropy in blocks of classes is the plain one, and lets tensor parallelism cut all of the vocabulary."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rota.graph.capture import capture
from rota.graph.graph import Role
from rota.graph.run import run_graph
from rota.graph.vocabulary import BLOCK_SCORES, block_classes
from rota.plan.layout import Kind
from rota.runtime.in_process import InProcess
from rota.runtime.ledger import Ledger
from rota.strategies.base import find
from rota.strategies.tensor import tensor
from rota.testing import check_rule, zoo
from rota.testing.models import GPT

ROWS, CLASSES = 10, 12


# ---- the loss ----


class Scores(nn.Module):
    """Nothing but scores."""

    def __init__(self, scores):
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self):
        return self.scores


def graph_of(scores, target, **options):
    model = Scores(scores)
    return model, capture(model, target, lambda model, target: F.cross_entropy(model(), target, **options).sum())


def outcome(model, graph, target):
    model.zero_grad()
    loss = run_graph(graph, dict(model.named_parameters()), target)["loss"]
    loss.backward()
    return loss.detach(), model.scores.grad.clone()


def scores_of(kind):
    scores = torch.randn(ROWS, CLASSES, dtype=torch.float64)
    if kind == "large":
        return scores * 1e4
    if kind == "shifted":
        return scores + 1e6
    if kind == "masked":  # all of a block of a row, and some of others
        scores[2, :4] = scores[3, 4:] = scores[4, 1:3] = -math.inf
    return scores


@pytest.mark.parametrize("kind", ["plain", "large", "shifted", "masked"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 0, 5])
def test_in_blocks_it_is_the_plain_loss(kind, reduction, ignored):
    torch.manual_seed(0)
    target = torch.randint(0, CLASSES, (ROWS,))
    target[2], target[3], target[4] = 7, 1, 0  # classes that are not masked
    target[6] = target[8] = ignored
    model, graph = graph_of(scores_of(kind), target, reduction=reduction, ignore_index=ignored)
    blocked = block_classes(graph, 3)
    assert len(list(blocked.find(kind=BLOCK_SCORES))) == 1
    assert not list(blocked.find(kind="cross_entropy_loss"))
    (loss, gradient), (expected, plain) = outcome(model, blocked, target), outcome(model, graph, target)
    assert torch.isfinite(expected)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(gradient, plain, rtol=1e-10, atol=1e-15)


def test_a_loss_of_ignored_targets_is_zero():
    target = torch.full((ROWS,), -100)
    model, graph = graph_of(torch.randn(ROWS, CLASSES).double(), target, reduction="sum")
    loss, gradient = outcome(model, block_classes(graph, 2), target)
    assert float(loss) == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("shape", "target", "options"),
    [
        ((ROWS, 13), (ROWS,), {}),
        ((ROWS, CLASSES), (ROWS,), {"weight": torch.rand(CLASSES)}),
        ((ROWS, CLASSES), (ROWS,), {"label_smoothing": 0.1}),
        ((ROWS, CLASSES, 3), (ROWS, 3), {}),
        ((CLASSES,), (), {}),
    ],
)
def test_what_has_no_blocks_stays_as_it_is(shape, target, options):
    _, graph = graph_of(torch.randn(shape), torch.zeros(target, dtype=torch.int64), **options)
    assert block_classes(graph, 3) == graph


def test_probabilities_few_bits_and_one_block_stay_as_they_are():
    _, graph = graph_of(torch.randn(ROWS, CLASSES), torch.rand(ROWS, CLASSES))
    assert block_classes(graph, 3) == graph
    target = torch.zeros(ROWS, dtype=torch.int64)
    _, graph = graph_of(torch.randn(ROWS, CLASSES, dtype=torch.bfloat16), target)
    assert block_classes(graph, 3) == graph
    _, graph = graph_of(torch.randn(ROWS, CLASSES), target)
    assert block_classes(graph, 1) == graph


def test_under_autocast_the_loss_is_computed_in_float32():
    torch.manual_seed(0)
    layer, rows = nn.Linear(8, CLASSES), torch.randn(ROWS, 8)
    target = torch.randint(0, CLASSES, (ROWS,))

    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    graph = capture(layer, (rows, target), loss)
    found = [
        run_graph(one, dict(layer.named_parameters()), (rows, target))["loss"]
        for one in (graph, block_classes(graph, 2))
    ]
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


def test_a_target_that_is_no_class_is_refused():
    target = torch.zeros(ROWS, dtype=torch.int64)
    model, graph = graph_of(torch.randn(ROWS, CLASSES), target)
    target[4] = CLASSES
    with pytest.raises(RuntimeError, match="none of the 12 classes"):
        outcome(model, block_classes(graph, 2), target)


def test_the_op_is_cut_as_its_rule_says():
    torch.manual_seed(0)
    scores, target = torch.randn(5, 4, 3, dtype=torch.float64), torch.tensor([0, 11, 4, -100, 7])
    start = torch.arange(0, CLASSES, 3)
    assert check_rule(torch.ops.rota.block_scores.default, scores, target, start, CLASSES, -100) == ["n", "b"]


def test_it_needs_no_more_memory_than_the_plain_loss():
    target = torch.zeros(64, dtype=torch.int64)
    model, graph = graph_of(torch.randn(64, 4096), target)
    peaks = []
    for one in (graph, block_classes(graph, 2)):
        ledger = Ledger()
        with ledger:
            ledger.watch(0)
            outcome(model, one, target)
        peaks.append(ledger.peak_bytes[0] / model.scores.nbytes)
    assert peaks[1] <= peaks[0] + 0.1


# ---- tensor parallelism ----


class Untied(GPT):
    """A head of its own, with a bias."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.head = nn.Linear(sizes["width"], sizes["vocabulary"])


def specimen(name, *, vocabulary=64):
    """A model in doubles, its batch with some targets left out, and its loss."""
    torch.manual_seed(0)
    if name == "t5":
        made = zoo.make("t5", batch=8)
        made.batch["labels"][:, -2:] = -100
        return made.model.double(), made.batch, made.loss
    model = (Untied if name == "untied" else GPT)(vocabulary=vocabulary, context=16, width=16, depth=2, heads=4)
    rows = torch.randint(0, vocabulary, (8, 13))
    rows[:, -1] = 3

    def loss(model, rows):
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), ignore_index=3)

    return model.double(), rows, loss


def assert_same(program, graph, state, batch):
    """With what one device computes."""
    found, expected = (
        InProcess(one, state, seed=3).run(batch) for one in (program, find("single")(graph, 1).compile())
    )
    torch.testing.assert_close(found.outputs["loss"], expected.outputs["loss"], rtol=1e-10, atol=0)
    largest = max(float(one.abs().max()) for one in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert float((found.gradients[name] - gradient).abs().max()) <= 1e-10 * largest, name


def moved(program):
    """The tensors that go from device to device, forward or backward."""
    tensors = program.refined.graph.tensors
    return {
        flow.tensor: tensors[flow.tensor]
        for flow in program.flows
        if any(step.kind is not Kind.LOCAL for step in flow.steps)
    }


@pytest.mark.parametrize("name", ["t5", "gpt", "untied"])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 1), (2, 4), (4, 1)])
def test_all_of_the_vocabulary_is_cut_and_no_score_is_moved(name, devices, microbatches):
    if name == "t5" and devices == 4:
        pytest.skip("it has two heads")
    model, batch, loss = specimen(name)
    graph, state = capture(model, batch, loss), dict(model.named_parameters())
    program = tensor(vocabulary=True, microbatches=microbatches)(graph, devices).compile()
    assert_same(program, graph, state, batch)
    for one in moved(program).values():
        assert one.role is not Role.PARAMETER
        assert one.shape[-1:] != (64,)
        assert len(one.shape) < 3 or one.shape[-2:] != (devices, 64 // devices)
    for parameter in graph.parameters:
        if parameter.shape[:1] == (64,) and len(parameter.shape) == 2:
            sizes = [piece.box.size for piece in program.stored[parameter.name]]
            assert sizes == [math.prod(parameter.shape) // devices] * devices


@pytest.mark.parametrize("name", ["gpt", "untied"])
def test_a_vocabulary_that_does_not_divide_is_cut_unevenly_and_its_scores_are_gathered(name):
    model, batch, loss = specimen(name, vocabulary=63)
    graph, state = capture(model, batch, loss), dict(model.named_parameters())
    program = tensor(vocabulary=True)(graph, 2).compile()
    assert_same(program, graph, state, batch)
    assert {piece.box.shape[0] for piece in program.stored["tokens.weight"]} == {31, 32}


def test_with_data_parallelism():
    model, batch, loss = specimen("gpt")
    graph, state = capture(model, batch, loss), dict(model.named_parameters())
    program = find("data(2) * tensor(2, vocabulary=True)")(graph, 4).compile()
    assert_same(program, graph, state, batch)


def test_ten_steps_of_training():
    model, batch, loss = specimen("gpt")
    graph = capture(model, batch, loss)
    runs = []
    for recipe, devices in (("single", 1), ("tensor(vocabulary=True)", 4)):
        state = {name: one.detach().clone() for name, one in model.named_parameters()}
        run = InProcess(find(recipe)(graph, devices).compile(), state)
        run.optimize(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        losses = [float(run.train(batch, step=step)["loss"]) for step in range(10)]
        runs.append((losses, {one.name: run.whole(one.name) for one in graph.parameters}))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-10)
    assert runs[0][0][-1] < runs[0][0][0]
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-10, atol=1e-10)
