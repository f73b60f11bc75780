"""A batch is a tensor or a container: any mapping, and what PyTorch's pytree knows. The loss gets the type it has."""

import types
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import rota
from rota.errors import CaptureError, InputError
from rota.graph.batch import mapped
from rota.graph.run import run_graph
from rota.plan.cache import shape_of
from rota.profile.signature import signature_of
from rota.runtime.executor import placed
from rota.runtime.shares import share_of
from rota.runtime.training import Training
from rota.strategies import data
from rota.task import Data, Task
from rota.testing import plain

Pair = namedtuple("Pair", "x y")


class SubPair(Pair):
    """A namedtuple with methods."""


@dataclass
class Registered:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "samples"


pytree.register_pytree_node(
    Registered, lambda one: ([one.x, one.y], one.name), lambda values, name: Registered(*values, name=name)
)


class Encoding(UserDict):
    """As transformers' BatchEncoding: items are attributes, and there is more beside them."""

    def __init__(self, data=None, *, encodings=None):
        super().__init__(data or {})
        self.encodings = encodings

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Frozen(Mapping):
    """A mapping that cannot be written into, and whose constructor takes something else."""

    def __init__(self, pairs, kind):
        self._pairs = tuple(pairs)
        self.kind = kind

    def __getitem__(self, key):
        return dict(self._pairs)[key]

    def __iter__(self):
        return iter(dict(self._pairs))

    def __len__(self):
        return len(self._pairs)


class Named(dict):
    """A dict with attributes."""

    kind = ""


def named(x, y):
    made = Named(x=x, y=y)
    made.kind = "named"
    return made


class Rows(list):
    """A list with methods."""


def encoding_of_transformers(x, y):
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding({"x": x, "y": y})


def by_key(batch):
    return batch["x"], batch["y"]


def by_place(batch):
    return batch[0], batch[1]


def by_attribute(batch):
    return batch.x, batch.y


WAYS = {
    "dict": (lambda x, y: {"x": x, "y": y}, by_key),
    "nested": (lambda x, y: {"x": (x, None), "y": {"deep": [y]}, "n": 3}, lambda b: (b["x"][0], b["y"]["deep"][0])),
    "nested mappings": (lambda x, y: Encoding({"x": [Encoding({"x": x})], "y": y}), lambda b: (b.x[0].x, b.y)),
    "OrderedDict": (lambda x, y: OrderedDict(x=x, y=y), by_key),
    "defaultdict": (
        lambda x, y: defaultdict(list, x=x, y=y),
        lambda b: (b["x"], b["y"]) if b.default_factory is list else None,
    ),
    "UserDict": (lambda x, y: UserDict(x=x, y=y), by_key),
    "an encoding": (lambda x, y: Encoding({"x": x, "y": y}, encodings=[1]), by_attribute),
    "BatchEncoding": (encoding_of_transformers, by_attribute),
    "a dict with attributes": (named, lambda b: by_key(b) if b.kind == "named" else None),
    "a frozen mapping": (lambda x, y: Frozen([("x", x), ("y", y)], 1), lambda b: by_key(b) if b.kind else None),
    "a mapping proxy": (lambda x, y: types.MappingProxyType({"x": x, "y": y}), by_key),
    "a chain of mappings": (lambda x, y: ChainMap({"x": x}, {"y": y}), by_key),
    "a namedtuple": (Pair, by_attribute),
    "a namedtuple's child": (SubPair, by_attribute),
    "a deque": (lambda x, y: deque([x, y]), by_place),
    "a list's child": (lambda x, y: Rows([x, y]), by_place),
    "a registered class": (Registered, lambda b: (b.x, b.y) if b.name == "samples" else None),
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))


def loss_of(way):
    make, take = way
    kind = type(make(X, Y))

    def loss(model, batch):
        assert type(batch) is kind, f"the loss got a {type(batch).__name__}"
        x, y = take(batch)
        return (model(x) - y).pow(2).mean()

    return loss


def collated(way):
    make, _ = way

    def collate(samples):
        return make(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))

    return collate


def task_of(way, **changes):
    pairs = list(zip(X, Y, strict=True))
    fields = {
        "name": "a",
        "model": lambda: nn.Linear(4, 2),
        "data": lambda: Data(train=pairs, valid=pairs[:3], batch_size=4, collate=collated(way)),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": loss_of(way),
        "steps": 3,
    }
    return Task(**(fields | changes))


def test_it_is_captured_and_runs_under_a_plan(way):
    model, batch, loss = nn.Linear(4, 2), way[0](X, Y), loss_of(way)
    state = dict(model.named_parameters())
    expected = loss(model, batch)
    expected.backward()
    graph = rota.capture(model, batch, loss)
    assert torch.equal(run_graph(graph, state, batch)["loss"], expected)
    other = way[0](X.roll(1, 0), Y)
    assert torch.equal(run_graph(graph, state, other)["loss"], loss(model, other))
    found = data(2)(graph, 2).compile().run_local(batch, state=state)
    assert torch.allclose(found.outputs["loss"], expected)
    assert torch.allclose(found.gradients["weight"], model.weight.grad)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_it_trains_as_in_the_plain_loop(way, precision):
    task = task_of(way, precision=precision)
    expected = plain.train(task)
    training = Training(task, device=torch.device("cpu"))
    while training.step < training.total_steps:
        training.train_batch()
    training.validate()
    assert training.last["valid/loss"] == expected.history[-1]["valid/loss"]
    assert all(map(torch.equal, training.model.parameters(), expected.model.parameters()))


def test_moving_it_leaves_the_users_own_alone(way):
    batch = way[0](X, Y)
    parts = Training(task_of(way, precision="float64"), device=torch.device("cpu")).parts
    moved = placed(batch, parts)
    assert type(moved) is type(batch)
    assert [one.dtype for one in way[1](moved)] == [torch.float64] * 2
    assert way[1](batch)[0] is X
    assert way[1](batch)[1] is Y


def test_it_is_cut_by_samples(way):
    make, take = way
    batch = make(X, Y)
    share, samples, total = share_of(batch, rank=1, size=3)
    assert (type(share), samples, total) == (type(batch), 3, 8)
    assert torch.equal(take(share)[0], X[2:5])
    assert torch.equal(take(share)[1], Y[2:5])


def test_what_programs_are_kept_for_is_the_same_for_other_values_and_another_for_other_shapes(way):
    make, _ = way
    assert shape_of(make(X, Y)) == shape_of(make(X + 1, Y))
    assert hash(shape_of(make(X, Y))) == hash(shape_of(make(X + 1, Y)))
    assert shape_of(make(X, Y)) != shape_of(make(X[:4], Y[:4]))


def test_tasks_of_the_same_batches_cost_the_same(way):
    training = Training(task_of(way), device=torch.device("cpu"))
    make, _ = way
    assert signature_of(training, make(X, Y)) == signature_of(training, make(X + 1, Y))
    assert signature_of(training, make(X, Y)) != signature_of(training, make(X[:4], Y[:4]))


def test_a_batch_that_names_one_tensor_twice_is_captured_as_two():
    """Labels are often the inputs themselves, until padding is masked out of them."""
    model = nn.Linear(4, 4)

    def loss(model, batch):
        return (model(batch["x"]) - batch["y"]).pow(2).mean()

    graph = rota.capture(model, {"x": X, "y": X}, loss)
    other = {"x": X, "y": X + 1}
    assert torch.equal(run_graph(graph, dict(model.named_parameters()), other)["loss"], loss(model, other))


def test_a_batch_of_another_structure_is_refused_with_its_place():
    graph = rota.capture(nn.Linear(4, 2), Encoding({"x": X, "y": [Y]}), lambda m, b: (m(b.x) - b.y[0]).pow(2).mean())
    state = dict(nn.Linear(4, 2).named_parameters())
    run_graph(graph, state, {"y": (Y,), "x": X})  # another container with the same items will do
    for batch, words in [
        ({"x": X}, "the batch must be a mapping with 'x', 'y'"),
        ({"x": X, "y": [Y, Y]}, r"the batch\['y'\] must be a list or tuple with 1 part"),
        ({"x": X, "y": [3]}, r"the batch\['y'\]\[0\] must be a tensor of float32, not int"),
        ({"x": X, "y": [Y.double()]}, r"the batch\['y'\]\[0\] must be of float32"),
        (X, "the batch must be a mapping"),
    ]:
        with pytest.raises(InputError, match=words):
            run_graph(graph, state, batch)


def test_a_long_text_that_has_changed_is_seen():
    graph = rota.capture(nn.Linear(4, 2), {"x": X, "t": "a" * 300}, lambda m, b: m(b["x"]).sum() * len(b["t"]))
    with pytest.raises(InputError, match=r"the batch\['t'\] was 'aaa.* capture it again"):
        run_graph(graph, dict(nn.Linear(4, 2).named_parameters()), {"x": X, "t": "a" * 301})


@dataclass
class Unknown:
    x: torch.Tensor


def test_a_class_that_nothing_is_known_of_is_refused_with_its_place_and_a_remedy():
    """What it holds would become constants of the graph."""
    with pytest.raises(CaptureError, match=r"the batch\['z'\] is a Unknown.*register_pytree_node"):
        rota.capture(nn.Linear(4, 2), {"x": X, "z": Unknown(X)}, lambda m, b: m(b["z"].x).sum())


class Lazy(Mapping):
    """Makes its items when it is asked for them, so that nobody can put others in their place."""

    def __getitem__(self, key):
        return {"x": X + 0}[key]

    def __iter__(self):
        return iter("x")

    def __len__(self):
        return 1


def test_a_container_that_cannot_be_made_with_other_tensors_is_refused():
    with pytest.raises(InputError, match=r"Lazy .*register_pytree_node"):
        mapped(lambda one: one.double(), Lazy())
