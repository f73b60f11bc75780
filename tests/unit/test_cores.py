"""A core is held by one process at a time, and free again however that ends."""

import subprocess
import sys

import pytest

from rota.execute.backends.cores import claim_core

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are claimed on Linux only")
CORES = (90001, 90007)  # numbers that no machine has: nobody else claims them


def test_each_core_is_had_once_beginning_where_asked():
    one = claim_core(CORES, first=1)
    other = claim_core(CORES, first=1)
    assert (one.core, other.core) == (90007, 90001)
    assert claim_core(CORES) is None
    one.close()
    again = claim_core(CORES)
    assert again.core == 90007
    for held in (other, again):
        held.close()


def test_no_cores_no_claim():
    assert claim_core(()) is None


def test_a_core_is_free_when_its_holder_was_killed():
    code = (
        "from rota.execute.backends.cores import claim_core\n"
        f"claimed = claim_core({CORES})\n"
        "print(claimed.core, flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "90001\n"
            with_it_held = claim_core(CORES)
            assert with_it_held.core == 90007
            with_it_held.close()
        finally:
            holder.kill()
    freed = claim_core(CORES)
    assert freed.core == 90001
    freed.close()
