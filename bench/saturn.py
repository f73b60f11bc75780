"""Saturn's setting on a virtual clock: how much time rota saves over current practice, beside what the paper reports.

python -m bench.saturn [--quick] [--json]

Twelve tasks each, two models with two sizes of batch and three learning rates. TXT: GPT-2 1.5B (48 x 1600) and GPT-J 6B
(28 x 4096, as a GPT-2 of this size) on WikiText-2. IMG: ViT-G 1.8B and a ResNet of 0.2B on ImageNet. Devices are
A100-40GB by their data sheet with the efficiencies that `rota.cluster.kinds` states; steps are predicted by rota's own
search. As in the paper's public code: float32 without TF32 but in convolutions, SGD, 512 tokens in a sample, no task
spans nodes. The number of steps (10 epochs) is scaled by one factor for each workload, so that the best 8-GPU runtimes
sum to what the paper's do: 27.56 h and 17.59 h.

The curves are compared with the paper's seconds per iteration as its code runs them: GPipe with as many micro-batches
as are best, and FSDP, both with recomputing. The ablation begins where the paper's does: FSDP with recomputing on 4
devices for each task, in random order.

TXT is looked at on 1 to 8 devices, IMG on 1, 2, 4 and 8. Predictions are kept in the temporary folder, by a digest of
the code that makes them; the whole takes half an hour without them. Quick takes TXT with batch 16 alone on one node,
only two strategies on 1, 4 and 8 devices, no ablation, and of the curves batch 8 on 8 devices.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import rota
from bench import harness
from bench.saturn_models import GPT2, GPTJ, RESNET, VITG, Model
from rota.cluster.kinds import KINDS
from rota.errors import RotaError
from rota.profile.estimate import Estimate
from rota.profile.predict import Subject, digest_of, predict
from rota.schedule.child import solve_in_child
from rota.schedule.heuristics import HEURISTICS
from rota.schedule.options import option_of
from rota.schedule.problem import Node, Option, Placement, Problem, Schedule, check, check_problem, makespan_s
from rota.schedule.solve import Limit
from rota.testing.clusters import replay

KIND = KINDS["A100-40GB"]
EPOCHS = 10
RATES = 3
"""Learning rates of each model and batch."""
SETTINGS: Mapping[str, tuple[int, ...]] = {"1_node": (8,), "2_nodes": (8, 8), "8_4": (8, 4)}
RECOMPUTED = "zero(stage=3) * coshard(1)"
"""FSDP as the paper's code has it; without layers to recompute, zero alone."""
QUICK = ("single(microbatches=4)", "zero(stage=3)")
SEEDS, QUICK_SEEDS = 10, 1
_TICK = 1e-3
"""What polling a virtual clock may add."""
SOLVE_S, QUICK_SOLVE_S = 10.0, 3.0

PAPER_SAVED = {
    "txt_1_node": 39.2, "txt_2_nodes": 43.5, "txt_8_4": 41.2,
    "img_1_node": 40.7, "img_2_nodes": 49.0, "img_8_4": 45.7,
}  # fmt: skip
"""Percent, of its makespans."""
PAPER_ABLATION = {"scheduler": 1.1, "allocation": 1.33, "parallelism": 1.95, "introspection": 2.27}
PAPER_CURVES = {
    ("pipeline", 8): (1.560, 1.251, 1.106, 1.007, 0.925, 0.877, 0.805),
    ("fsdp", 8): (2.151, 1.953, 1.782, 1.420, 0.912, 0.668, 0.367),
    ("pipeline", 32): (6.646, 4.738, 4.275, 4.219, 4.111, 4.076, 3.928),
    ("fsdp", 32): (6.912, 5.317, 4.221, 3.805, 3.454, 2.007, 1.303),
}
"""Seconds of an iteration of GPT-2 on 2 to 8 devices."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Models with their sizes of batch, and how long they take one after another on 8 devices, at best."""

    models: tuple[Model, ...]
    batches: tuple[int, ...]
    hours: float


WORKLOADS = {
    "txt": Workload(models=(GPT2, GPTJ), batches=(16, 32), hours=27.56),
    "img": Workload(models=(VITG, RESNET), batches=(64, 128), hours=17.59),
}

Ways = dict[tuple[str, int], list[Estimate]]
"""(model, batch) -> the best way of each count."""


def main() -> None:
    """Predict, schedule every arm in every setting, and compare."""
    chosen = harness.options(__doc__)
    torch.set_num_threads(1)
    quick = chosen.quick
    predictions = Predictions(shown=not chosen.json)
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        if quick and name != "txt":
            figures |= {f"{name}_{setting}": harness.LEFT_OUT for setting in SETTINGS}
            continue
        workload = replace(workload, batches=workload.batches[:1]) if quick else workload
        counts = (1, 4, 8) if quick else (1, 2, 4, 8) if name != "txt" else tuple(range(1, 9))
        ways = predictions.ways(workload, QUICK if quick else ("auto",), counts)
        steps = scaled_steps(workload, ways)
        details[f"{name}_ways"] = {f"{model} batch {batch}": _told(found) for (model, batch), found in ways.items()}
        for setting in SETTINGS:
            if quick and setting != "1_node":
                figures[f"{name}_{setting}"] = harness.LEFT_OUT
                continue
            hours = arms(problem_of(workload, ways, steps, SETTINGS[setting]), quick=quick)
            figures[f"{name}_{setting}"] = round(100 * (1 - hours["rota"] / hours["current_practice"]), 1)
            details[f"{name}_{setting}_hours"] = {key: round(value, 2) for key, value in hours.items()}
        if name == "txt":
            figures["ablation"] = dict.fromkeys(PAPER_ABLATION, harness.LEFT_OUT)
            if not quick:
                fixed = predictions.ways(workload, (RECOMPUTED,), counts)
                figures["ablation"] = ablation(workload, ways, fixed, steps)
    points = curves(predictions, quick=quick)
    figures["curve_error_median"] = round(statistics.median(abs(one["error"]) for one in points.values()), 3)
    details |= {"curves": points, "saved_in_the_paper": PAPER_SAVED, "ablation_in_the_paper": PAPER_ABLATION}
    details["saved_by_the_papers_curves"] = harness.LEFT_OUT if quick else by_the_papers_curves()
    harness.finish("saturn", figures, details, chosen)


# ---- problems and arms ----


def scaled_steps(workload: Workload, ways: Ways) -> dict[tuple[str, int], float]:
    """Ten epochs of each task, all times the factor that makes the best 8-GPU runtimes sum to the paper's."""
    epochs = {
        (model.name, batch): EPOCHS * model.samples / batch for model in workload.models for batch in workload.batches
    }
    alone_s = sum(
        RATES * steps * min(one.step_s for one in ways[key] if one.devices == 8) for key, steps in epochs.items()
    )
    return {key: steps * workload.hours * 3600 / alone_s for key, steps in epochs.items()}


def problem_of(workload: Workload, ways: Ways, steps: Mapping[tuple[str, int], float], sizes: Sequence[int]) -> Problem:
    """All tasks of a workload on nodes of these sizes."""
    options: list[Option] = []
    for model in workload.models:
        for batch in workload.batches:
            for rate in range(RATES):
                key = (model.name, batch)
                options += [option_of(f"{model.name}-b{batch}-lr{rate}", one, steps=steps[key]) for one in ways[key]]
    nodes = tuple(
        Node(name=f"n{place}", kind=KIND.name, devices=tuple(f"n{place}:{i}" for i in range(size)))
        for place, size in enumerate(sizes)
    )
    problem = Problem(options=tuple(options), nodes=nodes)
    check_problem(problem)
    return problem


def evaluate(problem: Problem, schedule: Schedule, *, replan: bool = False) -> float:
    """Hours until the last task has ended, run by the real controller on its virtual clock."""
    check(problem, schedule)
    hours = replay(problem, schedule, replan=replan).makespan_s / 3600
    assert replan or abs(hours * 3600 - makespan_s(problem, schedule)) <= _TICK * hours * 3600
    return hours


def arms(problem: Problem, *, quick: bool) -> dict[str, float]:
    """Hours of each way to schedule the tasks."""
    solved = solve_in_child(problem, limit=Limit(seconds=QUICK_SOLVE_S if quick else SOLVE_S))
    drawn = [evaluate(problem, HEURISTICS["random"](problem, seed)) for seed in range(QUICK_SEEDS if quick else SEEDS)]
    return {
        "current_practice": evaluate(problem, current_practice(problem)),
        "random": statistics.mean(drawn),
        "optimus": evaluate(problem, HEURISTICS["optimus"](problem, 0)),
        "rota": evaluate(problem, solved.schedule),
        "bound": solved.bound / 3600,
    }


def current_practice(problem: Problem) -> Schedule:
    """One task after another on all devices of a node, on the node where it ends first."""
    free = {node.name: 0.0 for node in problem.nodes}
    placed = []
    for task in problem.tasks:
        ways = [
            (free[node.name] + problem.options[index].seconds, index, node)
            for node in problem.nodes
            for index in problem.options_of[task]
            if problem.options[index].devices == max(_counts(problem, task, len(node.devices)))
        ]
        end_s, index, node = min(ways, key=lambda one: (one[0], one[1]))
        devices = node.devices[: problem.options[index].devices]
        placed.append(Placement(option=index, start_s=free[node.name], devices=devices))
        free[node.name] = end_s
    return Schedule.of(placed)


def _counts(problem: Problem, task: str, most: int) -> list[int]:
    found = [problem.options[index].devices for index in problem.options_of[task]]
    return [count for count in found if count <= most] or [0]


def ablation(
    workload: Workload, ways: Ways, fixed: Ways, steps: Mapping[tuple[str, int], float]
) -> dict[str, float | str]:
    """How many times faster than the start each part makes it, one after another, on one node."""
    four = {key: [one for one in found if one.devices == 4] for key, found in fixed.items()}
    if any(not found for found in four.values()):
        return dict.fromkeys(PAPER_ABLATION, f"{RECOMPUTED} does not fit on 4 devices")
    start = problem_of(workload, four, steps, (8,))
    hours = statistics.mean(evaluate(start, HEURISTICS["random"](start, seed)) for seed in range(SEEDS))
    found: dict[str, float | str] = {}
    both = {key: [*fixed[key], *ways[key]] for key in ways}
    for name, options in (("scheduler", four), ("allocation", fixed), ("parallelism", both)):
        problem = problem_of(workload, options, steps, (8,))
        solved = solve_in_child(problem, limit=Limit(seconds=SOLVE_S))
        found[name] = round(hours / evaluate(problem, solved.schedule), 2)
    return found | {"introspection": round(hours / evaluate(problem, solved.schedule, replan=True), 2)}


# ---- the curves ----


def curves(predictions: Predictions, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Our seconds per iteration of GPT-2 beside the paper's."""
    points: dict[str, dict[str, Any]] = {}
    for (way, batch), seconds in PAPER_CURVES.items():
        for count, paper_s in enumerate(seconds, start=2):
            if quick and (batch != 8 or count != 8):
                continue
            parts = (batch,) if quick else (batch, batch // 2)
            texts = [RECOMPUTED] if way == "fsdp" else [_gpipe(one) for one in parts]
            found = [one for text in texts for one in predictions.of(GPT2, batch, text, count)]
            if found:
                best_s = min(one.step_s for one in found)
                error = round(best_s / paper_s - 1, 3)
                points[f"{way}_{batch}_on_{count}"] = {"ours_s": round(best_s, 3), "paper_s": paper_s, "error": error}
    return points


def by_the_papers_curves() -> float:
    """Percent saved on one node by six GPT-2s of batch 8 and six of 32, if their steps take what the paper measured."""
    options = []
    for batch in (8, 32):
        for count in range(2, 9):
            step_s = min(curve[count - 2] for (_, of), curve in PAPER_CURVES.items() if of == batch)
            for task in range(2 * RATES):
                label = f"gpt2-b{batch}-{task}"
                seconds = step_s * EPOCHS * GPT2.samples / batch
                options.append(Option(tasks=(label,), kind=KIND.name, devices=count, seconds=seconds, label="measured"))
    node = Node(name="n", kind=KIND.name, devices=tuple(f"n:{i}" for i in range(8)))
    hours = arms(Problem(options=tuple(options), nodes=(node,)), quick=False)
    return round(100 * (1 - hours["rota"] / hours["current_practice"]), 1)


def _gpipe(parts: int) -> str:
    return f"pipeline(microbatches={parts}, order='gpipe') * coshard(1)"


def _told(found: Iterable[Estimate]) -> list[str]:
    return [
        f"{one.devices}: {one.label} {one.step_s:.3g} s, {one.memory_bytes / 2**30:.3g} GiB"
        for one in sorted(found, key=lambda one: one.devices)
    ]


# ---- predictions, kept ----


class Predictions:
    """Predicts each way once, and keeps it for the next run of the same code."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._folder = Path(tempfile.gettempdir()) / f"rota-bench-saturn-{os.getuid()}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._code = _code_digest()
        self._subjects: dict[tuple[str, int], Subject] = {}

    def ways(self, workload: Workload, strategies: Sequence[str], counts: Iterable[int]) -> Ways:
        """The best way of each count, for all models and batches of a workload."""
        return {
            (model.name, batch): [
                min(found, key=lambda one: one.step_s)
                for count in counts
                if (
                    found := [one for text in _suiting(strategies, count) for one in self.of(model, batch, text, count)]
                )
            ]
            for model in workload.models
            for batch in workload.batches
        }

    def of(self, model: Model, batch: int, strategy: str, count: int) -> list[Estimate]:
        """On so many devices; none if none fits."""
        facts = (self._code, model.name, batch, strategy, count, repr(KIND))
        path = self._folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.json"
        if path.exists():
            return [Estimate(**one) for one in json.loads(path.read_text())]
        if self._shown:
            print(f"predicting {model.name}, batch {batch}, {strategy} on {count}", file=sys.stderr, flush=True)
        found = self._predicted(model, batch, strategy, count)
        path.write_text(json.dumps([asdict(one) for one in found]))
        return found

    def _predicted(self, model: Model, batch: int, strategy: str, count: int) -> list[Estimate]:
        subject = replace(self._subject(model, batch), strategy=strategy)
        try:
            return list(predict(subject, KIND, count))
        except RotaError as error:
            if strategy == RECOMPUTED and "no layer that can be cut" in str(error):
                return self._predicted(model, batch, "zero(stage=3)", count)
            if self._shown:
                print(f"  {error}", file=sys.stderr, flush=True)
            return []

    def _subject(self, model: Model, batch: int) -> Subject:
        key = (model.name, batch)
        if key not in self._subjects:
            graph = model.graph(batch)
            self._subjects[key] = Subject(graph=graph, digest=digest_of(graph), moments=0.0)
        return self._subjects[key]


def _suiting(strategies: Sequence[str], count: int) -> list[str]:
    """Of several, those for one device or those for many."""
    return [text for text in strategies if len(strategies) == 1 or text.startswith("single") == (count == 1)]


def _code_digest() -> str:
    """Of everything that a prediction depends on."""
    root = Path(rota.__file__).parent
    total = hashlib.sha256(torch.__version__.encode())
    folders = ("graph", "plan", "search", "strategies")
    paths = [path for folder in folders for path in sorted((root / folder).glob("*.py"))]
    paths += [root / name for name in ("cluster/kinds.py", "profile/predict.py", "runtime/footprint.py")]
    for path in (*paths, root / "testing" / "models.py", Path(__file__).with_name("saturn_models.py")):
        total.update(path.read_bytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
