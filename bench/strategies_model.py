"""The model of the strategy benchmark, and how PyTorch's own tools run it on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, DEPTH, HEADS, VOCABULARY, LENGTH, BATCH = 256, 4, 4, 512, 128, 8
MICROBATCHES = 4


class Block(nn.Module):
    """Separate query, key and value layers, so that DTensor's colwise cuts are by heads."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input plus attention plus feed-forward."""
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            layer(y).view(batch, length, -1, self.head).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Model(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH // HEADS) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Of the next token."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def make() -> tuple[Model, torch.Tensor]:
    """The same on every rank."""
    torch.manual_seed(0)
    return Model(), torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same for all arms; fused, since rota would fuse its own."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


Step = Callable[[], float | None]


def eager(rank: int) -> Step:
    """Plain PyTorch on one rank."""
    model, rows = make()
    return _trained(model, lambda: loss_of(model, rows))


def ddp(rank: int) -> Step:
    """Half of the samples on each rank."""
    model, rows = make()
    half = rows.chunk(2)[rank]
    wrapped = nn.parallel.DistributedDataParallel(model)
    return _trained(wrapped, lambda: loss_of(wrapped, half))


def fsdp2(rank: int) -> Step:
    """fully_shard of each block and of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, rows = make()
    half = rows.chunk(2)[rank]
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trained(model, lambda: loss_of(model, half))


def dtensor(rank: int) -> Step:
    """parallelize_module with Megatron's plan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, rows = make()
    mesh = init_device_mesh("cpu", (2,))
    column, row = ColwiseParallel, RowwiseParallel
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {"query": column(), "key": column(), "value": column(), "out": row(), "fc1": column(), "fc2": row()},
        )
    return _trained(model, lambda: loss_of(model, rows))


def pipelining(rank: int) -> Step:
    """Two stages of torch.distributed.pipelining, 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, rows = make()
    half = DEPTH // 2
    if rank == 0:
        stage_model: nn.Module = _First(model, half)
    else:
        stage_model = _Last(model, half)
    stage = PipelineStage(stage_model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, MICROBATCHES, loss_fn=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten())
    )
    updater = optimizer(stage_model.parameters())

    def step() -> float | None:
        updater.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(rows[:, :-1].contiguous())
        else:
            schedule.step(target=rows[:, 1:].contiguous(), losses=losses)
        updater.step()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step


class _First(nn.Module):
    def __init__(self, model: Model, blocks: int) -> None:
        super().__init__()
        self.tokens, self.places, self.blocks = model.tokens, model.places, model.blocks[:blocks]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class _Last(nn.Module):
    def __init__(self, model: Model, blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[blocks:], model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _trained(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    # The fused kernel takes DTensors or plain tensors, not both at once.
    of_kind: dict[type, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        of_kind.setdefault(type(parameter.data), []).append(parameter)
    updater = optimizer([{"params": some} for some in of_kind.values()])

    def step() -> float:
        updater.zero_grad()
        value = loss()
        value.backward()
        updater.step()
        mean = value.detach().clone()
        return float(mean)

    return step


def close() -> None:
    """Leave the group."""
    if dist.is_initialized():
        dist.destroy_process_group()
