"""Finds the strategy with the shortest step that fits, among all that suit a graph, and says why the others lost.

Every candidate has a bound that is cheap: the work of its busiest device, and the parameters on it. In the order of
these bounds candidates are measured, until no bound is below the best step. A large model is measured by fewer of its
layers and replicas first; those that come out best are then compiled and simulated as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rota.cluster.device import format_bytes
from rota.errors import FitError, InputError, RotaError
from rota.graph.graph import Graph
from rota.plan.costs import Costs
from rota.plan.explain import format_seconds
from rota.plan.plan import Plan
from rota.search.bound import Bound, bound_of
from rota.search.measure import LAYERS, Measured, Meter
from rota.search.prepared import Prepared
from rota.search.space import degree_of, recipes_of, strategies, text_of
from rota.strategies.base import Strategy
from rota.strategies.zero import Zero
from rota.whole import positive

ADAM = 2.0
"""The bytes of Adam's moments for each byte of a parameter."""

_STEP_ERROR, _PEAK_ERROR = 0.03, 0.1
"""How far what is told from fewer layers and replicas may be from the whole; the peak is not linear throughout."""

_MOST_EXACT = 4
"""So many of the best are measured as they are, where others are told from smaller ones."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy and what is predicted of it."""

    text: str
    """What `rota.strategies.find` finds it by."""
    strategy: Strategy = field(repr=False, compare=False)
    devices: int
    """How many it uses."""
    step_s: float | None
    """None if it was refused; if it was not measured, what it takes at least."""
    peak_bytes: int | None
    """Of the device that needs the most, with the optimizer's moments."""
    fits: bool
    measured: bool
    exact: bool
    """Simulated as it is, not told from a smaller one."""
    why: str
    """Why it lost; empty for the one that is chosen."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        names = ("text", "devices", "step_s", "peak_bytes", "fits", "measured", "exact", "why")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search found."""

    candidates: tuple[Candidate, ...]
    """The best first; then those that are slower, that were not measured, that do not fit, that were refused."""
    memory_bytes: int | None

    @property
    def chosen(self) -> Candidate:
        """The best one that fits."""
        return self.candidates[0]

    def table(self, most: int = 12) -> list[str]:
        """Lines for people; the chosen one is marked."""
        shown = self.candidates[: max(1, most)]
        rows = [("", "strategy", "devices", "step", "memory", "")]
        for one in shown:
            mark = "*" if one is self.chosen else ""
            about = "" if one.exact else "about " if one.measured else "over "
            step = "-" if one.step_s is None else about + format_seconds(one.step_s)
            memory = "-" if one.peak_bytes is None else format_bytes(one.peak_bytes)
            rows.append((mark, one.text, str(one.devices), step, memory, one.why or "chosen"))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = []
        for row in rows:
            cells = [row[0].ljust(1), row[1].ljust(widths[1]), *(row[i].rjust(widths[i]) for i in (2, 3, 4)), row[5]]
            lines.append("  ".join(cells).rstrip())
        if len(self.candidates) > len(shown):
            lines.append(f"   and {len(self.candidates) - len(shown)} more")
        return lines

    def sentence(self) -> str:
        """What was chosen and why the next one was not, in one line."""
        best = self.chosen
        step = "" if best.step_s is None else f", {format_seconds(best.step_s)} a step predicted"
        rest = [one for one in self.candidates[1:] if one.measured and one.fits][:2]
        others = "; ".join(f"{one.text} is {one.why}" for one in rest if one.why)
        return f"{best.text} of {len(self.candidates)} candidates{step}" + (f" ({others})" if others else "")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "chosen": self.chosen.text,
            "memory_bytes": self.memory_bytes,
            "candidates": [one.to_json() for one in self.candidates],
        }


def search(
    graph: Graph,
    devices: int,
    *,
    memory_bytes: int | None = None,
    costs: Costs | None = None,
    optimizer_bytes_per_parameter_byte: float = ADAM,
    whole_parameters: bool = False,
    within: Callable[[Strategy], bool] | None = None,
    pinned: Callable[[Plan], None] | None = None,
    degrees: Mapping[str, int] | None = None,
    budget_s: float | None = None,
    notice: Callable[[str], None] = lambda sentence: None,
) -> Search:
    """The candidates in the order of their steps; FitError if none fits.

    The user may keep a part of the decision: `within` keeps strategies, `degrees` fixes those of axes, and `pinned` is
    applied to each plan before it is compiled. `whole_parameters` drops what stores trained parameters cut. After
    `budget_s` seconds nothing more is measured, once something fits.
    """
    devices = positive(devices, "the number of devices")
    prepared = Prepared(graph)
    found = [one for one in strategies(prepared.whole, devices, degrees=degrees) if within is None or within(one)]
    if not found:
        raise InputError("no strategy is left to choose from; allow more of them, or other degrees")
    meter = Meter(
        prepared=prepared,
        devices=devices,
        costs=costs or Costs(),
        moments=optimizer_bytes_per_parameter_byte,
        whole_parameters=whole_parameters,
        pinned=pinned,
    )
    return _Searching(meter, found, memory_bytes, budget_s, notice).run()


@dataclass(kw_only=True)
class _State:
    """What is known of a candidate so far."""

    strategy: Strategy
    text: str
    bound: Bound | None = None
    measured: Measured | None = None
    refusal: str = ""
    skipped: str = ""

    @property
    def step_s(self) -> float:
        assert self.measured is not None
        return self.measured.step_s

    @property
    def peak_bytes(self) -> float:
        assert self.measured is not None
        return max(self.measured.peak_bytes)


class _Searching:
    def __init__(
        self,
        meter: Meter,
        found: list[Strategy],
        memory_bytes: int | None,
        budget_s: float | None,
        notice: Callable[[str], None],
    ) -> None:
        self._meter = meter
        self._memory = float("inf") if memory_bytes is None else float(memory_bytes)
        self._memory_bytes = memory_bytes
        self._until_s = float("inf") if budget_s is None else time.monotonic() + budget_s
        self._notice = notice
        self._states = [_State(strategy=one, text=text_of(one)) for one in found]

    def run(self) -> Search:
        """Bound, measure, look again at the best, and rank."""
        self._bound_all()
        waiting = sorted(
            (one for one in self._states if one.bound is not None),
            key=lambda one: (one.bound.step_s, one.text) if one.bound else (0.0, one.text),
        )
        small = [one for one in waiting if one.bound is not None and one.bound.peak_bytes <= self._memory]
        for one in small:
            self._measure_unless_worse(one)
        if self._best() is None:
            self._find_smallest([one for one in waiting if one not in small])
        self._look_again()
        best = self._best()
        if best is None:
            raise self._nothing_fits()
        return self._ranked(best)

    # ---- steps ----

    def _bound_all(self) -> None:
        meter = self._meter
        stack = meter.prepared.stack
        folded = LAYERS if stack is not None and stack.layers > LAYERS[1] and meter.pinned is None else None
        for one in self._states:
            try:
                one.bound = bound_of(
                    meter.prepared,
                    one.strategy,
                    meter.devices,
                    costs=meter.costs,
                    moments=meter.moments,
                    folded=folded,
                )
            except RotaError as error:
                one.refusal = str(error)

    def _measure_unless_worse(self, one: _State) -> None:
        assert one.bound is not None
        best = self._best()
        if best is not None:
            slack = 0.0 if best.measured is not None and best.measured.exact else _STEP_ERROR
            if one.bound.step_s > best.step_s * (1 + slack):
                one.skipped = f"computes for {format_seconds(one.bound.step_s)} at least"
                return
            if time.monotonic() > self._until_s:
                one.skipped = "the time for the search was up"
                return
        self._try(one, self._meter.quick)

    def _try(self, one: _State, measure: Callable[[Strategy], Measured]) -> None:
        twin = self._twin(one)
        if twin is not None:
            one.measured = twin
            return
        self._notice(f"looking at {one.text}")
        try:
            one.measured = measure(one.strategy)
        except RotaError as error:
            one.refusal, one.measured = str(error), None

    def _twin(self, one: _State) -> Measured | None:
        """ZeRO's stages 1 and 2 make the same plan."""
        recipes = recipes_of(one.strategy)
        if not recipes or not isinstance(recipes[0], Zero) or recipes[0].stage not in (1, 2):
            return None
        other = one.text.replace(f"stage={recipes[0].stage}", f"stage={3 - recipes[0].stage}")
        if one.measured is not None:
            return None
        return next((state.measured for state in self._states if state.text == other), None)

    def _find_smallest(self, waiting: list[_State]) -> None:
        """Nothing fits: measure what may need the least, so that the user can be told how much that is."""
        for one in sorted(waiting, key=lambda one: (one.bound.peak_bytes if one.bound else 0.0, one.text)):
            smallest = min((other.peak_bytes for other in self._states if other.measured), default=float("inf"))
            assert one.bound is not None
            if one.bound.peak_bytes < smallest:
                self._try(one, self._meter.quick)

    def _look_again(self) -> None:
        """Measure the best as they are, until none that is told from a smaller one may be better."""
        tried = 0
        while True:
            exact = self._best(exact=True)
            if exact is not None and tried >= _MOST_EXACT:
                return
            tried += 1
            told = [
                one
                for one in self._states
                if one.measured is not None
                and not one.measured.exact
                and one.peak_bytes <= self._memory * (1 + _PEAK_ERROR)
                and (exact is None or one.step_s < exact.step_s)
            ]
            if not told or (exact is not None and time.monotonic() > self._until_s):
                return
            self._try(min(told, key=lambda one: (one.step_s, one.text)), self._meter.exact)

    def _best(self, *, exact: bool = False) -> _State | None:
        fitting = [
            one
            for one in self._states
            if one.measured is not None and one.peak_bytes <= self._memory and (one.measured.exact or not exact)
        ]
        return min(fitting, key=lambda one: (one.step_s, one.peak_bytes, one.text), default=None)

    # ---- what is told ----

    def _nothing_fits(self) -> RotaError:
        tried = [one for one in self._states if one.measured is not None]
        if not tried:
            reasons = "; ".join(dict.fromkeys(one.refusal for one in self._states if one.refusal))
            return InputError(f"no strategy suits the model: {reasons}")
        least = min(tried, key=lambda one: (one.peak_bytes, one.text))
        return FitError(
            f"no plan of the model fits into {format_bytes(self._memory)} on each of {self._meter.devices} devices; "
            f"the smallest, {least.text}, needs {format_bytes(least.peak_bytes)}"
        )

    def _ranked(self, best: _State) -> Search:
        chosen = self._best(exact=True) or best

        def key(one: _State) -> tuple[Any, ...]:
            if one.measured is not None:
                fits = one.peak_bytes <= self._memory
                return (0 if one is chosen else 1 if fits else 3, one.step_s, one.peak_bytes, one.text)
            if one.refusal:
                return (4, 0.0, 0.0, one.text)
            assert one.bound is not None
            small = one.bound.peak_bytes <= self._memory
            return (2 if small else 3, one.bound.step_s, one.bound.peak_bytes, one.text)

        ranked = [self._candidate(one, chosen) for one in sorted(self._states, key=key)]
        return Search(candidates=tuple(ranked), memory_bytes=self._memory_bytes)

    def _candidate(self, one: _State, chosen: _State) -> Candidate:
        bound, measured = one.bound, one.measured
        step_s = measured.step_s if measured is not None else bound.step_s if bound is not None else None
        peak = one.peak_bytes if measured is not None else bound.peak_bytes if bound is not None else None
        if one.refusal:
            step_s = peak = None
        return Candidate(
            text=one.text,
            strategy=one.strategy,
            devices=self._meter.devices if recipes_of(one.strategy) else _used(one, self._meter.devices),
            step_s=step_s,
            peak_bytes=None if peak is None else round(peak),
            fits=peak is not None and peak <= self._memory,
            measured=measured is not None,
            exact=measured is not None and measured.exact,
            why=self._why(one, chosen),
        )

    def _why(self, one: _State, chosen: _State) -> str:
        if one is chosen:
            return ""
        if one.refusal:
            return f"refused: {one.refusal}"
        assert one.bound is not None
        peak = one.bound.peak_bytes if one.measured is None else one.peak_bytes
        if peak > self._memory:
            least = "" if one.measured is not None else "at least "
            return f"needs {least}{format_bytes(peak)} of {format_bytes(self._memory)}"
        if one.measured is None:
            return f"not tried: {one.skipped}"
        ratio = one.step_s / chosen.step_s if chosen.step_s else 1.0
        slower = "as fast" if ratio < 1.005 else f"{ratio:.2f} times slower"
        if ratio < 1.005 and one.peak_bytes > chosen.peak_bytes:
            slower = "as fast, and needs more memory" if one.peak_bytes > 1.005 * chosen.peak_bytes else "as fast"
        reason = _reason(one, chosen)
        return f"{slower}: {reason}" if reason else slower


def _used(one: _State, devices: int) -> int:
    """How many devices a strategy that stands alone uses: those on which something happens."""
    if one.measured is None:
        return devices
    return max(1, sum(peak > 0 for peak in one.measured.peak_bytes))


def _reason(one: _State, chosen: _State) -> str:
    """What takes the most of the step beside what the chosen one computes, too."""
    assert one.measured is not None
    assert chosen.measured is not None
    step_s = one.step_s or 1.0
    found: list[tuple[float, str]] = []
    for what, seconds in one.measured.waits.items():
        found.append((seconds / step_s, f"waits {seconds / step_s:.0%} for {what}"))
    more = one.measured.busy_s - chosen.measured.busy_s
    if more > 0 and chosen.measured.busy_s > 0:
        found.append((more / step_s, f"computes {one.measured.busy_s / chosen.measured.busy_s:.2f} times as much"))
    idle = max(0.0, 1 - (one.measured.busy_s + sum(one.measured.waits.values())) / step_s)
    staged = degree_of(one.strategy, "pipeline") > 1
    found.append((idle, f"pipeline bubble {idle:.0%}" if staged else f"devices idle {idle:.0%}"))
    share, text = max(found)
    return text if share >= 0.005 else ""
