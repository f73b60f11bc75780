"""Programs are written and read without a loss, and are there for every shape of batch."""

import json

import pytest
import torch

from rota.errors import InputError
from rota.graph.capture import capture
from rota.plan.box import Box, even_widths
from rota.plan.cache import Programs
from rota.plan.check import check
from rota.plan.plan import Plan
from rota.plan.serial import from_json
from rota.runtime.in_process import InProcess
from rota.testing import zoo


def data_plan(graph, *, devices=2, microbatches=1):
    plan = Plan(graph, devices=devices, microbatches=microbatches)
    families = plan.refined.batch_families()
    for op in graph.ops:
        dims = [dim.name for dim in plan.dims(op).values() if dim.family in families and not dim.fixed]
        parts = plan.split(op, dims[0], devices) if dims else plan.replicate(op, devices)
        for device, part in enumerate(parts):
            plan.assign(part, device)
    return plan


def state_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", ["gpt", "mixture"])
@pytest.mark.parametrize("gather", [None, "use"])
def test_a_program_comes_back_as_it_was(name, gather):
    specimen = zoo.make(name, batch=8)
    graph = capture(specimen.model, specimen.batch, specimen.loss)
    plan = data_plan(graph, microbatches=2)
    if gather:
        for tensor in graph.parameters:
            whole = Box.whole(plan.refined.shape(tensor.name))
            plan.store(tensor.name, dict(enumerate(whole.split(0, even_widths(whole.shape[0], 2)))), gather=gather)
    program = plan.compile()
    again = from_json(program.to_json(), graph)
    for field in ("segments", "nodes", "frees", "boxes", "flows", "stored", "gradients", "results", "updates"):
        assert getattr(again, field) == getattr(program, field), field
    check(again)
    one, other = (InProcess(each, state_of(specimen.model)).run(specimen.batch) for each in (program, again))
    assert torch.equal(one.outputs["loss"], other.outputs["loss"])


def test_a_program_of_another_graph_is_refused():
    specimens = [zoo.make("mixture", batch=batch) for batch in (4, 8)]
    graphs = [capture(one.model, one.batch, one.loss) for one in specimens]
    text = data_plan(graphs[0]).compile().to_json()
    with pytest.raises(InputError, match="another graph"):
        from_json(text, graphs[1])
    with pytest.raises(InputError, match="not a program"):
        from_json("{}", graphs[0])
    with pytest.raises(InputError, match="not a program"):
        from_json("nonsense", graphs[0])


def test_there_is_a_program_for_every_shape_and_mode():
    specimen = zoo.make("gpt", batch=8)
    programs = Programs(specimen.model, specimen.loss, data_plan)
    first = programs.of(specimen.batch)
    assert programs.of(specimen.batch.clone()) is first
    smaller, shorter = specimen.batch[:3], specimen.batch[:, :7]
    for batch in (smaller, shorter):
        program = programs.of(batch)
        assert program is not first
        outcome = InProcess(program, state_of(specimen.model), plain_random=True).run(batch)
        assert torch.isfinite(outcome.outputs["loss"])
    specimen.model.eval()
    assert programs.of(specimen.batch) is not first
    assert programs.compiled == 4
    specimen.model.train()
    assert programs.of(specimen.batch) is first


def test_old_programs_are_forgotten():
    specimen = zoo.make("mixture", batch=8)
    programs = Programs(specimen.model, specimen.loss, data_plan, most=2)
    batches = [(specimen.batch[0][:n], specimen.batch[1][:n]) for n in (8, 6, 4)]
    for batch in batches:
        programs.of(batch)
    programs.of(batches[0])
    assert programs.compiled == 4


def test_an_altered_program_is_refused():
    specimen = zoo.make("mixture", batch=8)
    graph = capture(specimen.model, specimen.batch, specimen.loss)
    text = data_plan(graph, microbatches=2).compile().to_json()
    data = json.loads(text)
    for change in (
        {"microbatches": 3},
        {"nodes": data["nodes"][:-1]},
        {"frees": data["frees"][::-1]},
        {"boxes": data["boxes"][::-1]},
        {"values": []},
        {"segments": None},
    ):
        with pytest.raises(InputError, match="altered"):
            from_json(json.dumps({**data, **change}), graph)


def test_a_cached_program_is_not_used_after_a_module_changed_its_mode():
    specimen = zoo.make("gpt", batch=4)
    programs = Programs(specimen.model, specimen.loss, data_plan)
    first = programs.of(specimen.batch)
    specimen.model.blocks[0].eval()
    assert programs.of(specimen.batch) is not first
    specimen.model.blocks[0].train()
    specimen.model.positions.weight.requires_grad_(False)
    frozen = programs.of(specimen.batch)
    assert frozen is not first
    assert "positions.weight" not in frozen.gradients
