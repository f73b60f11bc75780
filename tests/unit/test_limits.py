"""Memory that was freed: kept for the next tensors, or given back (what is held: tests/property/test_reservoir.py)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rota.runtime.limits import HUGE_PAGES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc")

_SCRIPT = """
import resource, sys, torch
from rota.runtime import limits

torch.set_num_threads(1)
exec(sys.argv[1])


def step(scale):
    kept = [torch.full((scale * 2**18,), 1.0) for _ in range(4)]
    return [one + 1 for one in kept]


def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))


before = resident()
for _ in range(3):
    step(3), step(2), step(3)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
most = 0
for _ in range(20):
    step(3), step(2)
    most = max(most, resident() - before)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // 20, most)
"""


def measured(setting: str, environment: tuple[str, str]) -> tuple[int, int]:
    """Page faults of a step, and the kilobytes that are still there after one; two steps make 40 MiB of tensors."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, setting],
        env={**os.environ, environment[0]: environment[1]},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    faults, most = done.stdout.split()
    return int(faults), int(most)


def test_kept_memory_is_used_again():
    faults, _ = measured("limits.return_freed_memory(2**28); limits.keep_freed_memory()", HUGE_PAGES)
    assert faults < 200


def test_returned_memory_is_gone():
    _, most = measured("limits.return_freed_memory(2**28)", HUGE_PAGES)
    assert most < 8 * 1024
