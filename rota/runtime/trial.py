"""Tries torch.compile on a segment while it runs, and keeps the compiled code only where it is faster."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

_log = logging.getLogger(__name__)

_RUNS = 3
_WARM_UP = 2


class Trial:
    """Times the plain code, compiles it, times that, and decides."""

    def __init__(self, module: fx.GraphModule, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._module = module
        self._clock = clock
        self._runs = 0
        self._spent_s = 0.0
        self._best_s = {"plain": float("inf"), "compiled": float("inf")}
        self.choice: Callable[..., Any] = module.forward
        """What to call now."""
        self.kept: bool | None = None
        """Whether the compiled code stays; None while that is open."""

    @contextlib.contextmanager
    def timing(self, *, ends: bool) -> Iterator[None]:
        """Time a run, or its first half; `ends` when it is over."""
        if self.kept is not None:
            yield
            return
        begun_s = self._clock()
        yield
        self._spent_s += self._clock() - begun_s
        if ends:
            self._count()

    def _count(self) -> None:
        self._runs += 1
        which = "plain" if self._runs <= _WARM_UP + _RUNS else "compiled"
        within = self._runs if which == "plain" else self._runs - _WARM_UP - _RUNS
        if within > _WARM_UP:  # the first runs allocate, or compile
            self._best_s[which] = min(self._best_s[which], self._spent_s)
        self._spent_s = 0.0
        if self._runs == _WARM_UP + _RUNS:
            self.choice = self._compiled()
        elif self._runs == 2 * (_WARM_UP + _RUNS):
            self.kept = self._best_s["compiled"] < self._best_s["plain"]
            if not self.kept:
                self.choice = self._module.forward

    def _compiled(self) -> Callable[..., Any]:
        compiled = torch.compile(self._module, dynamic=False)

        def call(*arguments: Any) -> Any:
            try:
                return compiled(*arguments)
            except Exception as error:  # what the compiler cannot do is run as it is
                _log.warning("torch.compile failed on a segment, which runs uncompiled: %s", error)
                self.kept, self.choice = False, self._module.forward
                return self._module.forward(*arguments)

        return call
