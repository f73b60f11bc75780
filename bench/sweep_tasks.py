"""The sweep of `bench.sweep`: thirteen tasks of unlike size, shape and scaling; one is larger than both devices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rota
from rota.testing.models import GPT, ResNet, ViT

LENGTH = 64


def _text(batch: int) -> rota.Data:
    """The text of Python's own help, as bytes."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics)).encode()
    count = len(text) // (LENGTH + 1)
    rows = torch.frombuffer(bytearray(text[: count * (LENGTH + 1)]), dtype=torch.uint8).view(count, -1).long() % 128
    return rota.Data(train=rows, batch_size=batch)


def _images(batch: int, size: int) -> rota.Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(1024, 1, size, size, generator=generator)
    labels = torch.randint(0, 10, (1024,), generator=generator)
    return rota.Data(train=torch.utils.data.TensorDataset(images, labels), batch_size=batch)


def _next_token(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def _classes(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gpt(name: str, lr: float, *, width: int, depth: int, batch: int, steps: int) -> rota.Task:
    """A language model."""
    return rota.Task(
        name=f"{name}-lr{lr:g}",
        model=lambda: GPT(vocabulary=128, context=LENGTH, width=width, depth=depth, heads=4),
        data=lambda: _text(batch),
        loss=_next_token,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        steps=steps,
    )


def vit(lr: float, *, steps: int) -> rota.Task:
    """A vision transformer."""
    return rota.Task(
        name=f"vit-lr{lr:g}",
        model=lambda: ViT(image=16, patch=2, width=128, depth=4, heads=4),
        data=lambda: _images(32, 16),
        loss=_classes,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        steps=steps,
    )


def resnet(lr: float, *, steps: int) -> rota.Task:
    """Convolutions with BatchNorm, which do not scale over devices."""
    return rota.Task(
        name=f"resnet-lr{lr:g}",
        model=lambda: ResNet(width=32, depth=4),
        data=lambda: _images(64, 16),
        loss=_classes,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        steps=steps,
    )


def sweep(scale: float) -> rota.Sweep:
    """The tasks, of a length by which one may scale them."""

    def steps(count: int) -> int:
        return max(4, round(count * scale))

    tasks = [
        *(gpt("small", lr, width=96, depth=2, batch=16, steps=steps(400)) for lr in (1e-3, 3e-3, 1e-2)),
        *(gpt("medium", lr, width=192, depth=4, batch=16, steps=steps(160)) for lr in (3e-4, 1e-3, 3e-3)),
        *(vit(lr, steps=steps(140)) for lr in (3e-4, 1e-3)),
        *(resnet(lr, steps=steps(130)) for lr in (0.01, 0.03, 0.1)),
        gpt("large", 3e-4, width=384, depth=6, batch=16, steps=steps(110)),
        # 101 million parameters, 1.5 GiB with gradients and moments: more than two devices have, so it must spill.
        gpt("huge", 3e-4, width=1024, depth=8, batch=4, steps=steps(12)),
    ]
    return rota.Sweep(tasks=tuple(tasks), name="sweep")


def quick_sweep() -> rota.Sweep:
    """A few of them for some steps; what must spill has 120 MiB, which is more than a device has."""
    tasks = [
        *(gpt("small", lr, width=96, depth=2, batch=16, steps=8) for lr in (1e-3, 3e-3)),
        gpt("huge", 3e-4, width=384, depth=4, batch=4, steps=4),
    ]
    return rota.Sweep(tasks=tuple(tasks), name="sweep")
