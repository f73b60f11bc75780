"""The simulated engine keeps time: nothing begins before what it needs, and nobody is busier than the step is long."""

import functools

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.graph.capture import capture
from rota.plan.costs import Calibration, Costs, LinkCost, NodeCost, Rate
from rota.plan.layout import Kind
from rota.plan.ordering import read
from rota.strategies.base import find
from rota.testing.models import GPT

STRATEGIES = {
    "single(microbatches=2)": 1,
    "coshard(2)": 1,
    "data(microbatches=2)": 2,
    "zero(stage=3)": 2,
    "tensor(sequence=True)": 2,
    "pipeline(microbatches=4)": 2,
    "pipeline(order='interleaved', microbatches=2)": 2,
    "data(2) * tensor(2)": 4,
}


@functools.cache
def graph():
    with torch.device("meta"):
        model = GPT(vocabulary=32, context=8, width=16, depth=2, heads=2)
        rows = torch.zeros((8, 9), dtype=torch.int64)

    def loss(model, rows):
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return capture(model, rows, loss)


@functools.cache
def program(text):
    return find(text)(graph(), STRATEGIES[text]).compile()


seconds = st.floats(0, 1e-2)
per_byte = st.floats(0, 1e-6)
links = st.builds(
    LinkCost,
    group=st.sampled_from([2, 4]),
    launch_s=seconds,
    launch_byte_s=per_byte,
    latency_s=seconds,
    byte_s=per_byte,
)
calibrations = st.builds(
    Calibration,
    calls=st.just({}),
    rest=st.builds(Rate, op_s=seconds, flop_s=per_byte, byte_s=per_byte, backward=st.floats(0, 3)),
    node=st.builds(NodeCost, forward_s=seconds, backward_s=seconds, entry_forward_s=seconds, exchange_s=seconds),
    copy_byte_s=per_byte,
    assemble_s=seconds,
    assemble_byte_s=per_byte,
    links=st.dictionaries(st.sampled_from(list(Kind)), links.map(lambda one: (one,))),
    overlap_share=st.floats(0, 1),
    crowding=st.sampled_from([((1, 1.0),), ((1, 1.0), (2, 1.5))]),
    optimizer=st.just(((0, 1e-5), (10**6, 1e-3))),
    bucket_bytes=st.sampled_from([0, 2**10, 2**22]),
)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(STRATEGIES)), calibrations)
def test_nothing_begins_before_what_it_needs(text, calibration):
    found = program(text)
    simulation = found.simulate(Costs(calibration=calibration))
    there = {}
    for index, node in enumerate(found.nodes):
        start_s, end_s = simulation.start_s[index], simulation.end_s[index]
        assert 0 <= start_s <= end_s + 1e-12 <= simulation.makespan_s + 1e-9
        for one in read(node):
            assert there.get(one, 0.0) <= start_s + 1e-9
        if node.step is None:
            made = [(node.devices[0], value) for value in (*node.makes, *node.adds) if value is not None]
        else:
            made = [(piece.device, value) for piece, value in zip(node.step.outputs, node.makes, strict=True)]
        there.update((one, max(end_s, there.get(one, 0.0))) for one in made)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(STRATEGIES)), calibrations)
def test_no_device_is_busier_than_the_step_is_long(text, calibration):
    simulation = program(text).simulate(Costs(calibration=calibration))
    for busy_s, moving_s in zip(simulation.busy_s, simulation.moving_s, strict=True):
        assert busy_s >= 0
        assert moving_s >= 0
        assert busy_s + moving_s <= simulation.makespan_s * (1 + 1e-9) + 1e-9


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(sorted(STRATEGIES)), calibrations)
def test_the_same_costs_give_the_same_times(text, calibration):
    costs = Costs(calibration=calibration)
    assert program(text).simulate(costs) == program(text).simulate(Costs(calibration=calibration))
    assert program(text).simulate(costs) == program(text).simulate(costs)
