"""Cores and memory are shared out completely and fairly, whatever machine it is."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.cluster import discover, local
from rota.cluster.device import format_bytes, parse_bytes
from rota.errors import InputError

MACHINES = st.sets(st.integers(0, 500), min_size=1, max_size=64).map(lambda cores: tuple(sorted(cores)))


@given(cores=MACHINES, budget=st.integers(10**6, 2**45), data=st.data())
def test_the_devices_share_all_cores_and_no_more_than_the_memory(cores, budget, data):
    count = data.draw(st.none() | st.integers(1, len(cores)), label="devices")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discover, "available_cores", lambda: cores)
        patch.setattr(discover, "memory_limit_bytes", lambda: budget)
        devices = local(kind="cpu", devices=count).devices
    assert len(devices) == (count or len(cores))
    assert [core for device in devices for core in device.cores] == list(cores)
    sizes = [len(device.cores) for device in devices]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert len({device.memory_bytes for device in devices}) == 1
    assert sum(device.memory_bytes for device in devices) <= budget
    assert sum(device.memory_bytes for device in devices) >= 0.85 * budget
    assert len({device.name for device in devices}) == len(devices)


@given(cores=MACHINES, budget=st.integers(10**6, 2**45), asked=st.integers(1, 2**46))
def test_asked_memory_is_given_in_full_or_refused(cores, budget, asked):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discover, "available_cores", lambda: cores)
        patch.setattr(discover, "memory_limit_bytes", lambda: budget)
        if asked * len(cores) > budget:
            with pytest.raises(InputError, match="give at most"):
                local(kind="cpu", memory=asked)
        else:
            assert {device.memory_bytes for device in local(kind="cpu", memory=asked).devices} == {asked}


@given(amount=st.integers(1, 2**60))
def test_a_plain_number_is_read_as_it_is(amount):
    assert parse_bytes(amount) == parse_bytes(str(amount)) == amount


@given(amount=st.floats(1, 999), unit=st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_a_size_written_for_people_is_read_back_to_three_digits(amount, unit):
    amount_bytes = amount * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    # A size is a whole number of bytes: below 1 KiB that costs up to one of them.
    assert parse_bytes(format_bytes(amount_bytes)) == pytest.approx(amount_bytes, rel=0.005, abs=1)


@given(written=st.text(max_size=12))
def test_any_text_is_a_positive_size_or_refused(written):
    # Digits of other scripts that int() does not take are in tests/unit/test_cluster.py.
    if not any(c.isdigit() and not c.isdecimal() for c in written):
        with contextlib.suppress(InputError):
            assert parse_bytes(written) > 0
