"""The models of Saturn's paper as graphs, captured without memory for their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rota.graph.capture import capture
from rota.graph.graph import Graph
from rota.testing.models import GPT, ViT

CONTEXT = 512
"""Tokens in a sample: what the public code of the paper takes."""
TEXT_SAMPLES = 4_670
"""WikiText-2 has about 2.39 million tokens of GPT-2's vocabulary."""
IMAGE_SAMPLES = 1_281_167
_PIXELS = 224


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the paper, with the samples that it is trained on."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    samples: int

    def graph(self, batch: int) -> Graph:
        """Captured on a batch of so many samples."""
        with torch.device("meta"):
            model, rows = self.make(), self.batch(batch)
        return capture(model.train(), rows, self.loss)


class LargeViT(ViT):
    """A vision transformer with a feed-forward layer of its own width."""

    def __init__(self, *, width: int, depth: int, heads: int, inner: int, patch: int) -> None:
        super().__init__(image=_PIXELS, patch=patch, width=width, depth=depth, heads=heads, classes=1000, channels=3)
        for block in self.blocks:
            block.fc1, block.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)


class Bottleneck(nn.Module):
    """Three convolutions, added to what they read."""

    def __init__(self, wide: int, narrow: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide, narrow, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(narrow)
        self.conv3 = nn.Conv2d(narrow, 4 * narrow, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * narrow)
        self.short = nn.Identity() if wide == 4 * narrow else nn.Conv2d(wide, 4 * narrow, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.short(x) + self.norm3(self.conv3(y)))


class LargeResNet(nn.Module):
    """ResNet-152 with wider layers."""

    def __init__(self, *, width: int, depths: tuple[int, ...] = (3, 8, 36, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.ModuleList()
        wide = width
        for number, depth in enumerate(depths):
            narrow = width * 2**number
            blocks = []
            for place in range(depth):
                blocks.append(Bottleneck(wide, narrow, stride=2 if place == 0 and number else 1))
                wide = 4 * narrow
            self.stages.append(nn.ModuleList(blocks))
        self.head = nn.Linear(wide, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The logits of the classes."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, stride=2, padding=1)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for block in stage:
                x = block(x)
        logits: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def _text(batch: int) -> torch.Tensor:
    return torch.zeros((batch, CONTEXT + 1), dtype=torch.int64)


def _next_token(model: nn.Module, rows: Any) -> torch.Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def _images(batch: int) -> Any:
    return torch.zeros(batch, 3, _PIXELS, _PIXELS), torch.zeros(batch, dtype=torch.int64)


def _class(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


GPT2 = Model(
    name="gpt2-1.5b",
    make=lambda: GPT(vocabulary=50257, context=CONTEXT, width=1600, depth=48, heads=25),
    batch=_text,
    loss=_next_token,
    samples=TEXT_SAMPLES,
)
GPTJ = Model(
    name="gptj-6b",
    make=lambda: GPT(vocabulary=50400, context=CONTEXT, width=4096, depth=28, heads=16),
    batch=_text,
    loss=_next_token,
    samples=TEXT_SAMPLES,
)
VITG = Model(
    name="vitg-1.8b",
    make=lambda: LargeViT(width=1664, depth=48, heads=16, inner=8192, patch=14),
    batch=_images,
    loss=_class,
    samples=IMAGE_SAMPLES,
)
RESNET = Model(
    name="resnet-200m",
    make=lambda: LargeResNet(width=116),
    batch=_images,
    loss=_class,
    samples=IMAGE_SAMPLES,
)
