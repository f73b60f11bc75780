"""What planning promises: like layers are worked on once, models need no memory to be planned, forward alone works."""

import torch
import torch.nn.functional as F
from torch import nn

import rota
from rota.graph.run import run_graph
from rota.plan.collectives import _lower as lower
from rota.plan.layout import Kind
from rota.runtime.footprint import Footprints, likeness
from rota.runtime.in_process import InProcess
from rota.testing import zoo
from rota.testing.models import GPT


def causal_loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def meta_graph(*, depth, width=64, heads=4, batch=4, context=16, vocabulary=128):
    with torch.device("meta"):
        model = GPT(vocabulary=vocabulary, context=context, width=width, depth=depth, heads=heads)
        rows = torch.zeros((batch, context + 1), dtype=torch.int64)
    return rota.capture(model, rows, causal_loss)


def tensor_plan(graph, *, devices, microbatches=1):
    """Heads and feed-forward columns cut, everything else on all devices."""
    plan = rota.Plan(graph, devices=devices, microbatches=microbatches)
    families = {plan.dims(op)["h"].family for op in plan.ops(kind="scaled_dot_product_attention")}
    families |= {plan.dims(op)["n"].family for op in plan.ops(kind="linear", name="*.fc1")}
    for op in graph.ops:
        cut = [dim.name for dim in plan.dims(op).values() if dim.family in families and not dim.fixed]
        parts = plan.split(op, cut[0], devices) if cut else plan.replicate(op, devices)
        for device, part in enumerate(parts):
            plan.assign(part, device)
    return plan


def test_the_readme_example_runs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.fc2(torch.relu(self.fc1(x)))

    model, batch = Net().double(), torch.randn(8, 8, dtype=torch.float64)
    graph = rota.capture(model, batch, lambda model, x: model(x).square().mean())
    plan = rota.Plan(graph, devices=4, microbatches=2)
    for op in plan.ops():
        plan.assign(op, 0)
    for op in plan.ops(kind="linear", name="fc1"):
        for device, part in enumerate(plan.split(op, dim="n", widths=[2, 2, 4, 8])):
            plan.assign(part, device)
    program = plan.compile()
    assert "fc1" in program.explain()
    assert program.simulate().makespan_s > 0
    outcome = program.run_local(batch, state=dict(model.named_parameters()))
    loss = model(batch).square().mean()
    loss.backward()
    assert torch.allclose(outcome.outputs["loss"], loss, rtol=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(outcome.gradients[name], parameter.grad, rtol=1e-10, atol=1e-14), name


def test_work_on_one_layer_serves_all_that_look_like_it():
    lowered, footprints = {}, {}
    for depth in (3, 6):
        lower.cache_clear()
        program = tensor_plan(meta_graph(depth=depth), devices=4, microbatches=2).compile()
        lowered[depth] = lower.cache_info().misses
        table = Footprints(program.refined, plain_random=False)
        distinct = {likeness(program.refined, segment) for segment in program.segments}
        for segment in program.segments:
            table.of(segment)
        footprints[depth] = len(table)
        assert len(distinct) == len(table) < len(program.segments) / 2
    assert lowered[3] == lowered[6]
    assert footprints[3] == footprints[6]


def test_a_hundred_billion_parameters_are_planned_without_memory_for_them():
    graph = meta_graph(depth=8, width=32768, heads=64, batch=8, context=2048, vocabulary=50304)
    assert sum(torch.Size(tensor.shape).numel() for tensor in graph.parameters) > 100e9
    simulation = tensor_plan(graph, devices=8, microbatches=4).compile().simulate()
    assert min(simulation.stored_bytes) > 4 * 100e9 / 8
    assert min(simulation.peak_bytes) > min(simulation.stored_bytes)


def test_the_forward_pass_alone_has_no_gradients():
    specimen = zoo.make("gpt", batch=8)
    specimen.model.eval()
    graph = rota.capture(specimen.model, specimen.batch, specimen.loss)
    plan = rota.Plan(graph, devices=2, microbatches=2, backward=False)
    for i, op in enumerate(graph.ops):
        plan.assign(op, i * 2 // len(graph.ops))
    program = plan.compile()
    assert {str(node.kind) for node in program.nodes} == {"forward", "exchange"}
    assert {node.step.kind for node in program.nodes if node.step} <= {Kind.SEND, Kind.LOCAL}
    state = {**dict(specimen.model.named_parameters()), **dict(specimen.model.named_buffers())}
    outcome = InProcess(program, state).run(specimen.batch)
    with torch.no_grad():
        expected = run_graph(graph, state, specimen.batch)["loss"]
    assert torch.allclose(outcome.outputs["loss"], expected, rtol=1e-6)
    assert all(not gradient.any() for gradient in outcome.gradients.values())
