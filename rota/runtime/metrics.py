"""Collects the metrics of steps into reports, and keeps those that the journal does not have yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rota.runtime.messages import Measured

_REPORT_EVERY_S = 0.5

Row = tuple[int, dict[str, float]]
"""A step and its metrics."""


class MetricsLog:
    """Rows go in step by step; reports go out twice a second; unconfirmed reports travel in the checkpoint.

    That way a metric is either in the journal or in the checkpoint that training resumes from, or its step is taken
    again: after a crash no step is missing from the history.
    """

    def __init__(self, task: str, attempt: int, send: Callable[[Measured], None]) -> None:
        self._task = task
        self._attempt = attempt
        self._send = send
        self._rows: list[Row] = []
        self._unconfirmed: deque[Measured] = deque()
        self._latest: dict[str, float] = {}
        self._number = 0
        self._step_s: float | None = None
        self._sent_s = time.perf_counter()
        self.pace: Callable[[], tuple[float, ...]] = tuple
        """What each device took lately."""

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Note the metrics of a step."""
        self._rows.append((step, metrics))
        self._latest |= metrics
        if time.perf_counter() - self._sent_s > _REPORT_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Report what was noted."""
        now_s = time.perf_counter()
        trained = sum("train/loss" in metrics for _, metrics in self._rows)
        if trained and now_s > self._sent_s:  # not on a machine whose clocks cannot be trusted
            self._step_s = (now_s - self._sent_s) / trained
        if self._rows:
            self._number += 1
            self._dispatch(self._number, tuple(self._rows), dict(self._latest), self._step_s, self.pace())
            self._rows = []
        self._sent_s = now_s

    def confirm(self, number: int) -> None:
        """The journal has the reports up to this number."""
        while self._unconfirmed and self._unconfirmed[0].number <= number:
            self._unconfirmed.popleft()

    def restart_clock(self) -> None:
        """Do not count the time until now as training."""
        self._sent_s = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """The reports that are not confirmed yet."""
        self.flush()
        return {
            "number": self._number,
            "latest": dict(self._latest),
            "unconfirmed": [[m.number, m.rows, m.latest, m.step_s] for m in self._unconfirmed],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Report again what may not have reached the journal."""
        self._number, self._latest = state["number"], dict(state["latest"])
        for number, rows, latest, step_s in state["unconfirmed"]:
            self._dispatch(number, rows, latest, step_s)

    def _dispatch(
        self,
        number: int,
        rows: tuple[Row, ...],
        latest: dict[str, float],
        step_s: float | None,
        pace: tuple[float, ...] = (),
    ) -> None:
        report = Measured(
            task=self._task, attempt=self._attempt, number=number, rows=rows, latest=latest, step_s=step_s, pace=pace
        )
        self._unconfirmed.append(report)
        self._send(report)
