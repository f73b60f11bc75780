"""One device of a gang trains as it would alone, and the others only learn how it goes."""

from __future__ import annotations

from typing import Any

from rota.runtime.executor import Eager, Parts, Weights
from rota.runtime.gang import Gang


class Alone:
    """Plain PyTorch on the leader, for what is not worth cutting and for what cannot be captured."""

    def __init__(self, parts: Parts, *, gang: Gang) -> None:
        self._gang = gang
        self._eager = Eager(parts) if gang.leads else None

    def zero_grad(self) -> None:
        """On the leader."""
        if self._eager is not None:
            self._eager.zero_grad()

    def backward(self, batch: Any, *, number: int) -> dict[str, float]:
        """On the leader; the metrics are told to all."""
        return self._told(None if self._eager is None else self._eager.backward(batch, number=number))

    def update(self) -> None:
        """On the leader."""
        if self._eager is not None:
            self._eager.update()

    def measure(self, batch: Any) -> dict[str, float]:
        """On the leader; the metrics are told to all."""
        return self._told(None if self._eager is None else self._eager.measure(batch))

    def weights(self, *, between_steps: bool) -> Weights | None:
        """The leader's own."""
        return None if self._eager is None else self._eager.weights(between_steps=between_steps)

    def _told(self, metrics: dict[str, float] | None) -> dict[str, float]:
        found: dict[str, float] = self._gang.told(metrics)
        return found
