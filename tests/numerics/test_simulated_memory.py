"""The simulator's peak memory is within a tenth of what a run in this process needs, on each device, for each model."""

import functools
import warnings

import pytest

from rota.errors import InputError
from rota.graph.capture import capture
from rota.graph.refine import refine
from rota.plan.plan import Plan
from rota.runtime.in_process import InProcess
from rota.runtime.ledger import Ledger
from rota.testing import zoo
from rota.testing.plans import data_plan, pipeline_plan, single_plan, tensor_plan

LARGE = ("evoformer", "swin")
"""These take long."""


def tensor_or_copies(graph, *, degree, refined):
    """A ResNet has no pair of products to cut: all of it is on each device."""
    try:
        return tensor_plan(graph, degree, refined=refined)
    except InputError:
        plan = Plan(graph, devices=degree, refined=refined)
        for op in graph.ops:
            for device, part in enumerate(plan.replicate(op, degree)):
                plan.assign(part, device)
        return plan


PLANS = {
    "single": single_plan,
    "micro-batches": functools.partial(single_plan, microbatches=4),
    "data": functools.partial(data_plan, degree=2, microbatches=2),
    "tensor": functools.partial(tensor_or_copies, degree=2),
    "pipeline": functools.partial(pipeline_plan, stages=2, microbatches=4),
}


@pytest.fixture(scope="module")
def captured():
    """Each model of the zoo with its graph and its dims, made once."""

    @functools.cache
    def make(name):
        specimen = zoo.make(name, batch=8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = capture(specimen.model, specimen.batch, specimen.loss)
        return specimen, graph, refine(graph)

    return make


def measured(program, specimen):
    """The peak of each device in one step."""
    state = {**dict(specimen.model.named_parameters()), **dict(specimen.model.named_buffers())}
    ledger = Ledger()
    with ledger:
        InProcess(program, state, ledger=ledger).execute(specimen.batch)
    return [ledger.peak_bytes[device] for device in range(program.devices)]


def asked():
    """Every plan of two families, and of most others those that cut samples, time and tensors."""
    for name in zoo.names():
        for kind in PLANS:
            usual = name in ("gpt", "resnet") or (name not in LARGE and kind in ("data", "tensor"))
            yield pytest.param(name, kind, marks=[] if usual else pytest.mark.deep)


@pytest.mark.parametrize(("name", "kind"), list(asked()))
def test_the_simulated_peak_is_within_a_tenth_of_the_measured_one(name, kind, captured):
    specimen, graph, refined = captured(name)
    program = PLANS[kind](graph, refined=refined).compile()
    assert program.simulate().peak_bytes == pytest.approx(measured(program, specimen), rel=0.1)


def test_what_is_stored_is_the_parameters_and_buffers(captured):
    specimen, graph, refined = captured("resnet")
    simulation = single_plan(graph, refined=refined).compile().simulate()
    state = [*specimen.model.parameters(), *specimen.model.buffers()]
    assert simulation.stored_bytes == (sum(one.numel() * one.element_size() for one in state),)
