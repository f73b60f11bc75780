"""The way of a task through faults, as chaos retraces it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos_retrace import Stretch, stretches
from rota.execute.events import Launched
from rota.runtime.messages import Began
from rota.store.journal import Journal


@pytest.mark.parametrize(
    ("attempts", "way"),
    [
        ([(2, 0)], [(2, 0, 40)]),
        ([(2, 0), (2, 15)], [(2, 0, 40)]),
        ([(2, 0), (1, 15)], [(2, 0, 15), (1, 15, 40)]),
        ([(2, 0), (1, 15), (2, 25)], [(2, 0, 15), (1, 15, 25), (2, 25, 40)]),
        ([(2, None), (1, 0)], [(1, 0, 40)]),
        ([(2, 0), (1, 0)], [(1, 0, 40)]),
        ([(2, 0), (1, 15), (2, 15)], [(2, 0, 40)]),
        ([(2, 0), (1, 15), (2, 10)], [(2, 0, 40)]),
    ],
)
def test_steps_count_on_the_devices_that_took_them_last(
    tmp_path: Path, attempts: list[tuple[int, int | None]], way: list[tuple[int, int, int]]
) -> None:
    journal = Journal(tmp_path / "journal.db", durable=False)
    for number, (width, begin) in enumerate(attempts):
        devices = tuple(f"cpu:{i}" for i in range(width))
        journal.append(Launched(task="a", attempt=number, devices=devices, strategy=""), time_s=0.0)
        journal.append(Launched(task="b", attempt=number, devices=("cpu:9",), strategy=""), time_s=0.0)
        if begin is not None:
            began = Began(task="a", attempt=number, from_step=begin, total_steps=40, parameters=1)
            journal.append(began, time_s=0.0)
    journal.commit()
    journal.close()
    assert stretches(tmp_path, "a", 40) == [Stretch(width=w, begin=b, end=e) for w, b, e in way]
