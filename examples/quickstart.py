"""Compare six small GPTs on real text: ``python examples/quickstart.py``, or ``rota run examples/quickstart.py``.

The text is CPython's own documentation of its topics, which comes with Python; nothing is downloaded.
"""

import pydoc_data.topics

import torch
import torch.nn.functional as F
from torch import nn

import rota

CONTEXT = 64


class GPT(nn.Module):
    """Predicts the next character of a text."""

    def __init__(self, *, characters: int, depth: int, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The logits of the character that follows each place."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embed(text) + self.place(torch.arange(length))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def topics() -> tuple[torch.Tensor, int]:
    """CPython's topics as rows of character numbers, and how many different characters there are."""
    text = "\n".join(pydoc_data.topics.topics.values())
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    numbers = torch.tensor([number[character] for character in text])
    length = CONTEXT + 1
    return numbers[: len(numbers) // length * length].view(-1, length), len(alphabet)


def data() -> rota.Data:
    rows, _ = topics()
    return rota.Data(train=rows[:-400], valid=rows[-400:], batch_size=16, valid_batch_size=100)


def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def task(lr: float, depth: int) -> rota.Task:
    return rota.Task(
        name=f"gpt-d{depth}-lr{lr:g}",
        model=lambda: GPT(characters=topics()[1], depth=depth),
        data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=50),
        steps=300,
        valid_every=100,
    )


sweep = rota.grid(task, lr=[1e-3, 3e-4], depth=[4, 2, 1])

if __name__ == "__main__":
    result = rota.run(sweep)
    best = result.best("valid/loss")
    print(result.table())
    print(f"\nbest model  {best.model_path}")
    print(f"report      {result.report_path}")
