"""Stages of a pipeline: the dearest, with what it sends and receives, is as cheap as can be."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.strategies.pipeline import even_bounds


def dearest(costs, crossing, bounds):
    edges = [0, *bounds, len(costs)]
    cut = {0: 0.0, len(costs): 0.0} | {place: crossing[place] for place in bounds}
    return max(sum(costs[i:j]) + cut[i] + cut[j] for i, j in itertools.pairwise(edges))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_other_bounds_are_better(data):
    costs = data.draw(st.lists(st.integers(0, 20).map(float), min_size=2, max_size=9))
    crossing = data.draw(st.lists(st.integers(0, 9).map(float), min_size=len(costs) + 1, max_size=len(costs) + 1))
    stages = data.draw(st.integers(1, len(costs)))
    bounds = even_bounds(costs, crossing, stages)
    assert len(bounds) == stages - 1
    assert all(0 < a < b < len(costs) for a, b in itertools.pairwise([*bounds, len(costs)][:-1])) or stages <= 2
    best = min(
        dearest(costs, crossing, list(some)) for some in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    assert dearest(costs, crossing, bounds) == pytest.approx(best, rel=1e-6, abs=1e-6)
