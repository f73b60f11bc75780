"""Devices that are unequal from the start get work as they are fast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rota.runtime.choose import fitted
from rota.strategies.coshard import coshard
from rota.strategies.data import data
from rota.strategies.mesh import Product, axis_shares, can_balance, has_shares, with_shares
from rota.strategies.pipeline import even_bounds, pipeline
from rota.strategies.tensor import tensor


class _Gang:
    size = 2
    kind = "cpu"

    def __init__(self, paces: Sequence[float]) -> None:
        self._paces = list(paces)

    def everyone(self, mine: float) -> list[float]:
        assert mine > 0
        return self._paces


def _fitted(strategy: Any, paces: Sequence[float], *, balance: str = "migrate") -> tuple[Any, list[str]]:
    parts: Any = SimpleNamespace(task=SimpleNamespace(balance=balance), device=torch.device("cpu"))
    told: list[str] = []
    gang: Any = _Gang(paces)
    return fitted(strategy, parts, gang, told.append), told


def test_a_device_that_is_twice_as_slow_gets_a_third() -> None:
    found, told = _fitted(tensor(), (1.0, 2.0))
    assert found.shares == pytest.approx((2 / 3, 1 / 3))
    assert told == ["the devices are not equally fast, so they get 67%, 33% of the work"]


@pytest.mark.parametrize(
    ("strategy", "paces", "balance"),
    [
        pytest.param(tensor(), (1.0, 1.2), "migrate", id="nearly equal"),
        pytest.param(tensor(), (1.0, 2.0), "off", id="off"),
        pytest.param(with_shares(tensor(), (0.9, 0.1)), (1.0, 2.0), "migrate", id="the user has said"),
        pytest.param(coshard(2), (1.0, 2.0), "migrate", id="a strategy that heeds no shares"),
    ],
)
def test_otherwise_nothing_changes(strategy: Any, paces: Sequence[float], balance: str) -> None:
    found, told = _fitted(strategy, paces, balance=balance)
    assert found is strategy
    assert not told


def test_who_heeds_shares() -> None:
    assert can_balance(data() * tensor(2))
    assert can_balance(pipeline(2))
    assert not can_balance(lambda graph, devices: None)
    assert not has_shares(data())
    assert has_shares(with_shares(data(), (0.6, 0.4)))


def test_in_a_product_no_device_gets_more_than_its_axes_allow() -> None:
    shares = (0.4, 0.4, 0.1, 0.1)
    found = with_shares(data(2) * tensor(2), shares)
    assert isinstance(found, Product)
    assert found.recipes[0].shares == pytest.approx((0.8, 0.2))
    assert found.recipes[1].shares == pytest.approx((0.5, 0.5))


def test_one_slow_device_of_four_costs_less_than_with_even_shares() -> None:
    speeds = (0.1, 0.3, 0.3, 0.3)
    (rows, columns) = axis_shares(speeds, (2, 2), [True, True])
    assert rows is not None
    assert columns is not None
    loads = [a * b / speed for (a, b), speed in zip(itertools.product(rows, columns), speeds, strict=True)]
    assert max(loads) < 0.6 * max(0.25 / speed for speed in speeds)


def test_a_slow_stage_gets_fewer_ops() -> None:
    costs, crossing = [1.0] * 12, [0.0] * 13
    assert even_bounds(costs, crossing, 2) == [6]
    assert even_bounds(costs, crossing, 2, speeds=[4 / 3, 2 / 3]) == [8]
