"""Lines and rates through measured points, for what there was no time to measure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rota.calibrate.known import Part
from rota.plan.costs import Rate


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Base and slope, neither less than nothing; small values count as much as large ones."""
    weights = [1 / max(y, 1e-9) ** 2 for y in ys]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = 0.0
    if spread > 0:
        slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    if slope < 0:
        return mean_y, 0.0
    base = mean_y - slope * mean_x
    if base < 0:
        squares = sum(w * x * x for w, x in zip(weights, xs, strict=True))
        return 0.0, sum(w * x * y for w, x, y in zip(weights, xs, ys, strict=True)) / squares
    return base, slope


def fit_rates(parts: Iterable[Part]) -> tuple[dict[str, Rate], Rate]:
    """For each kind of op what a part costs that was not measured, and for all others."""
    parts = list(parts)
    free = [part.forward_s for part in parts if not part.touched_bytes and not part.flops]
    op_s = statistics.median(free) if free else min((part.forward_s for part in parts), default=1e-5)
    of_kind: dict[str, list[Part]] = {}
    for part in parts:
        of_kind.setdefault(part.kind, []).append(part)
    rates = {kind: _fit_rate(found, op_s) for kind, found in of_kind.items()}
    return rates, _fit_rate([part for part in parts if part.touched_bytes], op_s)


def _fit_rate(parts: Sequence[Part], op_s: float) -> Rate:
    """The better of: so much for a product, and so much for a byte. An op without work costs as much as it did."""
    if not parts:
        return Rate(op_s=op_s, flop_s=5e-11, byte_s=2e-10, backward=2.0)
    forward_s = sum(part.forward_s for part in parts)
    backward = sum(part.backward_s for part in parts) / forward_s if forward_s > 0 else 2.0
    worked = [part for part in parts if part.flops or part.touched_bytes]
    if not worked:
        base_s = statistics.median(part.forward_s for part in parts)
        return Rate(op_s=base_s, flop_s=0.0, byte_s=0.0, backward=backward)
    ys = [max(part.forward_s, 1e-9) for part in worked]
    best: tuple[float, Rate] | None = None
    for name, xs in (("flop_s", [p.flops for p in worked]), ("byte_s", [p.touched_bytes for p in worked])):
        if not all(xs):
            continue
        base_s, slope = fit_line(xs, ys)
        if slope == 0.0:  # of one size only, or nearly so
            base_s, slope = 0.0, statistics.median(y / x for x, y in zip(xs, ys, strict=True))
        error = sum(abs(base_s + slope * x - y) / y for x, y in zip(xs, ys, strict=True))
        if best is None or error < best[0]:
            given = {"flop_s": 0.0, "byte_s": 0.0, name: slope}
            best = (error, Rate(op_s=max(base_s, min(op_s, *ys)), backward=backward, **given))
    if best is None:
        return Rate(op_s=statistics.median(ys), flop_s=0.0, byte_s=0.0, backward=backward)
    return best[1]
