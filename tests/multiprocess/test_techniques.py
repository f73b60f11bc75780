"""Techniques that rota does not know join the choice; those that raise or lie are left out, and it is said."""

import re

import pytest
import torch

import rota
from rota.errors import InputError, TaskError
from rota.runtime.alone import Alone
from rota.runtime.executor import Eager
from rota.techniques import Found, Ready, checked, forget_technique, label_of, ready, register_technique
from rota.testing.techniques import check_technique


class Plain:
    """The leader trains as plain PyTorch does, and the others wait."""

    name = "everyone"

    def search(self, task, devices):
        return Found(knobs={"depth": 2}, step_s=0.01, memory_bytes=1000)

    def execute(self, task, devices, knobs):
        assert knobs == {"depth": 2}
        return Alone(task, gang=devices)


class Careless(Plain):
    name = "careless"

    def execute(self, task, devices, knobs):
        for parameter in task.model.parameters():
            torch.nn.init.zeros_(parameter)
        return Eager(task)


class Raising(Plain):
    name = "raising"

    def search(self, task, devices):
        raise ValueError("no idea")


class Lying(Plain):
    """Promises the fastest step, and needs more memory than there is."""

    name = "lying"

    def search(self, task, devices):
        return Found(knobs={}, step_s=1e-6, memory_bytes=10)

    def execute(self, task, devices, knobs):
        raise MemoryError("out of memory")


@pytest.fixture
def registering():
    names = []

    def register(technique):
        names.append(technique.name)
        return register_technique(technique)

    yield register
    for name in names:
        forget_technique(name)


@pytest.mark.timeout(120)
def test_a_technique_that_trains_the_model_conforms():
    assert [found.step_s for found in check_technique(Plain())] == [0.01, 0.01]


@pytest.mark.timeout(120)
def test_one_that_trains_another_model_does_not():
    with pytest.raises(TaskError, match="careless on 1 devices trains another model"):
        check_technique(Careless(), devices=1)


def task(steps=400):
    rows = torch.randn(64, 8)
    return rota.Task(
        name="t",
        model=lambda: torch.nn.Linear(8, 8),
        data=lambda: rota.Data(train=rows, batch_size=8),
        loss=lambda model, rows: model(rows).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        steps=steps,
    )


@pytest.mark.timeout(120)
def test_one_that_raises_or_lies_is_left_out_and_the_task_goes_on(registering, tmp_path, monkeypatch):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path / "cache"))
    registering(Raising())
    registering(Lying())
    sweep = rota.Sweep(tasks=(task(),))
    cluster = rota.local(devices=2, memory="1GiB")
    result = rota.run(sweep, cluster=cluster, out=tmp_path / "run", progress=False)
    assert result.tasks[0].state == "finished", result.tasks[0].reason
    said = " ".join(text for _, _, text in result.record.notices)
    assert "raising is left out on 1 devices: no idea" in said
    assert re.search(r"lying\(\)( on \d devices)? is left out", said)  # at its trial, or when it ran


def test_labels_come_back_with_their_knobs(registering):
    registering(Plain())
    label = label_of("everyone", {"depth": 2, "word": "a b"})
    assert ready(label).knobs == {"depth": 2, "word": "a b"}
    assert str(ready(label)) == label
    assert ready("data(2)") is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (7, "must return a Found or None"),
        (Found(knobs={"a": object()}, step_s=1.0, memory_bytes=1), "no plain values"),
        (Found(knobs={"a": float("inf")}, step_s=1.0, memory_bytes=1), "cannot be written as a call"),
        (Found(knobs={"class": 1}, step_s=1.0, memory_bytes=1), "cannot be written as a call"),
        (Found(knobs={}, step_s=True, memory_bytes=1), "which cannot be"),
        (Found(knobs={}, step_s=float("nan"), memory_bytes=1), "which cannot be"),
        (Found(knobs={}, step_s=-1.0, memory_bytes=1), "which cannot be"),
        (Found(knobs={}, step_s=1.0, memory_bytes=-1), "which cannot be"),
    ],
)
def test_what_a_search_says_is_checked(found, words):
    with pytest.raises(InputError, match=words):
        checked(found, "it")


def test_a_technique_needs_a_name_and_two_methods():
    with pytest.raises(InputError, match="needs a name"):
        register_technique(object())
    with pytest.raises(InputError, match="has no method execute"):
        register_technique(type("T", (), {"name": "t", "search": lambda self, task, devices: None})())


def test_a_technique_has_no_plan():
    with pytest.raises(InputError, match="has no plan"):
        Ready(technique=Plain(), knobs={})(None, 2)
