"""A short storm of faults; the long one is `make chaos`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_short_storm_is_survived(tmp_path):
    command = [sys.executable, "-m", "bench.chaos", "--quick", "--json", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["faults"] == told["survived"] == 5
    assert told["wrong_results"] == told["leaked_processes"] == 0
