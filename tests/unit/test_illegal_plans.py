"""Plans that cannot be are refused in one sentence that names the op, the tensor or the rule; others never deadlock."""

import itertools
import random

import pytest
import torch
from torch import nn

from rota.errors import CoverError, CutError, CycleError, FitError, InputError, PlacementError
from rota.graph.capture import capture
from rota.plan.box import Box
from rota.plan.check import check
from rota.plan.layout import Piece
from rota.plan.plan import At, Part, Plan
from rota.testing.plans import pipeline_plan, random_plan, single_plan


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 8)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(self.norm(x))))


@pytest.fixture(scope="module")
def graph():
    return capture(Model(), torch.randn(6, 8), lambda model, x: model(x).square().mean())


@pytest.fixture
def plan(graph):
    """On two devices, and all of it on the first."""
    made = Plan(graph, devices=2)
    made.assign(graph.ops, 0)
    return made


# ---- transform ----


def test_a_dim_that_the_op_does_not_have(plan, refused):
    sentence = refused(plan.split, "first.linear", "q", 2, error=CutError)
    assert "first.linear has no dim 'q'; it can be cut along d0, k, n" in sentence


def test_a_dim_that_the_rule_needs_whole(plan, refused):
    (fixed,) = (name for name, dim in plan.dims("norm.layer_norm").items() if dim.fixed)
    sentence = refused(plan.split, "norm.layer_norm", fixed, 2, error=CutError)
    assert f"norm.layer_norm cannot be cut along {fixed}: the rule of layer_norm needs all of it" in sentence


def test_an_op_that_cannot_be_cut_at_all(refused):
    graph = capture(nn.Linear(4, 4), torch.randn(4, 4), lambda model, x: model(x).cumsum(-1)[0].sort()[0].sum())
    op = next(op for op in graph.ops if op.kind == "sort")
    assert "it cannot be cut, only replicated" in refused(
        Plan(graph, devices=1).split, op, "nothing", 2, error=CutError
    )


@pytest.mark.parametrize("parts", [0, -1, 13])
def test_a_number_of_parts_that_the_dim_does_not_have(plan, refused, parts):
    assert "first.linear" in refused(plan.split, "first.linear", "n", parts, error=CutError)


@pytest.mark.parametrize("widths", [[6, 5], [12, 0], [13, -1], [], [6, 6, 6]])
def test_widths_that_do_not_add_up(plan, refused, widths):
    sentence = refused(plan.split, "first.linear", "n", widths=widths, error=CutError)
    assert "first.linear" in sentence
    assert "add up to 12" in sentence


def test_parts_and_widths_at_once_or_neither(plan, refused):
    refused(plan.split, "first.linear", "n", 2, widths=[6, 6])
    refused(plan.split, "first.linear", "n")


def test_a_part_that_is_gone(plan, refused):
    (whole,) = plan.parts("first.linear")
    left, _ = plan.split(whole, "n", 2)
    assert "not a part of the plan (any more)" in refused(plan.split, whole, "n", 2, error=CutError)
    assert "cut into 2 already" in refused(plan.split, "first.linear", "n", 2, error=CutError)
    plan.split(left, "n", 2)
    assert "first.linear[n 0:6]" in refused(plan.split, left, "k", 2, error=CutError)
    assert "first.linear[n 0:6]" in refused(plan.assign, left, 0, error=PlacementError)


def test_an_op_that_is_not_there(plan, refused):
    assert "'third.linear'" in refused(plan.split, "third.linear", "n", 2)
    assert "'third.linear'" in refused(plan.assign, "third.linear", 0)


def test_copies_of_which_only_one_is_cut(plan, refused):
    one, other = plan.replicate("first.linear", 2)
    plan.assign(other, 1)
    plan.split(one, "n", 2)
    assert "first.linear" in refused(plan.compile, error=CutError)


@pytest.mark.parametrize(("devices", "microbatches"), [(0, 1), (1, 0)])
def test_a_plan_for_nothing(graph, refused, devices, microbatches):
    refused(Plan, graph, devices=devices, microbatches=microbatches)


def test_more_micro_batches_than_samples(graph, refused):
    assert "6 samples cannot be cut into 7 micro-batches" in refused(Plan, graph, devices=1, microbatches=7)


def test_a_part_without_a_sample_of_each_micro_batch(graph, refused):
    plan = Plan(graph, devices=2, microbatches=6)
    plan.assign(graph.ops, 0)
    plan.split("tanh", "d0", 2)
    sentence = refused(plan.compile, error=CutError)
    assert "gets no sample of a micro-batch of 1" in sentence
    assert sentence.startswith("tanh[d0 ")


# ---- place ----


def test_an_op_without_a_device(graph, refused):
    plan = Plan(graph, devices=2)
    plan.assign([op for op in graph.ops if op.kind != "tanh"], 0)
    assert "tanh has no device; assign it to one of 0 to 1" in refused(plan.compile, error=PlacementError)


@pytest.mark.parametrize("device", [-1, 2])
def test_a_device_that_is_not_there(plan, refused, device):
    assert f"there is no device {device}" in refused(plan.assign, "tanh", device, error=PlacementError)


def test_copies_on_one_device(plan, refused):
    plan.replicate("tanh", 2)
    assert "tanh copy 1 is on device 0 twice" in refused(plan.compile, error=PlacementError)


def test_a_part_of_another_plan(plan, refused):
    refused(plan.assign, Part(op="tanh", ranges=(("d0", (0, 3)),)), 0, error=PlacementError)


# ---- store ----


def test_stored_pieces_that_leave_a_gap(plan, refused):
    plan.store("first.weight", {0: Box(ranges=((0, 4), (0, 8))), 1: Box(ranges=((5, 12), (0, 8)))})
    sentence = refused(plan.compile, error=CoverError)
    assert "the stored pieces of first.weight leave out [4:5, 0:8]" in sentence


def test_a_tensor_that_is_no_parameter_is_not_stored(plan, refused):
    assert "'tanh'" in refused(plan.store, "tanh", {0: Box(ranges=((0, 6), (0, 12)))})
    assert "'nothing'" in refused(plan.store, "nothing", {0: Box(ranges=())})


def test_a_parameter_stored_on_a_device_that_is_not_there(plan, refused):
    box = Box(ranges=((0, 12), (0, 8)))
    assert "first.weight" in refused(plan.store, "first.weight", (Piece(device=2, box=box),), error=PlacementError)


def test_a_stored_piece_outside_of_the_parameter(plan, refused):
    assert "first.weight" in refused(plan.store, "first.weight", {0: Box(ranges=((0, 13), (0, 8)))})


def test_a_stored_piece_with_another_number_of_dims(plan, refused):
    assert "first.weight" in refused(plan.store, "first.weight", {0: Box(ranges=((0, 12),))})


# ---- order ----


def test_an_order_against_the_data_flow_shows_the_cycle(plan, refused):
    plan.order("second.linear", before="first.linear")
    sentence = refused(plan.compile, error=CycleError)
    cycle = sentence.split(": ", 1)[1].split(" -> ")
    assert cycle[0] == cycle[-1]
    assert {"first.linear", "tanh", "second.linear"} <= set(cycle)


def test_an_order_against_itself_shows_the_cycle(refused):
    graph = capture(Model(), torch.randn(6, 8), lambda model, x: model.first(x).sum() + model.second.weight.sum())
    names = [op.name for op in graph.ops if op.kind in ("linear", "sum")]
    plan = single_plan(graph)
    plan.order("sum_1", before="first.linear")
    plan.compile()
    plan.order("sum", before="sum_1")
    sentence = refused(plan.compile, error=CycleError)
    assert all(name in sentence for name in names)


def test_an_order_of_micro_batches_against_itself_shows_the_cycle(graph, refused):
    plan = pipeline_plan(graph, 2, 2)
    (part,) = plan.parts("tanh")
    plan.order(At(part=part, microbatch=0), before=At(part=part, microbatch=1))
    plan.compile()
    plan.order(At(part=part, microbatch=1), before=At(part=part, microbatch=0))
    sentence = refused(plan.compile, error=CycleError)
    assert "of micro-batch 0" in sentence
    assert "of micro-batch 1" in sentence


def test_a_backward_pass_before_its_forward_pass_shows_the_cycle(graph, refused):
    plan = pipeline_plan(graph, 2, 2)
    (part,) = plan.parts("tanh")
    plan.order(At(part=part, microbatch=1, backward=True), before=At(part=part, microbatch=1))
    sentence = refused(plan.compile, error=CycleError)
    assert "backward" in sentence
    assert "forward" in sentence


# ---- memory ----


def test_a_plan_that_does_not_fit(plan, refused):
    peak = plan.compile().simulate().peak_bytes[0]
    plan.compile(memory_bytes=peak)
    sentence = refused(plan.compile, memory_bytes=peak - 1, error=FitError)
    assert sentence.startswith("device 0 needs ")


def test_a_batch_of_another_shape(plan, refused):
    program = plan.compile()
    state = dict(Model().named_parameters())
    assert "compile it for this shape" in refused(program.run_local, torch.randn(5, 8), state=state)


def test_a_state_without_a_parameter(plan, refused):
    state = dict(Model().named_parameters())
    del state["first.weight"]
    assert "first.weight" in refused(plan.compile().run_local, torch.randn(6, 8), state=state, error=InputError)


# ---- what is legal ----


@pytest.mark.parametrize("seed", range(60))
def test_a_legal_plan_with_a_legal_order_never_deadlocks(graph, seed):
    rng = random.Random(seed)
    plan = random_plan(graph, rng, devices=rng.randint(1, 8), microbatches=rng.randint(1, 3))
    ops = list(graph.ops)
    for _ in range(rng.randint(1, 8)):
        i, j = sorted(rng.sample(range(len(ops)), 2))
        plan.order(rng.choice(plan.parts(ops[i])), before=rng.choice(plan.parts(ops[j])))
    check(plan.compile())


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_in_any_order_never_deadlock(graph, seed):
    rng = random.Random(seed)
    plan = random_plan(graph, rng, devices=rng.randint(1, 4), microbatches=3)
    turns = rng.sample(range(3), 3)
    (part, *_) = plan.parts(rng.choice(["tanh", "first.linear", "second.linear"]))
    for first, second in itertools.pairwise(turns):
        for backward in (False, True):
            plan.order(
                At(part=part, microbatch=first, backward=backward),
                before=At(part=part, microbatch=second, backward=backward),
            )
    check(plan.compile())
