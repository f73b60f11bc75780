"""Code that is loaded while a task runs: without the limit of memory, and not counted as the task's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA and /proc")

_HEAD = """
import ctypes, importlib, importlib.util, pickle, resource, sys, threading
from rota.runtime import limits
from rota.runtime.loading import code_is_free

sys.path.insert(0, ".")
ROOM, LARGE, SMALL = 64 * 2**20, 96 * 2**20, 32 * 2**20


def soft():
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def fits(size):
    try:
        bytearray(size)
    except MemoryError:
        return False
    return True


with code_is_free(), limits.limited(ROOM):
    assert fits(SMALL) and not fits(LARGE)
"""
_TAIL = """
    assert fits(SMALL), "what was loaded was charged to the task"
    assert not fits(LARGE), "the limit is gone"
assert soft() == resource.RLIM_INFINITY
"""
_BY_PATH = """
    spec = importlib.util.spec_from_file_location("large", "large.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
_BY_A_LAZY_MODULE = """
    spec = importlib.util.find_spec("large")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(module.KEPT) == LARGE
"""
_IN_THREADS = """
    threads = [threading.Thread(target=__import__, args=(name,)) for name in ("large", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "large" in sys.modules and "other" in sys.modules
"""
_THAT_FAILS = """
    try:
        import broken
    except ValueError:
        pass
"""


def run(folder: Path, body: str) -> None:
    (folder / "large.py").write_text("KEPT = b'x' * (96 * 2**20)\n\ndef function(): pass\n")
    (folder / "other.py").write_text("KEPT = bytearray(96 * 2**20)\n")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("import large\nfrom . import part\n")
    (folder / "package" / "part.py").write_text("import other\n")
    (folder / "broken.py").write_text("import large\nraise ValueError('boo')\n")
    script = _HEAD + body + _TAIL
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "body",
    [
        "    import large\n",
        "    import package.part\n",
        "    importlib.import_module('package')\n",
        "    pickle.loads(b'clarge\\nfunction\\n.')\n",
        _BY_PATH,
        _BY_A_LAZY_MODULE,
        _IN_THREADS,
        _THAT_FAILS,
    ],
    ids=["statement", "nested", "import_module", "unpickled", "by path", "lazy", "threads", "fails"],
)
def test_a_module_larger_than_the_room_is_loaded_and_not_charged(tmp_path, body):
    run(tmp_path, body)


def test_libraries_are_loaded_without_the_limit(tmp_path):
    """What their constructors allocate cannot be seen from here, so the limit is looked at when each is opened."""
    seen = """
    limits_seen = {}

    def look(event, arguments):
        if event == "import" and arguments[1] or event == "ctypes.dlopen":
            limits_seen[event, arguments[0]] = soft()

    sys.addaudithook(look)
    import _lsprof
    ctypes.CDLL("libm.so.6")
    ctypes.CDLL(name="libdl.so.2")
    ctypes.CDLL(None)
    libraries = {what: limit for what, limit in limits_seen.items() if what[1] is not None}
    assert {name for _, name in libraries} >= {"_lsprof", "libm.so.6", "libdl.so.2"}, libraries
    assert set(libraries.values()) == {resource.RLIM_INFINITY}, libraries
"""
    run(tmp_path, seen)


def test_what_code_takes_is_no_memory_of_a_task_that_spills(tmp_path):
    taken = """
    before = limits.anonymous_bytes(), limits.code_bytes()
    import large
    kept = b"y" * SMALL
    assert abs(limits.anonymous_bytes() - before[0] - SMALL) < 4 * 2**20
    assert abs(limits.code_bytes() - before[1] - LARGE) < 4 * 2**20
    del kept
"""
    run(tmp_path, taken)


def test_limits_within_limits_keep_what_was_loaded_out_of_them(tmp_path):
    nested = """
    with limits.lifted():
        assert soft() == resource.RLIM_INFINITY
        import large
        with limits.limited(SMALL):
            import other
            assert not fits(SMALL + 2**20)
        assert fits(LARGE)
"""
    run(tmp_path, nested)


def test_loaders_are_as_they_were_afterwards(tmp_path):
    same = """
    pass
loaders = importlib.machinery.SourceFileLoader, importlib.machinery.ExtensionFileLoader, ctypes.CDLL
import types
before = [dict(vars(one)) for one in loaders]
with code_is_free():
    assert before != [dict(vars(one)) for one in loaders]
assert before == [dict(vars(one)) for one in loaders]
with code_is_free(), limits.limited(ROOM):
    pass
"""
    run(tmp_path, same)
