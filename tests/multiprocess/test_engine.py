"""Every strategy, run by one process per device, trains what one device trains: a few here, all in `make test-deep`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANK = r"""
import json, sys, traceback
import torch
import torch.distributed as dist
from rota.errors import RotaError
from rota.graph.capture import capture
from rota.runtime import comm
from rota.runtime.engine import Engine
from rota.runtime.in_process import InProcess
from rota.strategies import find
from rota.testing import zoo

rank, size, store, asked = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
torch.set_num_threads(1)
comm.connect(rank=rank, size=size, store=dist.FileStore(store, size), timeout_s=120)
groups = comm.Groups()
found = {}
for family, precision, texts in asked:
    precision = getattr(torch, precision)
    # Where a gradient is zero but for rounding (that of a key's bias), the default eps of 1e-8 would make anything of
    # it.
    adamw = lambda pieces: torch.optim.AdamW(pieces, lr=1e-2, eps=1e-6 if precision is torch.float64 else 1e-3)
    specimen = zoo.make(family, batch=8)
    if precision is torch.float64:
        specimen = specimen.in_doubles()
    model, batch = specimen.model, specimen.batch
    graph = capture(model, batch, specimen.loss)
    # Some models compute their loss in single precision whatever they are in; what cuts the loss sums that otherwise.
    own = precision is torch.float64 and any(tensor.dtype == "float32" for tensor in graph.tensors.values())
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    alone = InProcess(find("single")(graph, 1).compile(), state, seed=3)
    alone.optimize(adamw)
    for step in range(10):
        alone.train(batch, step=step, max_norm=0.5)
    for text in texts:
        try:
            program = find(text)(graph, size).compile()
        except RotaError as error:
            found[f"{family}: {text}"] = f"refused: {error}"
            continue
        engine = Engine(program, state, rank=rank, groups=groups, seed=3, bucket_bytes=4096)
        engine.optimize(adamw)
        for step in range(10):
            engine.train(batch, step=step, max_norm=0.5)
        worst = 0.0
        for name, piece, one in engine.device.parameters():
            from rota.plan.box import Box
            from rota.runtime.pieces import cut
            whole = alone.whole(name)
            shape = program.refined.shape(name)
            part = cut(whole, program.refined.factors[name], Box.whole(shape), piece.box)
            worst = max(worst, float((part - one).detach().abs().max() / whole.abs().max().clamp(min=1e-3)))
        single = precision is torch.float32 or own and ("vocabulary" in text or "interlaced" in text)
        found[f"{family}{' in single precision' if single else ''}: {text}"] = worst
comm.disconnect()
print(json.dumps(found))
"""

TWO = (
    "data",
    "data(microbatches=2)",
    "zero(stage=1, microbatches=2)",
    "zero(stage=2)",
    "zero(stage=3)",
    "tensor",
    "tensor(sequence=True)",
    "tensor(vocabulary=True)",
    "pipeline(microbatches=4)",
    "pipeline(microbatches=4, order='gpipe')",
    "pipeline(microbatches=2, order='interleaved')",
    "interlaced(microbatches=4)",
    "dap",
    "coshard(2)",
)
FOUR = (
    "data",
    "zero(stage=3)",
    "tensor",
    "pipeline(microbatches=4)",
    "interlaced(microbatches=4)",
    "dap",
    "data(2) * tensor(2)",
    "data(2) * pipeline(2, microbatches=2)",
    "tensor(2) * pipeline(2, microbatches=4)",
    "zero(2) * tensor(2)",
    "zero(2) * pipeline(2, microbatches=2)",
)
SINGLE = 1e-4
# Few and small here; the whole matrix takes a while.
FAMILIES = "gpt,gpt2,llama,t5,vit,swin,evoformer,resnet,mixture,bert,mbart"
NEVER_REFUSED = ("data", "zero", "coshard", "data(microbatches=2)", "zero(stage=3)", "pipeline(microbatches=4)")


def run_ranks(tmp_path, size, asked, *, timeout_s):
    """What each rank printed; asked is for families, precisions and strategies."""
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "error", "-c", RANK),
                *(str(rank), str(size), str(tmp_path / "store"), json.dumps(asked)),
            ],
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


def check(found):
    assert found
    trained = 0
    for rank in found:
        for name, difference in rank.items():
            if isinstance(difference, str):
                assert name.split(": ")[1] not in NEVER_REFUSED, difference
            else:
                assert difference < (SINGLE if "single precision" in name else 1e-10), name
                trained += 1
    assert trained


@pytest.mark.timeout(140)
@pytest.mark.parametrize(
    ("size", "asked"),
    [
        # In single precision they are near.
        (
            2,
            [
                ("gpt", "float64", (*TWO[1::2], "zero(stage=3)")),
                ("gpt", "float32", ("data", "tensor", "zero(stage=3)")),
            ],
        ),
        pytest.param(2, [("evoformer", "float64", ("dap",))], marks=pytest.mark.deep),
        (4, [("gpt", "float64", FOUR[-3:])]),
    ],
    ids=["2-gpt", "2-evoformer", "4-gpt"],
)
def test_ten_steps_over_processes_equal_ten_steps_of_one_device(tmp_path, size, asked):
    found = run_ranks(tmp_path, size, asked, timeout_s=130)
    check(found)
    wanted = sum(len(texts) for _, _, texts in asked)
    assert all(len(rank) == wanted for rank in found)


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES.split(","))
@pytest.mark.parametrize(("size", "texts"), [(2, TWO), (4, FOUR)])
def test_the_whole_matrix(tmp_path, size, family, texts):
    check(run_ranks(tmp_path, size, [(family, "float64", texts)], timeout_s=1700))
