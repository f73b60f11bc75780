"""What only plans can say: coshard, interlaced and recycled measured here, and the paper's settings simulated.

python -m bench.plans [--quick] [--json]
"""

from __future__ import annotations

from typing import Any

from bench import harness, plans_interlaced, plans_local, plans_simulated


def main() -> None:
    """All of it; the simulated part alone takes minutes."""
    chosen = harness.options(__doc__)
    found: dict[str, Any] = {}
    for part in (plans_local.coshard, plans_local.recycled, plans_interlaced.compare):
        found |= part(chosen.quick)
    names = ("coshard_memory", "coshard_time", "interlaced_vs_best", "recycled_vs_sequential")
    figures = {name: found[name] for name in names}
    figures["simulated"], simulated = plans_simulated.simulated(chosen.quick)
    details = {name: value for name, value in found.items() if name not in figures}
    harness.finish("plans", figures, details | {"simulated_details": simulated}, chosen)


if __name__ == "__main__":
    main()
