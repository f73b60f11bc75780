"""What leaving out a part of a slow device's products costs in accuracy: a ViT on images, tensor parallel over two.

python -m bench.resize_accuracy [--quick] [--json] [--keep]

Device 1 leaves out gamma of its products from the first step to the last, in every way that there is: what stands for
missing gradients x how columns are chosen. Five seeds each, in pairs with the same seed without resizing; intervals
are 95% of Student's t. Digits always, Fashion-MNIST where Debian's dataset-fashion-mnist is installed.
"""

from __future__ import annotations

import gzip
import itertools
import math
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench import harness
from rota.graph.capture import capture
from rota.runtime.in_process import InProcess
from rota.runtime.resizing import IMPUTES, SELECTS, Resizer, Resizing
from rota.strategies.tensor import tensor
from rota.testing.models import ViT

GAMMAS = (0.25, 0.5, 0.75)
FASHION = Path("/usr/share/datasets/fashion-mnist")
_STUDENT = {3: 4.303, 5: 2.776}
"""Of 0.975, by the number of samples."""


def images(dataset: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and classes to train with, and to test with."""
    if dataset == "digits":
        from sklearn.datasets import load_digits

        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
        x = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16 - 0.5
        y = torch.tensor(found.target)[order]
        return x[:1297], y[:1297], x[1297:], y[1297:]
    parts = [_read(FASHION / f"{part}-{what}") for part in ("train", "t10k") for what in ("images", "labels")]
    x, y, test_x, test_y = parts
    return _scaled(x), y.long(), _scaled(test_x), test_y.long()


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x[:, None].float() / 255 - 0.5


def _read(prefix: Path) -> torch.Tensor:
    """A file of the idx format."""
    (path,) = prefix.parent.glob(f"{prefix.name}*")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    dims = raw[3]
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i]) for i in range(dims)]
    return torch.frombuffer(bytearray(raw[4 + 4 * dims :]), dtype=torch.uint8).view(shape)


def accuracy(case: tuple[str, int, float, str, str, int]) -> float:
    """Train with one setting and one seed; the part of the test images that come out right."""
    dataset, seed, gamma, impute, select, steps = case
    torch.set_num_threads(1)
    x, y, test_x, test_y = images(dataset)
    torch.manual_seed(seed)
    model = ViT(image=x.shape[-1], patch=2 if dataset == "digits" else 7, width=64, depth=2, heads=4)
    batch = 64

    def loss(model: torch.nn.Module, one: Any) -> torch.Tensor:
        return F.cross_entropy(model(one[0]), one[1])

    program = tensor()(capture(model, (x[:batch], y[:batch]), loss), 2).compile()
    run = InProcess(program, dict(model.named_parameters()), seed=seed)
    run.optimize(lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05))
    how = Resizing(impute=impute, select=select)  # type: ignore[arg-type]
    resizer = Resizer(program, run.device(1), how=how, seed=seed)
    resizer.freeze(run.optimizers[1])
    run.device(1).products = resizer
    resizer.leave_out(gamma)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=draw)
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(len(x), generator=draw)
        chosen, order = order[:batch], order[batch:]
        resizer.begin_step()
        run.train((x[chosen], y[chosen]), step=step, max_norm=1.0)
    model.load_state_dict({name: run.whole(name) for name, _ in model.named_parameters()})
    model.eval()
    with torch.no_grad():
        pairs = zip(test_x.split(500), test_y.split(500), strict=True)
        right = sum((model(a).argmax(1) == b).sum().item() for a, b in pairs)
    return right / len(test_y)


def interval(values: list[float]) -> float:
    """Half of the 95% interval of a mean."""
    return _STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    """All settings."""
    chosen = harness.options(__doc__)
    seeds = range(3 if chosen.quick else 5)
    gammas = (0.5,) if chosen.quick else GAMMAS
    steps = 60 if chosen.quick else 300
    datasets = ["digits"] + (["fashion"] if FASHION.is_dir() and not chosen.quick else [])
    ways = list(itertools.product(IMPUTES, SELECTS))
    table: dict[str, Any] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        cases = [
            (dataset, seed, gamma, impute, select, steps)
            for dataset in datasets
            for gamma, impute, select in [(0.0, "zero", "random"), *((g, *way) for g in gammas for way in ways)]
            for seed in seeds
        ]
        found = dict(zip(cases, pool.map(accuracy, cases), strict=True))
    for dataset in datasets:
        plain = [found[(dataset, seed, 0.0, "zero", "random", steps)] for seed in seeds]
        rows = {"none": {"accuracy": statistics.mean(plain), "interval": interval(plain)}}
        for gamma, (impute, select) in itertools.product(gammas, ways):
            values = [found[(dataset, seed, gamma, impute, select, steps)] for seed in seeds]
            lost = [a - b for a, b in zip(plain, values, strict=True)]
            rows[f"{impute} {select} {gamma}"] = {
                "accuracy": statistics.mean(values),
                "interval": interval(values),
                "lost": statistics.mean(lost),
                "lost_interval": interval(lost),
            }
        table[dataset] = rows

    def mean_lost(way: tuple[str, str]) -> float:
        return statistics.mean(table[d][f"{way[0]} {way[1]} {gamma}"]["lost"] for d in datasets for gamma in gammas)

    best = min(ways, key=mean_lost)
    figures = {
        "winner": " ".join(best),
        "winner_lost": mean_lost(best),
        "lost": {" ".join(way): mean_lost(way) for way in sorted(ways, key=mean_lost)},
    }
    harness.finish("resize_accuracy", figures, {"table": table}, chosen)


if __name__ == "__main__":
    main()
