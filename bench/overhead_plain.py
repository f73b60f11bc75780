"""The plain arm of `bench.overhead`: a script as a user would write it without rota."""

import os

import torch
from overhead_model import BATCH, STEPS, Model, loss, rows
from torch.utils.data import DataLoader

os.sched_setaffinity(0, {int(os.environ["BENCH_CORE"])})
torch.set_num_threads(1)
torch.manual_seed(0)
model = Model()
loader = DataLoader(rows(), batch_size=BATCH, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
step = 0
while step < STEPS:
    for batch in loader:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(value.item())
        step += 1
        if step == STEPS:
            break
