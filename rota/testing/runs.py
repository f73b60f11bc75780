"""A new run under the real controller, on whatever backend: for tests, benchmarks and fake clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rota.execute.backends.base import Backend
from rota.execute.controller import Controller
from rota.execute.events import RunBegan
from rota.execute.identity import describe, digest
from rota.execute.record import RunRecord
from rota.store.journal import Journal
from rota.store.run_folder import RunFolder
from rota.sweep import Sweep


@contextmanager
def controlling(
    sweep: Sweep, path: Path, backend: Backend, devices: Sequence[str], *, durable: bool = True, **options: Any
) -> Iterator[Controller]:
    """The controller of a run that has begun in a new folder; its `record` tells how it went."""
    folder = RunFolder(path)
    folder.prepare()
    journal = Journal(folder.journal, durable=durable)
    began = RunBegan(
        name=path.name,
        source="",
        source_digest="",
        sweep_digest=digest(sweep),
        tasks=tuple(describe(task) for task in sweep),
        devices=(),
    )
    record = RunRecord()
    record.apply(began, backend.now_s())
    journal.append(began, time_s=backend.now_s())
    try:
        yield Controller(
            sweep=sweep, record=record, journal=journal, folder=folder, backend=backend, devices=devices, **options
        )
    finally:
        journal.close()
