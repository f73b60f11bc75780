"""rota's arm of `bench.overhead`: the same training as a sweep of one task, with checkpoints."""

import os

import torch
from overhead_model import BATCH, STEPS, Model, loss, rows

import rota


def task(lr: float) -> rota.Task:
    return rota.Task(
        name="gpt",
        model=Model,
        data=lambda: rota.Data(train=rows(), batch_size=BATCH),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        steps=STEPS,
        clip_norm=1.0,
        strategy="single",
        checkpoint_every=int(os.environ["BENCH_SAVE_EVERY"]),
    )


sweep = rota.grid(task, lr=[1e-3])
