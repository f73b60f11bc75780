"""Products that leave something out: right on average, exact where nothing is, frozen where nothing is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rota.graph.capture import capture
from rota.runtime.in_process import InProcess
from rota.runtime.resizing import IMPUTES, SELECTS, Resizer, Resizing, _Product, _Resized
from rota.strategies.tensor import tensor
from rota.testing.models import GPT


def _loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@pytest.fixture(scope="module")
def made() -> tuple[torch.nn.Module, torch.Tensor, InProcess]:
    torch.manual_seed(0)
    model = GPT(vocabulary=32, context=16, width=32, depth=2, heads=4, dropout=0.0).double()
    rows = torch.randint(0, 32, (8, 17))
    program = tensor()(capture(model, rows, _loss), 2).compile()
    return model, rows, InProcess(program, dict(model.named_parameters()))


def _again(made: tuple[torch.nn.Module, torch.Tensor, InProcess]) -> InProcess:
    return InProcess(made[2].program, dict(made[0].named_parameters()))


def _resizer(run: InProcess, how: Resizing | None = None, *, device: int = 1, seed: int = 0) -> Resizer:
    found = Resizer(run.program, run.device(device), how=how or Resizing(), seed=seed)
    run.device(device).products = found
    return found


def test_all_four_products_of_a_layer_are_found(made: tuple[torch.nn.Module, torch.Tensor, InProcess]) -> None:
    assert len(_resizer(_again(made))._products) == 4 * 2


@pytest.mark.parametrize("impute", IMPUTES)
def test_leaving_out_nothing_changes_nothing(
    made: tuple[torch.nn.Module, torch.Tensor, InProcess], impute: str
) -> None:
    plain, other = _again(made), _again(made)
    resizer = _resizer(other, Resizing(impute=impute))  # type: ignore[arg-type]
    resizer.begin_step()
    for product in resizer._products.values():  # all columns, by the other code
        product.kept = torch.arange(product.columns)
    expected, found = plain.run(made[1]), other.run(made[1])
    torch.testing.assert_close(found.outputs, expected.outputs, rtol=0, atol=1e-12)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12)


def test_a_product_is_right_on_average() -> None:
    torch.manual_seed(1)
    layer = torch.nn.Linear(24, 12).double()
    x = torch.randn(5, 24, dtype=torch.float64)
    product = _Product(weight=("w", None), columns=24, changes=torch.zeros(24))  # type: ignore[arg-type]
    total = torch.zeros(5, 12, dtype=torch.float64)
    for _ in range(4000):
        product.kept = torch.randperm(24)[:12]
        total += _Resized.apply(x, layer.weight, layer.bias, product, "zero").detach()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(total / 4000, layer(x).detach(), rtol=0, atol=0.08)


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("impute", IMPUTES)
def test_it_trains_and_what_is_left_out_is_frozen(
    made: tuple[torch.nn.Module, torch.Tensor, InProcess], impute: str, select: str
) -> None:
    run = _again(made)
    run.optimize(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1))
    resizer = _resizer(run, Resizing(impute=impute, select=select))  # type: ignore[arg-type]
    resizer.freeze(run.optimizers[1])
    for step in range(5):  # moments that would fade
        run.train(made[1], step=step)
    resizer.leave_out(0.5)
    first = 0.0
    for step in range(60):
        resizer.begin_step()
        product = next(iter(resizer._products.values()))
        assert product.gone is not None
        weight = run.device(1).stored(*product.weight)
        before = weight.detach().clone()
        moments = run.optimizers[1].state[weight]["exp_avg"].clone()
        loss = run.train(made[1], step=5 + step)["loss"].item()
        first = first or loss
        if impute == "zero":
            assert torch.equal(weight[:, product.gone], before[:, product.gone])
            assert torch.equal(run.optimizers[1].state[weight]["exp_avg"][:, product.gone], moments[:, product.gone])
        assert not torch.equal(weight[:, product.kept], before[:, product.kept])
    assert loss < first
    resizer.leave_out(0.0)
    resizer.begin_step()
    assert product.kept is None


def test_columns_that_change_most_are_kept_and_others_come_back(
    made: tuple[torch.nn.Module, torch.Tensor, InProcess],
) -> None:
    run = _again(made)
    run.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    resizer = _resizer(run, Resizing(select="priority"))
    resizer.leave_out(0.5)
    product = next(iter(resizer._products.values()))
    seen: set[int] = set()
    for step in range(61):
        resizer.begin_step()
        assert product.kept is not None
        seen |= set(product.kept.tolist())
        run.train(made[1], step=step)
    assert seen == set(range(product.columns))  # of which nothing is known comes first
    known = product.changes
    assert torch.isfinite(known).all()
