"""Programs run by one process per device do what they do with all devices in one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANK = r"""
import json, sys
import torch
import torch.distributed as dist
from rota.graph.capture import capture
from rota.runtime import comm
from rota.runtime.engine import Engine
from rota.runtime.in_process import InProcess
from rota.strategies.base import with_microbatches
from rota.strategies.data import data
from rota.strategies.pipeline import pipeline
from rota.strategies.tensor import tensor
from rota.strategies.zero import zero
from rota.testing import zoo

rank, size, store, families = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
torch.set_num_threads(1)
comm.connect(rank=rank, size=size, store=dist.FileStore(store, size), timeout_s=60)
groups = comm.Groups()
cases = {
    "data": (data(), 1),
    "data in micro-batches": (data(), 2),
    "zero 3": (zero(stage=3), 1),
    "zero 1": (zero(stage=1), 2),
    "tensor": (tensor(), 1),
    "tensor with sequence": (tensor(sequence=True), 1),
    "pipeline": (pipeline(), 4),
    "gpipe": (pipeline(order="gpipe"), 4),
    "interleaved": (pipeline(order="interleaved"), 2),
}
if size == 4:
    cases = {"data x tensor": (data(2) * tensor(2), 1), "zero x pipeline": (zero(2) * pipeline(2), 2)}
adamw = lambda pieces: torch.optim.AdamW(pieces, lr=1e-2)
worst = {}
for family in families:
    specimen = zoo.make(family, batch=8)
    model = specimen.model.double()
    whole = lambda one: one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
    batch = torch.utils._pytree.tree_map(whole, specimen.batch)
    graph = capture(model, batch, specimen.loss)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, (strategy, microbatches) in cases.items():
        program = with_microbatches(strategy, microbatches)(graph, size).compile()
        alone = InProcess(program, state, seed=3)
        alone.optimize(adamw)
        engine = Engine(program, state, rank=rank, groups=groups, seed=3, bucket_bytes=4096)
        engine.optimize(adamw)
        for step in range(10):
            alone.train(batch, step=step, max_norm=0.5)
            engine.train(batch, step=step, max_norm=0.5)
        mine = {(name, piece): one for name, piece, one in alone.parameters() if piece.device == rank}
        worst[f"{family}: {name}"] = max(
            (float((mine[(n, piece)] - one).detach().abs().max()) for n, piece, one in engine.device.parameters()),
            default=0.0,
        )
comm.disconnect()
print(json.dumps(worst))
"""


def run_ranks(tmp_path, size, families, *, timeout_s=100):
    """What each rank printed."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", RANK, str(rank), str(size), str(tmp_path / "store"), families],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(size)
    ]
    try:
        ends = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("size", "families"), [(2, "gpt,mixture"), (4, "gpt")])
def test_ten_steps_over_processes_equal_ten_steps_in_one(tmp_path, size, families):
    for rank in run_ranks(tmp_path, size, families):
        assert rank
        for name, difference in rank.items():
            assert difference < 1e-10, name
