"""Keeps the pace of a gang: hears what each device takes, decides as all others do, and prepares what was decided."""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rota.balance.decide import Decision, Facts, Migrate, Policy, Resize, Seen, Standing, given_up, moved
from rota.balance.pace import Shares
from rota.plan.cache import Programs
from rota.runtime.engine import Engine

_log = logging.getLogger(__name__)

_MOST_WAYS = 4
_SWITCH_S = 0.0005


@dataclass(kw_only=True)
class Way:
    """What is needed to run with some shares: programs, and an engine that has no pieces yet."""

    programs: Programs
    engine: Engine


class Tell(Protocol):
    """Reports what was done."""

    def __call__(self, *, step: int, shares: Shares, left_out: tuple[float, ...], pause_s: float, why: str) -> None:
        """One change."""
        ...


class Balancer:
    """One process's view of the balance of its gang. All processes hear the same numbers and hold the same state."""

    def __init__(
        self,
        *,
        rank: int,
        facts: Facts,
        standing: Standing,
        policy: Policy,
        total_steps: int,
        cost_s: float,
        asked: Shares,
        make: Callable[[Shares], Callable[[], Way]],
        tell: Tell,
    ) -> None:
        """`make` is called in the thread that trains; what it returns makes a way, in another.

        `asked` are the shares that what runs now was asked for, if it was for any.
        """
        self.facts = facts
        self.standing = standing
        self._rank = rank
        self._policy = policy
        self._total_steps = total_steps
        self._cost_s = cost_s
        self._make = make
        self._tell = tell
        self._times = [0.0] * facts.ranks
        self._heard_cost_s = cost_s
        self._ready = 0
        self._failed = 0
        self._spent_s = 0.0
        self._step = 0
        self._why = ""
        self._asked = asked
        """The shares that were asked for, of what runs now."""
        self._ways: OrderedDict[Shares, Way] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._made: Way | None = None
        self._error = ""

    # ---- measuring ----

    def spent(self, seconds: float) -> None:
        """This device has computed for so long."""
        self._spent_s += seconds

    def numbers(self) -> list[float]:
        """What is added up over all processes: what each has spent since the last time, and whether it is ready."""
        found = [0.0] * (self.facts.ranks + 3)
        found[self._rank] = self._spent_s
        found[-3] = self._cost_s if self._rank == 0 else 0.0
        # Looked at once: what becomes ready meanwhile is so for all from the next time on.
        found[-2] = 1.0 if self._made is not None else 0.0
        found[-1] = 1.0 if self._error else 0.0
        self._spent_s = 0.0
        return found

    def heard(self, numbers: list[float]) -> None:
        """The sums."""
        for rank in range(self.facts.ranks):
            self._times[rank] += numbers[rank]
        self._heard_cost_s, self._ready, self._failed = numbers[-3], round(numbers[-2]), round(numbers[-1])

    @property
    def times(self) -> tuple[float, ...]:
        """What each device computed in the latest step."""
        return tuple(self._times)

    # ---- deciding ----

    def step_ended(self, step: int) -> Decision:
        """Decide; `step` is the one that was just taken."""
        self._step = step
        seen = Seen(
            step=step,
            times=tuple(self._times),
            steps_left=max(0, self._total_steps - step),
            cost_s=self._heard_cost_s,
        )
        self._times = [0.0] * self.facts.ranks
        self.standing, decision = self._policy(self.standing, seen, self.facts)
        if isinstance(decision, Migrate):
            self._why = decision.why
            self._prepare(decision.shares)
        elif isinstance(decision, Resize):
            self._tell(
                step=step, shares=self.standing.shares, left_out=decision.left_out, pause_s=0.0, why=decision.why
            )
        return decision

    def _prepare(self, shares: Shares) -> None:
        self._made, self._error = self._ways.pop(shares, None), ""
        if self._made is not None:
            return
        make = self._make(shares)

        def work() -> None:
            before_s = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_S)  # training must not wait long for its turn
            try:
                self._made = make()
            except Exception as error:  # whatever it is, all go on as they were
                _log.warning("what was to be moved to cannot be prepared: %s", error)
                self._error = str(error) or type(error).__name__
            finally:
                sys.setswitchinterval(before_s)

        self._thread = threading.Thread(target=work, name="rota-balance", daemon=True)
        self._thread.start()

    def due(self) -> Way | None:
        """What to change to now: when it is ready in every process. Asked between two steps, by all alike."""
        if self.standing.under_way is None:
            return None
        if self._failed:
            self.give_up("it cannot be prepared")
            return None
        return self._made if self._ready == self.facts.ranks else None

    def give_up(self, reason: str) -> None:
        """Stay as it is, in every process alike."""
        self._close()
        self.standing = given_up(self.standing)
        if reason:
            text = f"{self._why}; nothing is moved, because {reason}"
            self._tell(
                step=self._step, shares=self.standing.shares, left_out=self.standing.left_out, pause_s=0.0, why=text
            )

    def changed(self, shares: Shares, *, old: Way, pause_s: float) -> None:
        """The change was made; `shares` is what came out of it, and `old` what it was before."""
        wanted = self.standing.under_way
        assert wanted is not None
        self._close()
        self._ways[self._asked] = old
        self._asked = wanted
        while len(self._ways) > _MOST_WAYS:
            self._ways.popitem(last=False)
        self.standing = moved(self.standing, shares)
        self._cost_s = pause_s
        self._tell(step=self._step, shares=shares, left_out=self.standing.left_out, pause_s=pause_s, why=self._why)

    def close(self) -> None:
        """Wait for what is being prepared."""
        self._close()

    def _close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread, self._made, self._error = None, None, ""
        self._ready = self._failed = 0


def silent(**what: Any) -> None:
    """Tells nobody."""
