"""Every defect of the menu of mutations, put into a compiled program, is caught: by the static check or by its numbers.

The table at the end says which way each is caught. What only the numbers tell: that an op computes something else
everywhere, and that a gradient is missing which nobody waits for.
"""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rota.errors import ProgramError
from rota.graph.capture import capture
from rota.graph.graph import Op
from rota.graph.refine import refine
from rota.plan.box import Box
from rota.plan.check import check, sequences_of
from rota.plan.layout import Kind, Piece
from rota.plan.ordering import read, written
from rota.plan.plan import Plan
from rota.plan.program import ONCE, NodeKind, Program, Value
from rota.runtime.in_process import InProcess
from rota.testing.models import GPT
from rota.testing.plans import data_plan, pipeline_plan, single_plan, tensor_plan

ROWS = torch.randint(0, 16, (4, 7), generator=torch.Generator().manual_seed(0))
PROJECTION, NORM = "blocks.0.projection.linear", "blocks.0.norm1.layer_norm"
WEIGHT = "blocks.0.fc1.weight"


@functools.cache
def captured():
    torch.manual_seed(0)
    model = GPT(vocabulary=16, context=8, width=8, depth=1, heads=2).double()

    def loss(model, rows):
        found = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        return {"loss": 0.5 * found, "unscaled": found}

    graph = capture(model, ROWS, loss)
    return graph, refine(graph), dict(model.named_parameters())


@functools.cache
def compiled(kind):
    graph, refined, _ = captured()
    if kind == "tensor":
        plan = tensor_plan(graph, 2, refined=refined)
    elif kind == "data":
        plan = data_plan(graph, 2, microbatches=2, refined=refined)
    elif kind == "pipeline":
        plan = pipeline_plan(graph, 3, 2, refined=refined)
    elif kind == "fan-out":
        plan, device = Plan(graph, devices=3, microbatches=2, refined=refined), 0
        for op in graph.ops:
            device = {"blocks.0.norm1.layer_norm": 1, "blocks.0.add": 2}.get(op.name, device)
            plan.assign(op, device)
    else:
        plan = data_plan(graph, 2, refined=refined)
        for parameter in graph.parameters:
            shape = refined.shape(parameter.name)
            dim = next(i for i, size in enumerate(shape) if size % 2 == 0)
            plan.store(parameter.name, dict(enumerate(Box.whole(shape).split(dim, [shape[dim] // 2] * 2))))
    return plan.compile()


# ---- how programs are changed ----


def changed(program: Program, nodes, **other) -> Program:
    """With other nodes, and each value freed after its last use, as a compiler that does not know better would."""
    program = replace(program, nodes=tuple(nodes), **other)
    kept = {(one.device, one.value) for one in program.results.values()}
    for pieces in program.gradients.values():
        kept |= {(device, value) for (device, _), values in pieces.items() for value in values}
    for updated in program.updates.values():
        kept |= {(device, value) for (device, _), value in updated.items()}
    for name, layout in program.stored.items():
        kept |= {(piece.device, Value(name, ONCE, program.boxes.index(piece.box))) for piece in layout}
    last = {key: i for i, node in enumerate(program.nodes) for key in (*read(node), *written(node))}
    frees = [[] for _ in program.nodes]
    for key, i in last.items():
        if key not in kept:
            frees[i].append(key)
    return replace(program, frees=tuple(tuple(one) for one in frees))


def only(program, node, **changes):
    """With one node changed, and nothing else."""
    return replace(program, nodes=tuple(replace(one, **changes) if one is node else one for one in program.nodes))


def exchanges(program, kind, tensor, *, backward=False):
    """The nodes that move a tensor, or its gradient."""
    return [
        node
        for node in program.nodes
        if node.step is not None
        and node.step.kind is kind
        and program.flows[node.flow].tensor == tensor
        and program.flows[node.flow].backward == backward
    ]


def runs(program, kind, op=None):
    """The runs of segments, forward or backward, that have an op."""
    return [
        node
        for node in program.nodes
        if node.kind is kind and (op is None or any(call.op == op for call in program.segments[node.segment].calls))
    ]


def without(program, dropped, **other):
    return changed(program, [node for node in program.nodes if not any(node is one for one in dropped)], **other)


def whole(program, box: int) -> int:
    """The number of the box with the same ranges and the whole value."""
    return program.boxes.index(Box(ranges=program.boxes[box].ranges))


def renamed(node, device, table):
    """A node of a device that reads other values."""
    if node.devices != (device,):
        return node
    return replace(
        node,
        reads=tuple(table.get(value, value) for value in node.reads),
        gradients=tuple(tuple(table.get(value, value) for value in values) for values in node.gradients),
    )


def instead(program, exchange):
    """Without an exchange, and its readers take what they had before it."""
    nodes = [node for node in program.nodes if node is not exchange]
    for piece, before, after in zip(exchange.step.outputs, exchange.reads, exchange.makes, strict=True):
        nodes = [renamed(node, piece.device, {after: before}) for node in nodes]
    return changed(program, nodes)


def with_segment(program, index, **changes):
    segments = list(program.segments)
    segments[index] = replace(segments[index], **changes)
    return replace(program, segments=tuple(segments))


def with_call(program, index, name, **changes):
    calls = [replace(call, **changes) if call.op == name else call for call in program.segments[index].calls]
    return with_segment(program, index, calls=tuple(calls))


def with_op(program, name, change) -> Program:
    """With another op of that name, on all devices."""
    refined = program.refined
    case = refined.cases[name]
    return replace(program, refined=replace(refined, cases={**refined.cases, name: replace(case, op=change(case.op))}))


def as_tanh(op: Op) -> Op:
    return replace(op, kind="tanh", target="aten.tanh.default", kwargs={})


# ---- mutations: reductions ----


def missing_all_reduce(program):
    return without(program, exchanges(program, Kind.ALL_REDUCE, PROJECTION))


def missing_all_reduce_read_around(program):
    return instead(program, exchanges(program, Kind.ALL_REDUCE, PROJECTION)[0])


def missing_all_reduce_of_what_is_said_to_be_whole(program):
    """Makers say that their partial sums are whole, so that there is nothing to reduce."""
    dropped = exchanges(program, Kind.ALL_REDUCE, PROJECTION)
    nodes = []
    for node in program.nodes:
        makes = [
            value._replace(box=whole(program, value.box))
            if node.kind is NodeKind.FORWARD and value.name == PROJECTION
            else value
            for value in node.makes
        ]
        nodes.append(replace(node, makes=tuple(makes)))
    segments = []
    for segment in program.segments:
        exits = [
            replace(one, box=Box(ranges=one.box.ranges)) if one.tensor == PROJECTION else one for one in segment.exits
        ]
        segments.append(replace(segment, exits=tuple(exits)))
    nodes = [new for new, old in zip(nodes, program.nodes, strict=True) if not any(old is one for one in dropped)]
    return changed(program, nodes, segments=tuple(segments))


def all_reduce_as_all_gather(program):
    (node,) = exchanges(program, Kind.ALL_REDUCE, PROJECTION)
    return only(program, node, step=replace(node.step, kind=Kind.ALL_GATHER))


def all_gather_as_all_reduce(program):
    node = exchanges(program, Kind.ALL_GATHER, WEIGHT)[0]
    return only(program, node, step=replace(node.step, kind=Kind.ALL_REDUCE))


def missing_reduce_in_backward(program):
    return without(program, exchanges(program, Kind.ALL_REDUCE, NORM, backward=True))


def missing_reduce_in_backward_read_around(program):
    return instead(program, exchanges(program, Kind.ALL_REDUCE, NORM, backward=True)[0])


def missing_reduce_in_backward_and_nobody_reads_it(program):
    """The gradient ends at who should have reduced it, and who made the tensor does not wait for any."""
    dropped = exchanges(program, Kind.ALL_REDUCE, NORM, backward=True)
    gone = {value for node in dropped for value in node.makes}
    nodes = [
        replace(node, gradients=tuple(tuple(one for one in values if one not in gone) for values in node.gradients))
        for node in program.nodes
        if not any(node is one for one in dropped)
    ]
    return changed(program, nodes)


def an_entry_that_returns_no_gradient(program):
    """One device takes a weight for a constant, in all micro-batches."""
    index = runs(program, NodeKind.FORWARD, "blocks.0.fc1.linear")[0].segment
    segment = program.segments[index]
    entries = tuple(replace(one, grad=one.grad and one.tensor != WEIGHT) for one in segment.entries)
    nodes = [
        replace(
            node,
            adds=tuple(added if entry.grad else None for entry, added in zip(entries, node.adds, strict=True)),
        )
        if node.kind is NodeKind.BACKWARD and node.segment == index
        else node
        for node in program.nodes
    ]
    return changed(with_segment(program, index, entries=entries), nodes)


def missing_reduce_of_a_gradient(program):
    return without(program, exchanges(program, Kind.ALL_REDUCE, WEIGHT, backward=True))


def missing_reduce_of_a_gradient_read_around(program):
    (node,) = exchanges(program, Kind.ALL_REDUCE, WEIGHT, backward=True)
    local = {piece.device: value for piece, value in zip(node.step.inputs, node.reads, strict=True)}
    pieces = {key: (local[key[0]],) for key in program.gradients[WEIGHT]}
    return without(program, [node], gradients={**program.gradients, WEIGHT: pieces})


def missing_reduce_of_a_gradient_that_is_said_to_be_whole(program):
    (dropped,) = exchanges(program, Kind.ALL_REDUCE, WEIGHT, backward=True)
    names = {value.name for value in dropped.makes}
    nodes = [
        replace(
            node,
            adds=tuple(
                value._replace(box=whole(program, value.box)) if value is not None and value.name in names else value
                for value in node.adds
            ),
        )
        for node in program.nodes
        if node is not dropped
    ]
    return changed(program, nodes)


def a_sum_without_one_of_its_terms(program):
    (node,) = exchanges(program, Kind.ALL_REDUCE, WEIGHT, backward=True)
    step = replace(node.step, inputs=node.step.inputs[:1], outputs=node.step.outputs[:1])
    return only(program, node, step=step, devices=node.devices[:1], reads=node.reads[:1], makes=node.makes[:1])


def gradient_reduced_before_the_last_micro_batch(program):
    (reduction,) = exchanges(program, Kind.ALL_REDUCE, WEIGHT, backward=True)
    nodes = [node for node in program.nodes if node is not reduction]
    adding = [i for i, node in enumerate(nodes) if set(reduction.reads) & set(node.adds)]
    nodes.insert(adding[-1], reduction)
    return changed(program, nodes)


# ---- mutations: peers, parts and ops ----


def wrong_peer(program):
    node = next(node for node in runs_of_sends(program) if node.step.group == (0, 1))
    box = node.step.outputs[0].box
    return only(program, node, step=replace(node.step, outputs=(Piece(device=2, box=box),)), devices=(0, 2))


def runs_of_sends(program):
    return [node for node in program.nodes if node.step is not None and node.step.kind is Kind.SEND]


def wrong_source(program):
    node = next(node for node in runs_of_sends(program) if node.step.group == (1, 2))
    box = node.step.inputs[0].box
    return only(program, node, step=replace(node.step, inputs=(Piece(device=0, box=box),)), devices=(0, 2))


def another_micro_batch_is_read(program):
    for node in runs(program, NodeKind.FORWARD):
        if node.microbatch == 1 and any(value is not None and value.microbatch == 1 for value in node.reads):
            reads = [
                value if value is None or value.microbatch != 1 else value._replace(microbatch=0)
                for value in node.reads
            ]
            nodes = [replace(one, reads=tuple(reads)) if one is node else one for one in program.nodes]
            return changed(program, nodes)
    raise AssertionError("nothing is read of micro-batch 1")


def one_device_computes_another_part(program):
    first, second = (runs(program, NodeKind.FORWARD, "blocks.0.gelu")[i].segment for i in (0, 1))
    ranges = next(call.ranges for call in program.segments[first].calls if call.op == "blocks.0.gelu")
    return with_call(program, second, "blocks.0.gelu", ranges=ranges)


def an_op_is_wrong_on_one_device(program):
    refined, name = program.refined, "blocks.0.gelu"
    wrong = "blocks.0.tanh"
    case = replace(refined.cases[name], op=replace(as_tanh(refined.cases[name].op), name=wrong))
    refined = replace(
        refined, cases={**refined.cases, wrong: case}, frames={**refined.frames, wrong: refined.frames[name]}
    )
    segment = runs(program, NodeKind.FORWARD, name)[0].segment
    return with_call(replace(program, refined=refined), segment, name, op=wrong)


def an_op_is_wrong_on_all_devices(program):
    return with_op(program, "blocks.0.gelu", as_tanh)


# ---- mutations: fan-out and outputs ----


def fan_out(program):
    """A backward run that sums several gradients for one exit, and which exit."""
    for node in runs(program, NodeKind.BACKWARD):
        for i, values in enumerate(node.gradients):
            if len(values) > 1:
                return node, i, values
    raise AssertionError("nothing is read twice")


def with_gradients(program, node, exit, values):
    gradients = (*node.gradients[:exit], tuple(values), *node.gradients[exit + 1 :])
    return changed(program, [replace(one, gradients=gradients) if one is node else one for one in program.nodes])


def a_gradient_of_the_fan_out_is_left_out(program):
    node, exit, values = fan_out(program)
    return with_gradients(program, node, exit, values[:-1])


def a_gradient_of_the_fan_out_is_read_twice(program):
    node, exit, values = fan_out(program)
    return with_gradients(program, node, exit, [values[0]] * len(values))


def a_gradient_of_another_tensor_is_read(program):
    node, exit, values = fan_out(program)
    shape = program.boxes[values[0].box].shape
    others = [value for values in program.gradients.values() for one in values.values() for value in one]
    others += [value for one in program.nodes for value in one.adds if value is not None]
    other = next(one for one in others if program.boxes[one.box].shape == shape and one not in values)
    return with_gradients(program, node, exit, [other, *values[1:]])


def outputs_of_an_op_reversed(program):
    op = "blocks.0.unbind"
    segment = runs(program, NodeKind.FORWARD, op)[0].segment
    call = next(call for call in program.segments[segment].calls if call.op == op)
    return with_call(program, segment, op, makes=call.makes[::-1])


def outputs_of_a_segment_reversed(program):
    node = next(node for node in runs(program, NodeKind.FORWARD) if len(node.makes) > 1)
    return only(program, node, makes=node.makes[::-1])


def outputs_of_a_collective_reversed(program):
    node = exchanges(program, Kind.REDUCE_SCATTER, WEIGHT, backward=True)[0]
    boxes = [piece.box for piece in node.step.outputs][::-1]
    outputs = [replace(piece, box=box) for piece, box in zip(node.step.outputs, boxes, strict=True)]
    return only(program, node, step=replace(node.step, outputs=tuple(outputs)))


def inputs_of_a_collective_reversed(program):
    node = exchanges(program, Kind.ALL_GATHER, WEIGHT)[0]
    return only(program, node, reads=node.reads[::-1])


def results_reversed(program):
    first, second = program.results.values()
    return replace(program, results=dict(zip(program.results, (second, first), strict=True)))


def gradients_of_two_parameters_reversed(program):
    one, other = "blocks.0.norm1.weight", "blocks.0.norm1.bias"
    gradients = {**program.gradients, one: program.gradients[other], other: program.gradients[one]}
    return replace(program, gradients=gradients)


# ---- mutations: scaling ----


def loss_scaled_by_another_number(program):
    return with_op(program, "mul", lambda op: replace(op, args=(op.args[0], 1.0)))


def a_loss_without_its_seed(program):
    node = next(node for node in program.nodes if node.seeds)
    return only(program, node, seeds=())


def another_tensor_is_the_loss(program):
    node = next(node for node in program.nodes if node.kind is NodeKind.BACKWARD and not node.seeds and node.gradients)
    return only(program, node, seeds=(0,))


def loss_divided_by_the_count_of_a_part(program):
    """Each micro-batch divides by how many labels it has itself."""
    nodes, count = [], "cross_entropy_loss.count"
    for node in program.nodes:
        if node.kind is NodeKind.FORWARD:
            made = {
                (other.microbatch, value)
                for other in program.nodes
                if other.kind is NodeKind.FORWARD and other.devices == node.devices
                for value in other.makes
                if value.name == count
            }
            own = [value for microbatch, value in made if microbatch == node.microbatch]
            reads = [own[0] if own and value is not None and value.name == count else value for value in node.reads]
            node = replace(node, reads=tuple(reads))
        nodes.append(node)
    return changed(program, nodes)


def a_gradient_added_twice(program):
    pieces = {key: values * 2 for key, values in program.gradients[WEIGHT].items()}
    return replace(program, gradients={**program.gradients, WEIGHT: pieces})


def a_backward_run_twice(program):
    node = runs(program, NodeKind.BACKWARD)[0]
    nodes = list(program.nodes)
    nodes.insert(nodes.index(node), node)
    return changed(program, nodes)


def a_backward_run_left_out(program):
    return without(program, runs(program, NodeKind.BACKWARD, "blocks.0.gelu")[:1])


def a_copy_summed_as_if_it_were_a_share(program):
    (node,) = exchanges(program, Kind.ALL_REDUCE, WEIGHT, backward=True)
    again = replace(
        node, reads=node.makes, step=replace(node.step, inputs=node.step.outputs, outputs=node.step.outputs)
    )
    nodes = list(program.nodes)
    nodes.insert(nodes.index(node) + 1, again)
    return changed(program, nodes)


# ---- mutations: order and memory ----


def a_node_before_what_it_reads(program):
    node = runs(program, NodeKind.BACKWARD)[-1]
    nodes = [one for one in program.nodes if one is not node]
    return changed(program, [node, *nodes])


def freed_too_early(program):
    frees = list(program.frees)
    at = next(i for i, one in enumerate(frees) if one and i > 1)
    frees[at - 1], frees[at] = (*frees[at - 1], *frees[at]), ()
    return replace(program, frees=tuple(frees))


def never_freed(program):
    frees = [list(one) for one in program.frees]
    next(one for one in frees if one).pop()
    return replace(program, frees=tuple(tuple(one) for one in frees))


TABLE = [
    # what is wrong, in which program, and what catches it
    (missing_all_reduce, "tensor", "check"),
    (missing_all_reduce_read_around, "tensor", "check"),
    (missing_all_reduce_of_what_is_said_to_be_whole, "tensor", "check"),
    (all_reduce_as_all_gather, "tensor", "check"),
    (all_gather_as_all_reduce, "sharded", "check"),
    (missing_reduce_in_backward, "tensor", "check"),
    (missing_reduce_in_backward_read_around, "tensor", "check"),
    (missing_reduce_in_backward_and_nobody_reads_it, "tensor", "numbers"),
    (an_entry_that_returns_no_gradient, "data", "check"),
    (an_entry_that_returns_no_gradient, "pipeline", "check"),
    (missing_reduce_of_a_gradient, "data", "check"),
    (missing_reduce_of_a_gradient_read_around, "data", "check"),
    (missing_reduce_of_a_gradient_that_is_said_to_be_whole, "data", "check"),
    (a_sum_without_one_of_its_terms, "data", "check"),
    (gradient_reduced_before_the_last_micro_batch, "data", "check"),
    (wrong_peer, "pipeline", "check"),
    (wrong_source, "pipeline", "check"),
    (another_micro_batch_is_read, "pipeline", "check"),
    (one_device_computes_another_part, "tensor", "check"),
    (an_op_is_wrong_on_one_device, "tensor", "check"),
    (an_op_is_wrong_on_one_device, "data", "check"),
    (an_op_is_wrong_on_all_devices, "tensor", "numbers"),
    (an_op_is_wrong_on_all_devices, "pipeline", "numbers"),
    (a_gradient_of_the_fan_out_is_left_out, "fan-out", "check"),
    (a_gradient_of_the_fan_out_is_read_twice, "fan-out", "check"),
    (a_gradient_of_another_tensor_is_read, "fan-out", "check"),
    (outputs_of_an_op_reversed, "tensor", "check"),
    (outputs_of_a_segment_reversed, "pipeline", "check"),
    (outputs_of_a_collective_reversed, "sharded", "check"),
    (inputs_of_a_collective_reversed, "sharded", "check"),
    (results_reversed, "data", "check"),
    (gradients_of_two_parameters_reversed, "data", "check"),
    (loss_scaled_by_another_number, "data", "numbers"),
    (a_loss_without_its_seed, "data", "check"),
    (another_tensor_is_the_loss, "pipeline", "check"),
    (loss_divided_by_the_count_of_a_part, "data", "check"),
    (a_gradient_added_twice, "data", "check"),
    (a_backward_run_twice, "data", "check"),
    (a_backward_run_left_out, "data", "check"),
    (a_copy_summed_as_if_it_were_a_share, "data", "check"),
    (a_node_before_what_it_reads, "pipeline", "check"),
    (freed_too_early, "pipeline", "check"),
    (never_freed, "pipeline", "check"),
]


@pytest.mark.parametrize(
    ("mutate", "kind", "caught_by"), TABLE, ids=[f"{mutate.__name__}-{kind}" for mutate, kind, _ in TABLE]
)
def test_a_mutation_is_caught_by_what_the_table_says(mutate, kind, caught_by):
    program = compiled(kind)
    mutated = mutate(program)
    if caught_by == "check":
        with pytest.raises(ProgramError):
            check(mutated)
    else:
        check(mutated)
        assert differs(mutated)


@pytest.mark.parametrize("kind", ["tensor", "data", "pipeline", "fan-out", "sharded"])
def test_what_is_not_mutated_is_right(kind):
    program = changed(compiled(kind), compiled(kind).nodes)
    check(program)
    assert not differs(program)


def differs(program):
    """Whether the loss or a gradient is not that of one device."""
    graph, refined, state = captured()
    expected = InProcess(single_plan(graph, refined=refined).compile(), state).run(ROWS)
    found = InProcess(program, state).run(ROWS)
    pairs = [(found.outputs[name], expected.outputs[name]) for name in expected.outputs]
    pairs += [(found.gradients[name], expected.gradients[name]) for name in expected.gradients]
    return any(not torch.allclose(one, other, rtol=1e-10, atol=1e-14) for one, other in pairs)


def test_devices_that_disagree_on_the_order_of_collectives_wait_for_ever():
    program = compiled("tensor")
    sequences = sequences_of(program)
    check(program, sequences)
    shared = [i for i, index in enumerate(sequences[1]) if len(program.nodes[index].devices) > 1]
    first, second = shared[0], shared[1]
    sequences[1][first], sequences[1][second] = sequences[1][second], sequences[1][first]
    with pytest.raises(ProgramError, match=r"wait for each other for ever: device 0 at .*, device 1 at "):
        check(program, sequences)
