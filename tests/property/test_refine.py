"""Refined graphs: factors that fit, cuts that tile, and parts of every op of the zoo that make up the op."""

import functools
import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from rota.graph.capture import capture
from rota.graph.part import makes_of, reads_of
from rota.graph.refine import Refined, refine
from rota.graph.rules import occurrences
from rota.graph.run import run_op
from rota.plan.box import Box, even_widths, first_overlap, missing
from rota.testing import check_op, zoo

ZOO = [pytest.param(name, marks=pytest.mark.deep) if name in ("evoformer", "swin") else name for name in zoo.names()]
"""The largest take long."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A captured model, with what each op read when it ran."""

    refined: Refined
    reads: dict[str, list[torch.Tensor]] = field(repr=False)


def ran(model, batch, loss):
    graph = capture(model if any(True for _ in model.parameters()) else model.eval(), batch, loss)
    values = {**graph.constants, **dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    values.update(zip(graph.inputs, leaves, strict=True))
    reads = {}
    with torch.no_grad():
        for op in graph.ops:
            reads[op.name] = [values[name].clone() for name in occurrences(op)]
            values.update(zip(op.outputs, run_op(op, values), strict=True))
    return Ran(refined=refine(graph), reads=reads)


@functools.cache
def specimen(name):
    made = zoo.make(name)
    return ran(made.model, made.batch, made.loss)


# ---- what must hold for every refined graph ----


def tensors_of(refined, op):
    """Each tensor that an op reads or makes, with the dims of its factors."""
    frame = refined.frames[op.name]
    yield from zip(occurrences(op), frame.reads, strict=True)
    yield from ((name, names) for name, names in zip(op.outputs, frame.makes, strict=True) if names is not None)


def assert_factors_fit(refined):
    for name, tensor in refined.graph.tensors.items():
        factors = refined.factors[name]
        assert tuple(math.prod(dim) for dim in factors) == tensor.shape
        assert all(size > 1 for dim in factors for size in dim)
        assert len(refined.families[name]) == len(refined.shape(name))
    for op in refined.graph.ops:
        dims = refined.frames[op.name].dims
        for name, names in tensors_of(refined, op):
            assert tuple(dims[one].size for one in names) == refined.shape(name)
            assert tuple(dims[one].family for one in names) == refined.families[name]
            assert len(set(names)) == len(names)


def assert_cuts_tile(refined):
    """Whatever dim an op is cut along, its parts make each element once and read each element at least once."""
    for op in refined.graph.ops:
        frame = refined.frames[op.name]
        for dim in frame.dims.values():
            if dim.fixed:
                continue
            for widths in {even_widths(dim.size, 2), (1, dim.size - 1)}:
                parts = [{dim.name: (sum(widths[:i]), sum(widths[: i + 1]))} for i in range(len(widths))]
                made = list(zip(*(makes_of(frame, part) for part in parts), strict=True))
                read = list(zip(*(reads_of(frame, part) for part in parts), strict=True))
                for name, names, boxes in zip(op.outputs, frame.makes, made, strict=True):
                    assert dim.reduced != (dim.name in names), f"{op.name} along {dim.name}"
                    assert_tiles(refined.shape(name), boxes, whole=dim.reduced)
                for i, (name, names, boxes) in enumerate(zip(occurrences(op), frame.reads, read, strict=True)):
                    if i in frame.once and dim.reduced:
                        assert boxes[1:] == (None,) * (len(parts) - 1)
                    else:
                        assert_tiles(refined.shape(name), boxes, whole=dim.name not in names)


def assert_tiles(shape, boxes, *, whole):
    if whole:
        assert set(boxes) == {Box.whole(shape)}
    else:
        assert missing(Box.whole(shape), boxes) == ()
        assert first_overlap(boxes) is None
        assert len(set(boxes)) == len(boxes)


# ---- the zoo ----


@pytest.mark.parametrize("name", ZOO)
def test_factors_fit_and_cuts_tile_in_every_model(name):
    refined = specimen(name).refined
    assert_factors_fit(refined)
    assert_cuts_tile(refined)


CHECKED = set()


@pytest.mark.parametrize("name", ZOO)
def test_parts_of_every_op_of_every_model_make_up_the_op(name):
    model = specimen(name)
    refined = model.refined
    for op in refined.graph.ops:
        tensors = [*occurrences(op), *(one for one in op.outputs if one is not None)]
        key = str((op.target, op.args, op.kwargs, [refined.factors[one] for one in tensors]))
        for i, one in enumerate(tensors):
            key = key.replace(f"name='{one}'", f"{i}")
        if key not in CHECKED:
            CHECKED.add(key)
            check_op(refined, op.name, model.reads[op.name], parts=(2,))


def cuttable(name, pattern, kind):
    """The dims of the first such op that can be cut."""
    refined = specimen(name).refined
    op = next(refined.graph.find(kind=kind, name=pattern))
    return {dim.name: dim.size for dim in refined.frames[op.name].dims.values() if not dim.fixed}


def test_heads_are_found_through_a_fused_layer_and_its_views():
    assert cuttable("gpt", "blocks.0.qkv.*", "linear") == {"d0": 4, "d1": 12, "k": 16, "n.0": 3, "n.1": 2, "n.2": 8}
    assert cuttable("gpt", "blocks.0*", "scaled_dot_product_attention") == {"d0": 4, "h": 2, "l": 12, "f": 8}
    assert cuttable("gpt", "blocks.0.projection.*", "linear") == {"d0": 4, "d1": 12, "k.0": 2, "k.1": 8, "n": 16}
    families = specimen("gpt").refined.families
    heads = families["blocks.0.qkv.weight"][1]
    assert heads == families["blocks.0.projection.weight"][1] == families["blocks.0.qkv.bias"][1]
    assert cuttable("gpt2", "*h.0.attn.c_attn*", "addmm") == {
        "m.0": 4,
        "m.1": 12,
        "k": 16,
        "n.0": 3,
        "n.1": 2,
        "n.2": 8,
    }


# ---- dims that are cut along a factor, where the rule must know which indices a part has ----


class Factored(nn.Module):
    """A vocabulary, positions, groups and repeats that other views of the same tensors take apart."""

    def __init__(self, *, dropout):
        super().__init__()
        self.dropout = dropout
        self.words = nn.Embedding(6, 8, padding_idx=4)
        self.norm = nn.GroupNorm(4, 8)
        self.mix = nn.Conv1d(8, 8, 1, groups=4)

    def forward(self, index):
        x = self.words(index)
        q, k, v = (one.unsqueeze(1) for one in (x, x.tanh(), x.sigmoid()))
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout).squeeze(1)
        x = x.reshape(-1, 2, 3, 8).flip(1).flatten(1, 2)
        x = self.mix(self.norm(x.transpose(1, 2)))
        x = x.unflatten(1, (2, 2, 2)).sum(2).flatten(1, 2).repeat_interleave(2, 1).repeat(1, 3, 1)
        return x.square().sum() + self.words.weight.view(2, 3, 8).amax(0).sum()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_ops_are_cut_along_factors_of_their_dims(dropout):
    torch.manual_seed(0)
    found = ran(Factored(dropout=dropout), torch.randint(0, 6, (2, 6)), lambda model, index: model(index))
    cut = {op.kind: check_op(found.refined, op.name, found.reads[op.name]) for op in found.refined.graph.ops}
    assert {"v.0", "v.1"} <= set(cut["embedding"])
    assert {"l.0", "l.1"} <= set(cut["scaled_dot_product_attention"])
    assert {"g.0", "g.1"} <= set(cut["group_norm"])
    assert {"g.0", "g.1", "n"} <= set(cut["conv1d"])
    assert_factors_fit(found.refined)
    assert_cuts_tile(found.refined)


# ---- random chains of views and linear layers ----

WIDTHS = (2, 3, 4, 6, 8, 12)


class Chain(nn.Module):
    """Does one step after the other; a step is a function of the tensor and of the linear layers."""

    def __init__(self, steps, layers):
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in layers)

    def forward(self, x):
        for step in self.steps:
            x = step(x, self.layers)
        return x


def view(shape):
    return lambda x, layers: x.reshape(shape)


def permute(order):
    return lambda x, layers: x.permute(order)


def transpose(one, other):
    return lambda x, layers: x.transpose(one, other)


def flatten(start, stop):
    return lambda x, layers: x.flatten(start, stop)


def halves(dim, count):
    """Split and put back together, in another order."""
    return lambda x, layers: torch.cat(x.chunk(count, dim)[::-1], dim)


def mixed(dim, count):
    """Split and add, as a gate does."""
    return lambda x, layers: functools.reduce(torch.mul, x.split(x.shape[dim] // count, dim))


def sliced(dim, start, stop):
    return lambda x, layers: x.narrow(dim, start, stop - start)


def linear(index):
    return lambda x, layers: layers[index](x)


def added(shape):
    """The same elements, grouped in another way on their way to a sum."""
    return lambda x, layers: x + x.reshape(shape).tanh().reshape(x.shape)


def divisors(size):
    return [one for one in range(2, size + 1) if size % one == 0]


@st.composite
def chains(draw):
    shape = (2, draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from(WIDTHS)))
    start, steps, layers = shape, [], []
    for _ in range(draw(st.integers(2, 7))):
        dim = draw(st.integers(0, len(shape) - 1))
        kinds = ["linear", "permute", "transpose"]
        if len(shape) < 5 and shape[dim] > 1:
            kinds.append("view")
        if len(shape) > 1:
            kinds.append("flatten")
        if shape[dim] > 1:
            kinds += ["halves", "mixed", "sliced", "added"]
        kind = draw(st.sampled_from(kinds))
        if kind == "linear":
            layers.append((shape[-1], draw(st.sampled_from(WIDTHS))))
            steps.append(linear(len(layers) - 1))
            shape = (*shape[:-1], layers[-1][1])
            continue
        count = draw(st.sampled_from(divisors(shape[dim]))) if shape[dim] > 1 else 1
        start_at = count and shape[dim] // count * draw(st.integers(0, count - 1))
        regrouped = (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
        last = draw(st.integers(dim, len(shape) - 1))
        step = {
            "permute": permute(draw(st.permutations(range(len(shape))))),
            "transpose": transpose(dim, last),
            "view": view(regrouped),
            "flatten": flatten(dim, last),
            "halves": halves(dim, count),
            "mixed": mixed(dim, count),
            "sliced": sliced(dim, start_at, start_at + shape[dim] // count),
            "added": added(regrouped),
        }[kind]
        steps.append(step)
        shape = tuple(step(torch.empty(shape, device="meta"), []).shape)
    return start, steps, layers


def assert_chain_can_be_cut(shape, steps, layers):
    torch.manual_seed(0)
    found = ran(Chain(steps, layers), torch.randn(shape), lambda model, x: model(x).square().sum())
    assert_factors_fit(found.refined)
    assert_cuts_tile(found.refined)
    for op in found.refined.graph.ops:
        check_op(found.refined, op.name, found.reads[op.name], parts=(2,))


@settings(max_examples=40)
@given(chains())
def test_random_chains_have_factors_that_fit_and_parts_that_make_up_the_whole(drawn):
    assert_chain_can_be_cut(*drawn)


def test_a_dim_that_one_tensor_has_in_other_factors_is_not_cut():
    assert_chain_can_be_cut((2, 1, 3), [flatten(0, 2), halves(0, 3)], [])
    assert_chain_can_be_cut(
        (2, 12), [view((2, 3, 4)), linear(0), flatten(1, 2), added((2, 2, 6)), linear(1)], [(4, 4), (12, 3)]
    )
