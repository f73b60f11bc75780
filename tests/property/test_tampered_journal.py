"""Whatever was done to a journal, its readers say one sentence: status, report, results, and resume before it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rota
from rota import codec
from rota.cli import main
from rota.cluster.device import Cluster, Device
from rota.errors import RotaError
from rota.execute import run as running
from rota.execute.clock import RunClock
from rota.execute.events import Launched, Lost, Requeued, RunBegan, RunEnded, RunNoted, RunResumed, Stopped
from rota.execute.identity import describe, digest
from rota.runtime.messages import Balanced, Began, Failed, Finished, Halted, Measured, Noticed, Saved
from rota.store.journal import Journal
from rota.sweep import Sweep
from rota.task import Task

DEVICE = Device(index=0, kind="cpu", memory_bytes=2**30, cores=(0,), label="a processor")
SWEEP = Sweep(
    tasks=tuple(
        Task(name=name, model=object, data=object, optimizer=object, loss=object, steps=9, settings={"lr": 0.1})
        for name in "abc"
    )
)
TWO = ("cpu:0", "cpu:1")
EVENTS = (
    RunBegan(
        name="run",
        source="",
        source_digest="",
        sweep_digest=digest(SWEEP),
        tasks=tuple(map(describe, SWEEP)),
        devices=({**dataclasses.asdict(DEVICE), "name": "cpu:0"},),
        asked={"devices": 1, "objective": "cost", "retries": 2},
    ),
    RunNoted(text="a schedule"),
    Launched(task="a", attempt=1, devices=TWO, strategy="data"),
    Began(task="a", attempt=1, from_step=0, total_steps=9, parameters=5),
    Measured(
        task="a",
        attempt=1,
        number=1,
        rows=((1, {"train/loss": 0.5}), (2, {"train/loss": 0.25, "valid/loss": 0.5})),
        latest={"train/loss": 0.25, "valid/loss": 0.5, "best/loss": 0.5, "best/step": 2.0},
        step_s=0.5,
        pace=(0.25, 0.5),
    ),
    Saved(task="a", attempt=1, step=2, write_s=0.125),
    Balanced(task="a", attempt=1, step=2, shares=(0.5, 0.5), left_out=(0.0, 0.25), pause_s=0.5, why="slow"),
    Noticed(task="a", attempt=1, text="something"),
    Requeued(task="a", attempt=1, reason="another way", save_s=1.0),
    Launched(task="a", attempt=2, devices=("cpu:0",)),
    Began(task="a", attempt=2, from_step=2, total_steps=9, parameters=5),
    Finished(task="a", attempt=2, step=9, metrics={"valid/loss": 0.125}),
    Launched(task="b", attempt=1, devices=("cpu:0",)),
    Lost(task="b", attempt=1, device="cpu:0", reason="died", retried=True),
    Launched(task="b", attempt=2, devices=("cpu:0",)),
    Failed(task="b", attempt=2, step=3, reason="raised", traceback="Traceback\n  line"),
    Launched(task="c", attempt=1, devices=("cpu:0",)),
    Halted(task="c", attempt=1, step=4),
    Stopped(task="c", attempt=1, step=4),
    RunEnded(state="incomplete"),
    RunResumed(retried=("c",), asked={"devices": 1}),
)
ROWS = [
    (float(1e9 + place), kind, getattr(event, "task", ""), data)
    for place, event in enumerate(EVENTS)
    for kind, data in (codec.encode(event),)
]
HOSTILE = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 10**400, 0.5, -0.5, 1e308, -1e308, 5e-324),
            *(float("inf"), float("-inf"), float("nan"), "", "a", "../x", "\x1b[31m", "\udcff", "a" * 5000),
            *([], {}, [[]], [0], ["a"], ["a", "a"], [None], {"a": {}}, [[1, {"train/loss": 1e308}]], "spill"),
        ]
    ),
    st.recursive(st.none() | st.integers() | st.floats() | st.text(max_size=4), st.lists, max_leaves=4),
    st.integers(15, 900).map(lambda depth: json.loads("[" * depth + "]" * depth)),
)
TIMES = st.floats(allow_nan=False) | st.sampled_from([float("inf"), -float("inf"), 1e308, -1e308, 3e11, 0.0])


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places_in(value[key], (*path, key))


@st.composite
def tampered_rows(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """The rows of a run, some of them altered, left out, repeated or moved."""
    rows: list[tuple[Any, ...]] = list(ROWS)
    for _ in range(draw(st.integers(1, 3))):
        if not rows:
            break
        place = draw(st.integers(0, len(rows) - 1))
        time_s, kind, task, data = rows[place]
        how = draw(st.sampled_from([*["value"] * 3, "time", "kind", "task", "text", "drop", "again", "move"]))
        if how == "value":
            fields = json.loads(data) if data.startswith('{"') else {"task": "a"}
            *path, last = draw(st.sampled_from([one for one in places_in(fields) if one]))
            holder = fields
            for key in path:
                holder = holder[key]
            holder[last] = draw(HOSTILE)
            rows[place] = (time_s, kind, task, json.dumps(fields))
        elif how == "time":
            rows[place] = (draw(TIMES), kind, task, data)
        elif how == "kind":
            rows[place] = (time_s, draw(st.sampled_from([*sorted(codec._KINDS), "Nonsense", ""])), task, data)
        elif how == "task":
            rows[place] = (time_s, kind, draw(st.sampled_from(["a", "b", "x", "", "../a"])), data)
        elif how == "text":
            rows[place] = (time_s, kind, task, draw(st.sampled_from(["", "{", "[]", "null", "{}", "[" * 9999])))
        elif how == "drop":
            del rows[place]
        elif how == "again":
            rows.insert(place, rows[place])
        else:
            rows.insert(draw(st.integers(0, len(rows) - 1)), rows.pop(place))
    return rows


@pytest.fixture(autouse=True, scope="module")
def _quick_disk() -> Iterator[None]:
    """Nothing here is about power failures."""
    with mock.patch.object(os, "fsync"):
        yield


@functools.cache
def empty() -> bytes:
    """A journal without events."""
    with tempfile.TemporaryDirectory() as root:
        Journal(Path(root) / "journal.db", durable=False).close()
        return (Path(root) / "journal.db").read_bytes()


def made(root: Path, rows: list[tuple[Any, ...]]) -> Path:
    """A run folder with these rows in its journal."""
    path = root / "run" / "journal.db"
    path.parent.mkdir()
    path.write_bytes(empty())
    trained = path.parent / "tasks" / "a" / "model.safetensors"
    trained.parent.mkdir(parents=True)
    trained.write_bytes((2).to_bytes(8, "little") + b"{}")  # task a has finished
    with contextlib.closing(sqlite3.connect(path)) as journal, journal:
        journal.execute("PRAGMA synchronous=OFF")
        journal.executemany("INSERT INTO events (time_s, kind, task, data) VALUES (?, ?, ?, ?)", rows)
    return path.parent


def use(run: Path) -> None:
    """As a script does."""
    result = rota.open_run(run)
    str(result.table()), result.table()._repr_html_(), repr(result), result.tasks, result.state
    for task in result.record.tasks.values():
        result.history(task.name)
    result.best()


class Nothing:
    """A backend that starts nothing."""

    session = ""
    shards: tuple[str, ...] = ()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.clock = RunClock()
        self.now_s = self.clock.now_s

    def warm_up(self, count: int) -> None:
        """No workers."""

    def taken_over(self) -> dict[str, Any]:
        """None."""
        return {}

    def keep(self, kept: Any) -> None:
        """None."""

    def close(self) -> None:
        """Nothing."""


def resume(run: Path) -> None:
    """Until tasks would be started."""
    with (
        mock.patch.object(running, "LocalBackend", Nothing),
        mock.patch.object(running, "Journal", functools.partial(Journal, durable=False)),
        mock.patch.object(running, "_carry_out"),
    ):
        running.run_source(
            lambda: running.Source(sweep=SWEEP),
            running.RunOptions(out=run, cluster=Cluster(devices=(DEVICE,)), retry_failed=True, progress=False),
        )


def told(*words: str) -> tuple[int, str, str]:
    """What a command answers."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code, out.getvalue(), err.getvalue()


@settings(max_examples=200)
@given(rows=tampered_rows())
def test_only_errors_of_rota_come_out_of_a_tampered_journal(rows):
    with tempfile.TemporaryDirectory() as root:
        run = made(Path(root), rows)
        for words in (("status", str(run)), ("status", str(run), "--json"), ("report", str(run))):
            code, out, err = told(*words)
            assert code in (0, 2), err
            assert (code == 2) == err.startswith("rota: "), (code, err)
            assert err.count("\n") == (code == 2), err
            assert "\x1b" not in out + err
        for read in (use, resume):
            with contextlib.suppress(RotaError):
                read(run)


def test_a_journal_that_nobody_touched_is_read():
    """Without which the test above would pass for any."""
    with tempfile.TemporaryDirectory() as root:
        run = made(Path(root), ROWS)
        assert told("status", str(run))[0] == told("report", str(run))[0] == 0
        use(run)
        resume(run)
        assert rota.open_run(run).record.tasks["b"].state == "pending"
