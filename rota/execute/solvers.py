"""Who solves for a policy: a child process beside the run, or, on a virtual clock, at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rota.errors import RotaError
from rota.schedule.child import Solving
from rota.schedule.problem import Problem, Schedule
from rota.schedule.solve import Limit, Solved, begin, solve

_WORTH_S = 0.5
"""A child that may think for less is not started: the simple rules must do."""
_GRACE_S = 3.0
_CLOSE_ENOUGH = 0.01
"""Of the bound."""


class ChildSolver:
    """The simple rules at once, and then a search in a child process, if that may be better."""

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._solving: Solving | None = None
        self._first: Solved | None = None
        self._until_s = 0.0

    def ask(self, problem: Problem, *, hints: Sequence[Schedule], seconds: float) -> None:
        """Begin; whatever was asked before is forgotten."""
        self.close()
        limit = Limit(seconds=seconds)
        self._first = begin(problem, limit=limit, seed=self._seed, clock=time.monotonic, hints=hints).solved
        if seconds < _WORTH_S or self._first.gap < _CLOSE_ENOUGH:
            return
        self._until_s = time.monotonic() + seconds + _GRACE_S
        self._solving = Solving.start(problem, limit=limit, seed=self._seed, hints=hints)

    def answer(self) -> Solved | None:
        """The best there is, when the time is up or nothing more is to come."""
        if self._first is None:
            return None
        best = self._first
        if self._solving is not None:
            if not self._solving.done and time.monotonic() < self._until_s:
                return None
            try:
                best = self._solving.poll() or best
            except RotaError:
                best = self._first
        self.close()
        return best

    def close(self) -> None:
        """End the child."""
        if self._solving is not None:
            self._solving.close()
        self._solving = self._first = None


class InlineSolver:
    """Solves when it is asked, in a number of steps: the same for the same question."""

    def __init__(self, *, steps: int = 3, seed: int = 0) -> None:
        self._steps = steps
        self._seed = seed
        self._found: Solved | None = None

    def ask(self, problem: Problem, *, hints: Sequence[Schedule], seconds: float) -> None:
        """Solve."""
        self._found = solve(problem, limit=Limit(steps=self._steps), seed=self._seed, clock=lambda: 0.0, hints=hints)

    def answer(self) -> Solved | None:
        """What was found."""
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Nothing is held."""
