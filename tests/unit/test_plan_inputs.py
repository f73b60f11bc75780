"""What a user may get wrong around plans is told in one sentence, and what looks odd but is right works."""

import pytest
import torch
from torch import nn

import rota
from rota.errors import CaptureError, CycleError, InputError, PlacementError, PlanError
from rota.plan.box import Box
from rota.plan.plan import At, Part


class Forward(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._forward = forward

    def forward(self, x):
        return self._forward(self.linear(x), x)


def square(model, batch):
    return model(batch).pow(2).mean()


def on_one(model, batch, loss=square, *, microbatches=1):
    plan = rota.Plan(rota.capture(model, batch, loss), devices=1, microbatches=microbatches)
    plan.assign(plan.ops(), 0)
    return plan


def state_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def run(model, batch, loss=square, **settings):
    return on_one(model, batch, loss, **settings).compile().run_local(batch, state=state_of(model))


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (lambda h, x: h[x > 0], "depends on values"),
        (lambda h, x: h + torch.zeros(8, 8).fill_diagonal_(1.0)[:6], "makes a new tensor"),
        (lambda h, x: h @ (torch.ones(8, 8) * 2).transpose_(0, 1), "changes the shape"),
    ],
)
def test_what_cannot_be_captured_says_why(forward, what):
    with pytest.raises(CaptureError, match=what):
        rota.capture(Forward(forward), torch.randn(6, 8), square)


def test_an_empty_batch_is_refused():
    with pytest.raises(CaptureError, match="empty"):
        rota.capture(nn.Linear(8, 8), torch.randn(0, 8), square)


@pytest.mark.parametrize(
    "noise",
    [
        lambda h, x: torch.empty(6, 8).bernoulli_(0.5),
        lambda h, x: x.new_empty(6, 1).bernoulli_(0.7),
        lambda h, x: torch.zeros(6, 8).normal_(),
        lambda h, x: torch.rand_like(h),
    ],
)
def test_random_ops_draw_the_same_however_they_run(noise):
    torch.manual_seed(0)
    model, batch = Forward(lambda h, x: h * noise(h, x)).double(), torch.randn(6, 8, dtype=torch.float64)
    plan = rota.Plan(rota.capture(model, batch, square), devices=2)
    for op in plan.ops():
        for device, part in enumerate(plan.replicate(op, 2)):
            plan.assign(part, device)
    outcomes = [run(model, batch), plan.compile().run_local(batch, state=state_of(model))]
    assert torch.isfinite(outcomes[0].outputs["loss"])
    assert torch.allclose(outcomes[0].outputs["loss"], outcomes[1].outputs["loss"], rtol=1e-12)


def test_an_out_argument_is_followed():
    def forward(h, x):
        return torch.mul(h.detach(), 2, out=torch.empty(6, 8)) + h

    model, batch = Forward(forward), torch.randn(6, 8)
    assert torch.allclose(run(model, batch).outputs["loss"], square(model, batch))


def test_a_metric_may_be_a_constant():
    model, batch = nn.Linear(8, 8), torch.randn(6, 8)
    outcome = run(model, batch, lambda m, b: {"loss": m(b).mean(), "three": torch.tensor(3.0)})
    assert outcome.outputs["three"] == 3.0


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_asking_whether_there_are_any_is_not_a_sum_over_microbatches(microbatches):
    def loss(model, batch):
        hidden = model(batch[0])
        return hidden.pow(2).mean() * (batch[1] >= 0).sum().bool().to(hidden.dtype)

    model, batch = nn.Linear(8, 8), (torch.randn(6, 8), torch.randint(0, 5, (6,)))
    outcome = run(model, batch, loss, microbatches=microbatches)
    assert torch.allclose(outcome.outputs["loss"], loss(model, batch))


class TestBatches:
    """A program takes batches like the one that was captured, and no others."""

    @pytest.fixture
    def program(self):
        self.model, self.x = nn.Linear(8, 8), torch.randn(6, 8)
        batch = {"a": self.x, "b": self.x * 0, "scale": 2.0}
        return on_one(self.model, batch, self.loss).compile()

    @staticmethod
    def loss(model, batch):
        return model(batch["a"]).pow(2).mean() * batch["scale"] + batch["b"].mean()

    def test_the_order_of_a_dict_does_not_matter(self, program):
        batch = {"scale": 2.0, "b": self.x + 1, "a": self.x}
        outcome = program.run_local(batch, state=state_of(self.model))
        assert torch.allclose(outcome.outputs["loss"], self.loss(self.model, batch))

    @pytest.mark.parametrize(
        "change",
        [
            lambda batch: None,
            lambda batch: tuple(batch.values()),
            lambda batch: {key: batch[key] for key in ("a", "scale")},
            lambda batch: {**batch, "c": 1},
            lambda batch: {**batch, "a": batch["a"].double()},
            lambda batch: {**batch, "a": batch["a"][:3]},
            lambda batch: {**batch, "a": 1.0},
            lambda batch: {**batch, "scale": 5.0},
        ],
    )
    def test_another_batch_is_refused(self, program, change):
        batch = change({"a": self.x, "b": self.x, "scale": 2.0})
        with pytest.raises(InputError, match="batch"):
            program.run_local(batch, state=state_of(self.model))

    @pytest.mark.parametrize("state", [None, {}, {"weight": torch.zeros(3, 3), "bias": torch.zeros(8)}])
    def test_another_state_is_refused(self, program, state):
        with pytest.raises(InputError, match="weight"):
            program.run_local({"a": self.x, "b": self.x, "scale": 2.0}, state=state)


class TestPlans:
    """The methods of a plan look at what they are given."""

    @pytest.fixture
    def plan(self):
        return on_one(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(6, 8), microbatches=2)

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda plan: plan.replicate("0.linear", 0),
            lambda plan: plan.split("0.linear", "n", 2.0),
            lambda plan: plan.split("0.linear", "n", widths=[4.0, 4.0]),
            lambda plan: plan.split(Part(op="nope"), "n", 2),
            lambda plan: plan.assign("0.linear", 0.5),
            lambda plan: plan.assign(Part(op="nope"), 0),
            lambda plan: plan.compile(memory_bytes="1GiB"),
            lambda plan: plan.store("0.weight", {0: Box.whole((8, 8))}, gather="foo"),
            lambda plan: plan.order(At(part=plan.parts("0.linear")[0], microbatch=9), before="2.linear"),
            lambda plan: rota.Plan(plan.graph, devices=1.5),
        ],
    )
    def test_nonsense_is_refused_at_once(self, plan, wrong):
        with pytest.raises((PlanError, PlacementError, InputError)):
            wrong(plan)

    def test_an_order_of_what_is_cut_later_is_one_of_its_parts(self, plan):
        plan.order("0.linear", before="2.linear")
        for part in plan.split("0.linear", "n", 2):
            plan.replicate(part, 1)
        plan.compile()
        assert [str(first.part) for first, _ in plan.order_edges] == ["0.linear[n 0:4]", "0.linear[n 4:8]"]

    def test_an_order_that_is_only_preferred_gives_way_to_the_data_flow(self, plan):
        plan.prefer("2.linear", before="0.linear")
        program = plan.compile()
        assert "contradicts the data flow" in program.explain()
        plan.order("2.linear", before="0.linear")
        with pytest.raises(CycleError):
            plan.compile()

    def test_copies_of_copies_have_their_own_numbers(self, plan):
        first, second = plan.replicate("0.linear", 2)
        plan.replicate(second, 2)
        plan.replicate(first, 3)
        numbers = [part.replica for part in plan.parts("0.linear")]
        assert len(set(numbers)) == len(numbers) == 5

    def test_one_op_can_be_recomputed(self, plan):
        plan.recompute("0.linear")
        assert any(segment.recompute for segment in plan.compile().segments)

    def test_without_a_backward_pass_there_are_no_gradients(self, plan):
        forward = rota.Plan(plan.graph, devices=1, backward=False)
        forward.assign(forward.ops(), 0)
        state = {tensor.name: torch.randn(tensor.shape) for tensor in plan.graph.parameters}
        assert forward.compile().run_local(torch.randn(6, 8), state=state).gradients == {}
