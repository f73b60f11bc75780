"""A task under training: its mistakes as sentences, its state as a whole. (Exactness is tested in tests/numerics.)"""

from __future__ import annotations

import math
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from rota.errors import CheckpointError, DivergedError, TaskError
from rota.memory.building import Building
from rota.runtime.executor import Eager, Room
from rota.runtime.training import Training
from rota.state import checkpoint
from rota.task import Data, Task
from rota.testing import plain

CPU = torch.device("cpu")
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def quadratic(model, batch):
    return model(batch).pow(2).mean()


def task_of(**changes):
    fields = {
        "name": "a",
        "model": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
        "data": lambda: Data(train=X, valid=X[:5], batch_size=3),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
        "loss": quadratic,
    }
    if "epochs" not in changes:
        fields["steps"] = 8
    return Task(**(fields | changes))


def training_of(**changes):
    return Training(task_of(**changes), device=CPU)


def failure(**changes):
    """How a task fails when it is set up, trained and validated."""

    def train_to_the_end():
        training = training_of(**changes)
        while training.step < training.total_steps:
            training.train_batch()
            if training.unvalidated:
                training.validate()

    with pytest.raises(TaskError) as caught:
        train_to_the_end()
    assert "\n" not in str(caught.value)
    return caught.value


# ---- several processes ----


@pytest.mark.parametrize("ask", [lambda training: training.state_dict(), lambda training: training.validate()])
def test_where_the_model_left_memory_in_one_process_all_choose_how_to_run(tmp_path, ask):
    """Their devices may differ, and to choose is something that they do together."""
    building = Building(tmp_path, budget_bytes=2**30)
    room = Room(memory_bytes=2**30, before_bytes=0, folder=tmp_path, building=building)
    chosen, asked = [], []

    def choose(parts, batch):
        chosen.append(batch)
        return Eager(parts)

    def in_any(flag):
        asked.append(flag)
        return True

    ask(Training(task_of(), device=CPU, choose=choose, room=room, in_any=in_any))
    assert (len(chosen), asked) == (1, [False])
    ask(Training(task_of(), device=CPU, choose=choose, room=room))
    assert len(chosen) == 1


# ---- factories ----


@pytest.mark.parametrize(
    ("field", "what", "expected"),
    [
        ("model", "the model factory", "Module"),
        ("data", "the data factory", "Data"),
        ("optimizer", "the optimizer factory", "Optimizer"),
        ("lr_schedule", "the lr_schedule factory", "LRScheduler"),
    ],
)
def test_a_factory_of_the_wrong_type_is_named_with_both_types(field, what, expected):
    for wrong in (None, 3, "x"):
        error = failure(**{field: lambda *arguments, wrong=wrong: wrong})
        assert str(error) == f"{what} returned {type(wrong).__name__}; it must return a {expected}"


def boom(*arguments):
    raise ValueError("no such width")


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("model", "the model factory"),
        ("data", "the data factory"),
        ("optimizer", "the optimizer factory"),
        ("lr_schedule", "the lr_schedule factory"),
        ("loss", "the loss function"),
    ],
)
def test_a_function_that_raises_is_named_with_its_file_and_line(field, what):
    error = failure(**{field: boom})
    line = boom.__code__.co_firstlineno + 1
    assert str(error) == f"{what} raised ValueError: no such width (test_training.py, line {line})"
    assert f'test_training.py", line {line}, in boom' in error.traceback
    assert "rota/runtime" not in error.traceback
    assert error.traceback.endswith("ValueError: no such width\n")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (lambda: Data(train=[], batch_size=1), "the train dataset is empty"),
        (lambda: Data(train=X, batch_size=13), "batch_size (13) is larger than the training dataset (12 samples)"),
        (lambda: Data(train=X, batch_size=0), "batch_size must be a whole number"),
    ],
)
def test_wrong_data_is_the_data_factorys_sentence(data, says):
    error = failure(data=data)
    assert str(error).startswith("the data factory: rota.Data: ")
    assert says in str(error)


def test_factories_are_called_in_order_and_each_is_announced_first():
    called: list[str] = []

    def watch(what, *, ours=False):
        called.append(what)

    task = task_of(
        model=lambda: called.append("model") or nn.Linear(4, 2),
        data=lambda: called.append("data") or Data(train=X, batch_size=2),
        optimizer=lambda m: called.append("optimizer") or torch.optim.SGD(m.parameters(), lr=0.1),
        lr_schedule=lambda o: called.append("lr_schedule") or lr_scheduler.ConstantLR(o),
    )
    Training(task, device=CPU, watch=watch)
    assert called == [
        *["the model factory", "model", "moving the model to its device", "the data factory", "data"],
        *["the optimizer factory", "optimizer", "the lr_schedule factory", "lr_schedule", "opening the training data"],
    ]


def test_the_seed_is_set_before_the_model_is_made():
    drawn = []

    def model():
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        return nn.Linear(4, 2)

    for seed in (1, 1, 2):
        training_of(model=model, seed=seed)
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


# ---- length ----


def test_epochs_are_counted_in_batches_and_accumulation():
    assert training_of(epochs=2).total_steps == 8
    assert training_of(epochs=3, accumulate=5).total_steps == 2
    assert training_of(epochs=1, accumulate=100).total_steps == 1
    assert training_of(steps=7).total_steps == 7


def test_epochs_of_an_iterable_without_a_length_are_refused():
    error = failure(epochs=2, data=lambda: Data(train=(x for x in X), batch_size=3))
    assert "epochs needs training data with a length" in str(error)
    assert "give steps instead" in str(error)


def test_epochs_of_an_iterable_with_a_length_are_counted():
    assert training_of(epochs=2, data=lambda: Data(train=DataLoader(X, batch_size=5))).total_steps == 6


# ---- what the factories return must go together ----

OTHER = nn.Linear(4, 2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda m: sgd(OTHER.parameters()), "of which all parameters are not the model's"),
        (lambda m: sgd([p.detach().clone().requires_grad_() for p in m.parameters()]), "of which all parameters"),
        (lambda m: sgd([*m.parameters(), *OTHER.parameters()]), "of which 2 of 6 parameters are not the model's"),
        (lambda m: sgd([{"params": []}]), "without parameters"),
    ],
)
def test_an_optimizer_of_something_else_is_refused(optimizer, words):
    error = str(failure(optimizer=optimizer))
    assert error.startswith("the optimizer factory returned an optimizer ")
    assert words in error
    assert "the model that it is called with" in error


def test_a_schedule_of_another_optimizer_is_refused():
    other = lambda optimizer: lr_scheduler.StepLR(sgd(OTHER.parameters()), 1)  # noqa: E731
    assert "a schedule of another optimizer" in str(failure(lr_schedule=other))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": lambda m, b: OTHER(b).mean()},
        {"optimizer": lambda m: sgd(m[0].parameters()), "loss": lambda m, b: m[2](b).mean()},
    ],
)
def test_a_step_that_would_train_nothing_is_refused(changes):
    assert "the loss gave no gradient to any parameter of the optimizer" in str(failure(**changes))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.LazyLinear(2), "has no shape yet"),
        (lambda: nn.Linear(4, 2, device="meta"), "is on the meta device and has no values"),
    ],
)
def test_a_model_without_values_is_refused(model, words):
    assert words in str(failure(model=model))


@pytest.mark.parametrize("made", [torch.utils.data.TensorDataset(X), DataLoader(X), [1, 2]])
def test_data_that_is_no_data_is_told_how_to_become_it(made):
    told = str(failure(data=lambda: made))
    assert told.endswith("it must return a Data, as in rota.Data(train=dataset, batch_size=...)")


@pytest.mark.parametrize("field", ["train", "valid"])
def test_a_collation_that_returns_nothing_is_told(field):
    def collate(samples):
        return torch.stack(list(samples)) if field == "valid" and len(samples) == 3 else None

    error = str(failure(data=lambda: Data(train=X, valid=X[:2], batch_size=3, collate=collate), steps=1))
    assert f"collate returned None for {3 if field == 'train' else 2} samples" in error


# ---- the loss ----


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda m, b: None, "a NoneType; return the loss, and if the model computes it, give the model labels"),
        (lambda m, b: 0.5, "a float; return the tensor itself, for .item() and float() drop its gradient"),
        (lambda m, b: "low", "a str"),
        (lambda m, b: [quadratic(m, b)], "a list; return the loss alone, or a dict that also has what else is to be"),
        (lambda m, b: (quadratic(m, b), m(b)), "a tuple; return the loss alone, or a dict that also has"),
        (lambda m, b: {"loss": 0.5}, "a float; return the tensor itself"),
        (lambda m, b: {}, "a dict without it; return the loss"),
        (lambda m, b: {"accuracy": quadratic(m, b)}, "a dict without it; return the loss"),
    ],
)
def test_a_loss_that_is_no_tensor_is_refused(loss, found):
    told = str(failure(loss=loss))
    assert told.startswith(f"the loss function must return a scalar tensor, or a dict with one as 'loss', not {found}")


class Output(dict):
    """As transformers' ModelOutput: a dict of which the items are attributes, without those that are None."""

    def __init__(self, loss, logits):
        super().__init__({"logits": logits} | ({} if loss is None else {"loss": loss}))
        self.loss = loss


Answer = namedtuple("Answer", "loss logits")


@pytest.mark.parametrize("kind", [Output, Answer])
def test_a_models_output_is_no_loss_and_its_loss_is(kind):
    assert str(failure(loss=lambda m, b: kind(quadratic(m, b), m(b)))) == (
        f"the loss function returned a {kind.__name__}, which is a model's output; return its .loss"
    )
    assert str(failure(loss=lambda m, b: kind(None, m(b)))) == (
        f"the loss function returned a {kind.__name__} whose loss is None; if the model computes it, give the model "
        "labels, and return its .loss"
    )


def test_a_models_output_of_scalars_is_a_dict_of_metrics():
    loss = lambda m, b: Output(quadratic(m, b), m(b).mean())  # noqa: E731
    assert training_of(loss=loss).train_batch().keys() == {"train/loss", "train/logits"}


@pytest.mark.parametrize(
    ("loss", "kind"), [(lambda m, b: m(b).argmax(), "int64"), (lambda m, b: m(b).mean() * 1j, "complex64")]
)
def test_a_loss_of_a_kind_without_a_gradient_is_refused(loss, kind):
    assert f"the loss is of {kind}, which has no gradient" in str(failure(loss=loss))


def test_a_loss_that_is_no_scalar_is_refused_with_its_shape_and_a_remedy():
    error = failure(loss=lambda m, b: m(b))
    assert "must be a scalar, and has shape (3, 2)" in str(error)
    assert ".mean()" in str(error)
    assert "shape (0,)" in str(failure(loss=lambda m, b: torch.zeros(0)))


def test_a_loss_with_one_element_counts_as_a_scalar():
    assert training_of(loss=lambda m, b: quadratic(m, b).reshape(1, 1)).train_batch().keys() == {"train/loss"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"loss": lambda m, b: quadratic(m, b).detach()}, "detached"),
        ({"loss": lambda m, b: torch.tensor(1.0)}, "constant"),
        (
            {
                "model": lambda: nn.Linear(4, 2).requires_grad_(False),
                "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            },
            "frozen",
        ),
    ],
)
def test_a_loss_without_a_gradient_is_refused_with_a_remedy(changes, name):
    error = failure(**changes)
    assert "the loss has no gradient" in str(error), name
    assert "not frozen" in str(error)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [1, 3])
def test_a_loss_that_is_not_finite_ends_the_task_at_that_step(value, step):
    calls = []

    def loss(model, batch):
        calls.append(1)
        return quadratic(model, batch) * (value if len(calls) == step else 1.0)

    error = failure(loss=loss)
    assert isinstance(error, DivergedError)
    assert error.step == step
    assert f"training loss became {value} at step {step}" in str(error)


def test_a_loss_that_is_not_finite_inside_an_accumulated_step_counts_for_that_step():
    calls = []

    def loss(model, batch):
        calls.append(1)
        return quadratic(model, batch) * (math.nan if len(calls) == 5 else 1.0)

    assert failure(loss=loss, accumulate=2).step == 3


def test_a_validation_loss_that_is_not_finite_ends_the_task_at_the_step_before():
    def loss(model, batch):
        return quadratic(model, batch) * (1.0 if model.training else math.inf)

    error = failure(loss=loss, valid_every=2)
    assert isinstance(error, DivergedError)
    assert error.step == 2
    assert "validation loss became inf" in str(error)


def test_a_diverged_step_changes_nothing_of_the_model():
    training = training_of(loss=lambda m, b: quadratic(m, b) * math.nan)
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    with pytest.raises(DivergedError):
        training.train_batch()
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.model.state_dict().items())


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (torch.zeros(3), "shape (3,)"),
        (torch.zeros(0), "shape (0,)"),
        ("high", "not str"),
        (None, "not NoneType"),
        ([1.0], "not list"),
    ],
)
def test_a_metric_that_is_no_number_is_refused_by_name(metric, says):
    error = failure(loss=lambda m, b: {"loss": quadratic(m, b), "accuracy": metric})
    assert "the metric 'accuracy' must be a" in str(error)
    assert says in str(error)


def test_metrics_may_be_tensors_and_numbers_and_need_not_be_finite():
    def loss(model, batch):
        return {"loss": quadratic(model, batch), "a": torch.tensor(2), "b": 3, "c": True, "d": math.nan}

    metrics = training_of(loss=loss).train_batch()
    assert list(metrics) == ["train/loss", "train/a", "train/b", "train/c", "train/d"]
    assert [metrics["train/a"], metrics["train/b"], metrics["train/c"]] == [2.0, 3.0, 1.0]
    assert math.isnan(metrics["train/d"])


def test_metrics_are_means_over_the_accumulated_batches():
    numbers = iter([1.0, 4.0])
    training = training_of(accumulate=2, loss=lambda m, b: {"loss": quadratic(m, b), "n": next(numbers)})
    assert training.train_batch() is None
    assert training.step == 0
    assert training.train_batch()["train/n"] == 2.5
    assert training.step == 1


def test_an_error_of_the_dataset_is_said_as_reading():
    class Broken:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise OSError("disk gone")

    error = failure(data=lambda: Data(train=Broken(), batch_size=2))
    assert str(error).startswith("reading the training data raised OSError: disk gone (test_training.py, line")


def test_a_generator_that_is_used_up_is_said_with_a_remedy():
    error = failure(data=lambda: Data(train=(x for x in X), batch_size=6))
    assert "reading the training data: the training iterable was used up" in str(error)


def test_an_optimizer_that_needs_a_closure_is_refused_with_a_sentence():
    error = failure(optimizer=lambda m: torch.optim.LBFGS(m.parameters()))
    assert "the optimizer raised TypeError" in str(error)
    assert "closure" in str(error)


# ---- validation ----


def test_validation_is_due_every_so_many_steps_and_at_the_end():
    training = training_of(valid_every=3)
    due = []
    for _ in range(8):
        training.train_batch()
        due.append(training.unvalidated)
        if training.unvalidated:
            training.validate()
            assert not training.unvalidated
    assert due == [False, False, True, False, False, True, False, True]


def test_without_validation_data_none_is_due():
    training = training_of(data=lambda: Data(train=X, batch_size=3), valid_every=1)
    for _ in range(8):
        training.train_batch()
        assert not training.unvalidated


def test_validation_weighs_batches_by_their_samples():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.w

    training = training_of(
        model=First,
        data=lambda: Data(train=X, valid=torch.tensor([1.0, 2.0, 9.0]), batch_size=2),
        loss=lambda m, b: m(b).mean(),
    )
    assert training.validate() == {"valid/loss": 4.0}


def test_validation_turns_dropout_off_and_gradients_and_training_on_again():
    seen = []

    def loss(model, batch):
        seen.append((model.training, torch.is_grad_enabled()))
        return quadratic(model, batch)

    training = training_of(loss=loss)
    assert training.validate() == training.validate()
    assert training.model.training
    assert set(seen) == {(False, False)}
    training.train_batch()
    assert seen[-1] == (True, True)


def test_the_best_validation_is_kept_with_its_step():
    values = iter([3.0, 1.0, 2.0])
    now = [0.0]

    def loss(model, batch):
        return quadratic(model, batch) if model.training else torch.tensor(now[0])

    training = training_of(loss=loss, steps=3, valid_every=1)
    for _ in range(3):
        training.train_batch()
        now[0] = next(values)
        training.validate()
    assert training.best == {"loss": 1.0, "step": 2}
    assert training.last["valid/loss"] == 2.0


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupted_validation_changes_nothing(after):
    def loss(model, batch):
        torch.rand(3)  # a loss may draw random numbers in validation too
        return quadratic(model, batch)

    training = training_of(loss=loss, valid_every=1)
    training.train_batch()
    torch_before, best_before, last_before = torch.get_rng_state(), training.best, dict(training.last)
    answers = iter([False] * after + [True])
    assert training.validate(interrupted=lambda: next(answers)) is None
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert (training.best, training.last, training.unvalidated) == (best_before, last_before, True)
    assert training.model.training


def test_an_error_in_validation_is_said_as_such_and_leaves_the_model_in_training():
    def loss(model, batch):
        return quadratic(model, batch) if model.training else boom()

    training = training_of(loss=loss)
    with pytest.raises(TaskError, match="the loss function in validation raised ValueError: no such width"):
        training.validate()
    assert training.model.training


def test_validation_data_that_gives_no_batch_is_refused():
    training = training_of(data=lambda: Data(train=X, valid=iter([]), batch_size=3))
    with pytest.raises(TaskError, match="the validation dataset gave no batch"):
        training.validate()


# ---- saving and going on ----


def through_a_checkpoint(tree, tmp_path):
    return checkpoint.read(checkpoint.write(tmp_path / "checkpoints", tree))


def train(training, batches):
    """Train on so many batches, validating when it is due; every number that is reported."""
    reported = []
    for _ in range(batches):
        reported.append(training.train_batch())
        if training.unvalidated:
            reported.append(training.validate())
    return reported


def assert_goes_on(tmp_path, *, split, batches=8, **changes):
    """Saved after `split` batches and loaded into a fresh training, it goes on as if nothing had happened."""
    whole = training_of(**changes)
    expected = train(whole, batches)
    first = training_of(**changes)
    reported = train(first, split)
    tree = through_a_checkpoint(first.state_dict(), tmp_path)
    torch.manual_seed(999)
    second = training_of(**changes)
    second.load_state_dict(tree, notice=lambda text: None)
    reported += train(second, batches - split)
    assert reported == expected
    assert (second.step, second.batches, second.best, second.last) == (
        whole.step,
        whole.batches,
        whole.best,
        whole.last,
    )
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor), name


@pytest.mark.parametrize("split", range(9))
def test_it_goes_on_from_any_batch(tmp_path, split):
    assert_goes_on(tmp_path, split=split, valid_every=2, clip_norm=0.1)


@pytest.mark.parametrize("split", range(1, 8))
def test_it_goes_on_from_the_middle_of_an_accumulated_step(tmp_path, split):
    assert_goes_on(tmp_path, split=split, accumulate=3, steps=100)


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_it_goes_on_in_any_precision(tmp_path, precision):
    assert_goes_on(tmp_path, split=3, precision=precision)


OPTIMIZERS = [
    *["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam"],
    *["RMSprop", "Rprop", "SGD"],
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_goes_on_with_every_optimizer_of_torch(tmp_path, name):
    changes = {"optimizer": lambda m: getattr(torch.optim, name)(m.parameters(), lr=0.01)}
    if name == "Muon":  # only for matrices
        changes["model"] = lambda: nn.Linear(4, 2, bias=False)
    assert_goes_on(tmp_path, split=3, **changes)


SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 6]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1e9, threshold_mode="abs"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_goes_on_with_every_schedule_of_torch(tmp_path, name):
    assert_goes_on(tmp_path, split=5, valid_every=1, lr_schedule=SCHEDULES[name])


def test_a_schedule_on_plateau_steps_with_the_validation_loss():
    training = training_of(valid_every=2, lr_schedule=SCHEDULES["ReduceLROnPlateau"])
    rates = []
    for _ in range(8):
        train(training, 1)
        rates.append(training.optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] == 0.05
    assert rates[3] < 0.05


class Buffers(nn.Module):
    """Draws from every generator, and counts its calls in a buffer that state_dict does not have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        noise = random.gauss(0, 0.1) + float(np.random.standard_normal()) * 0.1
        return self.norm(self.linear(x)) * (1 + 0.1 * self.calls) + noise


@pytest.mark.parametrize("split", [1, 2, 5])
def test_it_goes_on_with_hidden_buffers_and_every_generator(tmp_path, split):
    assert_goes_on(tmp_path, split=split, model=Buffers, valid_every=2)


def shuffled_by_its_loader():
    return Data(train=DataLoader(X, batch_size=3, shuffle=True))


def test_it_goes_on_in_the_first_epoch_of_a_loader_that_shuffles(tmp_path):
    assert_goes_on(tmp_path, split=2, data=shuffled_by_its_loader)


def test_it_goes_on_in_a_later_epoch_of_a_loader_that_shuffles(tmp_path):
    assert_goes_on(tmp_path, split=6, data=shuffled_by_its_loader)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 2))},
        {"model": lambda: nn.Linear(4, 2)},
        {"optimizer": lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()])},
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_a_sentence(changes, refused):
    first = training_of()
    train(first, 2)
    other = training_of(**changes)
    sentence = refused(other.load_state_dict, first.state_dict(), notice=pytest.fail, error=CheckpointError)
    assert "does not fit the model or optimizer" in sentence
    assert "start a new run" in sentence


# ---- against the plain loop, where tests/numerics may not look ----


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


def assert_equals_plain(**changes):
    training = training_of(**changes)
    train(training, training.total_steps)
    expected = plain.train(task_of(**changes)).model.state_dict()
    for name, tensor in training.model.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def test_an_optimizer_of_a_part_of_the_model_equals_the_plain_loop():
    assert_equals_plain(model=TwoParts, optimizer=lambda m: torch.optim.SGD(m.head.parameters(), lr=0.1))


def test_clipping_with_an_optimizer_of_a_part_of_the_model_equals_the_plain_loop():
    assert_equals_plain(
        model=TwoParts, optimizer=lambda m: torch.optim.SGD(m.head.parameters(), lr=0.1), clip_norm=0.01
    )


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.w).abs()


def test_complex_parameters_train_as_in_the_plain_loop():
    assert_equals_plain(model=Complex)


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_complex_parameters_stay_complex_in_double_precision():
    assert training_of(model=Complex, precision="float64").model.w.is_complex()
