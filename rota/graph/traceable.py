"""Losses of PyTorch that torch.export cannot trace, as the same computation in ops that it can."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

_MEAN, _SUM = "mean", "sum"


@contextlib.contextmanager
def traceable_losses() -> Iterator[None]:
    """Within, `torch.nn.functional` has versions of these losses that can be captured."""
    with (
        mock.patch.object(F, "gaussian_nll_loss", _gaussian_nll_loss),
        mock.patch.object(F, "ctc_loss", _ctc_loss),
    ):
        yield


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = _MEAN,
) -> torch.Tensor:
    """Without the look whether any variance is negative: a graph has no values."""
    spread = var if isinstance(var, torch.Tensor) else torch.full_like(input, var)
    if spread.shape != input.shape and spread.shape == input.shape[:-1]:
        spread = spread.unsqueeze(-1)
    # PyTorch clamps the variance and keeps its gradient: the second term is zero.
    kept = spread.detach().clamp(min=eps) + (spread - spread.detach())
    loss = 0.5 * (torch.log(kept) + (input - target) ** 2 / kept)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == _MEAN:
        return loss.mean()
    return loss.sum() if reduction == _SUM else loss


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = _MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    lengths = [one if isinstance(one, torch.Tensor) else torch.tensor(one) for one in (input_lengths, target_lengths)]
    terms: torch.Tensor = ctc_terms(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == _MEAN:
        return (terms / lengths[1].clamp_min(1).to(terms)).mean()
    return terms.sum() if reduction == _SUM else terms


@torch.library.custom_op("rota::ctc_terms", mutates_args=())
def ctc_terms(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The loss of each sequence: PyTorch's own op makes an intermediate result whose size depends on values."""
    return _terms(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity).clone()


def _terms(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)


@ctc_terms.register_fake
def _(log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1:-1])


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    log_probs, targets, input_lengths, target_lengths = ctx.saved_tensors
    with torch.enable_grad():
        again = log_probs.detach().requires_grad_()
        terms = _terms(again, targets, input_lengths, target_lengths, ctx.blank, ctx.zero_infinity)
        (found,) = torch.autograd.grad(terms, again, gradient)
    return found, None, None, None, None, None


ctc_terms.register_autograd(_gradient, setup_context=_keep_inputs)
