"""What timed steps say: warm ones, or the first alone where another would be too dear."""

from types import SimpleNamespace

import pytest
import torch

from rota.runtime import probe


def timed(monkeypatch, took, *, total_steps, alike):
    now = [0.0]
    rows = iter(took)

    def train_batch():
        now[0] += next(rows, took[-1])
        return {}

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    training = SimpleNamespace(train_batch=train_batch, device=torch.device("cpu"), total_steps=total_steps)
    return probe.timed(training, begun_s=0.0, watch=lambda what: None, alike=alike)


@pytest.mark.parametrize(
    ("took", "total_steps", "alike", "step_s"),
    [
        ([5.0, 3.0], 8, 1, 5.0),
        ([5.0, 3.0], 8, 9, 3.0),
        ([5.0, 3.0], 8, None, 3.0),
        ([1.4, 0.1], 8, 1, 0.1),
        ([12.0, 3.0], 1000, 1, 12.0),
    ],
    ids=["dear", "many alike", "of a trial", "a slow start", "too slow"],
)
def test_the_first_step_counts_alone_or_not_at_all(monkeypatch, took, total_steps, alike, step_s):
    found = timed(monkeypatch, took, total_steps=total_steps, alike=alike)
    assert found.step_s == pytest.approx(step_s)
    assert found.spread == pytest.approx(0.0)
