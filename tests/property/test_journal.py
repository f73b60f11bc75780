"""Any events are read back; any damage is either harmless or a StoreError with advice, never sqlite's own error."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota import codec
from rota.errors import StoreError
from rota.execute.events import Launched, RunBegan
from rota.execute.record import RunRecord
from rota.runtime.messages import Began, Halted, Measured, Noticed, Saved
from rota.store.journal import Journal, read_events, read_metrics, read_summary

NAMES = st.sampled_from(["a", "b", "c"])
EVENTS = st.one_of(
    st.builds(
        Launched, task=NAMES, attempt=st.integers(1, 9), devices=st.lists(st.text(max_size=5), max_size=3).map(tuple)
    ),
    st.builds(Noticed, task=NAMES, attempt=st.integers(1, 9), text=st.text(max_size=20)),
    st.builds(Saved, task=NAMES, attempt=st.integers(1, 9), step=st.integers(0, 10**9), write_s=st.floats(0, 9)),
    st.builds(Halted, task=NAMES, attempt=st.integers(1, 9), step=st.integers(0, 10**9)),
)
TIMES = st.floats(codec.TIME.least, codec.TIME.most)


@given(batches=st.lists(st.lists(st.tuples(TIMES, EVENTS), max_size=6), max_size=5), reopen=st.booleans())
def test_any_events_in_any_batches_are_read_back_in_order(batches, reopen):
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "journal.db"
        journal = Journal(path, durable=False)
        for batch in batches:
            for time_s, event in batch:
                journal.append(event, time_s=time_s)
            journal.commit()
            if reopen:
                journal.close()
                journal = Journal(path, durable=False)
        expected = [one for batch in batches for one in batch]
        assert list(read_events(path)) == expected
        journal.close()
        assert list(read_events(path)) == expected


@st.composite
def reports(draw: st.DrawFn) -> list[Measured | Saved]:
    """What running tasks report: each report knows the latest value of every metric, as workers do."""
    made: list[Measured | Saved] = []
    step = dict.fromkeys("ab", 0)
    latest: dict[str, dict[str, float]] = {"a": {}, "b": {}}
    for number in range(draw(st.integers(0, 12))):
        task = draw(st.sampled_from("ab"))
        if draw(st.booleans()):
            made.append(Saved(task=task, attempt=1, step=step[task], write_s=0.0))
            continue
        rows = []
        for _ in range(draw(st.integers(1, 3))):
            step[task] += 1
            rows.append((step[task], {"train/loss": draw(st.floats(0, 9))}))
            if draw(st.booleans()):
                rows.append((step[task], {"valid/loss": draw(st.floats(0, 9))}))
        for _, metrics in rows:
            latest[task] |= metrics
        made.append(
            Measured(
                task=task,
                attempt=1,
                number=number + 1,
                rows=tuple(rows),
                latest=dict(latest[task]),
                step_s=draw(st.floats(0, 9)),
            )
        )
    return made


@given(made=reports())
def test_the_summary_amounts_to_the_same_record_as_the_whole(made):
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "journal.db"
        journal = Journal(path, durable=False)
        tasks = ({"name": "a", "steps": 99}, {"name": "b", "steps": 99})
        journal.append(
            RunBegan(name="n", source="", source_digest="", sweep_digest="", tasks=tasks, devices=()), time_s=0.0
        )
        for task in "ab":
            journal.append(Launched(task=task, attempt=1, devices=(f"cpu:{task}",)), time_s=1.0)
            journal.append(Began(task=task, attempt=1, from_step=0, total_steps=99, parameters=1), time_s=2.0)
        for number, event in enumerate(made):
            journal.append(event, time_s=3.0 + number)
        journal.commit()
        journal.close()
        summary, whole = RunRecord.replay(read_summary(path)), RunRecord.replay(read_events(path))
        assert summary.tasks == whole.tasks
        assert summary.state == whole.state
        for task in "ab":
            rows = read_metrics(path, task)
            assert [row["step"] for row in rows] == list(range(1, whole.tasks[task].step + 1))


@pytest.fixture(scope="module")
def journal_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "journal.db"
    journal = Journal(path, durable=False)
    for i in range(30):
        journal.append(Noticed(task="abc"[i % 3], attempt=1, text="word " * i), time_s=float(i))
    journal.commit()
    journal.close()
    return path


def read_damaged(original: Path, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "journal.db"
        shutil.copy(original, path)
        path.write_bytes(content)
        for read in (read_events, read_summary, lambda path: iter(read_metrics(path, "a"))):
            with contextlib.suppress(StoreError):
                list(read(path))


@settings(max_examples=150)
@given(place=st.integers(0, 10**6), mask=st.integers(1, 255), head=st.booleans())
def test_an_altered_byte_is_harmless_or_a_store_error(journal_file, place, mask, head):
    raw = bytearray(journal_file.read_bytes())
    raw[place % (100 if head else len(raw))] ^= mask
    read_damaged(journal_file, bytes(raw))


@settings(max_examples=40)
@given(length=st.integers(1, 10**6))
def test_a_file_cut_short_is_harmless_or_a_store_error(journal_file, length):
    raw = journal_file.read_bytes()
    read_damaged(journal_file, raw[: length % len(raw)])


@settings(max_examples=40)
@given(place=st.integers(0, 10**6), junk=st.binary(min_size=1, max_size=64).map(lambda some: some * 32))
def test_a_stretch_of_junk_is_harmless_or_a_store_error(journal_file, place, junk):
    raw = bytearray(journal_file.read_bytes())
    place %= len(raw)
    raw[place : place + len(junk)] = junk[: len(raw) - place]
    read_damaged(journal_file, bytes(raw))


@settings(max_examples=30)
@given(content=st.binary(min_size=1, max_size=300))
def test_arbitrary_bytes_are_a_store_error(journal_file, content):
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "journal.db"
        path.write_bytes(content)
        with pytest.raises(StoreError):
            list(read_events(path))
