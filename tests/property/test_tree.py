"""Any nested state comes back exactly: types, order, bits and sharing."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.state.tree import flatten, unflatten

DTYPES = st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    tensor = torch.randint(0, 100, shape, generator=generator).to(draw(DTYPES))
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


KEYS = st.one_of(
    st.sampled_from(["a", "b", "a.b", "b.a", "", "'", "$tensor", "$tuple", "$pairs", "0", "1"]),
    st.text(max_size=4),
    st.integers(-3, 3),
    st.none(),
    st.booleans(),
    st.tuples(st.integers(0, 2), st.text(max_size=2)),
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | tensors()
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "a.b"]), inner, max_size=3)
        | inner.map(lambda one: [one, one])  # the same object twice
    ),
    max_leaves=16,
)


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    elif isinstance(a, float):
        assert repr(a) == repr(b)  # to the last bit, but for the payload of NaN, which nothing depends on
    elif isinstance(a, dict):
        assert [(type(key), key) for key in a] == [(type(key), key) for key in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def leaves_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [leaf for item in items for leaf in leaves_of(item)]


@settings(max_examples=200)
@given(tree=TREES)
def test_any_tree_comes_back_exactly(tree):
    skeleton, found = flatten(tree)
    assert_same(unflatten(json.loads(json.dumps(skeleton)), found), tree)


@settings(max_examples=100)
@given(tree=TREES)
def test_tensors_that_are_one_stay_one_and_others_stay_apart(tree):
    skeleton, found = flatten(tree)
    before, after = leaves_of(tree), leaves_of(unflatten(skeleton, found))
    full = [i for i, tensor in enumerate(before) if tensor.numel()]
    for i in full:
        for j in full:
            assert (before[i] is before[j]) == (after[i] is after[j])


@settings(max_examples=50)
@given(tree=TREES)
def test_flattening_changes_neither_the_tree_nor_its_tensors(tree):
    before = json.dumps(flatten(tree)[0])
    copies = [leaf.clone() for leaf in leaves_of(tree)]
    flatten(tree)
    assert json.dumps(flatten(tree)[0]) == before
    for copy, leaf in zip(copies, leaves_of(tree), strict=True):
        assert_same(copy, leaf)
