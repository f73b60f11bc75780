"""The examples are what the README says, and each of their tasks trains."""

import dataclasses
from pathlib import Path

import pytest
import torch

from rota.cli.sweep_file import load_source
from rota.runtime.loop import Loop
from rota.runtime.messages import Finished

EXAMPLES = Path(__file__).parents[2] / "examples"


class Silence:
    """A process that wants nothing."""

    def report(self, report):
        pass

    def watch(self, what, *, limit_s, retry, step):
        pass

    def halt_requested(self):
        return False

    def confirmed_number(self):
        return 0


def test_the_quickstart_is_a_grid_of_at_least_six():
    assert len(load_source(str(EXAMPLES / "quickstart.py")).sweep) >= 6


@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_kind_of_task_in_the_examples_trains(file, tmp_path):
    sweep = load_source(str(EXAMPLES / file)).sweep
    for task in (sweep.tasks[0], sweep.tasks[-1]):
        short = dataclasses.replace(task, steps=3, epochs=None, valid_every=None)
        folder = tmp_path / task.name
        outcome = Loop(short, attempt=1, folder=folder, device=torch.device("cpu"), surroundings=Silence()).run()
        assert isinstance(outcome, Finished)
        assert outcome.metrics["valid/loss"] > 0
