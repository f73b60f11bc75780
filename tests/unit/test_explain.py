"""What is told about a program: names that repeat are folded, numbers add up, and the drawings fit what they draw."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from rota.graph.capture import capture
from rota.plan.explain import explain, format_seconds, lines_of
from rota.plan.explanation import summarise
from rota.plan.folding import Leaf, collapse, fold, fold_loosely, ranges
from rota.plan.plan import Plan
from rota.plan.program import NodeKind
from rota.plan.simulate import Simulation
from rota.report.timeline import timeline
from rota.report.trace import trace_events
from rota.strategies.base import find
from rota.testing.models import GPT


def next_token_loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def capture_gpt(*, depth, batch=8):
    with torch.device("meta"):
        model = GPT(vocabulary=32, context=8, width=16, depth=depth, heads=4)
        rows = torch.zeros((batch, 9), dtype=torch.int64)
    return capture(model, rows, next_token_loss)


@pytest.fixture(scope="module")
def graph():
    return capture_gpt(depth=12)


@pytest.fixture(scope="module")
def small_graph():
    return capture_gpt(depth=2)


@pytest.fixture(scope="module")
def data_program(graph):
    return find("data(microbatches=2)")(graph, 4).compile()


def megatron(graph, *, devices):
    """Attention heads and feed-forward columns are cut, all else is replicated."""
    plan = Plan(graph, devices=devices)
    families = {plan.dims(op)["h"].family for op in plan.ops(kind="scaled_dot_product_attention")}
    families |= {plan.dims(op)["n"].family for op in plan.ops(kind="linear", name="*.fc1")}
    for op in graph.ops:
        cut = [dim.name for dim in plan.dims(op).values() if dim.family in families and not dim.fixed]
        parts = plan.split(op, cut[0], devices) if cut else plan.replicate(op, devices)
        for device, part in enumerate(parts):
            plan.assign(part, device)
    return plan


def pipeline(graph, *, microbatches=2):
    """The second block and all that follows is on the second device."""
    plan = Plan(graph, devices=2, microbatches=microbatches)
    device = 0
    for op in graph.ops:
        device = max(device, int(op.name.startswith("blocks.1.")))
        plan.assign(op, device)
    return plan


# ---- folding ----


def test_names_that_differ_in_a_number_are_folded_into_ranges():
    names = [f"blocks.{i}.fc1.linear" for i in (0, 1, 2, 5)] + ["norm.layer_norm", "blocks.1.add_1", "fc12"]
    assert [pattern for pattern, _ in fold(names)] == [
        "blocks.{0-2,5}.fc1.linear", "norm.layer_norm", "blocks.1.add_1", "fc12",
    ]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, unique=True))
def test_patterns_stand_for_exactly_the_names_that_were_given(points):
    names = [f"layers.{a}.blocks.{b}.fc" for a, b in points]
    found = fold(names)
    assert sorted(name for _, members in found for name in members) == sorted(names)
    for pattern, members in found:
        parts = [part.strip("{}") for part in pattern.split(".")]
        values = [
            [n for run in parts[i].split(",") for n in range(int(run.split("-")[0]), int(run.split("-")[-1]) + 1)]
            for i in (1, 3)
        ]
        assert sorted(f"layers.{a}.blocks.{b}.fc" for a, b in itertools.product(*values)) == sorted(members)


def test_sentences_fold_number_by_number():
    assert fold_loosely(["x.1.a, x.0.b and 2 more", "x.2.a, x.1.b and 2 more"]) == "x.{1-2}.a, x.{0-1}.b and 2 more"
    assert ranges([3, 1, 2, 7]) == "1-3,7"


def leaves(**told):
    return [Leaf(name=name.replace("__", "."), same=same, item=i) for i, (name, same) in enumerate(told.items())]


def test_a_module_that_is_mostly_alike_is_one_row_and_the_others_are_named():
    rows = collapse(leaves(m__a="x", m__b="x", m__c="x", m__d="y", n__a="z"), most=0.75)
    assert [(row.pattern, len(row.leaves)) for row in rows] == [("m.*", 3), ("m.d", 1), ("n.a", 1)]


def test_no_row_stands_for_a_name_of_which_nothing_is_told():
    told = leaves(m__a="x", m__b="x")
    assert [row.pattern for row in collapse(told)] == ["*"]
    assert [row.pattern for row in collapse(told, root=False)] == ["m.*"]
    assert [row.pattern for row in collapse(told, others=["m.c"])] == ["m.{a,b}"]
    twice = [Leaf(name="m.a", same="x", item=i) for i in (0, 1)]
    assert [(row.pattern, len(row.leaves)) for row in collapse(twice)] == [("m.a", 2)]


@given(st.dictionaries(st.lists(st.sampled_from("ab01"), min_size=1, max_size=4).map(".".join), st.sampled_from("xyz")))
def test_every_leaf_is_in_exactly_one_row_that_tells_the_truth(told):
    found = [Leaf(name=name, same=same, item=i) for i, (name, same) in enumerate(told.items())]
    rows = collapse(found, most=0.6)
    assert sorted(leaf.item for row in rows for leaf in row.leaves) == list(range(len(found)))
    for row in rows:
        assert len({leaf.same for leaf in row.leaves}) == 1
        if "{" not in row.pattern:
            prefix = row.pattern.removesuffix("*")
            assert all(leaf.name.startswith(prefix) for leaf in row.leaves)


# ---- text ----


def test_repeated_layers_are_told_once(graph):
    lines = explain(megatron(graph, devices=4).compile()).splitlines()
    assert len(lines) <= 60
    cells = [line.split("  ") for line in lines]
    told = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in cells if row[0]}
    assert told["blocks.{0-11}.fc1.linear"][:3] == ["n cut in 4", "0-3", "12"]
    assert told["blocks.{0-11}.fc2.linear"][0] == "k cut in 4, leaves partial sums"
    assert told["blocks.{0-11}.norm1.layer_norm"][:2] == ["replicated", "0-3"]
    forward = told["blocks.{0-11}.{projection.linear,fc2.linear}"]
    assert forward[:7] == ["forward", "4 partial sums", "replicated", "all_reduce", "0-3", "24", "24"]
    assert forward[-1] == "its makers leave partial sums; ... needs the sum"


def test_data_parallelism_is_told_in_few_lines(data_program):
    lines = data_program.explain().splitlines()
    assert lines[0] == "plan  4 devices, 2 micro-batches of 4 samples"
    assert len(lines) <= 25
    assert any(line.split("  ")[0] == "*" and "samples cut in 4" in line for line in lines)
    (blocks,) = (line for line in lines if line.startswith("blocks.*"))
    assert "backward" in blocks
    assert "4 partial sums" in blocks
    assert "all_reduce" in blocks
    assert " 144 " in blocks


def test_uneven_widths_are_told(small_graph):
    plan = Plan(small_graph, devices=3)
    for op in small_graph.ops:
        if op.name == "blocks.1.fc1.linear":
            for device, part in enumerate(plan.split(op, "n", widths=[8, 16, 40])):
                plan.assign(part, device)
        else:
            plan.assign(op, 2)
    text = explain(plan.compile())
    assert "n cut 8+16+40" in text
    assert "dim 2 cut 8+16+40 on 0-2  whole on 2" in text


def test_stages_and_recomputation_are_told(small_graph):
    plan = pipeline(small_graph)
    plan.recompute(op for op in small_graph.ops if op.name.startswith("blocks.0."))
    lines = explain(plan.compile()).splitlines()
    (first,) = (line for line in lines if line.startswith("blocks.0.*"))
    assert "whole, recomputed" in first
    (sent,) = (line for line in lines if line.startswith("blocks.0.add_1") and "forward" in line)
    cells = [cell.strip() for cell in sent.split("  ") if cell.strip()]
    tensors, times = "1", "2"  # once for each micro-batch
    assert cells[1:8] == ["forward", "whole on 0", "whole on 1", "send", "0-1", tensors, times]


def test_columns_are_aligned(data_program):
    lines = data_program.explain().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("communication"))
    table = list(itertools.takewhile(lambda line: line and not line[0].isdigit(), lines[start:]))
    assert len(table) > 3
    column = table[0].index("why")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in table)


def test_times_for_people():
    found = [format_seconds(s) for s in (3560.2, 1.234, 0.0125, 1e-4, 1e-12)]
    assert found == ["3560 s", "1.23 s", "12.5 ms", "100 us", "0 us"]


# ---- values ----


def test_numbers_add_up_to_those_of_the_simulation(data_program):
    simulation = data_program.simulate()
    explanation = summarise(data_program, simulation)
    assert sum(one.received_bytes for one in explanation.communications) == simulation.received_bytes > 0
    assert sum(one.compute_share for one in explanation.ops) == pytest.approx(1.0)
    named = [name for one in explanation.ops for name in one.names]
    assert sorted(named) == sorted(op.name for op in data_program.refined.graph.ops)
    for load in explanation.loads:
        assert load.busy_s + load.moving_s + load.idle_s == pytest.approx(explanation.step_s)
    for one in explanation.communications:
        assert sum(one.received_bytes_of_each) == one.received_bytes
        assert sum(one.times_of_each) == one.times


def test_every_part_is_where_the_plan_put_it(small_graph):
    plan = megatron(small_graph, devices=2)
    program = plan.compile()
    for group in summarise(program, program.simulate()).ops:
        for name in group.names:
            wanted = sorted((plan.device_of(part), part.ranges) for part in plan.parts(name))
            assert sorted((part.device, tuple(sorted(part.ranges.items()))) for part in group.parts) == wanted


def test_an_explanation_is_plain_json(data_program):
    explanation = summarise(data_program, data_program.simulate())
    plain = explanation.to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["devices"] == 4
    (cut,) = next(one for one in plain["ops"] if one["pattern"] == "blocks.{0-11}.fc1.linear")["cuts"]
    assert cut == {"dim": "d0", "samples": True, "sums": False, "ranges": [[0, 1], [1, 2], [2, 3], [3, 4]]}


def test_notes_of_the_capture_are_told(small_graph):
    program = find("single")(small_graph, 1).compile()
    explanation = summarise(program, program.simulate())
    noted = type(explanation)(**{**vars(explanation), "notes": ("captured in eval mode",)})
    assert "note  captured in eval mode" in lines_of(noted)
    assert not any(line.startswith("note") for line in lines_of(explanation))


# ---- timeline ----


def drawn(*nodes, devices, width=100):
    """Of (kind, devices, start, end)."""
    program = SimpleNamespace(devices=devices, nodes=[SimpleNamespace(kind=k, devices=d) for k, d, _, _ in nodes])
    ends = tuple(float(end) for *_, end in nodes)
    simulation = Simulation(
        makespan_s=max(ends), start_s=tuple(float(start) for *_, start, _ in nodes), end_s=ends, busy_s=(), moving_s=(),
        peak_bytes=(), stored_bytes=(), received_bytes=0,
    )  # fmt: skip
    return timeline(program, simulation, width=width)


def test_the_timeline_shows_what_takes_most_of_each_slice():
    axis, first, second, legend = drawn(
        (NodeKind.FORWARD, (0,), 0, 4),
        (NodeKind.EXCHANGE, (0, 1), 4, 6),
        (NodeKind.BACKWARD, (0,), 12, 12.4),
        (NodeKind.FORWARD, (1,), 6, 9.9),
        (NodeKind.BACKWARD, (1,), 9.9, 20),
        devices=2,
        width=len("device 0 ") + 20,
    )
    assert first == "device 0 FFFF--.............."
    assert second == "device 1 ....--FFFFBBBBBBBBBB"
    assert axis.split() == ["0", "20", "s"]
    assert len(axis) == len(first)
    assert "idle" in legend


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_timeline_is_as_wide_as_asked(data_program, width):
    lines = timeline(data_program, data_program.simulate(), width=width)
    assert [line[:8] for line in lines[1:-1]] == [f"device {i}" for i in range(4)]
    assert {len(line) for line in lines[:-1]} == {width}


# ---- trace ----


def test_the_trace_is_what_perfetto_reads(small_graph):
    program = pipeline(small_graph).compile()
    simulation = program.simulate()
    trace = json.loads(json.dumps(trace_events(program, simulation), allow_nan=False))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "device 0", 1: "device 1"}
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(len(node.devices) for node in program.nodes)
    assert {event["cat"] for event in slices} == {"compute", "communication"}
    for event in slices:
        assert event.keys() >= {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["dur"] >= 0
        wanted = {"ops"} if event["cat"] == "compute" else {"tensor", "bytes", "why"}
        assert event["args"].keys() >= wanted
    times = [
        (start_s, end_s)
        for node, start_s, end_s in zip(program.nodes, simulation.start_s, simulation.end_s, strict=True)
        for _ in node.devices
    ]
    assert [event["ts"] for event in slices] == pytest.approx([start_s * 1e6 for start_s, _ in times])
    assert [event["dur"] for event in slices] == pytest.approx([(end_s - start_s) * 1e6 for start_s, end_s in times])
    for device in (0, 1):
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in slices if event["tid"] == device)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(own))
    assert any(event["name"].startswith("forward") and event["name"].endswith("#1") for event in slices)


def test_each_send_has_an_arrow_from_its_sender_to_its_receiver(small_graph):
    program = pipeline(small_graph).compile()
    events = trace_events(program, program.simulate())["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    sends = {i for i, node in enumerate(program.nodes) if node.step is not None and node.step.kind == "send"}
    assert starts.keys() == ends.keys() == sends != set()
    for number in sends:
        assert (starts[number]["tid"], ends[number]["tid"]) == program.nodes[number].step.group
        for arrow in (starts[number], ends[number]):
            assert any(
                event["ph"] == "X" and event["tid"] == arrow["tid"] and event["name"] == arrow["name"]
                and event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"]
                for event in events
            )  # fmt: skip
