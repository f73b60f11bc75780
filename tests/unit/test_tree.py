"""`flatten` and `unflatten`: the particular trees that JSON and safetensors alone could not hold."""

from __future__ import annotations

import collections
import enum
import json
import math

import numpy as np
import pytest
import torch

from rota.errors import CheckpointError
from rota.state.tree import flatten, unflatten


def round_trip(tree):
    skeleton, tensors = flatten(tree)
    return unflatten(json.loads(json.dumps(skeleton)), tensors)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        True,
        0,
        -(2**80),
        "text",
        "",
        [],
        (),
        {},
        [()],
        ([],),
        {"a": ()},
        (1, (2, [3, (4,)])),
        {1: "one", 2: "two"},
        {None: 1, True: 2, 2.5: 3, "text": 4, (1, "a"): 5},
        {"$tensor": 1},
        {"$tuple": [1]},
        {"$pairs": [[1, 2]]},
        {"$tensor": {"$tuple": {"$pairs": ("$tensor",)}}},
        {"state": {0: {"step": 1}}, "param_groups": [{"betas": (0.9, 0.999), "params": [0]}]},
    ],
)
def test_a_tree_comes_back_with_the_same_types(tree):
    back = round_trip(tree)
    assert back == tree
    assert repr(back) == repr(tree)  # == does not tell True from 1


@pytest.mark.parametrize("value", [0.1, 1e-320, -0.0, math.inf, -math.inf, math.nan, 1.7976931348623157e308])
def test_every_float_comes_back_to_the_bit(value):
    back = round_trip({"x": value})["x"]
    assert np.float64(back).tobytes() == np.float64(value).tobytes()


DTYPES = [
    *[torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    *[torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64],
    *[torch.bool, torch.float8_e4m3fn, torch.float8_e5m2],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3,), (2, 3)], ids=str)
def test_a_tensor_of_any_type_and_shape_comes_back(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    back = round_trip([tensor])[0]
    assert back.dtype == dtype
    assert back.shape == shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_parameter_comes_back_without_its_graph():
    parameter = torch.nn.Parameter(torch.ones(2))
    back = round_trip({"w": parameter * 2})["w"]
    assert not back.requires_grad
    assert torch.equal(back, torch.full((2,), 2.0))


def test_a_tensor_in_two_places_is_kept_once_and_is_one_tensor_again():
    tensor = torch.arange(3.0)
    skeleton, tensors = flatten({"a": tensor, "b": [tensor, tensor.detach()]})
    assert len(tensors) == 1
    back = unflatten(skeleton, tensors)
    assert back["a"] is back["b"][0] is back["b"][1]


def test_tied_weights_of_a_model_are_kept_once():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert len(flatten(dict(model.state_dict()))[1]) == 1


def test_tensors_that_are_only_equal_stay_apart():
    skeleton, tensors = flatten({"a": torch.zeros(2), "b": torch.zeros(2)})
    assert len(tensors) == 2
    assert unflatten(skeleton, tensors)["a"] is not unflatten(skeleton, tensors)["b"]


def test_views_of_one_memory_keep_their_own_shapes_and_types():
    base = torch.arange(6.0)
    tree = {
        "all": base,
        "head": base[:2],
        "square": base.view(2, 3),
        "turned": base.view(2, 3).t(),
        "bits": base.view(torch.int32),
    }
    back = round_trip(tree)
    for name, tensor in tree.items():
        assert torch.equal(back[name], tensor)
        assert back[name].dtype == tensor.dtype


def test_empty_tensors_of_different_shape_do_not_become_one():
    back = round_trip([torch.zeros(0, 2), torch.zeros(3, 0), torch.zeros(0, 2, dtype=torch.int64)])
    assert [(tuple(t.shape), t.dtype) for t in back] == [
        ((0, 2), torch.float32),
        ((3, 0), torch.float32),
        ((0, 2), torch.int64),
    ]


@pytest.mark.parametrize(
    "keys",
    [
        [("a", "b"), ("a.b",)],
        [("a.b",), ("a", "b")],
        [("a", "b", "c"), ("a.b", "c"), ("a", "b.c"), ("a.b.c",)],
        [("", "a"), ("a",), (".a",)],
        [("a", "b"), ("a.b",), ("a.b'",)],
        [(1,), ("1",)],
    ],
)
def test_tensors_whose_paths_read_the_same_stay_apart(keys):
    tree: dict = {}
    for number, path in enumerate(keys):
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = torch.tensor(number)
    back = round_trip(tree)
    for number, path in enumerate(keys):
        node = back
        for key in path:
            node = node[key]
        assert int(node) == number


def test_the_order_of_keys_is_kept():
    assert list(round_trip({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]
    assert list(round_trip({3: 1, 1: 2, 2: 3})) == [3, 1, 2]


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (Color.RED, 1),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.uint8(7), 7),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array(3), 3),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.Counter([2, 2]), {2: 2}),
    ],
)
def test_values_that_only_look_different_become_plain_ones(value, kept):
    back = round_trip([value])[0]
    assert back == kept
    assert type(back) is type(kept)


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), b"bytes", 1j, np.zeros(2), len, torch.float32, torch.nn.Identity()]
)
def test_what_cannot_be_kept_is_refused_with_its_path_and_type(value, refused):
    tree = {"optimizer": {"state": {0: {"history": [1, (2, value)]}}}}
    sentence = refused(flatten, tree, error=CheckpointError)
    assert "optimizer.state.0.history.1.1" in sentence
    assert type(value).__name__ in sentence
    assert "state_dict()" in sentence


def test_a_sparse_tensor_is_kept_or_refused_with_its_path():
    tensor = torch.eye(2).to_sparse()  # such as the gradient of Embedding(sparse=True)
    try:
        back = round_trip({"gradients": {"embedding": tensor}})
    except CheckpointError as error:
        assert "gradients.embedding" in str(error)  # noqa: PT017
    else:
        assert torch.equal(back["gradients"]["embedding"].to_dense(), tensor.to_dense())


def test_a_lazily_conjugated_tensor_is_not_taken_for_its_base():
    base = torch.tensor([1 + 2j, 3 - 4j])
    back = round_trip({"base": base, "conjugate": base.conj()})
    assert torch.equal(back["conjugate"], base.conj())


def test_a_long_double_is_kept_or_refused_with_its_path(refused):
    assert "best" in refused(flatten, {"best": np.longdouble(1)}, error=CheckpointError)


@pytest.mark.parametrize("tree", [object(), [object()]], ids=["root", "in a list"])
def test_a_refusal_at_the_root_is_still_a_sentence(tree, refused):
    assert refused(flatten, tree, error=CheckpointError)[0].isalnum()
