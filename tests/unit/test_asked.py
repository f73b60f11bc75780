"""What was said when a run began holds when it is resumed, until something else is said or it is no longer there."""

import pytest

from rota.cluster import discover
from rota.errors import InputError, StoreError
from rota.execute.asked import Asked
from rota.execute.events import RunBegan, RunResumed
from rota.execute.record import RunRecord
from rota.execute.run import RunOptions, _as_before, _device_facts

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """Sets how many cores and how much memory this machine has; no GPUs."""

    def be(*, cores, memory_bytes=64 * GIB):
        monkeypatch.setattr(discover, "available_cores", lambda: tuple(range(cores)))
        monkeypatch.setattr(discover, "memory_limit_bytes", lambda: memory_bytes)
        monkeypatch.setattr(discover, "_cuda_devices", lambda: ())

    return be


def begun(asked, **given):
    """The record of a run that was begun on the machine as it is."""
    cluster, options, notes = _as_before(RunOptions(asked=asked, **given), RunRecord())
    assert all("devices compute with" in note for note in notes)
    event = RunBegan(
        name="r",
        source="",
        source_digest="",
        sweep_digest="",
        tasks=({"name": "a"},),
        devices=tuple(_device_facts(cluster)),
        asked=options.asked.plain(),
    )
    record = RunRecord()
    record.apply(event, 0.0)
    return record


ALL = Asked(devices=2, memory="4GiB", strategy="spill", objective="completion", profile=False, retries=5, strict=True)


def test_a_resume_has_what_the_run_had_and_says_so(machine):
    machine(cores=4)
    cluster, options, (note,) = _as_before(RunOptions(), begun(ALL))
    assert [(len(one.cores), one.memory_bytes) for one in cluster.devices] == [(2, 4 * GIB)] * 2
    assert (options.strategy, options.objective, options.profile, options.retries) == ("spill", "completion", False, 5)
    assert "--devices 2 --memory 4GiB --strategy spill --objective completion --retries 5 --no-profile --strict" in note
    assert options.strict


def test_what_is_said_at_a_resume_holds_from_then_on(machine):
    machine(cores=4)
    record = begun(ALL)
    said = Asked(memory="1GiB", profile=True, strategy="single", strict=False)
    cluster, options, _ = _as_before(RunOptions(asked=said), record)
    assert [one.memory_bytes for one in cluster.devices] == [GIB] * 2
    assert (options.strategy, options.profile, options.retries, options.strict) == ("single", True, 5, False)
    record.apply(RunResumed(asked=options.asked.plain()), 1.0)
    _, again, _ = _as_before(RunOptions(), record)
    assert again.asked == options.asked


def test_a_script_that_is_run_again_has_its_own_devices_and_they_are_remembered(machine):
    machine(cores=4)
    record = begun(Asked(strategy="spill"), cluster=discover.local(devices=1, memory="2GiB"))
    cluster, options, _ = _as_before(RunOptions(), record)
    assert [(len(one.cores), one.memory_bytes) for one in cluster.devices] == [(4, 2 * GIB)]
    given = discover.local(devices=4)
    cluster, options, notes = _as_before(RunOptions(cluster=given), record)
    assert cluster is given
    assert options.asked == Asked(devices=4, strategy="spill")
    assert [note for note in notes if "had 4 threads and has 1 thread now" not in note] == []


def test_where_nothing_was_said_nothing_is(machine):
    machine(cores=2)
    record = begun(Asked())
    cluster, options, notes = _as_before(RunOptions(), record)
    assert (len(cluster.devices), options.asked, notes) == (2, Asked(), [])


@pytest.mark.parametrize(
    ("asked", "cores", "memory_bytes", "sentence", "left"),
    [
        (Asked(devices=4), 2, 64 * GIB, "--devices 4, and only 2 are here now; it goes on with 2", [1, 1]),
        (Asked(), 2, 64 * GIB, "the run had 4 devices of 1 core, and here there are 2 devices of 1 core", [1, 1]),
        (Asked(devices=1, threads=4), 2, 64 * GIB, "1 device of 2 cores; it goes on with that", [2]),
        (Asked(devices=1, memory="8GiB"), 4, 4 * GIB, "--memory 8GiB, and here each device can have at most 3.6", [4]),
    ],
)
def test_devices_that_are_gone_are_told_and_the_run_goes_on(machine, asked, cores, memory_bytes, sentence, left):
    machine(cores=4)
    record = begun(asked)
    machine(cores=cores, memory_bytes=memory_bytes)
    cluster, _, notes = _as_before(RunOptions(), record)
    assert [len(one.cores) for one in cluster.devices] == left
    (told,) = (note for note in notes if "goes on as it was begun" not in note)
    assert sentence in told


@pytest.mark.parametrize(
    ("before", "now", "sentence"),
    [
        (Asked(devices=4), Asked(devices=1), "each device had 1 thread and has 4 threads now"),
        (Asked(devices=1, threads=2), Asked(threads=4), "had 2 threads and has 4 threads now"),
        (Asked(devices=3), Asked(), "compute with 1 or 2 threads, so the last digits of a task depend on where it"),
        (Asked(devices=4, threads=1), Asked(devices=1), ""),
        (Asked(devices=4), Asked(devices=1, threads=1), ""),
        (Asked(devices=3, threads=1), Asked(), ""),
    ],
)
def test_where_the_number_of_threads_differs_it_is_said_how_to_keep_it(machine, before, now, sentence):
    machine(cores=4)
    cluster, options, notes = _as_before(RunOptions(asked=now), begun(before))
    told = [note for note in notes if "thread" in note and "goes on as it was begun" not in note]
    assert len(told) == bool(sentence)
    assert all(sentence in note and "--threads" in note for note in told)
    assert options.asked.threads == (now.threads or before.threads)
    if options.asked.threads:
        assert {one.thread_count for one in cluster.devices} == {options.asked.threads}


def test_what_is_asked_for_now_must_be_there(machine):
    machine(cores=2)
    with pytest.raises(InputError, match="3 devices were asked for"):
        _as_before(RunOptions(asked=Asked(devices=3)), begun(Asked(devices=2)))
    with pytest.raises(InputError, match="more than this machine's"):
        _as_before(RunOptions(asked=Asked(memory="100GiB")), begun(Asked(devices=2)))


def test_devices_of_one_cluster_are_not_those_of_another():
    before = Asked(cluster="ray", devices=9, memory="1GiB", strategy="data")
    assert Asked(cluster="local").over(before) == Asked(cluster="local", strategy="data")
    assert Asked(cluster="ray").over(before) == before


@pytest.mark.parametrize("plain", [{"devices": "2"}, {"memory": []}, {"strange": 1}, {"strategy": 3}, {"threads": "1"}])
def test_a_journal_that_says_something_else_is_an_error(plain):
    with pytest.raises(StoreError, match="cannot be understood"):
        Asked.of(plain)
