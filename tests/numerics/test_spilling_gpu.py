"""Spilling on a GPU: written with care, never run by the authors."""

from dataclasses import replace

import pytest
import torch

from rota.runtime.loop import Loop
from rota.runtime.messages import Finished
from rota.strategies import spill
from tests.numerics.test_exact import Surroundings, gpt_task


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_equals_the_training_that_fits(tmp_path):
    rows = []
    for strategy in ("single", spill(shards=4, activations="spill")):
        folder, surroundings = tmp_path / str(len(rows)), Surroundings()
        folder.mkdir()
        task = replace(gpt_task(strategy=strategy, accumulate=2, steps=20), precision="float64")
        loop = Loop(
            task,
            attempt=1,
            folder=folder,
            device=torch.device("cuda", 0),
            surroundings=surroundings,
            memory_bytes=2**30,
        )
        assert isinstance(loop.run(), Finished)
        rows.append(surroundings.rows)
    plain, spilled = rows
    assert plain.keys() == spilled.keys()
    for step, metrics in plain.items():
        assert spilled[step] == pytest.approx(metrics, rel=1e-10)
