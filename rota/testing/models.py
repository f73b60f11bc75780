"""Small models for tests, examples and benchmarks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GPT(nn.Module):
    """A causal language model with pre-norm blocks, learned positions and tied embeddings."""

    def __init__(
        self,
        *,
        vocabulary: int = 128,
        context: int = 64,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width=width, heads=heads, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of the next token at each position."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what it reads."""

    def __init__(self, *, width: int, heads: int, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of the input's shape."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        y: torch.Tensor = x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return y


class ViT(nn.Module):
    """A vision transformer for small images."""

    def __init__(
        self,
        *,
        image: int = 8,
        patch: int = 2,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        classes: int = 10,
        channels: int = 1,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width=width, heads=heads, causal=False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The logits of the classes."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


class ResNet(nn.Module):
    """A residual network for small single-channel images, with BatchNorm."""

    def __init__(self, *, width: int = 16, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The logits of the classes."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions, added to what they read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of the input's shape."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class MixtureOfExperts(nn.Module):
    """Every expert sees every token, and a softmax weighs what they say (dense routing)."""

    def __init__(self, *, width: int = 16, experts: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * width).normal_(std=0.1))
        self.down = nn.Parameter(torch.empty(experts, 2 * width, width).normal_(std=0.1))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of each token's class; `x` is batch, tokens, width."""
        weights = F.softmax(self.gate(x), dim=-1)
        hidden = F.gelu(torch.einsum("btw,ewh->beth", x, self.up))
        spoken = torch.einsum("beth,ehw->betw", hidden, self.down)
        logits: torch.Tensor = self.head(x + torch.einsum("bte,betw->btw", weights, spoken))
        return logits


class Evoformer(nn.Module):
    """A compact Evoformer on an alignment and a pair map, run several times; only the last run is differentiated."""

    def __init__(self, *, width: int = 8, depth: int = 2, heads: int = 2, recycles: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.recycles = recycles
        self.recycle_msa = nn.LayerNorm(width)
        self.recycle_pair = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(EvoformerBlock(width=width, heads=heads) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, msa: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
        """The logits for each position of each sequence; `msa` is b, s, r, w and `pair` is b, r, r, w."""
        last_msa, last_pair = torch.zeros_like(msa), torch.zeros_like(pair)
        with torch.no_grad():
            for _ in range(self.recycles - 1):
                last_msa, last_pair = self._trunk(msa, pair, last_msa, last_pair)
        last_msa, _ = self._trunk(msa, pair, last_msa, last_pair)
        logits: torch.Tensor = self.head(last_msa)
        return logits

    def _trunk(
        self, msa: torch.Tensor, pair: torch.Tensor, last_msa: torch.Tensor, last_pair: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        msa, pair = msa + self.recycle_msa(last_msa), pair + self.recycle_pair(last_pair)
        for block in self.blocks:
            msa, pair = block(msa, pair)
        return msa, pair


class EvoformerBlock(nn.Module):
    """Row and column attention, outer product mean, triangle multiplication and attention, transitions."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.row = AxialAttention(width=width, heads=heads, biased=True)
        self.column = AxialAttention(width=width, heads=heads)
        self.msa_transition = Transition(width)
        self.outer = OuterProductMean(width)
        self.outgoing = TriangleMultiplication(width, equation="bikc,bjkc->bijc")
        self.incoming = TriangleMultiplication(width, equation="bkic,bkjc->bijc")
        self.starting = AxialAttention(width=width, heads=heads, biased=True)
        self.ending = AxialAttention(width=width, heads=heads, biased=True)
        self.pair_transition = Transition(width)

    def forward(self, msa: torch.Tensor, pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, refined by each other."""
        msa = msa + self.row(msa, pair)
        msa = msa + self.column(msa.transpose(1, 2), None).transpose(1, 2)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer(msa)
        pair = pair + self.outgoing(pair)
        pair = pair + self.incoming(pair)
        pair = pair + self.starting(pair, pair)
        turned = pair.transpose(1, 2)
        pair = pair + self.ending(turned, turned).transpose(1, 2)
        return msa, pair + self.pair_transition(pair)


class AxialAttention(nn.Module):
    """Attention along the third dim, each line of the second for itself, with an optional bias from the pair map."""

    def __init__(self, *, width: int, heads: int, biased: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.bias = nn.Linear(width, heads, bias=False) if biased else None
        self.gate = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, pair: torch.Tensor | None) -> torch.Tensor:
        """What each place gathers from its line."""
        batch, lines, length, width = x.shape
        x = self.norm(x)
        q, k, v = self.qkv(x).view(batch, lines, length, 3, self.heads, -1).permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        if self.bias is not None and pair is not None:
            scores = scores + self.bias(pair).permute(0, 3, 1, 2).unsqueeze(1)
        mixed = (scores.softmax(-1) @ v).transpose(2, 3).reshape(batch, lines, length, width)
        gathered: torch.Tensor = self.output(torch.sigmoid(self.gate(x)) * mixed)
        return gathered


class OuterProductMean(nn.Module):
    """What two columns of the alignment have to do with each other, averaged over the sequences."""

    def __init__(self, width: int, inner: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.left = nn.Linear(width, inner)
        self.right = nn.Linear(width, inner)
        self.output = nn.Linear(inner * inner, width)

    def forward(self, msa: torch.Tensor) -> torch.Tensor:
        """An update of the pair map."""
        msa = self.norm(msa)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(msa), self.right(msa)) / msa.shape[1]
        update: torch.Tensor = self.output(outer.flatten(-2))
        return update


class TriangleMultiplication(nn.Module):
    """Each pair learns from the two other edges of its triangles."""

    def __init__(self, width: int, *, equation: str) -> None:
        super().__init__()
        self.equation = equation
        self.norm = nn.LayerNorm(width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.middle = nn.LayerNorm(width)
        self.output = nn.Linear(width, width)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        """An update of the pair map."""
        pair = self.norm(pair)
        product = torch.einsum(self.equation, self.left(pair), self.right(pair))
        update: torch.Tensor = torch.sigmoid(self.gate(pair)) * self.output(self.middle(product))
        return update


class Transition(nn.Module):
    """Two linear layers with a wider space between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An update of `x`."""
        update: torch.Tensor = self.down(F.relu(self.up(self.norm(x))))
        return update
