"""`Sweep` and `grid`: which tasks come out, and what is said when something is wrong with them."""

from __future__ import annotations

import functools

import pytest

import rota
from rota.errors import InputError
from rota.sweep import Sweep, grid


@pytest.fixture(scope="module")
def task(make_task):
    def gpt(lr, depth=1):
        return make_task(f"gpt-d{depth}-lr{lr:g}")

    return gpt


# ---- Sweep ----


def test_a_sweep_keeps_the_order_of_its_tasks_and_finds_them_by_name(make_task):
    tasks = [make_task(name) for name in ("c", "a", "b")]
    sweep = Sweep(tasks=tasks)
    assert sweep.tasks == tuple(tasks)
    assert list(sweep) == tasks
    assert len(sweep) == 3
    assert sweep["a"] is tasks[1]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("progress", "no"),
        ("retry_failed", 1),
        ("allow_changes", "yes"),
        ("profile", 0),
        ("strict", "no"),
        ("retries", -1),
        ("retries", True),
        ("storage", 5),
        ("out", 5),
        ("shards", 5),
        ("strategy", 5),
        ("strategy", "zz("),
        ("objective", "x" * 500),
        ("cluster", "local"),
    ],
)
def test_an_option_of_a_run_that_is_none_is_refused_before_anything_starts(option, value, make_task, refused):
    sentence = refused(rota.run, Sweep(tasks=[make_task("a")]), **{option: value})
    assert option in sentence
    assert len(sentence) < 300


@pytest.mark.parametrize("options", [{"devices": "2"}, {"devices": True}, {"memory": 5.5}, {"address": 5}])
def test_devices_of_another_type_are_refused(options, refused):
    assert next(iter(options)) in refused(rota.ray, **options)
    if "address" not in options:
        assert next(iter(options)) in refused(rota.local, **options)


def test_a_sweep_needs_a_task(refused):
    assert "no tasks" in refused(Sweep, tasks=())
    assert "at least one" in refused(Sweep, tasks=[])


def test_two_tasks_of_one_name_are_refused_and_the_name_is_said(make_task, refused):
    sentence = refused(Sweep, tasks=[make_task("gpt"), make_task("b"), make_task("gpt")])
    assert "'gpt'" in sentence
    assert "name" in sentence
    assert "distinguishes" in sentence


@pytest.mark.parametrize(("one", "other"), [("gpt", "GPT"), ("Run-A", "run-a")])
def test_names_that_differ_only_in_case_are_refused(one, other, make_task, refused):
    assert repr(other) in refused(Sweep, tasks=[make_task(one), make_task(other)])


@pytest.mark.parametrize("stranger", ["gpt", None, 3, {"name": "a"}])
def test_what_is_not_a_task_is_refused(stranger, make_task, refused):
    sentence = refused(Sweep, tasks=[make_task(), stranger])
    assert "rota.Task" in sentence
    assert type(stranger).__name__ in sentence


@pytest.mark.parametrize("tasks", [None, 3])
def test_tasks_that_are_not_a_list_are_refused(tasks, refused):
    assert "task" in refused(Sweep, tasks=tasks)


def test_one_task_without_a_list_is_refused(make_task, refused):
    assert "task" in refused(Sweep, tasks=make_task())


@pytest.mark.parametrize("name", ["../x", "a/b", "/abs", "..", "a" * 300, 7])
def test_a_sweep_name_that_cannot_be_a_folder_is_refused(name, make_task, refused):
    assert repr(name)[:50] in refused(Sweep, tasks=[make_task()], name=name)


def test_an_unknown_task_is_an_input_error_that_lists_some_known_ones(make_task, refused):
    sweep = Sweep(tasks=[make_task(f"t{i}") for i in range(8)])
    sentence = refused(sweep.__getitem__, "ghost")
    assert "'ghost'" in sentence
    assert "t0, t1, t2, t3, t4, t5, ..." in sentence
    assert "t6" not in sentence
    assert "..." not in refused(Sweep(tasks=[make_task("only")]).__getitem__, "ghost")


# ---- grid ----


def test_a_grid_calls_the_function_with_every_combination_in_order(task):
    sweep = grid(task, lr=[1e-3, 3e-4], depth=[2, 4, 6])
    assert [one.name for one in sweep] == [
        *["gpt-d2-lr0.001", "gpt-d4-lr0.001", "gpt-d6-lr0.001"],
        *["gpt-d2-lr0.0003", "gpt-d4-lr0.0003", "gpt-d6-lr0.0003"],
    ]


def test_a_grid_fills_in_the_settings(task):
    sweep = grid(task, lr=[0.5], depth=[2, 4])
    assert [one.settings for one in sweep] == [{"lr": 0.5, "depth": 2}, {"lr": 0.5, "depth": 4}]


def test_a_grid_leaves_settings_that_the_function_gave(make_task):
    sweep = grid(lambda lr: make_task(f"a{lr}", settings={"own": 1}), lr=[1])
    assert sweep.tasks[0].settings == {"own": 1}


def test_a_grid_without_axes_is_one_task(make_task):
    assert len(grid(lambda: make_task())) == 1


def test_a_grid_takes_any_iterable_as_an_axis(task):
    sweep = grid(task, lr=(x / 2 for x in (1, 2)), depth=range(2, 4))
    assert len(sweep) == 4


def test_a_grid_takes_anything_that_can_be_called(task):
    assert [one.name for one in grid(functools.partial(task, depth=3), lr=[1])] == ["gpt-d3-lr1"]


@pytest.mark.parametrize("axis", ["adam", 3, None, 0.5])
def test_an_axis_that_is_not_a_list_is_refused_with_the_right_spelling(axis, task, refused):
    sentence = refused(grid, task, lr=axis)
    assert "lr must be a list of values" in sentence
    assert f"lr=[{axis!r}]" in sentence


@pytest.mark.parametrize("axis", [[], (), {}, iter(())])
def test_an_axis_without_values_is_refused_by_name(axis, task, refused):
    sentence = refused(grid, task, lr=[1.0], depth=axis)
    assert "depth has no values" in sentence
    assert "at least one" in sentence


def test_a_grid_of_something_that_is_no_function_is_refused(make_task, refused):
    sentence = refused(grid, make_task(), lr=[1])
    assert "function that returns a rota.Task" in sentence
    assert "not Task" in sentence


def test_a_function_that_raises_is_named_with_the_values_it_was_called_with(refused):
    def gpt(lr, depth):
        raise RuntimeError("no such depth")

    sentence = refused(grid, gpt, lr=[0.1], depth=[7])
    assert "gpt(lr=0.1, depth=7)" in sentence
    assert "RuntimeError: no such depth" in sentence


def test_the_exception_of_the_function_is_kept_as_the_cause():
    def gpt(lr):
        raise RuntimeError("no such lr")

    with pytest.raises(InputError) as caught:
        grid(gpt, lr=[1])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_function_that_raises_several_lines_still_gives_one_sentence(refused):
    def gpt(lr):
        raise ValueError("first line\nsecond line")

    refused(grid, gpt, lr=[1])


def test_a_function_that_lacks_an_argument_is_refused(task, refused):
    sentence = refused(grid, task, learning_rate=[0.1])
    assert "gpt(learning_rate=0.1)" in sentence
    assert "TypeError" in sentence


@pytest.mark.parametrize("returned", [None, "a", {}])
def test_a_function_that_returns_something_else_is_refused_by_type(returned, refused):
    def gpt(lr):
        return returned

    sentence = refused(grid, gpt, lr=[1])
    assert "gpt(lr=1)" in sentence
    assert f"returned {type(returned).__name__}" in sentence
    assert "rota.Task" in sentence


def test_a_wrong_task_inside_a_grid_keeps_its_own_sentence(make_task, refused):
    def gpt(steps):
        return make_task("gpt", steps=steps)

    sentence = refused(grid, gpt, steps=[5, 0])
    assert "task 'gpt': steps must be a whole number" in sentence


def test_a_grid_whose_names_do_not_tell_the_tasks_apart_is_refused(make_task, refused):
    assert "'same'" in refused(grid, lambda lr: make_task("same"), lr=[1, 2])
