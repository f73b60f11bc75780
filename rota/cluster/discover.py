"""Finds the devices of this machine, without importing torch (that would cost a second at every start)."""

from __future__ import annotations

import os
import platform

import psutil

from rota.cluster.device import Cluster, Device, parse_bytes, said
from rota.errors import InputError, TooFewDevicesError, TooLittleMemoryError
from rota.whole import positive, quoted

# What the controller, the page cache and the rest of the machine keep for themselves.
_HOST_SHARE = 0.1


def local(
    *, devices: int | None = None, memory: str | int | None = None, kind: str | None = None, threads: int | None = None
) -> Cluster:
    """This machine: its GPUs if it has any, else its CPU cores, each core a device with its share of the memory.

    `devices` is how many to use, `memory` what each may use ("4GiB"), `kind` "cpu" or "cuda". `threads` is how many
    compute on each CPU device (one on each of its cores); with the same number, results are the same to the last digit.
    """
    if kind not in (None, "cpu", "cuda"):
        raise InputError(f"rota.local: kind {quoted(kind)} is unknown; it can be 'cpu' or 'cuda'")
    devices = None if devices is None else positive(devices, "rota.local: devices")
    threads = None if threads is None else positive(threads, "rota.local: threads")
    memory_bytes = None if memory is None else parse_bytes(memory, what="rota.local: memory")
    gpus = _cuda_devices() if kind != "cpu" else ()
    if kind == "cuda" and not gpus:
        raise InputError("rota.local: no CUDA device was found here; use kind='cpu', or see `rota doctor`")
    if gpus and threads is not None:
        raise InputError("rota.local: threads is for CPU devices; leave it out, or use kind='cpu'")
    found = (
        _pick_gpus(gpus, count=devices, memory_bytes=memory_bytes)
        if gpus
        else _cpu_devices(count=devices, memory_bytes=memory_bytes, threads=threads or 0)
    )
    return Cluster(devices=found, asked=said(devices=devices, memory=memory, kind=kind, threads=threads))


def available_cores() -> tuple[int, ...]:
    """The cores this process may use (a container or batch system may give fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def memory_limit_bytes() -> int:
    """The memory of this machine, or of the control group this process lives in, if that is less."""
    total: int = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):
            continue
    return total


def _cpu_devices(*, count: int | None, memory_bytes: int | None, threads: int) -> tuple[Device, ...]:
    cores = available_cores()
    count = len(cores) if count is None else count
    if count > len(cores):
        raise TooFewDevicesError(
            f"rota.local: {count} devices were asked for, and this process may use {len(cores)} CPU cores; "
            f"give at most {len(cores)}",
            there=len(cores),
        )
    budget = memory_limit_bytes()
    share = int(budget * (1 - _HOST_SHARE)) // count
    if memory_bytes is not None and memory_bytes * count > budget:
        raise TooLittleMemoryError(
            f"rota.local: {count} devices of {memory_bytes} bytes are more than this machine's {budget} bytes "
            f"of memory; give at most {share} bytes each",
            there_bytes=share,
        )
    groups = [cores[i * len(cores) // count : (i + 1) * len(cores) // count] for i in range(count)]
    return tuple(
        Device(index=i, kind="cpu", memory_bytes=memory_bytes or share, cores=group, label=cpu_label(), threads=threads)
        for i, group in enumerate(groups)
    )


def cpu_label() -> str:
    """What this machine calls its processor."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _pick_gpus(gpus: tuple[Device, ...], *, count: int | None, memory_bytes: int | None) -> tuple[Device, ...]:
    if count is not None and count > len(gpus):
        raise TooFewDevicesError(
            f"rota.local: {count} devices were asked for, and this machine shows {len(gpus)} GPUs", there=len(gpus)
        )
    chosen = gpus[: count or len(gpus)]
    if memory_bytes is None:
        return chosen
    return tuple(
        Device(index=gpu.index, kind="cuda", memory_bytes=min(memory_bytes, gpu.memory_bytes), label=gpu.label)
        for gpu in chosen
    )


def _cuda_devices() -> tuple[Device, ...]:
    """The GPUs that the driver shows, in the order of CUDA_VISIBLE_DEVICES. Never run on a GPU by its authors."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        indices = _visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), pynvml.nvmlDeviceGetCount())
        found = []
        for index in indices:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            label = pynvml.nvmlDeviceGetName(handle)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(Device(index=index, kind="cuda", memory_bytes=int(memory.total), label=str(label)))
        return tuple(found)
    finally:
        pynvml.nvmlShutdown()


def _visible_gpus(visible: str | None, count: int) -> list[int]:
    """The indices that CUDA_VISIBLE_DEVICES leaves; as in CUDA, a wrong one hides itself and all behind it."""
    if visible is None:
        return list(range(count))
    indices: list[int] = []
    for part in visible.split(","):
        if not part.strip().isdecimal() or int(part) >= count:
            break
        indices.append(int(part))
    return indices
