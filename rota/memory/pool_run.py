"""Runs a pool: a thread for each device takes unit after unit, and the next one's shard comes while one computes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rota.memory.pooled import Pooled
from rota.memory.sharp import Pick, Pool, Work, longest_remaining
from rota.memory.slab import Budget
from rota.memory.units import Unit


@dataclass(kw_only=True)
class Member:
    """A model in a pool, with its data."""

    name: str
    model: Pooled
    batches: Callable[[], Any]
    """The next batch."""
    steps: int
    accumulate: int = 1
    stepped: Callable[[int, list[dict[str, float]]], bool] = lambda step, metrics: True
    """Told of each step, with the metrics of its batches; whether to go on."""


@dataclass(kw_only=True)
class PoolResult:
    """What became of a pool."""

    makespan_s: float = 0.0
    busy_s: dict[int, float] = field(default_factory=dict)
    """device -> how long it computed"""
    failed: dict[str, Exception] = field(default_factory=dict)
    """model -> why it left"""
    ran: list[tuple[int, str, int, float, float]] = field(default_factory=list)
    """(device, model, unit, begin and end), in the order of their ends"""


class PoolRun:
    """The devices of a pool, at work."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        budgets_bytes: Sequence[int],
        cores: Sequence[int | None] = (),
        pick: Pick = longest_remaining,
    ) -> None:
        """`cores` are those that the threads of devices run on, if given."""
        self._members: Mapping[str, Member] = {one.name: one for one in members}
        self._steps = dict.fromkeys(self._members, 0)
        self._metrics: dict[str, list[dict[str, float]]] = {one.name: [] for one in members}
        self._budgets = [Budget(size) for size in budgets_bytes]
        self._cores = [*cores, *[None] * (len(self._budgets) - len(cores))]
        works = [Work(name=one.name, units_s=tuple(one.model.units_s), steps=one.steps) for one in members]
        self._pool = Pool(works=works, pick=pick)
        self._changed = threading.Condition()
        self._result = PoolResult()
        self._begun_s = 0.0
        self._error: BaseException | None = None

    @property
    def budgets(self) -> Sequence[Budget]:
        """Of each device."""
        return self._budgets

    def run(self) -> PoolResult:
        """Until all models have ended."""
        self._begun_s = time.perf_counter()
        threads = [
            threading.Thread(target=self._guarded, args=(device,), name=f"rota-device-{device}", daemon=True)
            for device in range(len(self._budgets))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        self._result.makespan_s = time.perf_counter() - self._begun_s
        return self._result

    def _guarded(self, device: int) -> None:
        try:
            self._serve(device)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _serve(self, device: int) -> None:
        core = self._cores[device]
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})  # of this thread
        coming = self._wait_for_unit(device)
        while coming is not None:
            name, number = coming
            with self._changed:
                self._pool.began(device)
                following = self._pool.choose(device)
            goes_on = self._run_unit(device, name, number, following)
            with self._changed:
                if goes_on:
                    self._pool.ended(device)
                    self._changed.notify_all()
                follows = self._pool.follows(device)  # unless it has left meanwhile
            coming = following if follows else self._wait_for_unit(device)

    def _wait_for_unit(self, device: int) -> tuple[str, int] | None:
        with self._changed:
            while not self._pool.done and self._error is None:
                chosen = self._pool.choose(device)
                if chosen is not None:
                    return chosen
                self._changed.wait()
        return None

    def _run_unit(self, device: int, name: str, number: int, following: tuple[str, int] | None) -> bool:
        """Run a unit while the following one's shard comes; whether the model goes on."""
        member, budget = self._members[name], self._budgets[device]
        unit = member.model.units[number]
        keep: frozenset[str] = frozenset()
        try:
            member.model.bring(unit, budget)
            if following is not None:
                keep = self._bring_following(name, unit, following, budget)
            self._begin_batch(member, number)
            took_s = member.model.run(unit, budget)
            self._note(device, name, number, took_s)
            member.model.release(unit, budget, keep=keep)
            return self._end_batch(member, number)
        except Exception as error:  # one model's failure is not the others'
            self._leave(name, error)
            return False

    def _bring_following(self, name: str, unit: Unit, following: tuple[str, int], budget: Budget) -> frozenset[str]:
        model = self._members[following[0]].model
        coming = model.units[following[1]]
        if following[0] != name:
            try:
                model.bring(coming, budget)
            except Exception as error:
                self._leave(following[0], error)
            return frozenset()
        # What both need stays; what the present one makes or changes cannot come before.
        model.bring(coming, budget, without=unit.needs | unit.changes)
        return coming.needs

    def _begin_batch(self, member: Member, number: int) -> None:
        model = member.model
        place = model.batch_of(number)
        if number == 0 or model.batch_of(number - 1) != place:
            number = self._steps[member.name] * member.accumulate + place
            model.begin(member.batches(), place=place, number=number)

    def _end_batch(self, member: Member, number: int) -> bool:
        model = member.model
        place = model.batch_of(number)
        is_last = number == len(model.units) - 1
        if not is_last and model.batch_of(number + 1) == place:
            return True
        metrics = self._metrics[member.name]
        metrics.append({key: float(value) for key, value in model.end().items()})
        if not is_last:
            return True
        self._steps[member.name] += 1
        self._metrics[member.name] = []
        if member.stepped(self._steps[member.name], metrics):
            return True
        self._leave(member.name, None)
        return False

    def _note(self, device: int, name: str, number: int, took_s: float) -> None:
        with self._changed:
            result = self._result
            result.busy_s[device] = result.busy_s.get(device, 0.0) + took_s
            end_s = time.perf_counter()
            result.ran.append((device, name, number, end_s - took_s - self._begun_s, end_s - self._begun_s))
            units_s = self._members[name].model.units_s
            units_s[number] = took_s
            if number == len(units_s) - 1:
                self._pool.measured(name, units_s)

    def _leave(self, name: str, error: Exception | None) -> None:
        with self._changed:
            if error is not None:
                self._result.failed[name] = error
            self._pool.leave(name)
            self._changed.notify_all()
        self._members[name].model.abandon()
