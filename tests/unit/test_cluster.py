"""Sizes as people write them, and `local`: which devices this machine is said to have."""

from __future__ import annotations

import os
import sys
import types

import psutil
import pytest

from rota.cluster import Cluster, Device, discover, local
from rota.cluster.device import format_bytes, parse_bytes
from rota.errors import InputError

# ---- sizes ----


@pytest.mark.parametrize(
    ("written", "amount"),
    [
        (1, 1),
        (2**40, 2**40),
        ("1", 1),
        (" 1024 ", 1024),
        ("7B", 7),
        ("1kB", 1000),
        ("500 MB", 500 * 10**6),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("1.5 KiB", 1536),
        ("0.5TB", 5 * 10**11),
        ("2TiB", 2 * 2**40),
        ("  3  MiB  ", 3 * 2**20),
    ],
)
def test_a_size_is_read_in_bytes(written, amount):
    assert parse_bytes(written) == amount


@pytest.mark.parametrize(
    "written", ["", "GiB", "4 G", "4Gi", "four GiB", "1e9", "4,5GiB", "-4GiB", "4GiB!", "nan", "inf"]
)
def test_a_text_that_is_no_size_is_refused_with_examples(written, refused):
    sentence = refused(parse_bytes, written)
    assert repr(written) in sentence
    assert "4GiB" in sentence


@pytest.mark.parametrize("written", [None, 4.0, True, False, [4], b"4GiB"])
def test_a_value_of_the_wrong_type_is_refused(written, refused):
    assert "is not a size" in refused(parse_bytes, written)


@pytest.mark.parametrize("written", [0, -1, "0", "0GiB", "0.1B"])
def test_a_size_of_nothing_is_refused(written, refused):
    sentence = refused(parse_bytes, written, what="rota.local: memory")
    assert "rota.local: memory" in sentence
    assert "more than nothing" in sentence


@pytest.mark.parametrize("written", ["²", "9" * 400 + "GiB", "9" * 5000], ids=["superscript", "beyond-floats", "long"])
def test_a_number_that_python_cannot_take_is_refused_like_any_other(written, refused):
    assert "size" in refused(parse_bytes, written)


@pytest.mark.parametrize(
    ("amount", "written"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (512 * 2**20, "512 MiB"),
        (11.3 * 2**30, "11.3 GiB"),
        (2**40, "1 TiB"),
        (250 * 2**40, "250 TiB"),
    ],
)
def test_a_size_is_written_for_people(amount, written):
    assert format_bytes(amount) == written


@pytest.mark.parametrize("amount", [1000, 1023, 1000 * 2**20, 1023.9 * 2**30, 5000 * 2**40])
def test_a_size_is_never_written_with_an_exponent(amount):
    assert "e+" not in format_bytes(amount)


# ---- devices ----


def test_a_device_is_named_by_kind_and_index():
    assert Device(index=3, kind="cuda", memory_bytes=1).name == "cuda:3"
    assert Device(index=0, kind="cpu", memory_bytes=1).name == "cpu:0"


def test_a_cluster_needs_a_device(refused):
    assert "no devices" in refused(Cluster, devices=())


# ---- local, as this machine is ----


def test_by_default_there_is_one_cpu_device_per_core():
    cores = tuple(sorted(os.sched_getaffinity(0)))
    devices = local(kind="cpu").devices
    assert [device.cores for device in devices] == [(core,) for core in cores]
    assert [device.name for device in devices] == [f"cpu:{i}" for i in range(len(cores))]
    assert all(device.label for device in devices)


def test_one_device_gets_every_core_and_nearly_all_memory():
    (device,) = local(kind="cpu", devices=1).devices
    assert device.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert 0.5 * discover.memory_limit_bytes() < device.memory_bytes < discover.memory_limit_bytes()


def test_the_memory_limit_is_at_most_what_the_machine_has():
    assert 0 < discover.memory_limit_bytes() <= psutil.virtual_memory().total


def test_the_devices_shares_of_memory_are_equal_and_fit_together():
    devices = local(kind="cpu").devices
    assert len({device.memory_bytes for device in devices}) == 1
    assert sum(device.memory_bytes for device in devices) <= discover.memory_limit_bytes()


def test_memory_that_is_asked_for_is_what_each_device_gets():
    assert [device.memory_bytes for device in local(kind="cpu", memory="64MiB").devices] == [
        64 * 2**20 for _ in os.sched_getaffinity(0)
    ]
    assert local(kind="cpu", devices=1, memory=12345).devices[0].memory_bytes == 12345


def test_more_devices_than_cores_are_refused_with_the_number_there_is(refused):
    cores = len(os.sched_getaffinity(0))
    sentence = refused(local, kind="cpu", devices=cores + 1)
    assert "rota.local" in sentence
    assert f"{cores + 1} devices" in sentence
    assert f"at most {cores}" in sentence


def test_more_memory_than_there_is_is_refused_with_what_would_fit(refused):
    sentence = refused(local, kind="cpu", devices=1, memory="900TiB")
    assert "rota.local" in sentence
    assert "give at most" in sentence
    advised = int(sentence.split("give at most ")[1].split()[0])
    assert local(kind="cpu", devices=1, memory=advised).devices[0].memory_bytes == advised


@pytest.mark.parametrize("devices", [0, -1, 1.0, "2", True])
def test_a_number_of_devices_that_is_no_count_is_refused(devices, refused):
    sentence = refused(local, kind="cpu", devices=devices)
    assert "devices must be a whole number of at least 1" in sentence
    assert repr(devices) in sentence


@pytest.mark.parametrize("kind", ["gpu", "tpu", "", 0, "CPU"])
def test_an_unknown_kind_is_refused_and_the_known_are_listed(kind, refused):
    sentence = refused(local, kind=kind)
    assert repr(kind) in sentence
    assert "'cpu' or 'cuda'" in sentence


def test_a_memory_that_is_no_size_is_refused_as_locals(refused):
    assert "rota.local: memory 'plenty'" in refused(local, memory="plenty")


# ---- local, on machines that this one is not ----


def use_gpus(monkeypatch, memories_bytes, *, visible=None):
    """Let the driver's library show GPUs; rota asks nothing else of it."""

    class NVMLError(Exception):
        pass

    def handle(index):
        if index >= len(memories_bytes):
            raise NVMLError("Invalid Argument")
        return index

    fake = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(memories_bytes),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetName=lambda index: f"GPU {index}",
        nvmlDeviceGetMemoryInfo=lambda index: types.SimpleNamespace(total=memories_bytes[index]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_gpus_are_taken_where_there_are_any(monkeypatch):
    use_gpus(monkeypatch, [100, 200, 300])
    assert [(d.name, d.memory_bytes, d.label) for d in local().devices] == [
        ("cuda:0", 100, "GPU 0"),
        ("cuda:1", 200, "GPU 1"),
        ("cuda:2", 300, "GPU 2"),
    ]
    assert [d.name for d in local(devices=2).devices] == ["cuda:0", "cuda:1"]
    assert local(kind="cpu").devices[0].kind == "cpu"


def test_cuda_visible_devices_chooses_and_orders_the_gpus(monkeypatch):
    use_gpus(monkeypatch, [100, 200, 300], visible="2,0")
    assert [d.name for d in local().devices] == ["cuda:2", "cuda:0"]


def test_no_visible_gpu_leaves_the_cores(monkeypatch):
    use_gpus(monkeypatch, [100], visible="")
    assert local().devices[0].kind == "cpu"


def test_asked_memory_does_not_exceed_a_gpus_own(monkeypatch):
    use_gpus(monkeypatch, [100, 300])
    assert [d.memory_bytes for d in local(memory=200).devices] == [100, 200]


def test_more_devices_than_gpus_are_refused(monkeypatch, refused):
    use_gpus(monkeypatch, [100, 200])
    assert "2 GPUs" in refused(local, devices=3)


def test_cuda_without_a_gpu_is_refused_with_a_way_out(monkeypatch, refused):
    use_gpus(monkeypatch, [])
    sentence = refused(local, kind="cuda")
    assert "no CUDA device" in sentence
    assert "kind='cpu'" in sentence
    assert "rota doctor" in sentence


def test_a_visible_gpu_that_does_not_exist_is_no_crash(monkeypatch):
    use_gpus(monkeypatch, [100, 200], visible="0,7")
    try:
        names = [d.name for d in local().devices]
    except InputError as error:
        assert "CUDA_VISIBLE_DEVICES" in str(error)  # noqa: PT017
    else:
        assert names == ["cuda:0"]
