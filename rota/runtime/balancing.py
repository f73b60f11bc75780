"""Keeps the pace of a gang: hears what each device takes, decides as all others do, and prepares what was decided."""

from __future__ import annotations

import logging
import math
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rota.balance.decide import (
    MOST_LEFT_OUT,
    Decision,
    Facts,
    Migrate,
    Policy,
    Resize,
    Seen,
    Standing,
    given_up,
    moved,
)
from rota.balance.pace import Shares
from rota.errors import InputError, TaskError
from rota.plan.cache import Programs
from rota.runtime.engine import Engine
from rota.runtime.user_code import calling
from rota.threads import OwnedThread, StoppedError

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
        """`make` is called in the thread that trains; what it returns makes a way, in another that may stop it.

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
        self._thread: OwnedThread | None = None
        self._made: Way | None = None
        self._error = ""

    # ---- measuring ----

    def spent(self, seconds: float) -> None:
        """This device has computed for so long."""
        self._spent_s += seconds

    def numbers(self) -> list[float]:
        """What is added up over all processes: what each has spent since the last time, and whether it is ready."""
        found = [0.0] * (self.facts.ranks + 4)
        found[-4] = self._asked_for()
        found[self._rank] = self._spent_s
        found[-3] = self._cost_s if self._rank == 0 else 0.0
        # Looked at once: what becomes ready meanwhile is so for all from the next time on.
        found[-2] = 1.0 if self._made is not None else 0.0
        found[-1] = 1.0 if self._error else 0.0
        self._spent_s = 0.0
        return found

    def heard(self, numbers: list[float]) -> None:
        """The sums. TaskError if not all have decided the same, before anything is done about it."""
        if numbers[-4] != self.facts.ranks * self._asked_for():
            raise TaskError(
                "the balance policy decided differently in the processes of the task; it may depend on nothing but "
                "what it is given"
            )
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
        before = self.standing
        with calling("the balance policy"):
            self.standing, decision = checked(self._policy(before, seen, self.facts), self.facts)
        if isinstance(decision, Migrate):
            if before.under_way is not None:
                self.standing = replace(self.standing, under_way=before.under_way)
                return None  # one thing after another
            self.standing = replace(self.standing, under_way=tuple(decision.shares))
            self._why = decision.why
            self._prepare(tuple(decision.shares))
        elif isinstance(decision, Resize):
            self.standing = replace(self.standing, left_out=tuple(decision.left_out))
            self._tell(
                step=step, shares=self.standing.shares, left_out=decision.left_out, pause_s=0.0, why=decision.why
            )
        return decision

    def _asked_for(self) -> float:
        """A number for what was decided, by which processes see that they all decided the same."""
        return float(zlib.crc32(repr((self.standing.under_way, self.standing.left_out)).encode()))

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
            except StoppedError:
                raise
            except Exception as error:  # whatever it is, all go on as they were
                _log.warning("what was to be moved to cannot be prepared: %s", error)
                self._error = str(error) or type(error).__name__
            finally:
                sys.setswitchinterval(before_s)

        self._thread = OwnedThread(work, name="balance")
        self._thread.start()

    def due(self) -> Way | None:
        """What to change to now: when it is ready in every process. Asked between two steps, by all alike."""
        if self.standing.under_way is None:
            return None
        if self._failed:
            self.give_up(self._error or "another device cannot prepare it")
            return None
        return self._made if self._ready == self.facts.ranks else None

    def give_up(self, reason: str) -> None:
        """Stay as it is, in every process alike."""
        self.close()
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
        self.close()
        self._ways[self._asked] = old
        self._asked = wanted
        while len(self._ways) > _MOST_WAYS:
            self._ways.popitem(last=False)
        self.standing = moved(self.standing, shares)
        self._cost_s = pause_s
        self._tell(step=self._step, shares=shares, left_out=self.standing.left_out, pause_s=pause_s, why=self._why)

    def close(self) -> None:
        """Have what is being prepared stop at its next safe point, and forget it."""
        if self._thread is not None:
            self._thread.end()
        self._thread, self._made, self._error = None, None, ""
        self._ready = self._failed = 0


def checked(answer: Any, facts: Facts) -> tuple[Standing, Decision]:
    """What a policy returned; InputError with one sentence if it cannot be carried out."""
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], Standing):
        raise InputError(f"it must return (standing, decision), not {str(answer)[:80]}")
    standing, decision = answer
    if decision is None:
        return standing, None
    if isinstance(decision, Migrate):
        if not _numbers(decision.shares, facts.ranks) or not all(0 < one < math.inf for one in decision.shares):
            raise InputError(f"shares must be {facts.ranks} positive numbers, not {decision.shares!r}")
    elif isinstance(decision, Resize):
        if facts.products <= 0:
            raise InputError(
                "nothing can be left out of this task: its policy has no mode 'semi' or 'resize', it is compiled, or "
                "no product is cut between its devices (as tensor cuts them)"
            )
        if not _numbers(decision.left_out, facts.ranks) or not all(
            0 <= one <= MOST_LEFT_OUT for one in decision.left_out
        ):
            raise InputError(
                f"left_out must be {facts.ranks} numbers from 0 to {MOST_LEFT_OUT}, not {decision.left_out!r}"
            )
    else:
        raise InputError(f"a decision is Migrate, Resize or None, not {decision!r}")
    return standing, decision


def _numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) == count
        and all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
    )


def silent(**what: Any) -> None:
    """Tells nobody."""
