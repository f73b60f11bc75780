"""The search finds what trying everything finds, says why the others lost, and keeps what the user decided."""

import json

import pytest
import torch
import torch.nn.functional as F

from rota.errors import FitError, InputError, RotaError
from rota.graph.capture import capture
from rota.graph.refine import refine
from rota.plan.box import Box
from rota.plan.compile import compile_plan
from rota.plan.costs import Costs
from rota.plan.simulate import simulate
from rota.search import measure
from rota.search.bound import bound_of
from rota.search.layers import stack_of
from rota.search.measure import LAYERS, Meter, trained_bytes
from rota.search.prepared import Prepared
from rota.search.samples import with_samples
from rota.search.search import search
from rota.search.space import degree_of, recipes_of, strategies, text_of
from rota.strategies.base import find
from rota.strategies.zero import Zero
from rota.testing import zoo
from rota.testing.models import GPT

COSTS = Costs(op_s=1e-7)
"""Small models are all overhead by the usual rates."""


def next_token_loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def capture_gpt(*, depth, batch=8, width=32, heads=4, context=16):
    with torch.device("meta"):
        model = GPT(vocabulary=64, context=context, width=width, depth=depth, heads=heads)
        rows = torch.zeros((batch, context + 1), dtype=torch.int64)
    return capture(model, rows, next_token_loss)


@pytest.fixture(scope="module")
def graph():
    return capture_gpt(depth=2)


@pytest.fixture(scope="module")
def deep_graph():
    return capture_gpt(depth=8, width=64)


@pytest.fixture(scope="module")
def everything(graph):
    """Every candidate on four devices, compiled and simulated: (seconds, bytes), or None if it was refused."""
    found = {}
    for one in strategies(refine(graph), 4):
        try:
            program = compile_plan(one(graph, 4), checked=False)
            simulation = simulate(program, COSTS)
        except RotaError:
            found[text_of(one)] = None
            continue
        moments = [2 * own for own in trained_bytes(program)]
        peak = max(a + b for a, b in zip(simulation.peak_bytes, moments, strict=True))
        found[text_of(one)] = (simulation.makespan_s, peak)
    return found


@pytest.fixture(scope="module")
def found(graph):
    return search(graph, 4, costs=COSTS)


# ---- the space ----


def test_the_space_has_all_kinds_and_each_is_found_again_by_its_text(graph):
    texts = [text_of(one) for devices in (4, 8) for one in strategies(refine(graph), devices)]
    texts = list(dict.fromkeys(texts))

    assert all(text_of(find(text)) == text for text in texts)
    for part in ("single", "coshard(", "data(8)", "zero(8, stage=1)", "zero(8, stage=2)", "zero(8)", "gpipe"):
        assert any(part in text for text in texts)
    axes = {tuple(type(recipe).__name__ for recipe in recipes_of(find(text))) for text in texts}
    assert {("Data", "Tensor"), ("Data", "Pipeline"), ("Tensor", "Pipeline"), ("Zero", "Tensor")} <= axes
    assert {("Zero", "Pipeline"), ("Data", "Tensor", "Pipeline"), ("Tensor",), ("Pipeline",)} <= axes


def test_tensor_parallelism_goes_no_further_than_the_heads(graph):
    degrees = {degree_of(one, "tensor") for one in strategies(refine(graph), 8)}
    assert degrees == {1, 2, 4}


# ---- the best ----


def test_the_best_is_what_trying_everything_finds(found, everything):
    tried = {text: one for text, one in everything.items() if one is not None}
    best_s = min(step_s for step_s, _ in tried.values())
    assert everything[found.chosen.text][0] == pytest.approx(best_s)
    assert {one.text for one in found.candidates} == everything.keys()
    for one in found.candidates:
        if one.exact:
            assert (one.step_s, one.peak_bytes) == pytest.approx(everything[one.text])
        elif one.step_s is None:
            assert everything[one.text] is None
        else:  # it was left out since it cannot be better
            assert one.step_s <= everything[one.text][0] * (1 + 1e-9)
            assert everything[one.text][0] >= best_s
    ranked = [one.step_s for one in found.candidates if one.exact]
    assert ranked == sorted(ranked)


def test_no_bound_is_above_what_is_simulated(graph, everything):
    prepared = Prepared(graph)
    for one in strategies(prepared.whole, 4):
        if everything[text_of(one)] is not None:
            bound = bound_of(prepared, one, 4, costs=COSTS, moments=2.0, folded=None)
            step_s, peak_bytes = everything[text_of(one)]
            assert bound.step_s <= step_s * (1 + 1e-9), text_of(one)
            assert bound.peak_bytes <= peak_bytes * (1 + 1e-9), text_of(one)


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_what_does_not_fit_is_not_chosen(graph, everything, share):
    peaks = sorted(one[1] for one in everything.values() if one is not None)
    memory_bytes = int(peaks[int(len(peaks) * share)])
    found = search(graph, 4, memory_bytes=memory_bytes, costs=COSTS)
    fitting = [one for one in everything.values() if one is not None and one[1] <= memory_bytes]
    assert everything[found.chosen.text][0] == pytest.approx(min(step_s for step_s, _ in fitting))
    assert found.chosen.peak_bytes <= memory_bytes
    lost = [one for one in found.candidates if not one.fits and one.step_s is not None]
    assert lost
    assert all(one.why.startswith("needs ") for one in lost)


def test_if_nothing_fits_the_smallest_that_would_is_told(graph, everything):
    smallest = min(one[1] for one in everything.values() if one is not None)
    with pytest.raises(FitError, match="the smallest") as raised:
        search(graph, 4, memory_bytes=1000, costs=COSTS)
    text = next(text for text, one in everything.items() if one is not None and one[1] == smallest)
    assert text in str(raised.value) or f"{smallest / 1024:.3g} KiB" in str(raised.value)


def test_a_search_comes_out_the_same_again(graph, found):
    assert search(graph, 4, costs=COSTS).to_json() == found.to_json()


def test_the_refused_are_listed_with_their_sentence(found):
    refused = [one for one in found.candidates if one.why.startswith("refused: ")]
    assert [one.text for one in refused] == ["recycled"]
    assert "no passes that repeat" in refused[0].why
    assert refused[0].step_s is None
    assert not refused[0].fits


# ---- what the user decides ----


def test_an_optimizer_that_needs_whole_parameters_gets_them(graph):
    found = search(graph, 2, costs=COSTS, whole_parameters=True)
    cut = [one for one in found.candidates if "needs whole parameters" in one.why]
    assert any("zero" in one.text for one in cut)
    program = found.chosen.strategy(graph, 2).compile()
    for name, layout in program.stored.items():
        assert all(piece.box == Box.whole(program.refined.shape(name)) for piece in layout)


def test_degrees_and_kinds_can_be_fixed(graph):
    found = search(graph, 4, costs=COSTS, degrees={"tensor": 2, "data": 2})
    assert all(degree_of(one.strategy, "tensor") == degree_of(one.strategy, "data") == 2 for one in found.candidates)
    stored = search(graph, 2, costs=COSTS, within=lambda one: any(isinstance(axis, Zero) for axis in recipes_of(one)))
    assert all(one.text.startswith("zero") for one in stored.candidates)
    with pytest.raises(InputError, match="no axis 'width'"):
        search(graph, 2, degrees={"width": 2})
    with pytest.raises(InputError, match="divides 4"):
        search(graph, 4, degrees={"tensor": 3})
    with pytest.raises(InputError, match="no strategy is left"):
        search(graph, 2, within=lambda one: False)


def test_a_part_of_the_plan_can_be_pinned(graph):
    seen = []

    def pinned(plan):
        seen.append(plan)
        plan.recompute([op for op in plan.graph.ops if op.name.startswith("blocks.0.")])

    only = {"within": lambda one: text_of(one) == "data(2)", "costs": COSTS}
    with_pin, without = search(graph, 2, pinned=pinned, **only), search(graph, 2, **only)
    assert len(seen) == 1
    assert with_pin.chosen.step_s > without.chosen.step_s
    refusing = search(graph, 2, costs=COSTS, pinned=lambda plan: plan.assign("blocks.0.fc1.linear", plan.devices - 1))
    assert refusing.chosen.text


def test_a_search_can_be_cut_short(graph):
    found = search(graph, 2, costs=COSTS, budget_s=0.0)
    assert sum(one.measured for one in found.candidates) < len(found.candidates) // 2
    assert any(one.why == "not tried: the time for the search was up" for one in found.candidates)


# ---- what is told ----


def test_the_table_marks_the_chosen_one_and_json_has_all(found):
    lines = found.table(most=5)
    assert len(lines) == 7
    assert [line.startswith("*") for line in lines] == [False, True, *[False] * 5]
    assert found.chosen.text in lines[1]
    assert lines[-1].strip() == f"and {len(found.candidates) - 5} more"
    told = json.loads(json.dumps(found.to_json()))
    assert told["chosen"] == found.chosen.text
    assert len(told["candidates"]) == len(found.candidates)
    assert all(one["why"] for one in told["candidates"][1:])


def test_reasons_come_from_the_simulation(graph):
    dear = Costs(op_s=1e-7, link=type(Costs().link)(latency_s=1e-3, bandwidth_bytes_per_s=1e6))
    found = {one.text: one for one in search(graph, 2, costs=dear).candidates}
    assert "all-reduce of gradients" in found["data(2)"].why


def test_auto_makes_the_plan_of_the_winner(graph):
    auto = find("auto")
    assert str(auto) == "auto"
    assert str(find("auto(memory='1GiB')")) == "auto(memory='1GiB')"
    best = search(graph, 2).chosen
    assert auto(graph, 2).compile().to_json() == best.strategy(graph, 2).compile().to_json()


# ---- smaller graphs ----


def test_a_graph_with_fewer_layers_is_what_a_model_with_fewer_layers_gives(deep_graph):
    stack = stack_of(deep_graph)
    assert stack is not None
    assert stack.layers == 8
    fewer, captured = stack.with_layers(3), capture_gpt(depth=3, width=64)
    assert fewer.ops == captured.ops
    assert fewer.tensors == captured.tensors
    assert fewer.outputs == captured.outputs
    assert stack_of(capture_gpt(depth=2)) is None


@pytest.mark.parametrize("name", ["gpt", "bert", "vit"])
def test_a_graph_with_fewer_samples_has_the_shapes_of_a_smaller_batch(name):
    large, small = (zoo.make(name, batch=batch) for batch in (8, 4))
    made = with_samples(refine(capture(large.model, large.batch, large.loss)), 4)
    captured = capture(small.model, small.batch, small.loss)
    assert made is None if name != "gpt" else made is not None  # the others number their samples by an arange
    assert made is None or made.tensors == captured.tensors


@pytest.mark.parametrize(
    "text",
    [
        *("data(2)", "tensor(2)", "tensor(2, sequence=True)", "zero(2)", "zero(2, stage=2)", "single"),
        *("pipeline(2, microbatches=4)", "data(2, microbatches=2)", "coshard(2)"),
    ],
)
def test_fewer_layers_tell_what_all_of_them_take(deep_graph, monkeypatch, text):
    monkeypatch.setattr(measure, "_FEW_OPS", 0)
    meter = Meter(prepared=Prepared(deep_graph), devices=2, costs=Costs(), moments=2.0)
    told, exact = meter.quick(find(text)), meter.exact(find(text))
    assert exact.exact
    assert not told.exact
    assert told.step_s == pytest.approx(exact.step_s, rel=0.1)
    assert max(told.peak_bytes) == pytest.approx(max(exact.peak_bytes), rel=0.1)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("data(8)", 8),
        ("zero(8)", 8),
        ("zero(8, stage=2)", 8),
        ("data(4) * tensor(2)", 8),
        ("data(8) * tensor(2) * pipeline(2, microbatches=2)", 32),
    ],
)
def test_few_replicas_tell_what_many_take(monkeypatch, text, devices):
    monkeypatch.setattr(measure, "_FEW_OPS", 0)
    graph = capture_gpt(depth=2, batch=16, width=64, context=12)
    meter = Meter(prepared=Prepared(graph), devices=devices, costs=Costs(), moments=2.0)
    told, exact = meter.quick(find(text)), meter.exact(find(text))
    assert not told.exact
    assert told.step_s == pytest.approx(exact.step_s, rel=0.05)
    assert max(told.peak_bytes) == pytest.approx(max(exact.peak_bytes), rel=0.1)


@pytest.mark.deep
def test_a_deep_model_is_searched_by_its_layers_and_its_winner_is_exact(deep_graph):
    found = search(deep_graph, 8)
    assert any(one.measured and not one.exact for one in found.candidates)
    assert found.chosen.exact
    simulation = found.chosen.strategy(deep_graph, 8).compile().simulate()
    assert found.chosen.step_s == pytest.approx(simulation.makespan_s)
    assert LAYERS[1] < 8
