"""The clock of a run: it begins with the wall clock, and never goes back."""

from __future__ import annotations

import time
from collections.abc import Callable

from rota.runtime.link import clock_s


class RunClock:
    """Whoever sets the clock of the machine does not change how long something took, or how long it may take."""

    def __init__(self, *, wall_s: Callable[[], float] = time.time, steady_s: Callable[[], float] = clock_s) -> None:
        """`steady_s` only ever goes on."""
        self._steady_s = steady_s
        self._ahead_s = wall_s() - steady_s()

    def now_s(self) -> float:
        """The time, as the wall clock would have it if nobody had set it meanwhile."""
        return self._ahead_s + self._steady_s()

    def not_before(self, time_s: float) -> None:
        """Let it be at least this time now: a run that is resumed goes on after its last event."""
        self._ahead_s = max(self._ahead_s, time_s - self._steady_s())
