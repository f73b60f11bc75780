"""Programs are written and read without a loss, no damage passes, and they are there for every shape of batch."""

import copy
import functools
import json
import random
import tracemalloc

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
from rota.strategies.base import find
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
    for text in ("nonsense", "[]", "[" * 100_000):
        with pytest.raises(InputError, match="not a program"):
            from_json(text, graphs[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"devices":2', '"devices":2000000000'),
        ('"devices":2', '"devices":100000'),
        ('"microbatches":2', '"microbatches":2000000000'),
        ('["0","1"]', '["0","1e1000000000"]'),
    ],
)
def test_a_number_that_would_take_all_memory_is_refused(old, new):
    specimen = zoo.make("mixture", batch=4)
    graph = capture(specimen.model, specimen.batch, specimen.loss)
    text = data_plan(graph, microbatches=2).compile().to_json()
    assert old in text
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="altered or damaged"):
            from_json(text.replace(old, new), graph)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


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


class Recycler(torch.nn.Module):
    """Layers that run once without gradient, and once with it on what they made."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def once(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def forward(self, x):
        with torch.no_grad():
            last = self.once(x)
        return self.once(x + last)


STRATEGIES = {
    "single": 1,
    "single(microbatches=3)": 1,
    "data": 2,
    "data(microbatches=2)": 2,
    "zero": 2,
    "zero(stage=3, microbatches=2)": 2,
    "tensor": 2,
    "tensor(sequence=True, vocabulary=True)": 2,
    "pipeline": 2,
    "pipeline(microbatches=4, order='gpipe')": 2,
    "coshard(2)": 1,
    "dap(microbatches=2)": 2,
    "interlaced": 2,
    "recycled": 2,
    "recycled(order='sequential')": 2,
    "data(2) * tensor(2)": 4,
    "tensor(2) * pipeline(2)": 4,
    "coshard(2) * data(2)": 2,
}


@functools.cache
def captured(name):
    torch.manual_seed(0)
    if name == "recycler":
        model, batch = Recycler().double(), torch.randn(8, 3, 4, dtype=torch.float64)
        return model, batch, capture(model, batch, lambda model, batch: model(batch).square().mean())
    specimen = zoo.make(name, batch=8).in_doubles()
    return specimen.model, specimen.batch, capture(specimen.model, specimen.batch, specimen.loss)


@functools.cache
def compiled(strategy, name="mixture"):
    model, batch, graph = captured("recycler" if strategy.startswith("recycled") else name)
    program = find(strategy)(graph, STRATEGIES[strategy]).compile()
    return model, batch, graph, program, json.loads(program.to_json())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_program_of_every_strategy_comes_back(strategy):
    """Read with the graph that was captured, though the strategy may have rewritten it."""
    _, _, graph, program, data = compiled(strategy, name="gpt")
    again = from_json(json.dumps(data, indent=1), graph)
    assert again == program
    assert json.loads(again.to_json()) == data


def test_what_becomes_of_a_plan_after_it_was_compiled_is_not_written():
    _, _, graph = captured("mixture")
    plan = find("single")(graph, 2)
    program = plan.compile()
    plan.assign(graph.ops[0], 1)
    assert from_json(program.to_json(), graph) == program


def damaged(data, *path, change):
    """The program with one value changed; `change` is given what holds the value and its key."""
    data = copy.deepcopy(data)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return data


def repeat(holder, key):
    holder[key].append(holder[key][0])


def invert(holder, key):
    holder[key] = not holder[key]


def empty(holder, key):
    holder[key] = []


def runs_backward(data):
    """The nodes that read a gradient, and the segments of all nodes that run backward."""
    nodes = [i for i, node in enumerate(data["nodes"]) if node[0] == "backward"]
    return [i for i in nodes if any(data["nodes"][i][8])], {data["nodes"][i][3] for i in nodes}


@pytest.mark.parametrize("strategy", ["single", "zero", "pipeline"])
def test_a_damaged_program_is_refused(strategy, refused):
    _, _, graph, _, data = compiled(strategy)
    nodes, segments = runs_backward(data)
    changes = [(("stored", name), repeat) for name in data["stored"]]
    changes += [(("nodes", i, 8), empty) for i in nodes]
    changes += [(("nodes", i, 8, 0), empty) for i in nodes if data["nodes"][i][8][0]]
    for i in segments:
        changes += [(("segments", i, "entries", j, 5), invert) for j in range(len(data["segments"][i]["entries"]))]
        changes += [(("segments", i, "exits", j, 3), invert) for j in range(len(data["segments"][i]["exits"]))]
    changes += [((key,), dict.pop) for key in data]
    assert len(changes) > 30
    for path, change in changes:
        sentence = refused(from_json, json.dumps(damaged(data, *path, change=change)), graph)
        assert "compile the plan again" in sentence or "not a program" in sentence
        assert len(sentence) < 500


def places(value, path=()):
    """The paths to all values within a value of JSON."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def damage(data, draw, kinds):
    """Damage the data in one place, and say where and how."""
    path = draw.choice(kinds[draw.choice(list(kinds))])
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    key, value = path[-1], holder[path[-1]]
    how = draw.choice(["drop", "change", *(["repeat", "swap"] if isinstance(holder, list) else ["rename"])])
    if how == "drop":
        del holder[key]
    elif how == "repeat":
        holder.insert(key, copy.deepcopy(value))
    elif how == "swap":
        other = draw.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif how == "rename":
        holder[draw.choice([*holder, f"{key}x"])] = holder.pop(key)
    elif isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = draw.choice([value + 1, value - 1, -value, 10**9, 0.5, str(value), None])
    else:
        holder[key] = draw.choice([None, 0, [], {}, f"{value}x"[:20], "1/2"])
    return how, path


def check_damages(strategy, name, count, seed):
    """Damage a program so many times; what is not refused computes the same."""
    model, batch, graph, program, data = compiled(strategy, name)
    kinds = {}  # else most damage would be to the nodes, which are most of the text
    for path in places(data):
        kinds.setdefault((tuple(key for key in path if isinstance(key, str))[:2], len(path)), []).append(path)
    draw = random.Random(seed)
    whole = program.run_local(batch, state=state_of(model))
    refusals = 0
    for _ in range(count):
        changed = copy.deepcopy(data)
        how = damage(changed, draw, kinds)
        try:
            again = from_json(json.dumps(changed), graph)
        except InputError:
            refusals += 1
            continue
        if again != program:
            found = again.run_local(batch, state=state_of(model))
            for field in ("outputs", "gradients", "buffers"):
                torch.testing.assert_close(getattr(found, field), getattr(whole, field), msg=f"{how} {field}")
    assert refusals > count // 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_damage_changes_what_a_program_computes(strategy):
    check_damages(strategy, "mixture", 20, 0)


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["mixture", "gpt"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_damage_of_thousands_changes_what_a_program_computes(strategy, name):
    check_damages(strategy, name, 300, 1)


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
