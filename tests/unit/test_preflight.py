"""What cannot run is refused before a process starts, in one sentence that names the task."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import rota
from rota.cluster.device import Cluster, Device
from rota.errors import InputError
from rota.execute import preflight
from rota.runtime import first_step
from rota.strategies import base
from rota.strategies.base import _FACTORIES, _USERS, find, with_microbatches
from rota.testing.models import GPT

ROWS = torch.randint(0, 32, (24, 9), generator=torch.Generator().manual_seed(1))


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def task_of(**changes):
    return rota.Task(
        **(
            {
                "name": "one",
                "model": lambda: GPT(vocabulary=32, context=8, width=16, depth=2, heads=2, dropout=0.0),
                "data": lambda: rota.Data(train=ROWS, batch_size=8),
                "loss": loss,
                "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
                "steps": 3,
            }
            | changes
        )
    )


def cluster_of(devices=2, memory_bytes=2**30):
    devices = [Device(kind="cpu", index=i, memory_bytes=memory_bytes, cores=(i,)) for i in range(devices)]
    return Cluster(devices=tuple(devices))


def checked(task, cluster=None, strategy=None):
    cluster = cluster or cluster_of()
    return ready(task, cluster=cluster, strategy=strategy).widths["one"]


def ready(*tasks, cluster=None, strategy=None, strict=False):
    sweep = preflight.resolve(rota.Sweep(tasks=tasks), strategy=strategy)
    return preflight.ready(sweep, cluster or cluster_of(), strict=strict)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("tensors", "there is no strategy 'tensors'; choose one of"),
        ("tensor(4)", "needs 4 devices"),
        ("tensor(2, colour=1)", "does not take these knobs"),
        ("tensor(f(x))", "plain values"),
        ("2 + 2", "cannot be read"),
        ("data(**{'a': 1})", "by name"),
        ("tensor(", "cannot be read"),
        ("single * data(2)", "stands alone"),
        ("data * tensor", "give the degree of all but one"),
        ("data(3)", "needs 3 devices"),
        ("data(0)", "at least 1"),
        ("tensor('two')", "whole number"),
        ("pipeline(2, microbatches=64)", "cannot be cut into 64 micro-batches"),
        ("pipeline(2, order='sideways')", "sideways"),
        ("recycled", "no passes that repeat"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused(refused, strategy, words):
    assert words in refused(checked, task_of(), strategy=strategy)


def test_a_plan_that_does_not_fit_into_memory_is_refused(refused):
    sentence = refused(checked, task_of(strategy="data"), cluster_of(memory_bytes=20_000))
    assert "'one' cannot run as data" in sentence


@pytest.mark.parametrize(
    ("changes", "devices", "width"),
    [
        ({}, 2, 2),
        ({}, 1, 1),
        ({"strategy": "single"}, 2, 1),
        ({"strategy": "tensor(2)"}, 2, 2),
        ({"strategy": "data"}, 4, 4),
        ({"strategy": "data", "devices": 3}, 4, 3),
        ({"strategy": "coshard(2)"}, 2, 1),
        ({"strategy": "data(2) * tensor(2)"}, 4, 4),
        ({"strategy": "torch_ddp"}, 2, 2),
    ],
)
def test_how_many_devices_a_task_gets(changes, devices, width):
    assert checked(task_of(**changes), cluster_of(devices)) == width


def test_auto_tasks_share_the_devices():
    tasks = [task_of(name=name) for name in "abc"]
    assert preflight.widths(rota.Sweep(tasks=tasks), cluster_of(8)) == dict.fromkeys("abc", 2)
    assert preflight.widths(rota.Sweep(tasks=tasks), cluster_of(2)) == dict.fromkeys("abc", 1)


@pytest.mark.parametrize(
    ("strategies", "devices", "objective", "matters"),
    [
        (["data"], 2, "makespan", False),
        (["single", "single"], 2, "cost", False),
        (["single", "single"], 1, "makespan", False),
        (["single", "single"], 1, "completion", True),
        (["data", "single"], 2, "makespan", True),
        (["auto"], 2, "makespan", True),
    ],
)
def test_what_tasks_take_matters_only_where_there_is_something_to_decide(strategies, devices, objective, matters):
    tasks = [replace(task_of(strategy=one), name=f"t{i}") for i, one in enumerate(strategies)]
    cluster = cluster_of(devices)
    widths = preflight.widths(rota.Sweep(tasks=tuple(tasks)), cluster)
    assert preflight.undecided(tasks, cluster, widths, objective) is matters


def test_devices_and_a_degree_must_agree(refused):
    assert "is for 2 devices" in refused(checked, task_of(strategy="tensor(2)", devices=4), cluster_of(4))


@pytest.mark.parametrize("strategy", [3, None, ["tensor"]])
def test_a_strategy_is_a_name_or_a_function(refused, strategy):
    assert "strategy must be" in refused(task_of, strategy=strategy)


# ---- strategies of users ----


@pytest.fixture
def registered():
    """Forgets what a test registers."""
    before = dict(_FACTORIES)
    yield
    _FACTORIES.clear()
    _FACTORIES.update(before)
    _USERS.clear()


def test_a_registered_strategy_is_found_by_its_name_with_knobs(registered):
    @rota.strategy
    def mine(graph, devices, *, first=1, microbatches=1):
        plan = rota.Plan(graph, devices=devices, microbatches=microbatches)
        plan.assign(graph.ops[:first], 0)
        plan.assign(graph.ops[first:], 1)
        return plan

    assert checked(task_of(strategy="mine")) == 2
    assert checked(task_of(strategy="mine(first=4)")) == 2
    assert checked(task_of(strategy=mine)) == 2
    graph = first_step.first_graph(task_of())
    assert with_microbatches(find("mine(first=3)"), 2)(graph, 2).microbatches == 2


def test_a_strategy_that_leaves_an_op_unplaced_is_refused(refused, registered):
    @rota.strategy
    def forgetful(graph, devices):
        plan = rota.Plan(graph, devices=devices)
        plan.assign(graph.ops[:-1], 0)
        return plan

    sentence = refused(checked, task_of(strategy="forgetful"))
    assert "forgetful" in sentence
    assert "no device" in sentence


def test_what_a_strategy_raises_and_returns_is_told(refused, registered):
    @rota.strategy
    def broken(graph, devices):
        return graph.ops[10_000]

    assert "broken raised IndexError" in refused(checked, task_of(strategy="broken"))

    @rota.strategy
    def empty(graph, devices):
        return None

    assert "must return a rota.Plan" in refused(checked, task_of(strategy="empty"))


def test_a_name_of_rota_cannot_be_taken_and_an_own_one_can_be_written_again(refused, registered):
    def data(graph, devices):
        return None

    assert "already a strategy named 'data'" in refused(rota.strategy, data)
    for _ in range(2):

        @rota.strategy
        def again(graph, devices):
            return None


class EntryPoint:
    """What a package that brings a strategy registers."""

    value = "elsewhere:mine"

    def __init__(self, name, load):
        self.name, self.load = name, load


def test_a_package_brings_a_strategy(refused, registered, monkeypatch):
    def first(graph, devices, *, device=0):
        plan = rota.Plan(graph, devices=devices)
        plan.assign(graph.ops, device)
        return plan

    points = [EntryPoint("elsewhere", lambda: first)]
    monkeypatch.setattr(base.importlib.metadata, "entry_points", lambda *, group: points)
    base._load_entry_points.cache_clear()
    assert checked(task_of(strategy="elsewhere(device=1)")) == 2
    assert "elsewhere" in base.names()

    def broken():
        raise ImportError("no module named lost")

    points = [EntryPoint("lost", broken)]
    base._load_entry_points.cache_clear()
    assert "'lost'" in refused(find, "data")
    monkeypatch.undo()
    base._load_entry_points.cache_clear()


def test_tasks_that_differ_in_their_seed_are_planned_once(monkeypatch):
    seen = []
    real = first_step.first_step
    monkeypatch.setattr(first_step, "first_step", lambda task: seen.append(task.name) or real(task))
    one = task_of(name="one", strategy="data")
    other = replace(one, name="other", seed=5)
    ready(one, other)
    assert seen == ["one"]


class Stubborn(torch.nn.Linear):
    """Asks for a number in the middle, which no graph has."""

    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum().item() > 0 else y


def stubborn(name, **changes):
    fields = {
        "model": lambda: Stubborn(4, 4),
        "data": lambda: rota.Data(train=torch.rand(16, 4), batch_size=8),
        "loss": lambda model, rows: model(rows).square().mean(),
    }
    return task_of(name=name, **(fields | changes))


@pytest.mark.parametrize("strategy", ["data", "zero(stage=3)", "pipeline", "data(2)"])
def test_a_model_that_cannot_be_captured_runs_on_one_device_and_the_others_as_asked(strategy):
    found = ready(stubborn("odd"), task_of(), stubborn("twin", seed=3), strategy=strategy)
    assert found.widths == {"odd": 1, "one": 2, "twin": 1}
    assert [task.strategy == "single" for task in found.sweep] == [True, False, True]
    assert [note.split(":")[0] for note in found.notes] == ["odd", "twin"]
    for words in ("it runs on one device", "instead of as", "cannot be captured", "torch_ddp", "--strict"):
        assert words in found.notes[0]


def test_a_task_that_says_itself_how_many_devices_it_gets_runs_on_one_if_it_cannot_be_captured():
    found = ready(stubborn("odd", strategy=rota.strategies.data(2), devices=2))
    assert found.widths == {"odd": 1}
    assert found.sweep["odd"].devices is None


def test_strict_refuses_a_model_that_cannot_be_captured(refused):
    told = refused(ready, stubborn("odd"), task_of(), strategy="data", strict=True)
    assert "task 'odd' cannot run as data: the model cannot be captured" in told


def test_strict_refuses_also_what_workers_plan(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = refused(ready, stubborn("odd"), strategy="spill", strict=True)
    assert "task 'odd' cannot run as spill: the model cannot be captured" in told
    assert list(tmp_path.iterdir()) == []
    assert ready(task_of(), strategy="spill", strict=True).notes == ()


def test_what_makes_no_plan_needs_no_graph(monkeypatch):
    found = ready(stubborn("odd"), stubborn("twin"), strategy="torch_ddp", strict=True)
    assert (found.widths, found.notes) == ({"odd": 2, "twin": 2}, ())


def test_the_strategy_is_part_of_what_a_run_tells_and_not_of_what_it_trains():
    from rota.execute.identity import describe, digest

    one, other = task_of(strategy="data"), task_of(strategy=rota.strategies.tensor(2), devices=2)
    assert describe(one)["strategy"] == "data"
    assert describe(other)["strategy"] == "tensor(2)"
    assert digest(rota.Sweep(tasks=[one])) == digest(rota.Sweep(tasks=[other]))


def test_refusals_are_input_errors():
    with pytest.raises(InputError):
        checked(task_of(), strategy="nothing")


@pytest.mark.parametrize("strategy", ["tensor", "zero"])
def test_an_optimizer_that_needs_whole_parameters_is_refused_where_they_are_cut(refused, strategy):
    adafactor = task_of(strategy=strategy, optimizer=lambda model: torch.optim.Adafactor(model.parameters()))
    assert "Adafactor looks at whole parameters" in refused(checked, adafactor)
    assert checked(replace(adafactor, strategy="data")) == 2


class Own(torch.optim.AdamW):
    """Of which nothing is known."""


def hooked(model):
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *arguments: None)
    return optimizer


@pytest.mark.parametrize("make", [lambda model: Own(model.parameters()), hooked])
@pytest.mark.parametrize("strategy", ["zero", "pipeline"])
def test_an_optimizer_of_which_nothing_is_known_gets_everything_or_is_refused(refused, make, strategy):
    assert "use data" in refused(checked, task_of(strategy=strategy, optimizer=make))
    assert checked(task_of(strategy="data", optimizer=make)) == 2


def test_a_plan_for_other_devices_than_the_task_has_is_refused(refused, registered):
    @rota.strategy
    def more(graph, devices):
        plan = rota.Plan(graph, devices=4)
        plan.assign(graph.ops, 3)
        return plan

    assert "for 4 devices, and the task has 2" in refused(checked, task_of(strategy="more"))


def with_generator(model, rows):
    return loss(model, rows) * torch.rand((), generator=torch.Generator().manual_seed(1))


def of_sparse(model, rows):
    return torch.sparse.mm(rows.float().to_sparse(), torch.ones(9, 1)).sum() * loss(model, rows)


@pytest.mark.parametrize(
    ("own", "words"), [(with_generator, "torch.Generator"), (of_sparse, "sparse tensor")], ids=["generator", "sparse"]
)
def test_what_no_graph_can_hold_moves_one_task_and_not_the_sweep(own, words):
    found = ready(task_of(name="odd", loss=own), task_of(name="usual"), strategy="data")
    assert [str(task.strategy) for task in found.sweep] == ["single", "data"]
    (note,) = found.notes
    assert words in note
    assert "one device" in note


def test_a_model_on_which_a_strategy_of_rota_fails_runs_on_one_device(monkeypatch):
    def fails(strategy, graph, devices):
        raise NotImplementedError("no such op")

    monkeypatch.setattr(type(find("data")), "__call__", fails)
    found = ready(task_of(), strategy="data")
    assert str(found.sweep.tasks[0].strategy) == "single"
    assert "cannot plan the ops of its model (NotImplementedError: no such op)" in found.notes[0]
