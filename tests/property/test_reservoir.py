"""Memory that is used again: whatever is asked for and given back, it stays as it was written, within a bound."""

import ctypes
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.runtime import reservoir as module
from rota.runtime.limits import prepare
from rota.runtime.reservoir import Reservoir, compiled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc")

MIB = 2**20
GRANULE = 2 * MIB
LIMIT = 24 * MIB


@pytest.fixture(scope="module")
def held():
    """Not preloaded: what is asked of it by name is enough here."""
    found = Reservoir(ctypes.CDLL(str(compiled())))
    assert found.hold(LIMIT)
    yield found
    found.let_go()
    assert found.counts_bytes[:2] == (0, 0)


sizes = st.one_of(
    st.integers(1, 8 * MIB), st.integers(1, 200_000), st.sampled_from([4096, MIB - 1, MIB, 2 * MIB, 2 * MIB + 1])
)
steps = st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 100)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_what_is_taken_stays_as_it_was_written_and_what_is_there_is_bounded(held, steps):
    before, taken = held.counts_bytes, []
    assert before[1] == 0
    try:
        for number, (more, size, which) in enumerate(steps):
            if more or not taken:
                memory = held.take(size)
                mark = (number % 251 + 1).to_bytes(1, "little")
                memory[:1] = memory[-1:] = memory[size // 2 : size // 2 + 1] = mark
                taken.append((memory, mark))
            else:
                memory, mark = taken.pop(which % len(taken))
                assert bytes(memory[:1]) == bytes(memory[-1:]) == mark
                held.give(memory)
            assert all(bytes(one[len(one) // 2 : len(one) // 2 + 1]) == mark for one, mark in taken)
            there, used, _ = held.counts_bytes
            pages = sum(-(-len(one) // 4096) * 4096 for one, _ in taken)
            assert used == pages
            # Beyond the bound only by what is used: each piece may keep what is left of its first and last granule.
            assert there <= max(LIMIT, used + 2 * GRANULE * len(taken))
    finally:
        for memory, _ in taken:
            held.give(memory)
    assert held.counts_bytes[1] == 0
    assert held.counts_bytes[0] <= LIMIT


def test_memory_is_used_again_also_where_it_lies_in_pieces(held):
    held.trim()
    assert held.counts_bytes[0] == 0
    pieces = [held.take(4 * MIB) for _ in range(6)]
    for one in pieces:
        one[::4096] = bytes(len(one) // 4096)
    for one in pieces[::2]:
        held.give(one)
    made = held.counts_bytes[2]
    for number in range(20):  # wider than any gap: granules of the gaps come together
        wide = held.take(12 * MIB)
        wide[::4096] = bytes([number]) * (len(wide) // 4096)
        held.give(wide)
    assert held.counts_bytes[2] - made <= GRANULE
    for one in pieces[1::2]:
        held.give(one)


_TIGHT = """
import ctypes, mmap, resource, sys
from rota.runtime.limits import data_bytes
from rota.runtime.reservoir import Reservoir

MIB = 2**20
held = Reservoir(ctypes.CDLL(sys.argv[1]))
assert held.hold(24 * MIB)
pieces = [held.take(4 * MIB) for _ in range(6)]
place = ctypes.addressof(ctypes.c_char.from_buffer(pieces[0]))
for number, one in enumerate(pieces):
    one[:] = bytes([number]) * len(one)
for one in pieces[::2]:
    held.give(one)
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes(), resource.RLIM_INFINITY))
for size in (12 * MIB, 30 * MIB, 2**64 - 1, 0, 12 * MIB):
    wide = held.take(size)
    assert (wide is not None) == (size == 12 * MIB), size
    if wide is not None:
        wide[:: 4096] = bytes(len(wide) // 4096)
        held.give(wide)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert all(bytes(one) == bytes([2 * number + 1]) * len(one) for number, one in enumerate(pieces[1::2]))
end = place  # nothing of the address space was lost, where somebody else's memory could come to lie
with open("/proc/self/maps") as file:
    for line in file:
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= end < high:
            end = high
assert end - place >= 2**32 - 4 * MIB, end - place
"""


def test_a_limit_of_the_system_leaves_no_hole():
    done = subprocess.run([sys.executable, "-c", _TIGHT, str(compiled())], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


_SCRIPT = """
import ctypes, json, resource, sys, torch
from rota.runtime.limits import give_back
from rota.runtime.reservoir import reservoir

torch.set_num_threads(1)
held = reservoir()


def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))


def step(scale):
    kept = [torch.full((scale * 2**18,), 1.0) for _ in range(4)]
    return [one + 1 for one in kept]


outside = torch.ones(2**20)
held.hold(int(sys.argv[1]))
before = resident()
for _ in range(3):
    step(3), step(2), step(3)
_, _, made = held.counts_bytes
most = 0
for _ in range(20):
    step(3), step(2)
    most = max(most, resident() - before)
inside = torch.arange(2**20)
lies = held.has(inside.data_ptr()), held.has(outside.data_ptr())
del outside
libc = ctypes.CDLL(None)
libc.realloc.restype = libc.memalign.restype = ctypes.c_void_p
place = ctypes.c_void_p()
assert libc.posix_memalign(ctypes.byref(place), ctypes.c_size_t(64), ctypes.c_size_t(2**20)) == 0
ctypes.memset(place, 7, 2**20)
moved = libc.realloc(place, ctypes.c_size_t(2**21))
assert ctypes.string_at(moved, 2**20) == bytes([7]) * 2**20
libc.free(ctypes.c_void_p(moved))
used = held.counts_bytes[1]
held.let_go()
there = held.counts_bytes[0]
total = int(inside.sum())
del inside
give_back()
print(json.dumps({
    "made": held.counts_bytes[2] - made, "most": most, "lies": lies, "used": used, "there": there,
    "right": total == 2**19 * (2**20 - 1), "left": held.counts_bytes[0],
}))
"""


def test_pytorch_is_served_in_a_process_that_was_started_for_it():
    environment = dict(os.environ)
    prepare(environment)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(64 * MIB)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["made"] <= GRANULE  # nothing but `inside` was made new
    assert found["most"] <= 64 * MIB + 4 * MIB
    assert found["lies"] == [True, False]
    assert found["used"] == 8 * MIB
    assert found["there"] <= 10 * MIB  # what is used stays where it is when nothing is held any more
    assert found["right"]
    assert found["left"] == 0


def no_library():
    environment = {}
    prepare(environment)
    return "LD_PRELOAD" not in environment


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002, 0o000])
def test_it_is_compiled_once_for_its_user_alone_whatever_the_umask_is(tmp_path, monkeypatch, mask):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path / "cache" / "rota"))
    before = os.umask(mask)
    try:
        library = compiled()
        made = library.stat()
        assert compiled() == library
    finally:
        os.umask(before)
    assert library.stat().st_mtime_ns == made.st_mtime_ns
    for path in (library, *library.parents[:3]):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to a group")
@pytest.mark.parametrize("mine", [True, False])
def test_a_group_may_write_if_it_is_the_users_own(tmp_path, monkeypatch, mine):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path / "rota"))
    tmp_path.chmod(0o770)
    if not mine:
        os.chown(tmp_path, -1, os.getgid() + 1)
    assert no_library() != mine


def test_a_library_that_others_could_have_written_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path))
    library = compiled()
    good = library.read_bytes()
    library.write_bytes(b"evil")
    library.chmod(0o777)
    assert compiled().read_bytes() == good
    assert library.stat().st_mode & 0o077 == 0


def test_nothing_is_loaded_from_where_others_can_write(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("ROTA_CACHE", str(shared / "rota"))
    assert not no_library()
    shared.chmod(0o777)  # also later: whoever can rename folders there can put another in its place
    assert no_library()
    with pytest.raises(module.UnavailableError, match="can be written by others"):
        compiled()
    shared.chmod(0o1777)  # but not so in /tmp
    assert not no_library()


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        (None, "no C compiler"),
        ("printf '\\377\\376 bad' >&2; exit 1", "does not compile it"),
        ("exit 0", "does not compile it"),
    ],
)
def test_without_a_compiler_that_works_everything_goes_on_without(tmp_path, monkeypatch, compiler, why):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    if compiler:
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{compiler}\n")
        (tmp_path / "cc").chmod(0o755)
    assert no_library()
    with pytest.raises(module.UnavailableError, match=why):
        compiled()


@pytest.mark.parametrize("name", ["my cache", "my:cache"])
def test_a_path_that_cannot_be_preloaded_is_told(tmp_path, monkeypatch, name):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path / name))
    assert no_library()
    with pytest.raises(module.UnavailableError, match="a blank or a colon"):
        compiled()


def test_what_was_preloaded_before_still_is():
    environment = {"LD_PRELOAD": "/other.so"}
    prepare(environment)
    assert environment["LD_PRELOAD"] == f"{compiled()}:/other.so"
