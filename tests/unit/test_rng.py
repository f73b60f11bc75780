"""The state of the random number generators: what is drawn after a restore is what would have been drawn."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from rota.state import rng
from rota.state.tree import flatten, unflatten

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _leave_no_trace():
    before = rng.get_state(CPU)
    yield
    rng.set_state(before, CPU)


def draws():
    """Something of every kind; an odd number of normals, since those are made in pairs."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        np.random.rand(),
        np.random.standard_normal(3).tolist(),
        np.random.randint(0, 10**9),
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
        torch.randperm(10).tolist(),
        torch.nn.functional.dropout(torch.ones(8), 0.5).tolist(),
    ]


def through_a_checkpoint(state):
    skeleton, tensors = flatten(state)
    return unflatten(json.loads(json.dumps(skeleton)), {name: tensor.clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_one_seed_gives_one_sequence_in_every_generator(seed):
    rng.seed_all(seed)
    first = draws()
    draws()
    rng.seed_all(seed)
    assert draws() == first


def test_different_seeds_differ_in_every_generator():
    rng.seed_all(1)
    first = draws()
    rng.seed_all(2)
    assert all(one != other for one, other in zip(first, draws(), strict=True))


@pytest.mark.parametrize("warm_up", range(4))
def test_a_restored_state_continues_as_if_nothing_had_been_drawn(warm_up):
    rng.seed_all(7)
    for _ in range(warm_up):
        draws()
    state = through_a_checkpoint(rng.get_state(CPU))
    expected = [draws(), draws()]
    rng.seed_all(999)
    draws()
    rng.set_state(state, CPU)
    assert [draws(), draws()] == expected


def test_the_second_of_a_pair_of_normals_is_part_of_the_state():
    rng.seed_all(3)
    random.gauss(0, 1)
    np.random.standard_normal()
    state = through_a_checkpoint(rng.get_state(CPU))
    expected = random.gauss(0, 1), np.random.standard_normal()
    rng.seed_all(4)
    rng.set_state(state, CPU)
    assert (random.gauss(0, 1), np.random.standard_normal()) == expected


def test_taking_the_state_draws_nothing():
    rng.seed_all(5)
    expected = draws()
    rng.seed_all(5)
    rng.get_state(CPU)
    assert draws() == expected
