"""`Task` and `Data` check themselves: every mistake is an InputError that says what, where, and what to do."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from rota.task import Data, Task, is_map_style

COUNTS = ["steps", "epochs", "valid_every", "checkpoint_every", "accumulate"]
NOT_COUNTS = [0, -1, 1.0, 2.5, True, False, "3", math.nan, [1]]


# ---- names ----


@pytest.mark.parametrize(
    "name",
    [
        *["", ".", "..", "../x", "a/../b", "/abs", "a/b", "a\\b", "a/"],
        *[".hidden", "-rf", "_x", "=x", " a", "a ", "a b", "a\n", "a\x00b", "a\tb"],
        *["é", "а", "a:b", "a*", "a?", "~", "$HOME", "a" * 129],
        *[None, 7, b"a", ("a",)],
    ],
)
def test_a_name_that_cannot_be_a_folder_is_refused_and_quoted(name, make_task, refused):
    sentence = refused(make_task, name)
    assert repr(name)[:50] in sentence
    assert "letters, digits" in sentence
    assert "folder" in sentence


@pytest.mark.parametrize("name", ["a", "7", "A" * 128, "gpt-d2-lr0.001", "lr=1e-3,depth=2", "a.b_c+d@e", "a..b"])
def test_a_name_of_letters_digits_and_safe_signs_is_kept(name, make_task):
    assert make_task(name).name == name


@pytest.mark.parametrize("name", ["a" * 500, "( " * 500])
def test_of_a_long_text_only_the_beginning_and_the_end_are_quoted(name, make_task, refused):
    assert len(refused(make_task, name)) < 300
    assert len(refused(make_task, "a" * 128, steps=name)) < 300
    assert len(refused(make_task, "a" * 128, balance=name)) < 300
    assert len(refused(make_task, "a" * 128, strategy=name + "(")) < 300


# ---- how long ----


def test_steps_and_epochs_together_are_refused(make_task, refused):
    sentence = refused(make_task, "gpt", steps=3, epochs=2)
    assert "'gpt'" in sentence
    assert "either steps or epochs" in sentence
    assert "both" in sentence


def test_neither_steps_nor_epochs_is_refused(make_task, refused):
    sentence = refused(make_task, "gpt", steps=None)
    assert "'gpt'" in sentence
    assert "either steps or epochs" in sentence
    assert "neither" in sentence


def test_epochs_may_stand_instead_of_steps(make_task):
    task = make_task(epochs=3)
    assert (task.steps, task.epochs) == (None, 3)


# ---- numbers ----


@pytest.mark.parametrize("value", NOT_COUNTS)
@pytest.mark.parametrize("field", COUNTS)
def test_a_count_must_be_a_whole_number_of_at_least_one(field, value, make_task, refused):
    changes = {field: value} | ({"steps": None} if field == "epochs" else {})
    sentence = refused(make_task, "gpt", **changes)
    assert "task 'gpt'" in sentence
    assert field in sentence
    assert repr(value) in sentence
    assert "whole number of at least 1" in sentence


def test_optional_counts_may_be_none(make_task):
    task = make_task(valid_every=None, checkpoint_every=None)
    assert (task.valid_every, task.checkpoint_every, task.accumulate) == (None, None, 1)


def test_accumulate_none_is_refused(make_task, refused):
    assert "accumulate" in refused(make_task, accumulate=None)


@pytest.mark.parametrize("value", [0, -1.5, math.nan, math.inf, -math.inf, True, "1", [1.0], 1j])
@pytest.mark.parametrize("field", ["clip_norm", "setup_timeout_s", "step_timeout_s"])
def test_an_amount_must_be_a_positive_finite_number(field, value, make_task, refused):
    sentence = refused(make_task, "gpt", **{field: value})
    assert "task 'gpt'" in sentence
    assert field in sentence
    assert repr(value) in sentence
    assert "positive number" in sentence


@pytest.mark.parametrize("field", ["clip_norm", "setup_timeout_s", "step_timeout_s"])
def test_an_amount_may_be_whole_or_fractional(field, make_task):
    assert getattr(make_task(**{field: 3}), field) == 3
    assert getattr(make_task(**{field: 0.25}), field) == 0.25


def test_an_amount_beyond_floats_is_refused_like_any_other(make_task, refused):
    assert "clip_norm" in refused(make_task, clip_norm=10**400)


@pytest.mark.parametrize("field", ["setup_timeout_s", "step_timeout_s"])
def test_a_timeout_of_none_is_refused(field, make_task, refused):
    assert field in refused(make_task, **{field: None})


@pytest.mark.parametrize("value", [-1, 2**32, 1.0, True, "0", None])
def test_a_seed_must_be_a_whole_number_that_numpy_takes(value, make_task, refused):
    sentence = refused(make_task, "gpt", seed=value)
    assert "task 'gpt'" in sentence
    assert "seed" in sentence
    assert repr(value) in sentence


@pytest.mark.parametrize("value", [0, 1, 2**32 - 1])
def test_a_seed_that_is_accepted_seeds_every_generator(value, make_task):
    seed = make_task(seed=value).seed
    np.random.RandomState(seed)
    torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("value", ["float16", "fp32", "", None, torch.float32])
def test_an_unknown_precision_is_refused_and_the_known_are_listed(value, make_task, refused):
    sentence = refused(make_task, "gpt", precision=value)
    assert "task 'gpt'" in sentence
    assert repr(value) in sentence
    assert "float32, float64, bfloat16" in sentence


# ---- functions ----


@pytest.mark.parametrize("value", [None, 3, "model", torch.zeros(1)])
@pytest.mark.parametrize("field", ["model", "data", "optimizer", "loss"])
def test_a_factory_must_be_a_function(field, value, make_task, refused):
    sentence = refused(make_task, "gpt", **{field: value})
    assert "task 'gpt'" in sentence
    assert f"{field} must be a function, not {type(value).__name__}" in sentence
    assert f"{field}=lambda" in sentence


def test_a_module_is_no_factory(make_task, refused):
    sentence = refused(make_task, "gpt", model=torch.nn.Linear(2, 2))
    assert "task 'gpt': model is a Linear and not a function that makes one; write model=lambda" in sentence


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, functools.partial(torch.optim.AdamW, lr=0.1)])
def test_an_optimizer_of_parameters_is_no_function_of_the_model(optimizer, make_task, refused):
    sentence = refused(make_task, optimizer=optimizer)
    assert "AdamW takes parameters; write optimizer=lambda model: torch.optim.AdamW(model.parameters()" in sentence


@pytest.mark.parametrize("loss", [torch.nn.functional.mse_loss, torch.nn.MSELoss(), torch.nn.MSELoss])
def test_a_loss_of_predictions_is_no_function_of_the_model(loss, make_task, refused):
    assert "takes predictions and targets; write loss=lambda model, batch" in refused(make_task, loss=loss)


@pytest.mark.parametrize(
    ("field", "function", "words"),
    [
        ("model", torch.nn.Linear, "model is called with nothing, and Linear does not take that"),
        ("model", lambda width: None, "missing a required argument: 'width'); write model=lambda: ..."),
        ("data", lambda seed: None, "data is called with nothing"),
        ("optimizer", lambda: None, "optimizer is called with the model"),
        ("lr_schedule", torch.optim.lr_scheduler.StepLR, "lr_schedule is called with the optimizer, and StepLR"),
        ("loss", lambda model, x, y: None, "loss is called with the model and the batch"),
        ("loss", functools.partial(lambda model, batch: None, 1), "write loss=lambda model, batch: ..."),
    ],
)
def test_a_function_that_takes_something_else_is_refused(field, function, words, make_task, refused):
    assert words in refused(make_task, **{field: function})


class Callable:
    def __call__(self, model, batch):
        return None

    def method(self, model, batch, scale=1):
        return None


@pytest.mark.parametrize(
    "loss",
    [
        Callable(),
        Callable().method,
        lambda *arguments: None,
        functools.partial(lambda scale, model, batch: None, 2),
        functools.partial(lambda model, batch, scale: None, scale=2),
    ],
)
def test_whatever_takes_what_it_is_given_is_a_function(loss, make_task):
    assert make_task(loss=loss).loss is loss


def test_a_class_is_a_factory_too(make_task):
    assert make_task(model=torch.nn.Identity).model is torch.nn.Identity


def test_a_schedule_that_is_not_a_function_is_refused(make_task, refused):
    sentence = refused(make_task, "gpt", lr_schedule=0.1)
    assert "task 'gpt'" in sentence
    assert "lr_schedule must be a function" in sentence


@pytest.mark.parametrize("cls", [Task, Data])
def test_tasks_and_data_are_frozen_and_take_keywords_only(cls, make_task):
    value = make_task() if cls is Task else Data(train=[1], batch_size=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.seed = 1
    with pytest.raises(TypeError):
        cls("a")


@pytest.mark.parametrize(
    "strategy", ["", "zz(", "a + b", "(" * 500, "tensor\0", "-" * 100_000, torch.nn.Linear, torch.nn.ReLU(), 5]
)
def test_what_no_strategy_can_be_is_refused_when_the_task_is_made(strategy, make_task, refused):
    sentence = refused(make_task, "gpt", strategy=strategy)
    assert sentence.startswith("task 'gpt': ")
    assert "strategy" in sentence
    assert len(sentence) < 250


def test_a_factory_of_strategies_is_no_strategy(make_task, refused):
    from rota.strategies import tensor

    assert "strategy is called with the graph and the devices" in refused(make_task, strategy=tensor)


def test_a_name_that_may_be_registered_later_is_taken(make_task):
    assert make_task(strategy="mine(2) * data").strategy == "mine(2) * data"


@pytest.mark.parametrize("value", [5, ["a"], None])
def test_settings_are_names_and_values(value, make_task, refused):
    assert "settings must be a dict" in refused(make_task, settings=value)


# ---- data ----


@pytest.mark.parametrize("field", ["shuffle", "drop_last"])
@pytest.mark.parametrize("value", ["no", 1, None, np.True_])
def test_a_flag_of_data_is_true_or_false(field, value, refused):
    assert f"rota.Data: {field} must be True or False" in refused(Data, train=[1], batch_size=1, **{field: value})


class Squares(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index * index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("value", NOT_COUNTS)
@pytest.mark.parametrize("field", ["batch_size", "valid_batch_size"])
def test_a_batch_size_must_be_a_whole_number_of_at_least_one(field, value, refused):
    sentence = refused(Data, **({"train": [1, 2, 3], "batch_size": 2} | {field: value}))
    assert "rota.Data" in sentence
    assert f"{field} must be a whole number of at least 1" in sentence
    assert repr(value) in sentence


@pytest.mark.parametrize("empty", [[], (), torch.zeros(0, 3), Squares(0), TensorDataset(torch.zeros(0, 2))])
@pytest.mark.parametrize("field", ["train", "valid"])
def test_an_empty_dataset_is_refused_by_name(field, empty, refused):
    sentence = refused(Data, **({"train": [1, 2], "batch_size": 1} | {field: empty}))
    assert f"the {field} dataset is empty" in sentence
    assert "at least one sample" in sentence


@pytest.mark.parametrize("dataset", [[1, 2, 3], torch.zeros(3, 2), Squares(3)])
def test_a_batch_larger_than_the_dataset_is_refused_with_both_numbers(dataset, refused):
    sentence = refused(Data, train=dataset, batch_size=4)
    assert "batch_size (4)" in sentence
    assert "3 samples" in sentence
    assert "at most 3" in sentence


def test_a_batch_as_large_as_the_dataset_is_taken():
    assert Data(train=[1, 2, 3], batch_size=3).batch_size == 3


def test_a_validation_batch_may_be_larger_than_the_validation_data():
    assert Data(train=[1, 2], valid=[1], batch_size=2, valid_batch_size=64).valid_batch_size == 64


def test_a_dataset_with_an_index_needs_a_batch_size(refused):
    sentence = refused(Data, train=[1, 2, 3])
    assert "batch_size is missing" in sentence
    assert "number of samples" in sentence


def test_an_iterable_may_yield_whole_batches():
    assert Data(train=Stream()).batch_size is None


@pytest.mark.parametrize("value", [None, 5, object()])
def test_what_is_neither_a_dataset_nor_an_iterable_is_refused(value, refused):
    sentence = refused(Data, train=value, batch_size=1)
    assert "train must be a dataset" in sentence
    assert type(value).__name__ in sentence
    sentence = refused(Data, train=[1], valid=5, batch_size=1)
    assert "valid must be a dataset" in sentence


@pytest.mark.parametrize("field", ["train", "valid"])
def test_a_loader_is_no_dataset_where_batches_are_made_of_it(field, refused):
    fields = {"train": [1, 2], "batch_size": 1} | {field: DataLoader([1, 2], batch_size=2)}
    sentence = refused(Data, **fields)
    assert f"{field} is a DataLoader, which makes batches itself" in sentence
    assert f"{field}=loader.dataset" in sentence
    assert Data(train=DataLoader([1, 2], batch_size=2)).batch_size is None
    assert Data(**(fields | {field: DataLoader([1, 2], batch_size=None)})).batch_size == 1


@pytest.mark.parametrize("field", ["train", "valid"])
def test_columns_by_name_are_no_dataset(field, refused):
    sentence = refused(Data, **({"train": [1, 2], "batch_size": 1} | {field: {"x": torch.zeros(3)}}))
    assert f"{field} is a dict with 'x', and a dataset has samples 0, 1, 2" in sentence


def test_a_dict_of_samples_by_number_is_a_dataset():
    assert len(Data(train={0: 1, 1: 2}, batch_size=1).train) == 2


def test_a_collate_that_is_not_a_function_is_refused(refused):
    assert "collate must be a function, not int" in refused(Data, train=[1], batch_size=1, collate=3)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ([1], True),
        (torch.zeros(2), True),
        (np.zeros(2), True),
        (Squares(2), True),
        (TensorDataset(torch.zeros(2)), True),
        (Stream(), False),
        (iter([1]), False),
        ({1, 2}, False),
        (DataLoader([1, 2]), False),
    ],
)
def test_a_dataset_is_map_style_if_it_has_a_length_and_an_index(dataset, expected):
    assert is_map_style(dataset) is expected


def test_an_iterable_dataset_that_tells_its_length_is_not_map_style():
    assert not is_map_style(SizedStream())


def test_validation_data_with_an_index_needs_a_batch_size_too(refused):
    sentence = refused(Data, train=Stream(), valid=[1, 2, 3])
    assert "valid_batch_size" in sentence
