"""The model, data and loss of both arms of `bench.overhead`; nothing of rota is imported here."""

import json
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, DEPTH, CONTEXT, VOCABULARY = 128, 3, 32, 256
BATCH, ROWS = 8, 4096
STEPS = int(os.environ.get("BENCH_STEPS", "200"))
CHUNK = 25
ARMS = ("plain", "rota")

times_s: list[float] = []


class Turns:
    """Lets the two arms train in turns, a chunk of steps each, through two named pipes."""

    def __init__(self, folder: str, arm: str) -> None:
        # Opened for both ways, because opening a pipe for one way waits for the other end.
        pipes = {name: os.open(f"{folder}/{name}", os.O_RDWR) for name in ARMS}
        self._mine = pipes.pop(arm)
        (self._other,) = pipes.values()
        self._arm = arm

    def before(self, step: int) -> None:
        """Wait for the turn that this step belongs to."""
        if step == 0 and self._arm == "plain":
            os.read(self._mine, 1)  # until the other arm has started too
        elif step % CHUNK == 0:
            os.write(self._other, b".")
            os.read(self._mine, 1)

    def end(self) -> None:
        """Leave the other arm alone."""
        os.write(self._other, b"." * (STEPS // CHUNK + 1))


turns = Turns(os.environ["BENCH_TURNS"], os.environ["BENCH_ARM"]) if "BENCH_TURNS" in os.environ else None


class Model(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of the next token."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def rows() -> torch.Tensor:
    """The training data."""
    return torch.randint(0, VOCABULARY, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy; it also notes when it was called, which is what the benchmark measures."""
    if turns is not None:
        turns.before(len(times_s))
    times_s.append(time.time())
    if len(times_s) == STEPS:
        if turns is not None:
            turns.end()
        with open(os.environ["BENCH_TIMES"], "w") as file:
            json.dump(times_s, file)
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
