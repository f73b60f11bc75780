"""The scheduler against what others do: gaps to a proven bound, and makespans of simple rules and of the paper's MILP.

python -m bench.schedule [--quick] [--json]

12 tasks on 8 devices (the paper's kind of sweep, and random ones), 1,000 on 256 and 10,000 on 4,096, in nodes of 8.
The random tasks scale as Amdahl's law has it, with constants of their own for each strategy, and need at least so many
devices that they fit. A ratio is the other's makespan over ours; the MILP has as many seconds as we have.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import harness
from rota.schedule.milp import milp
from rota.schedule.problem import Node, Option, Problem, check, makespan_s
from rota.schedule.solve import Limit, Solved, solve

RULES = ("max", "min", "optimus", "random")
PER_NODE = 8

# Seconds per iteration of GPT-2 on 2..8 devices, read off a figure of the Saturn paper.
CURVES = {
    ("pipeline", 8): (1.560, 1.251, 1.106, 1.007, 0.925, 0.877, 0.805),
    ("fsdp", 8): (2.151, 1.953, 1.782, 1.420, 0.912, 0.668, 0.367),
    ("pipeline", 32): (6.646, 4.738, 4.275, 4.219, 4.111, 4.076, 3.928),
    ("fsdp", 32): (6.912, 5.317, 4.221, 3.805, 3.454, 2.007, 1.303),
}
PAPER_S = 27.56 * 3600
"""What the best runtimes on 8 devices add up to in the paper."""

# strategy -> the part that does not scale, and the work compared with plain data parallelism
STRATEGIES = {"data": (0.02, 1.0), "zero": (0.05, 1.08), "pipeline": (0.10, 0.95)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem with the time for it."""

    name: str
    problem: Problem
    seconds: float


def paper_sweep(seed: int) -> Problem:
    """2 models x 2 batch sizes x 3 learning rates on one node; curves a little off the figure's."""
    draw = random.Random(seed)
    shapes: list[tuple[str, str, int, float]] = []
    for model, size in (("gpt-2", 1.0), ("gpt-j", 3.3)):
        for batch in (8, 32):
            size_here = size * draw.uniform(0.85, 1.15)
            tilt = {strategy: draw.uniform(0.9, 1.1) for strategy in ("pipeline", "fsdp")}
            for rate, (strategy, curve) in [(r, s) for r in range(3) for s in CURVES.items() if s[0][1] == batch]:
                for devices, step_s in enumerate(curve, start=2):
                    length = step_s / batch * size_here * tilt[strategy[0]]
                    shapes.append((f"{model} batch {batch} rate {rate}", strategy[0], devices, length))
    best = {task: min(one[3] for one in shapes if one[0] == task and one[2] == PER_NODE) for task, *_ in shapes}
    scale = PAPER_S / sum(best.values())
    options = [
        Option(tasks=(task,), kind="gpu", devices=devices, seconds=length * scale, label=strategy)
        for task, strategy, devices, length in shapes
    ]
    return Problem(options=tuple(options), nodes=nodes(1))


def random_sweep(seed: int, *, tasks: int, devices: int) -> Problem:
    """Tasks of unlike lengths, of which some need several devices to fit."""
    draw = random.Random(seed)
    options = []
    for task in range(tasks):
        work_s = draw.lognormvariate(0, 0.8) * 4 * 3600
        least = draw.choices((1, 2, 4, 8), (5, 3, 2, 1))[0]
        for strategy, (serial, constant) in STRATEGIES.items():
            part, factor = serial * draw.uniform(0.5, 2), constant * draw.uniform(0.9, 1.15)
            for width in (1, 2, 4, 8):
                # Plain data parallelism keeps everything on every device.
                if width >= (2 * least if strategy == "data" else least):
                    seconds = work_s * factor * (part + (1 - part) / width)
                    options.append(
                        Option(tasks=(f"t{task}",), kind="gpu", devices=width, seconds=seconds, label=strategy)
                    )
    return Problem(options=tuple(options), nodes=nodes(devices // PER_NODE))


def nodes(count: int) -> tuple[Node, ...]:
    """Of eight devices each."""
    return tuple(
        Node(name=f"n{n}", kind="gpu", devices=tuple(f"n{n}/{i}" for i in range(PER_NODE))) for n in range(count)
    )


def small(*, quick: bool) -> list[Case]:
    """12 tasks on 8 devices."""
    seconds, papers, randoms = (2.0, 1, 3) if quick else (10.0, 3, 6)
    return [
        *(Case(name=f"paper {seed}", problem=paper_sweep(seed), seconds=seconds) for seed in range(papers)),
        *(
            Case(name=f"random {seed}", problem=random_sweep(seed, tasks=12, devices=8), seconds=seconds)
            for seed in range(randoms)
        ),
    ]


def middle(*, quick: bool) -> list[Case]:
    """1,000 tasks on 256 devices."""
    seconds, count = (10.0, 1) if quick else (60.0, 3)
    return [
        Case(name=f"random {seed}", problem=random_sweep(seed, tasks=1000, devices=256), seconds=seconds)
        for seed in range(count)
    ]


def large() -> list[Case]:
    """10,000 tasks on 4,096 devices."""
    return [Case(name="random 0", problem=random_sweep(0, tasks=10_000, devices=4096), seconds=300.0)]


def solved(case: Case) -> Solved:
    """Within the time of the case."""
    answer = solve(case.problem, limit=Limit(seconds=case.seconds), clock=time.perf_counter)
    check(case.problem, answer.schedule)
    return answer


def milp_ratio(case: Case, ours: Solved) -> float | None:
    """The MILP's makespan over ours, in as much time; None if it found no schedule."""
    found = milp(case.problem, case.seconds).schedule
    if found is None:
        return None
    check(case.problem, found)
    return makespan_s(case.problem, found) / ours.value.objective


def main() -> None:
    """Solve all and print."""
    chosen = harness.options(__doc__)
    cases = small(quick=chosen.quick)
    answers = [solved(case) for case in cases]
    ratios = [milp_ratio(case, answer) for case, answer in zip(cases, answers, strict=True)]
    more = [solved(case) for case in middle(quick=chosen.quick)]
    most = [] if chosen.quick else [solved(case) for case in large()]
    known = [ratio for ratio in ratios if ratio is not None]
    figures: dict[str, Any] = {
        "gap_12x8": _gap(answers),
        "gap_1000x256": _gap(more),
        "gap_10000x4096": _gap(most) if most else harness.LEFT_OUT,
        "vs_milp_12x8": statistics.median(known) if known else "the MILP found no schedule",
    }
    for rule in RULES:
        figures[f"vs_{rule}"] = statistics.median(
            one.heuristics[rule].objective / one.value.objective for one in [*answers, *more]
        )
    details = {
        "worst_gap_12x8": max(one.gap for one in answers),
        "worst_gap_1000x256": max(one.gap for one in more),
        "gaps_12x8": {case.name: round(one.gap, 4) for case, one in zip(cases, answers, strict=True)},
        "gaps_1000x256": [round(one.gap, 4) for one in more],
        "milp_without_answer": len(ratios) - len(known),
        "milp_ratios": [None if ratio is None else round(ratio, 3) for ratio in ratios],
        "worst_vs_max": min(one.heuristics["max"].objective / one.value.objective for one in [*answers, *more]),
        "worst_vs_milp": min(known, default=None),
        "found_by": [one.by for one in [*answers, *more, *most]],
        "seconds": {"12x8": cases[0].seconds, "1000x256": middle(quick=chosen.quick)[0].seconds},
    }
    harness.finish("schedule", figures, details, chosen)


def _gap(answers: Sequence[Solved]) -> float:
    return statistics.median(one.gap for one in answers)


if __name__ == "__main__":
    main()
