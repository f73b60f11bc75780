"""The arbiter of a pool: one unit at a time on a device, room for two, and nobody waits for one that is gone."""

import socket
import threading
import time

import pytest

from rota.errors import TaskError
from rota.memory.arbiter import Arbiter
from rota.memory.turns import Turns


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
                assert len(table[device]) <= 2, "three units in two halves"

    def took(self, seconds):
        with self.lock:
            self.busy_s += seconds

    def leave(self, table, device, name):
        with self.lock:
            table[device].remove(name)


def member(name, turns, watch, *, rows, unit_s, dies_after=None):
    """A model of so many batches and units, which does as `Pooled` does."""
    count = 0
    for left in range(len(rows) - 1, -1, -1):
        turns.ready([unit_s] * rows[left], after_s=left * unit_s * rows[left])
        device = None
        for unit in range(rows[left]):
            if device is None:
                promised = turns.promised is not None
                device = turns.wait_for_room()
                if not promised:
                    watch.enter(watch.held, device, name)
            follows = turns.wait_for_turn()
            if follows:
                watch.enter(watch.held, device, name)
            if count == dies_after:
                watch.leave(watch.held, device, name)
                if follows:
                    watch.leave(watch.held, device, name)
                turns._socket.close()
                return
            watch.enter(watch.running, device, name)
            began_s = time.monotonic()
            time.sleep(unit_s)
            watch.took(time.monotonic() - began_s)
            watch.leave(watch.running, device, name)
            turns.ran(unit_s)
            watch.leave(watch.held, device, name)
            turns.gone(device)
            count += 1
            if follows and unit == rows[left] - 1:
                assert left > 0, "it has no more units"
                turns.promised = device
            device = device if follows else None


def played(models, *, devices, **options):
    pairs = {name: socket.socketpair() for name in models}
    arbiter = Arbiter({name: ours for name, (ours, _) in pairs.items()}, devices=devices, **options)
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
    assert watch.most_held <= 2


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
