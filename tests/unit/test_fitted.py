"""Devices that are unequal from the start get work as they are fast."""

from __future__ import annotations

from typing import Any

import pytest

from rota.runtime.choose import fitted
from rota.strategies.data import data
from rota.strategies.mesh import Product, Recipe, axis_shares, can_balance, has_shares, with_shares
from rota.strategies.pipeline import even_bounds, pipeline
from rota.strategies.tensor import tensor


class _Gang:
    size = 2

    def __init__(self, *paces: float) -> None:
        self._paces = list(paces)

    def everyone(self, mine: float) -> list[float]:
        assert mine > 0
        return self._paces


class _Parts:
    class task:  # noqa: N801
        balance: Any = "migrate"


def _fitted(strategy: Any, *paces: float, balance: Any = "migrate") -> tuple[Any, list[str]]:
    parts: Any = _Parts()
    parts.task = type("task", (), {"balance": balance})
    told: list[str] = []
    gang: Any = _Gang(*paces)
    return fitted(strategy, parts, gang, told.append), told


def test_a_device_that_is_twice_as_slow_gets_a_third() -> None:
    found, told = _fitted(tensor(), 1.0, 2.0)
    assert found.shares == pytest.approx((2 / 3, 1 / 3))
    assert told == ["the devices are not equally fast, so they get 67%, 33% of the work"]


@pytest.mark.parametrize(
    ("strategy", "paces", "balance"),
    [
        (tensor(), (1.0, 1.2), "migrate"),
        (tensor(), (1.0, 2.0), "off"),
        (tensor(), (1.0, 2.0), "migrate"),
    ],
)
def test_nothing_is_said_of_devices_that_are_nearly_equal_or_where_it_is_off(
    strategy: Recipe, paces: tuple[float, ...], balance: str
) -> None:
    if max(paces) > 1.3 and balance == "migrate":
        strategy = with_shares(strategy, (0.9, 0.1))  # type: ignore[assignment]
    found, told = _fitted(strategy, *paces, balance=balance)
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
    (rows, columns) = axis_shares((0.1, 0.3, 0.3, 0.3), (2, 2), [True, True])
    assert rows is not None
    assert columns is not None
    assert sum(rows) == pytest.approx(1)
    loads = [a * b / s for (a, b), s in zip(((a, b) for a in rows for b in columns), (0.1, 0.3, 0.3, 0.3), strict=True)]
    assert max(loads) <= 2.5  # even shares would load the slow one 2.5 times


def test_a_slow_stage_gets_fewer_ops() -> None:
    costs, crossing = [1.0] * 12, [0.0] * 13
    assert even_bounds(costs, crossing, 2) == [6]
    assert even_bounds(costs, crossing, 2, speeds=[4 / 3, 2 / 3]) == [8]
