"""Brings what is cut over the devices of a program together on the first, and cuts what is whole for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from rota.graph.refine import local_shape
from rota.plan.box import Box
from rota.plan.ownership import owned
from rota.plan.program import Program
from rota.runtime.fused import fuse
from rota.runtime.gang import Gang, talking
from rota.runtime.pieces import assemble, cut

PieceOf = Callable[[str, Box], torch.Tensor]
"""The tensor of a stored piece of a parameter or buffer on this device."""


def gather(
    program: Program, gang: Gang, names: Iterable[str], piece_of: PieceOf, *, dtypes: dict[str, torch.dtype]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each name with its tensor, whole, on the leader; nothing on the others. Every process calls it alike."""
    for name in names:
        factors = program.refined.factors[name]
        parts: list[tuple[Box, torch.Tensor]] = []
        for piece, boxes in owned(program.stored[name]).items():
            for box in boxes:
                if piece.device == gang.rank:
                    part = cut(piece_of(name, piece.box).detach(), factors, piece.box, box)
                    if gang.leads:
                        parts.append((box, part))
                    else:
                        with talking():
                            dist.send(part.contiguous(), dst=0)
                elif gang.leads:
                    part = torch.empty(local_shape(factors, box.shape), dtype=dtypes[name])
                    with talking():
                        dist.recv(part, src=piece.device)
                    parts.append((box, part))
        if gang.leads:
            yield name, assemble(parts, factors, Box.whole(program.refined.shape(name)))


class PieceOptimizer:
    """The user's optimizer, made to update the pieces of this device instead of whole parameters.

    An optimizer that treats every element alike does not notice. Its settings, its groups and a learning-rate schedule
    that holds it stay as they are; only the tensors are others.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, pieces: dict[str, list[tuple[Box, Any]]], names: dict[int, str]
    ) -> None:
        """`pieces` are those of this device, by the names of the graph; `names` has the parameters by their id."""
        self.optimizer = optimizer
        self._pieces = pieces
        self._names: list[list[str | None]] = []
        """Of each group, what its parameters are called; None for one that no batch uses."""
        self._said: list[Any] = []
        """What the user said of each group's implementation."""
        self._rest: dict[int, dict[str, Any]] = {}
        """The state of those, by their number."""
        for group in optimizer.param_groups:
            self._names.append([names.get(id(parameter)) for parameter in group["params"]])

    def cut(self, program: Program) -> None:
        """Replace the parameters, and what the optimizer remembers of them, by pieces."""
        self._said = [group.get("fused") for group in self.optimizer.param_groups]
        number = 0
        for group, names in zip(self.optimizer.param_groups, self._names, strict=True):
            whole = list(group["params"])
            group["params"] = []
            for parameter, name in zip(whole, names, strict=True):
                state = self.optimizer.state.pop(parameter, {})
                if name is None:
                    self._rest[number] = state
                else:
                    for box, piece in self._pieces.get(name, ()):
                        group["params"].append(piece)
                        found = {key: _cut(program, name, box, value, parameter) for key, value in state.items()}
                        if found:
                            self.optimizer.state[piece] = found
                number += 1
        fuse(self.optimizer)

    def held(self, piece: torch.Tensor) -> dict[str, Any]:
        """What the optimizer remembers of a piece."""
        return dict(self.optimizer.state.get(piece, {}))

    def replace(self, pieces: dict[str, list[tuple[Box, Any]]], remembered: dict[int, dict[str, Any]]) -> None:
        """Update other pieces from now on; `remembered` is what it knows of them, by their id."""
        for old in self._pieces.values():
            for _, piece in old:
                self.optimizer.state.pop(piece, None)
        self._pieces = pieces
        for group, names in zip(self.optimizer.param_groups, self._names, strict=True):
            group["params"] = [piece for name in names if name is not None for _, piece in pieces.get(name, ())]
            for piece in group["params"]:
                if remembered.get(id(piece)):
                    self.optimizer.state[piece] = remembered[id(piece)]

    def state_dict(self, program: Program, gang: Gang) -> dict[str, Any]:
        """As plain PyTorch's, of whole parameters; on the leader."""
        described = [
            {"params": list(numbers), **{key: value for key, value in group.items() if key != "params"}}
            for group, numbers in zip(self.optimizer.param_groups, self._numbers(), strict=True)
        ]
        for group, said in zip(described, self._said, strict=True):
            if "fused" in group:  # on one device the user's own choice counts again
                group["fused"] = said
        state = {number: rest for number, rest in self._rest.items() if rest}
        for number, name in self._numbered():
            if name is not None:
                found = self._whole_state(program, gang, name)
                if found:
                    state[number] = found
        return {"state": dict(sorted(state.items())), "param_groups": described}

    def _whole_state(self, program: Program, gang: Gang, name: str) -> dict[str, Any]:
        mine = self._pieces.get(name, [])
        # Which keys there are, and which of them are as large as the parameter, may be known on some devices only.
        shown: dict[str, Any] = {}
        for _, piece in mine:
            for key, value in self.optimizer.state.get(piece, {}).items():
                large = isinstance(value, torch.Tensor) and value.shape == piece.shape and value.dim() > 0
                shown.setdefault(key, ("piece", value.dtype) if large else ("same", value))
        everyone: dict[str, Any] = {}
        for one in gang.everyone(shown):
            for key, what in one.items():
                everyone.setdefault(key, what)
        whole: dict[str, Any] = {}
        for key, (how, what) in everyone.items():
            if how == "same":
                whole[key] = what
                continue
            by_box = dict(mine)

            def of(name: str, box: Box, key: str = key, by_box: Any = by_box, dtype: Any = what) -> torch.Tensor:
                state = self.optimizer.state.get(by_box[box], {})
                value = state.get(key)
                return value if value is not None else torch.zeros(by_box[box].shape, dtype=dtype)

            for _, tensor in gather(program, gang, [name], of, dtypes={name: what}):
                whole[key] = tensor
        return whole

    def _numbers(self) -> Iterator[range]:
        start = 0
        for names in self._names:
            yield range(start, start + len(names))
            start += len(names)

    def _numbered(self) -> Iterator[tuple[int, str | None]]:
        yield from enumerate(name for names in self._names for name in names)


def _cut(program: Program, name: str, box: Box, value: Any, parameter: torch.Tensor) -> Any:
    """What an optimizer remembers of a parameter, for a piece of it."""
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
        whole = Box.whole(program.refined.shape(name))
        return cut(value, program.refined.factors[name], whole, box).clone(memory_format=torch.contiguous_format)
    return value.clone() if isinstance(value, torch.Tensor) else value
