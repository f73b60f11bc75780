"""3F1B computes what one device computes, in the order that it promises, and refuses models that do not recycle."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F

from rota.graph.capture import capture
from rota.plan.costs import Calibration, Costs
from rota.plan.plan import Plan
from rota.plan.program import ONCE, NodeKind
from rota.runtime.in_process import InProcess
from rota.strategies.base import find
from rota.strategies.recycled import find_passes, tasks
from rota.testing import zoo
from rota.testing.models import Evoformer

AS_THE_ENGINE_RUNS = Costs(calibration=Calibration(calls={}))


class Recycler(torch.nn.Module):
    """Layers that run three times on what they made, the last time with gradient."""

    def __init__(self, width=16, depth=4):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 3)

    def once(self, x, last):
        x = x + self.norm(last)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def forward(self, x):
        last = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(2):
                last = self.once(x, last)
        return self.head(self.once(x, last))


def recycler(*, samples=16, rows=8, width=16):
    torch.manual_seed(0)
    model = Recycler(width).double()
    batch = (torch.randn(samples, rows, width, dtype=torch.float64), torch.randint(0, 3, (samples, rows)))
    return model, batch, capture(model, batch, lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()))


@pytest.fixture(scope="module")
def evoformer():
    torch.manual_seed(0)
    model = Evoformer(depth=2, recycles=2).double()
    batch = (
        torch.randn(4, 3, 4, 8, dtype=torch.float64),
        torch.randn(4, 4, 4, 8, dtype=torch.float64),
        torch.randint(0, 5, (4, 3, 4)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (
            model,
            batch,
            capture(model, batch, lambda m, b: F.cross_entropy(m(*b[:2]).flatten(0, 2), b[2].flatten())),
        )


@pytest.fixture(scope="module")
def small():
    return recycler()


@pytest.fixture(scope="module")
def large():
    """Large enough that what ops compute outweighs what they cost each."""
    return recycler(samples=16, rows=256, width=128)[2]


def run_of(made, strategy, devices):
    model, _, graph = made
    model = copy.deepcopy(model)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return InProcess(find(strategy)(graph, devices).compile(), state, seed=3)


def trained(made, strategy, devices, steps=4):
    run = run_of(made, strategy, devices)
    run.optimize(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    losses = [run.train(made[1], step=step)["loss"].clone() for step in range(steps)]
    return torch.stack(losses), {name: run.whole(name).clone() for name in run.program.stored}


@pytest.mark.parametrize("order", ["3f1b", "sequential"])
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 4), (2, 1), (2, 4), (2, 5), (4, 8), (4, 3)])
def test_it_computes_what_one_device_computes(small, devices, microbatches, order):
    one = run_of(small, "single", 1).run(small[1])
    found = run_of(small, f"recycled(microbatches={microbatches}, order={order!r})", devices).run(small[1])
    assert found.gradients.keys() == one.gradients.keys()
    torch.testing.assert_close(found.outputs, one.outputs, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.gradients, one.gradients, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("devices", [2, 4])
def test_it_trains_as_one_device_does(small, devices):
    one = trained(small, "single", 1)
    found = trained(small, f"recycled(microbatches={2 * devices})", devices)
    torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-10)


def test_an_evoformer_trains_as_on_one_device(evoformer):
    one = trained(evoformer, "single", 1, steps=3)
    for devices in (2, 4):
        found = trained(evoformer, "recycled(microbatches=4)", devices, steps=3)
        torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-10)


def test_it_can_be_multiplied(small):
    one = run_of(small, "single", 1).run(small[1])
    found = run_of(small, "data(2) * recycled(2, microbatches=4)", 4).run(small[1])
    torch.testing.assert_close(found.gradients, one.gradients, rtol=1e-10, atol=1e-13)


def test_all_passes_of_a_layer_are_on_one_device(small):
    plan = find("recycled(microbatches=8)")(small[2], 4)
    devices = {}
    for op in small[2].ops:
        for name in op.inputs:
            if name in {tensor.name for tensor in small[2].parameters}:
                devices.setdefault(name, set()).update(plan.device_of(part) for part in plan.parts(op))
    assert all(len(found) == 1 for found in devices.values())
    assert set.union(*devices.values()) == {0, 1, 2, 3}


def test_what_the_last_stage_makes_goes_back_to_the_first(small):
    program = find("recycled(microbatches=4)")(small[2], 2).compile()
    sends = {(node.step.inputs[0].device, node.step.outputs[0].device) for node in program.nodes if node.step}
    assert {(0, 1), (1, 0)} <= sends
    back = {
        program.flows[node.flow].tensor
        for node in program.nodes
        if node.step and node.step.inputs[0].device == 1 and node.step.outputs[0].device == 0
        if not program.flows[node.flow].backward
    }
    assert back, "nothing of a forward pass returns to the first stage"


def test_the_passes_are_found(small):
    passes = find_passes(small[2])
    assert passes.count == 3
    for op in small[2].ops:
        if "layers.0" in op.name and op.kind == "linear":
            assert passes.number[op.name] == (2 if op.with_grad else int("_1" in op.name))


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 8), (4, 16)])
def test_no_stage_keeps_more_activations_than_stages_follow(small, devices, microbatches):
    program = find(f"recycled(microbatches={microbatches})")(small[2], devices).compile()
    kept = {}
    for node in program.nodes:
        if node.kind is NodeKind.EXCHANGE or not program.segments[node.segment].grad or node.microbatch == ONCE:
            continue
        device = node.devices[0]
        held = kept.setdefault(device, {})
        if node.kind is NodeKind.FORWARD:
            held[node.microbatch] = held.get(node.microbatch, 0) + 1
        else:
            held[node.microbatch] -= 1
        assert sum(count > 0 for count in held.values()) <= devices - device


@pytest.mark.parametrize(("stages", "groups"), [(2, [4]), (4, [16]), (4, [16, 17]), (3, [2])])
def test_a_stage_does_everything_once_and_a_backward_after_its_forward(stages, groups):
    for stage in range(stages):
        order = tasks(stage, stages=stages, passes=3, groups=groups)
        assert len(order) == len(set(order)) == 4 * sum(groups)
        place = {(task.number, task.microbatch, task.backward): i for i, task in enumerate(order)}
        for m in range(sum(groups)):
            assert place[(0, m, False)] < place[(1, m, False)] < place[(2, m, False)] < place[(2, m, True)]


def test_only_the_sequential_order_waits_for_a_whole_pass(small):
    for order, waits in (("3f1b", False), ("sequential", True)):
        program = find(f"recycled(microbatches=8, order={order!r})")(small[2], 2).compile()
        crossing = {
            flow.tensor for flow in program.flows if flow.crossing and flow.tensor.endswith((".gathered", "add"))
        }
        assert any(name.endswith(".gathered") for name in crossing) is waits


@pytest.mark.parametrize("devices", [2, 4])
def test_it_is_faster_than_one_pass_after_another(large, devices):
    seconds = {}
    for order in ("3f1b", "sequential"):
        program = find(f"recycled(microbatches=8, order={order!r})")(large, devices).compile()
        seconds[order] = program.simulate(AS_THE_ENGINE_RUNS).makespan_s
    assert seconds["3f1b"] < seconds["sequential"]


def test_what_cannot_be_recycled_is_refused(small, refused):
    made = zoo.make("gpt", batch=4)
    graph = capture(made.model, made.batch, made.loss)
    assert "no passes that repeat" in refused(find("recycled"), graph, 2)
    assert "'3f1b', 'sequential'" in refused(find, "recycled(order='gpipe')")
    assert "does not fit 4 devices" in refused(find("recycled(2)"), small[2], 4)
    assert "at least 1" in refused(find, "recycled(microbatches=0)")
    assert "17 micro-batches" in refused(find("recycled(microbatches=17)"), small[2], 2)
    many = len(small[2].ops) + 1
    assert "stages" in refused(find("recycled(microbatches=1)"), small[2], many)


def test_a_plan_is_made_of_the_graph_as_it_is(small):
    assert isinstance(find("recycled(microbatches=2)")(small[2], 2), Plan)
    assert find("recycled(microbatches=2)")(small[2], 2).graph is small[2]
