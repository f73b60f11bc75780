"""What a user may get wrong around plans is told in one sentence, and what looks odd but is right works."""

import numpy as np
import pytest
import torch
from torch import nn

import rota
from rota.errors import CaptureError, CycleError, InputError, PlacementError, PlanError, RotaError
from rota.graph.capture import capture
from rota.plan.box import Box
from rota.plan.plan import At, Part
from rota.plan.serial import from_json
from rota.strategies import data, find


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


def narrow():
    """The graph of a model without anything that coshard could cut."""
    return on_one(nn.Linear(8, 1), torch.randn(6, 8)).graph


def state_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def run(model, batch, loss=square, **settings):
    return on_one(model, batch, loss, **settings).compile().run_local(batch, state=state_of(model))


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (lambda h, x: h[x > 0], "depends on values"),
        (lambda h, x: torch.zeros(6, 8, dtype=torch.complex64)[:, :4].copy_(h[:, :4]).real, "part of a complex"),
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

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda state, batch: state | {"weight": "x"}, "the state's weight must be a tensor, not str"),
            (lambda state, batch: state | {"weight": state["weight"].to("meta")}, "weight is on the meta device"),
            (lambda state, batch: state | {"weight": state["weight"].double()}, "weight is torch.float64"),
            (lambda state, batch: state | {"weight": state["weight"][0]}, "weight is torch.float32 [8]"),
            (lambda state, batch: state | {"weight": state["weight"].detach().to_sparse()}, "give a dense tensor"),
            (
                lambda state, batch: batch.update(a=batch["a"].to("meta")) or state,
                "the batch['a'] is on the meta device",
            ),
        ],
    )
    def test_a_state_or_batch_that_cannot_be_computed_with_is_refused(self, program, change, says, refused):
        batch = {"a": self.x, "b": self.x, "scale": 2.0}
        state = change(state_of(self.model), batch)
        assert says in refused(program.run_local, batch, state=state)

    def test_seed_and_step_are_whole_numbers(self, program, refused):
        batch, state = {"a": self.x, "b": self.x, "scale": 2.0}, state_of(self.model)
        assert "seed must be a whole number" in refused(program.run_local, batch, state=state, seed="x")
        assert "step must be a whole number" in refused(program.run_local, batch, state=state, step=-1)


@pytest.mark.parametrize(
    ("model", "loss", "says"),
    [
        (None, square, "must be a torch.nn.Module, not NoneType"),
        (nn.Linear, square, "Linear is a class; make one of it first"),
        (nn.Linear(8, 8), None, "the loss must be a function, not NoneType"),
        (nn.Linear(8, 8), nn.MSELoss(), "MSELoss takes predictions and targets"),
        (nn.Linear(8, 8), lambda batch: 0, "loss is called with the model and the batch"),
    ],
)
def test_what_cannot_be_a_model_or_a_loss_is_refused(model, loss, says, refused):
    assert says in refused(rota.capture, model, torch.randn(6, 8), loss)


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

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            (lambda plan: plan.split("0.linear", "n", widths=9), "a list of whole numbers"),
            (lambda plan: plan.split("0.linear", "n", widths="44"), "a list of whole numbers"),
            (lambda plan: plan.assign("0.linear", True), "no device True"),
            (lambda plan: plan.assign(3, 0), "name an op, a part, or a list of them"),
            (lambda plan: plan.assign(["0.linear", None], 0), "name an op, a part, or a list of them"),
            (lambda plan: plan.group(None), "name an op, a part, or a list of them"),
            (lambda plan: plan.recompute(3), "name an op, a part, or a list of them"),
            (lambda plan: plan.split(None, "n", 2), "no op named None"),
            (lambda plan: plan.dims([]), "no op named []"),
            (lambda plan: plan.order(At(part="0.linear"), before="2.linear"), "a moment has a part"),
            (lambda plan: plan.store("0.weight", None), "say where 0.weight is stored"),
            (lambda plan: plan.store("0.weight", {0: "all"}), "say where 0.weight is stored"),
            (lambda plan: rota.Plan(nn.Linear(2, 2)), "rota.capture(model, batch, loss)"),
            (lambda plan: rota.Plan(nn.Linear(2, 2), devices=2), "rota.capture(model, batch, loss)"),
            (lambda plan: find("data")(nn.Linear(2, 2), 2), "rota.capture(model, batch, loss)"),
            (lambda plan: find("coshard(2)")(nn.Linear(2, 2), 1), "rota.capture(model, batch, loss)"),
            (lambda plan: rota.Plan(plan.graph, backward="no"), "backward must be True or False, not 'no'"),
            (lambda plan: rota.Plan(plan.graph, devices=2_000_000_000), "at most 65536 devices"),
            (lambda plan: plan.ops(kind=5), "the kind of ops must be a text, not 5"),
            (lambda plan: plan.ops(name=["0.linear"]), "the name of ops must be a text"),
            (lambda plan: plan.split("0.linear", ["n"], 2), "the dim to split 0.linear along must be a text"),
            (lambda plan: plan.store("0.weight", ()), "say where 0.weight is stored"),
            (lambda plan: plan.store("0.weight", {}), "say where 0.weight is stored"),
            (lambda plan: plan.store(["0.weight"], {}), "the name of a parameter must be a text"),
            (lambda plan: plan.compile(reference="x"), "reference must be True or False"),
            (
                lambda plan: plan.order(At(part=plan.parts("0.linear")[0], microbatch="x"), before="2.linear"),
                "no micro-batch 'x'",
            ),
            (
                lambda plan: plan.order(At(part=plan.parts("0.linear")[0], backward="no"), before="2.linear"),
                "must be True or False",
            ),
            (lambda plan: from_json(plan.compile().to_json(), None), "rota.capture(model, batch, loss)"),
            (lambda plan: from_json(plan.compile().to_json(), nn.Linear(2, 2)), "rota.capture(model, batch, loss)"),
            (lambda plan: from_json(None, plan.graph), "not from NoneType"),
            (lambda plan: find(None), "the strategy None cannot be read"),
            (lambda plan: find(5), "the strategy 5 cannot be read"),
            (lambda plan: find("data")(plan.graph, "2"), "a whole number of at least 1, not '2'"),
            (
                lambda plan: find("coshard(1)")(narrow(), 1),
                "no layer that coshard can compute again",
            ),
            (
                lambda plan: find("coshard(2)")(narrow(), 1),
                "no layer that can be cut into 2; use single",
            ),
        ],
    )
    def test_nonsense_gets_one_clear_sentence(self, plan, wrong, says, refused):
        sentence = refused(wrong, plan, error=RotaError)
        assert says in sentence

    def test_whole_numbers_of_numpy_and_torch_are_whole_numbers(self, plan):
        two = np.int64(2)
        made = rota.Plan(plan.graph, devices=two, microbatches=torch.tensor(2))
        first, second = made.split("0.linear", "n", two)
        made.split("2.linear", "n", widths=np.array([4, 4]))
        made.assign(made.ops(), np.int64(1))
        made.assign(first, torch.tensor(0))
        assert (made.device_of(first), made.device_of(second)) == (0, 1)
        assert type(made.device_of(first)) is int
        text = made.compile().to_json()
        assert from_json(text, plan.graph).to_json() == text
        assert find("data")(plan.graph, two).compile() == find("data")(plan.graph, 2).compile()
        assert str(data(two, microbatches=two)) == "data(2, microbatches=2)"

    def test_a_plan_is_for_one_device_unless_more_are_asked_for(self, plan):
        made = rota.Plan(plan.graph)
        made.assign(made.ops(), 0)
        assert made.compile().devices == 1

    def test_a_contradiction_names_two_decisions_and_says_what_to_do(self, refused):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
        plan = on_one(model, torch.randn(2, 4))
        plan.order("29.linear", before="0.linear")
        sentence = refused(plan.compile, error=CycleError)
        assert sentence.startswith("the plan orders 29.linear to run before 0.linear, which needs it done first")
        assert "take this order out" in sentence
        assert len(sentence) < 300
        plan = on_one(model, torch.randn(2, 4), microbatches=2)
        (first,), (last,) = plan.parts("0.linear"), plan.parts("29.linear")
        plan.order(At(part=first, microbatch=0, backward=True), before=At(part=last, microbatch=1))
        plan.order(At(part=last, microbatch=1, backward=True), before=At(part=last, microbatch=0))
        sentence = refused(plan.compile, error=CycleError)
        assert "backward 0.linear of micro-batch 0 to run before forward" in sentence
        assert "take one of them out" in sentence
        assert len(sentence) < 400

    @pytest.mark.parametrize(
        "loss",
        [
            lambda model, batch: model(batch).detach().mean(),
            lambda model, batch: batch.mean(),
            lambda model, batch: (model(batch).argmax(-1) == 0).float().mean(),
            lambda model, batch: torch.no_grad()(model)(batch).mean(),
        ],
    )
    def test_a_loss_without_a_gradient_is_refused(self, loss, refused):
        model = nn.Linear(8, 8)
        assert "nothing would be trained" in refused(capture, model, torch.randn(6, 8), loss, error=CaptureError)
        capture(model.eval(), torch.randn(6, 8), loss)  # to validate
        frozen = nn.Linear(8, 8).requires_grad_(False)
        assert "requires_grad" in refused(
            capture, frozen, torch.randn(6, 8), lambda model, batch: model(batch).mean(), error=CaptureError
        )

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
