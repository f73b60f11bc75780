"""The arbiter of a pool: one unit at a time on a device, as many as there is room for, and nobody waits in vain."""

import itertools
import socket
import threading
import time

import pytest

from rota.errors import TaskError
from rota.memory.arbiter import Arbiter
from rota.memory.turns import Turns

ROOM_BYTES, MOVED_BYTES, WORK_BYTES = 100, 30, 10


class Watch:
    """Who is where."""

    def __init__(self):
        self.lock = threading.Lock()
        self.running = {}
        self.held = {}
        self.most_held = 0
        self.busy_s = 0.0
        self.ran = []

    def enter(self, table, device, name):
        with self.lock:
            table.setdefault(device, []).append(name)
            if table is self.running:
                assert len(table[device]) == 1, "two units at a time"
                self.ran.append((device, name))
            else:
                self.most_held = max(self.most_held, len(table[device]))
                spans = sorted((begin, begin + size) for _, begin, size in table[device])
                assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), "two in one place"
                assert sum(end - begin for begin, end in spans) + WORK_BYTES <= ROOM_BYTES

    def took(self, seconds):
        with self.lock:
            self.busy_s += seconds

    def leave(self, table, device, name):
        with self.lock:
            table[device].remove(name)


def member(name, turns, watch, *, rows, unit_s, dies_after=None, sizes=(MOVED_BYTES,)):
    """A model of so many batches and units, which does as `Pooled` does; batches of several sizes take turns."""
    count = 0
    promised = None
    for left in range(len(rows) - 1, -1, -1):
        units, size = rows[left], sizes[left % len(sizes)]
        if promised is not None and promised[2] < size:
            watch.leave(watch.held, promised[0], (name, *promised[1:]))
            turns.gone(*promised[:2])
            promised = None
        turns.ready(
            [unit_s] * units,
            moved_bytes=[size] * units,
            work_bytes=[WORK_BYTES] * units,
            room_bytes=ROOM_BYTES,
            after_s=left * unit_s * units,
        )
        here, promised = promised, None
        for unit in range(units):
            if here is None:
                here = (*turns.wait_for_room(), size)
                watch.enter(watch.held, here[0], (name, *here[1:]))
            following = turns.wait_for_turn()
            there = None if following is None else (here[0], following, size)
            if there is not None:
                watch.enter(watch.held, there[0], (name, *there[1:]))
            if count == dies_after:
                for one in (here, there):
                    if one is not None:
                        watch.leave(watch.held, one[0], (name, *one[1:]))
                turns._socket.close()
                return
            watch.enter(watch.running, here[0], name)
            began_s = time.monotonic()
            time.sleep(unit_s)
            watch.took(time.monotonic() - began_s)
            watch.leave(watch.running, here[0], name)
            turns.ran(unit_s)
            watch.leave(watch.held, here[0], (name, *here[1:]))
            turns.gone(*here[:2])
            count += 1
            if unit == units - 1:
                assert there is None or left > 0, "it has no more units"
                promised = there
            here = there


def played(models, *, devices, **options):
    pairs = {name: socket.socketpair() for name in models}
    arbiter = Arbiter(
        {name: ours for name, (ours, _) in pairs.items()}, devices=devices, memory_bytes=ROOM_BYTES, **options
    )
    watch = Watch()
    threads = [
        threading.Thread(target=member, args=(name, Turns(pairs[name][1]), watch), kwargs=models[name], daemon=True)
        for name in models
    ]
    begun_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "it waits for ever"
    took_s = time.monotonic() - begun_s
    arbiter.close()
    for _, theirs in pairs.values():
        theirs.close()
    return watch, took_s


@pytest.mark.parametrize(("count", "devices"), [(1, 1), (1, 3), (3, 1), (3, 2), (7, 3)])
def test_units_take_turns(count, devices):
    models = {f"m{i}": {"rows": [2 + i % 3] * (2 + i), "unit_s": 0.002} for i in range(count)}
    watch, _ = played(models, devices=devices)
    assert len(watch.ran) == sum(sum(one["rows"]) for one in models.values())
    assert watch.most_held <= 3


def test_what_is_large_has_its_turn_among_what_is_small():
    models = {f"m{i}": {"rows": [3] * 6, "unit_s": 0.002, "sizes": (20 + 6 * i, 45)} for i in range(4)}
    watch, _ = played(models, devices=2)
    assert len(watch.ran) == 4 * 18


@pytest.mark.alone
def test_devices_are_busy_and_the_longest_goes_first():
    models = {name: {"rows": [3] * batches, "unit_s": 0.02} for name, batches in {"a": 10, "b": 6, "c": 4}.items()}
    watch, took_s = played(models, devices=2, wait=True)
    # A machine of which a host takes a part away sleeps longer than it was told to: what units really took counts.
    assert took_s < 1.35 * watch.busy_s / 2
    early = [name for _, name in watch.ran[:20]]
    assert early.count("a") >= 9, early


def test_one_that_is_gone_leaves_its_devices_to_the_others():
    models = {f"m{i}": {"rows": [3] * 5, "unit_s": 0.003} for i in range(3)}
    models["m1"]["dies_after"] = 4
    watch, _ = played(models, devices=2)
    assert len(watch.ran) == 2 * 15 + 4


def test_a_pool_that_is_gone_is_told():
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(TaskError, match="the pool is gone"):
        Turns(theirs).wait_for_room()
    theirs.close()
