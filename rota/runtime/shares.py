"""Whether what devices compute of their shares of a batch makes up what one device computes of all of it."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from rota.errors import TaskError
from rota.graph.batch import mapped, tensors_in
from rota.runtime.executor import Parts, check_loss, numbers_of, outputs_of
from rota.runtime.gang import Gang, talking
from rota.runtime.limits import has_room_for
from rota.runtime.unrandom import Unrandom
from rota.runtime.user_code import is_out_of_memory
from rota.state.rng import keeping_random_state

_SINGLE = torch.finfo(torch.float32).eps
_IN_DOUBLES = 128 * _SINGLE
"""So far apart may two sums be that are computed in doubles: some models compute parts in single precision anyway."""
_IN_SINGLES = 1024 * _SINGLE
"""The same in single precision, where each op of a deep model adds its rounding to that of those before it.

Small models of transformers differ by about 2 of these units, and the routers of their mixtures of experts by 12,000.
"""
_SMALL = 0.01
"""Of the norm of the whole gradient: a parameter whose gradient is smaller may be off as if it had this size."""
_TINY = torch.finfo(torch.float64).tiny
_COPIES = 3
"""Of a model in doubles: its copy, and the gradients of a share and of the whole batch."""
_MOST_UNLIKE = 16
"""Batches that are compared because their padding lies in a new way: each costs several steps."""

Notice = Callable[[str], None]


def share_of(batch: Any, *, rank: int, size: int) -> tuple[Any, int, int]:
    """A process's share of a batch, how many samples it has, and how many the batch has."""
    total = samples_of(batch)
    if total < size:
        raise TaskError(f"a batch of {total} samples cannot be shared by {size} devices; use fewer, or drop_last")
    start, stop = total * rank // size, total * (rank + 1) // size

    def cut(leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    return mapped(cut, batch), stop - start, total


def samples_of(batch: Any) -> int:
    """How many samples a batch has; TaskError if its tensors do not agree."""
    sizes = {int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.dim()}
    if len(sizes) != 1:
        raise TaskError("PyTorch's wrappers need batches whose tensors all have one row for each sample")
    return sizes.pop()


@dataclass(frozen=True, kw_only=True)
class Makeup:
    """How the numbers of a whole batch are made of those of its shares."""

    sums: frozenset[str] = frozenset()
    """Metrics that are sums over samples; the others are means."""
    sure: bool = False
    """Whether the loss is the one and not the other; neither can be told of a loss that is zero."""

    def part(self, name: str, samples: int, total: int) -> float:
        """By what a share's number counts."""
        return 1.0 if name in self.sums else samples / total


def makeup_of(
    parts: Parts,
    batch: Any,
    *,
    gang: Gang,
    strategy: str,
    notice: Notice,
    number: int = 1,
    before: Makeup | None = None,
) -> Makeup | None:
    """Compare a batch's loss, gradients and buffers, by shares and whole; every process comes to this.

    It is done on copies of the model, in doubles where the model's code allows that. TaskError if the loss is neither a
    mean nor a sum over samples, or not what it was `before`; None, with a notice, where that cannot be found out.
    """
    share, samples, total = share_of(batch, rank=gang.rank, size=gang.size)
    reason = ""
    for look in _looks(parts):
        own, whole, reason = _tried(look, share, batch if gang.leads else None)
        reason = next(filter(None, gang.everyone(reason)), "")
        if not reason:
            assert own is not None
            where = "the first batch" if number == 1 else f"batch {number}"
            comparison = _Comparison(own, whole, samples / total, gang, strategy, look.tolerance, where)
            return comparison.run(notice, before)
    since = "" if before is None else f" on batch {number} and later ones"
    notice(
        f"{strategy}: it was not checked whether the loss is a mean over samples{since} ({reason}); if it is not, "
        "results differ from those of one device"
    )
    return None


# ---- which batches are looked at ----


class Lookout:
    """Compares the first batch, the batches 2, 4, 8, ..., and those whose padding lies in a new way."""

    def __init__(self, parts: Parts, batch: Any, *, gang: Gang, strategy: str, notice: Notice) -> None:
        """Before the model is wrapped: `parts` has it whole."""
        self._parts = parts
        self._gang = gang
        self._strategy = strategy
        self._notice = _once(notice)
        self._batches = 0
        self._ways: set[Hashable] = set()
        self._unlike = 0
        self._shell: torch.nn.Module | None = None
        """A copy of the model without its tensors; None where later batches are not compared."""
        self.makeup = Makeup()
        if gang.size == 1:
            return
        self._ways |= _ways_of(batch, gang.size)
        found = makeup_of(parts, batch, gang=gang, strategy=strategy, notice=self._notice)
        if found is None:
            return
        self.makeup = found
        self._shell = _shell_of(parts.model)
        self._notice(
            f"{strategy}: the first batch was compared with one device; compared are also the batches 2, 4, 8, ... and "
            "those with padding in a new place, and no others"
        )

    def look(self, batch: Any) -> None:
        """Compare a batch if it is its turn, before anything of it counts; TaskError if it shows another loss."""
        if self._shell is None:
            return
        self._batches += 1
        fresh = _ways_of(batch, self._gang.size) - self._ways
        self._ways |= fresh
        unlike = bool(fresh) and self._unlike < _MOST_UNLIKE
        self._unlike += unlike
        if not unlike and (self._batches == 1 or self._batches & (self._batches - 1)):
            return
        found = makeup_of(
            replace(self._parts, model=_filled(self._shell, self._parts.model)),
            batch,
            gang=self._gang,
            strategy=self._strategy,
            notice=self._notice,
            number=self._batches,
            before=self.makeup,
        )
        if found is None:
            self._shell = None
        else:
            self.makeup = found


def _once(notice: Notice) -> Notice:
    said: set[str] = set()

    def tell(words: str) -> None:
        if words not in said:
            said.add(words)
            notice(words)

    return tell


def _ways_of(batch: Any, size: int) -> set[Hashable]:
    """How zeros and negative numbers, which padding is made of, lie in the tensors of a batch, and whether it divides.

    Of each: whether there are none, as many for each sample of each share, or more in one share than in another.
    """
    total = samples_of(batch)
    edges = [total * rank // size for rank in range(size + 1)]
    found: set[Hashable] = {total % size == 0}
    for number, tensor in enumerate(tensors_in(batch)):
        if not tensor.dim() or not tensor.numel() or tensor.is_complex():
            continue
        negative = None if tensor.is_floating_point() or tensor.dtype is torch.bool else tensor < 0
        for kind, marks in (("zero", tensor == 0), ("negative", negative)):
            if marks is not None:
                rows = marks.reshape(total, -1).sum(1).tolist()
                counts = {sum(rows[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a}
                found.add((number, kind, "uneven" if len(counts) > 1 else "even" if any(counts) else "none"))
    return found


def _shell_of(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model whose tensors have no numbers: what it keeps of a step later cannot always be copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def _filled(shell: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """The shell with the numbers and the modes of the model, whole; each process comes to this."""
    there = dict(shell.named_modules(remove_duplicate=False))
    made: dict[int, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        there[path].training = module.training
        for table, target in ((module._parameters, there[path]._parameters), (module._buffers, there[path]._buffers)):
            for name, tensor in table.items():
                if tensor is None:
                    target[name] = None
                    continue
                if id(tensor) not in made:
                    held: Any = tensor.detach()
                    with talking():
                        held = held.full_tensor() if hasattr(held, "full_tensor") else held
                    if isinstance(tensor, torch.nn.Parameter):
                        held = torch.nn.Parameter(held, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = held
                target[name] = made[id(tensor)]
    return shell


# ---- looking at one share ----


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a step of some samples gives, without taking it."""

    metrics: dict[str, float]
    counts: frozenset[str]
    """Metrics that are whole numbers."""
    names: tuple[str, ...]
    gradients: tuple[torch.Tensor, ...]
    buffers: dict[str, torch.Tensor]
    drew: bool


class _UnlikeError(Exception):
    """It cannot be compared, and why."""


@dataclass(frozen=True, kw_only=True)
class _Look:
    parts: Parts
    doubles: bool
    tolerance: float

    def at(self, samples: Any) -> _Seen:
        """A step on a copy of the model: parameters, gradients, buffers and whatever else it holds stay as they are."""
        model = copy.deepcopy(self.parts.model)
        parts = replace(self.parts, model=model)
        if self.doubles:
            model.double()
            parts = replace(parts, task=replace(parts.task, precision="float64"))
        model.zero_grad(set_to_none=True)
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        with keeping_random_state(parts.device), Unrandom() as mode:
            outputs = outputs_of(parts, model, samples)
            check_loss(outputs["loss"])
            found = torch.autograd.grad(outputs["loss"], [one for _, one in named], materialize_grads=True)
        if mode.unknown:
            raise _UnlikeError(f"it draws by {', '.join(sorted(mode.unknown))}, which differs from share to share")
        return _Seen(
            metrics=numbers_of(outputs),
            counts=frozenset(name for name, value in outputs.items() if _is_whole(value)),
            names=tuple(name for name, _ in named),
            gradients=tuple(one.to_dense() if one.is_sparse else one for one in found),
            buffers=dict(model.named_buffers()),
            drew=mode.drew,
        )


def _looks(parts: Parts) -> Iterator[_Look]:
    """In doubles first; where code insists on its own precision, in single precision, if that is what it is in."""
    yield _Look(parts=parts, doubles=True, tolerance=_IN_DOUBLES)
    kinds = {one.dtype for one in parts.model.parameters() if one.is_floating_point()}
    if parts.task.precision == "float32" and kinds <= {torch.float32, torch.float64}:
        yield _Look(parts=parts, doubles=False, tolerance=_IN_SINGLES)


def _tried(look: _Look, share: Any, batch: Any) -> tuple[_Seen | None, _Seen | None, str]:
    """What is seen of a share, and of the whole batch if one is given, or why nothing is."""
    needed_bytes = _COPIES * sum(8 * one.numel() for one in look.parts.model.parameters())
    if look.parts.device.type == "cpu" and not has_room_for(needed_bytes):
        return None, None, "there is no room for a copy of the model and its gradients"
    try:
        return look.at(share), None if batch is None else look.at(batch), ""
    except _UnlikeError as error:
        return None, None, str(error)
    except Exception as error:  # of the user's code, which may not run on a copy, in doubles or on so many samples
        if is_out_of_memory(error):
            return None, None, "the whole batch does not fit on one device"
        return None, None, f"a copy of the model raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _is_whole(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() and not value.is_complex()
    return isinstance(value, int)


# ---- comparing ----


class _Comparison:
    """Of one share in each process and the whole batch in the leader."""

    def __init__(
        self,
        own: _Seen,
        whole: _Seen | None,
        part: float,
        gang: Gang,
        strategy: str,
        tolerance: float,
        where: str,
    ) -> None:
        self._own = own
        self._whole = whole
        self._part = part
        self._gang = gang
        self._strategy = strategy
        self._tolerance = tolerance
        self._where = where

    def run(self, notice: Notice, before: Makeup | None) -> Makeup:
        """How the whole is made up; TaskError if it is in no way that is known."""
        gang = self._gang
        whole = gang.told(None if self._whole is None else self._whole.metrics)
        shares = gang.everyone(self._own.metrics)
        counts = gang.everyone(sorted(self._own.counts))[0]
        each = gang.everyone(self._part)
        if not all(map(math.isfinite, [whole["loss"], *(one["loss"] for one in shares)])):
            return before or Makeup()  # it is told where it is met
        ways = {name: self._ways(name, value, shares, each) for name, value in whole.items()}
        if not ways["loss"]:
            mean = sum(part * one["loss"] for part, one in zip(each, shares, strict=True))
            self._refuse(f"the loss of all samples is {whole['loss']:.6g}, and the mean of its shares' is {mean:.6g}")
        problems = {way: self._gradients_problem(self._part if way == "mean" else 1.0) for way in ways["loss"]}
        right = [way for way, problem in problems.items() if not problem]
        if not right:
            self._refuse(problems[ways["loss"][0]])
        known = "" if before is None or not before.sure else "sum" if "loss" in before.sums else "mean"
        if known and known not in right:
            self._refuse(f"the loss is a {right[0]} over samples, and before it was a {known}")
        unclear = counts if before is None else before.sums
        sums = {name for name, found in ways.items() if found == ["sum"] or (len(found) == 2 and name in unclear)}
        sums -= {"loss"}
        if (known or right[0]) == "sum":
            sums.add("loss")
        if problem := self._buffers_problem():
            self._refuse(problem)
        for name, found in ways.items():
            if not found:
                notice(
                    f"{self._strategy}: the metric {name!r} is neither a mean nor a sum over samples; what is shown "
                    "is the mean of what the devices found for their shares"
                )
        if self._own.drew:
            notice(
                f"{self._strategy}: each device draws random numbers (dropout) for its own share, so that results "
                "are not those of one device"
            )
        return Makeup(sums=frozenset(sums), sure=bool(known) or len(right) == 1)

    def _ways(self, name: str, whole: float, shares: list[dict[str, float]], each: list[float]) -> list[str]:
        """In which ways a number may be made up of those of the shares; both, if they are all zero."""
        values = [one.get(name, math.nan) for one in shares]
        found = []
        for way, parts in (("mean", each), ("sum", [1.0] * len(each))):
            made = [part * value for part, value in zip(parts, values, strict=True)]
            if abs(sum(made) - whole) <= self._tolerance * sum(map(abs, made)):
                found.append(way)
        return found

    def _gradients_problem(self, part: float) -> str:
        """Which parameter's gradient is not that of the whole batch, if the shares count so much."""
        whole = self._whole
        norm = 0.0 if whole is None else math.hypot(*map(_norm, whole.gradients))
        worst, told = 1.0, ""
        for i, name in enumerate(self._own.names):
            made = self._gang.sum(part * self._own.gradients[i])
            if whole is None:
                continue
            wanted = whole.gradients[i].to(made)
            off = _norm(made - wanted) / max(_norm(wanted), _SMALL * norm, _TINY)
            if off > worst * self._tolerance:
                worst, told = off / self._tolerance, f"the gradient of {name} differs by {off:.2g} of its size"
        return str(self._gang.told(told))

    def _buffers_problem(self) -> str:
        """Which buffer is another one after the leader's share than after the whole batch."""
        told = ""
        for name, wanted in {} if self._whole is None else self._whole.buffers.items():
            made = self._own.buffers.get(name)
            if made is None or not _near(made, wanted, self._tolerance):
                told = f"the buffer {name} is another one after the first share than after all samples"
        return str(self._gang.told(told))

    def _refuse(self, what: str) -> NoReturn:
        raise TaskError(
            f"{self._strategy} takes the loss for a mean or a sum over samples, and this one is neither: on "
            f"{self._where} {what}; use a strategy that sees the whole batch (single, or data if the model can be "
            "captured), or write a loss and a model that treat samples one by one"
        )


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _near(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    same = torch.isclose(one, other, rtol=tolerance, atol=tolerance * _norm(other) * _SMALL, equal_nan=True)
    return bool(same.all())
