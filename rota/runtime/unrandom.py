"""Replaces what random ops draw by the mean of what they could draw, so that a share and the whole can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MEANS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "bernoulli": lambda given: given.get("p", given["self"]),
    "bernoulli_": lambda given: given["p"],
    "rand": lambda given: 0.5,
    "rand_like": lambda given: 0.5,
    "randn": lambda given: 0.0,
    "randn_like": lambda given: 0.0,
    "uniform_": lambda given: (given["from"] + given["to"]) / 2,
    "normal": lambda given: given["mean"],
    "normal_": lambda given: given["mean"],
    "exponential_": lambda given: 1 / given["lambd"],
}
"""op -> what it draws on average, by its arguments"""
_OFF: dict[str, dict[str, float]] = {"native_dropout": {"p": 0.0}, "dropout": {"p": 0.0}, "_fused_dropout": {"p": 1.0}}
_OFF_ANYWHERE = ("dropout_p", "dropout")
"""Arguments of fused ops that turn their dropout on."""


class Unrandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this is active nothing is drawn by the ops that are known here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False
        """Whether any op would have drawn."""
        self.unknown: set[str] = set()
        """Random ops of which the mean is no use, such as permutations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = _bound(func, args, kwargs)
        off = _OFF.get(name) or {key: 0.0 for key in _OFF_ANYWHERE if key in given}
        if off:
            self.drew |= any(given[key] != value for key, value in off.items()) and given.get("train") is not False
            names = [argument.name for argument in func._schema.arguments]
            args = [off.get(key, value) for key, value in zip(names, args, strict=False)]
            return func(*args, **{key: off.get(key, value) for key, value in kwargs.items()})
        if name not in _MEANS:
            self.unknown.add(name)
            return func(*args, **kwargs)
        self.drew = True
        drawn, mean = func(*args, **kwargs), _MEANS[name](given)
        return drawn.copy_(mean) if isinstance(mean, torch.Tensor) else drawn.fill_(mean)


def _bound(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Each argument by its name, in the order of the schema."""
    found = {}
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            found[argument.name] = args[place]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found
