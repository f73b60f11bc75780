"""What else a plan may ask for: recomputing, micro-batches, uneven widths, PyTorch's random numbers, other dtypes."""

import pytest
import torch
import torch.nn.functional as F

from rota.graph.capture import capture
from rota.graph.refine import refine
from rota.plan.box import Box
from rota.plan.plan import Plan
from rota.runtime.in_process import InProcess
from rota.runtime.ledger import Ledger
from rota.strategies.base import find
from rota.testing.models import GPT
from rota.testing.plans import cuttable, data_plan, pipeline_plan, single_plan, tensor_plan

VOCABULARY = 32


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


class Case:
    """A model with dropout, its batch and its graph."""

    def __init__(self, *, samples=8, dropout=0.1, loss=loss, dtype=torch.float64):
        torch.manual_seed(0)
        self.model = GPT(vocabulary=VOCABULARY, context=8, width=8, depth=2, heads=4, dropout=dropout).to(dtype)
        self.batch = torch.randint(0, VOCABULARY, (samples, 9))
        self.graph = capture(self.model, self.batch, loss)
        self.refined = refine(self.graph)
        self.state = dict(self.model.named_parameters())

    def run(self, plan, **options):
        return InProcess(plan.compile(), self.state, **options).run(self.batch)

    def single(self, **options):
        return single_plan(self.graph, refined=self.refined, **options)

    def peaks(self, plan):
        """Measured and simulated bytes of each device."""
        program, ledger = plan.compile(), Ledger()
        with ledger:
            InProcess(program, self.state, ledger=ledger).execute(self.batch)
        return [ledger.peak_bytes[device] for device in range(program.devices)], list(program.simulate().peak_bytes)


@pytest.fixture(scope="module")
def case():
    return Case()


def assert_same(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found.outputs["loss"], expected.outputs["loss"], rtol=tolerance, atol=0.0)
    largest = max(float(one.abs().max()) for one in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = float((found.gradients[name] - gradient).abs().max())
        assert error <= tolerance * (float(gradient.abs().max()) + 1e-4 * largest), name


# ---- recompute ----


def recomputed(plan, blocks=2):
    for i in range(blocks):
        plan.recompute(op for op in plan.graph.ops if op.module.startswith(f"blocks.{i}"))
    return plan


def test_recomputing_gives_the_same_bits_and_needs_less_memory(case):
    kept, again = case.single(), recomputed(case.single())
    found, expected = case.run(again), case.run(kept)
    assert torch.equal(found.outputs["loss"], expected.outputs["loss"])
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name
    for before, after in zip(case.peaks(kept), case.peaks(again), strict=True):
        assert after[0] < 0.8 * before[0]


def test_recomputing_with_pytorchs_own_random_numbers_repeats_them(case):
    found = []
    for plan in (case.single(), recomputed(case.single())):
        torch.manual_seed(5)
        found.append(case.run(plan, plain_random=True))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("make", [data_plan, tensor_plan, pipeline_plan])
def test_recomputing_works_in_every_kind_of_plan(case, make):
    plan = recomputed(make(case.graph, 2, microbatches=2, refined=case.refined))
    assert_same(case.run(plan), case.run(case.single()))


# ---- micro-batches ----


def test_micro_batches_need_less_memory(case):
    whole, halves, eighths = (case.peaks(case.single(microbatches=count)) for count in (1, 2, 8))
    for one, other, last in zip(whole, halves, eighths, strict=True):
        assert last[0] < other[0] < one[0]
        assert last[0] < 0.6 * one[0]


@pytest.mark.parametrize("microbatches", [2, 3, 7])
@pytest.mark.parametrize("make", [data_plan, tensor_plan, pipeline_plan])
def test_a_batch_of_odd_size_in_micro_batches_of_unequal_size(make, microbatches):
    odd = Case(samples=15 if make is data_plan else 7)
    plan = make(odd.graph, 2, microbatches=microbatches, refined=odd.refined)
    assert_same(odd.run(plan), odd.run(odd.single()))


@pytest.mark.parametrize("gather", ["step", "use"])
@pytest.mark.parametrize("samples", [8, 15])
def test_parameters_in_pieces_in_micro_batches_of_any_size(samples, gather):
    sharded = Case(samples=samples)
    plan = data_plan(sharded.graph, 2, microbatches=2, refined=sharded.refined)
    for parameter in sharded.graph.parameters:
        shape = sharded.refined.shape(parameter.name)
        boxes = Box.whole(shape).split(0, [1, shape[0] - 1])
        plan.store(parameter.name, dict(enumerate(boxes)), gather=gather)
    assert_same(sharded.run(plan), sharded.run(sharded.single()))


# ---- widths ----


@pytest.mark.parametrize("widths", [[1, 7], [5, 2, 1], [3, 3, 1, 1]])
def test_samples_in_uneven_widths(case, widths):
    plan = data_plan(case.graph, len(widths), widths=widths, refined=case.refined)
    assert_same(case.run(plan), case.run(case.single()))


def test_heads_and_columns_in_uneven_widths(case):
    plan = Plan(case.graph, devices=2, refined=case.refined)
    heads = {plan.dims(op)["h"].family for op in plan.ops(kind="scaled_dot_product_attention")}
    columns = {plan.dims(op)["n"].family for op in plan.ops(kind="linear", name="*.fc1")}
    for op in case.graph.ops:
        dims = cuttable(plan, op, heads | columns)
        widths = [1, dims[0].size - 1] if dims else []
        parts = plan.split(op, dims[0].name, widths=widths) if dims else plan.replicate(op, 2)
        for device, part in enumerate(parts):
            plan.assign(part, device)
    assert_same(case.run(plan), case.run(case.single()))


# ---- random numbers ----


def test_dropout_depends_on_seed_and_step_and_not_on_the_plan(case):
    plan = data_plan(case.graph, 4, microbatches=2, refined=case.refined)
    assert_same(case.run(plan, seed=7), case.run(case.single(), seed=7))
    assert case.run(plan, seed=7).outputs["loss"] != case.run(plan, seed=8).outputs["loss"]
    engine = InProcess(plan.compile(), case.state)
    assert engine.run(case.batch, step=1).outputs["loss"] != engine.run(case.batch, step=2).outputs["loss"]


def test_pytorchs_own_dropout_is_that_of_eager_on_one_device(case):
    torch.manual_seed(11)
    expected = loss(case.model, case.batch)
    torch.manual_seed(11)
    found = case.run(case.single(), plain_random=True)
    torch.testing.assert_close(found.outputs["loss"], expected.detach(), rtol=1e-12, atol=0.0)


def test_pytorchs_own_dropout_runs_under_a_plan(case):
    plan = data_plan(case.graph, 2, microbatches=2, refined=case.refined)
    found = [case.run(plan, plain_random=True) for _ in range(2)]
    assert found[0].outputs["loss"] != found[1].outputs["loss"]
    assert all(torch.isfinite(gradient).all() for gradient in found[0].gradients.values())


# ---- precision and passes ----


@pytest.mark.parametrize("make", [data_plan, tensor_plan, pipeline_plan])
def test_a_model_under_autocast_trains_in_bfloat16(make):
    def in_half(model, rows):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model, rows)

    half = Case(dropout=0.0, loss=in_half, dtype=torch.float32)
    expected = in_half(half.model, half.batch)
    expected.backward()
    found = half.run(make(half.graph, 2, microbatches=2, refined=half.refined))
    torch.testing.assert_close(found.outputs["loss"], expected.detach(), rtol=2e-3, atol=0.0)
    for name, parameter in half.state.items():
        assert found.gradients[name].dtype == torch.float32
        scale = float(parameter.grad.abs().max())
        assert float((found.gradients[name] - parameter.grad).abs().max()) <= 0.1 * scale + 1e-4, name


def test_a_plan_of_the_forward_pass_alone_gives_the_loss(case):
    plan = Plan(case.graph, devices=2, backward=False, refined=case.refined)
    half = len(case.graph.ops) // 2
    plan.assign(case.graph.ops[:half], 0)
    plan.assign(case.graph.ops[half:], 1)
    found, expected = case.run(plan), case.run(case.single())
    torch.testing.assert_close(found.outputs["loss"], expected.outputs["loss"], rtol=1e-12, atol=0.0)
    assert not any(bool(gradient.any()) for gradient in found.gradients.values())


class RowForEachSample(torch.nn.Module):
    """Parameters whose rows are those of the batch, which micro-batches take apart."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.rows, self.longer = (torch.nn.Parameter(torch.randn(count, 4)) for count in (8, 16))
        self.mix = torch.nn.Parameter(torch.randn(8, 8))
        self.register_buffer("scale", torch.randn(8, 4))

    def forward(self, x):
        return self.mix @ self.linear(x) * self.scale + self.rows + self.longer[:8]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("product", ["{}", "data(2) * {}", "pipeline(2) * {}", "{} * pipeline(2)"])
def test_a_parameter_with_a_row_for_each_sample(stage, product):
    torch.manual_seed(0)
    model = RowForEachSample().double()
    batch = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    graph = capture(model, batch, lambda model, one: F.mse_loss(model(one[0]), one[1]))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    expected = InProcess(single_plan(graph).compile(), state).run(batch)
    text = product.format(f"zero(2, stage={stage}, microbatches=2)")
    plan = find(text)(graph, 4 if "*" in product else 2)
    assert_same(InProcess(plan.compile(), state).run(batch), expected)
