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


@pytest.mark.parametrize("size_bytes", [0, 100, 9000])
def test_a_library_that_is_damaged_is_made_anew(tmp_path, monkeypatch, size_bytes):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    library = compiled()
    good = library.read_bytes()
    monkeypatch.setattr(module, "_made_here", set())  # as in a process that finds it there
    os.truncate(library, size_bytes)
    assert module.preloaded({}) == str(library)
    assert library.read_bytes() == good


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


# ---- beside other libraries that are preloaded ----

_OTHER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <malloc.h>

/* What is not found leaves a text behind, which the next call of dlsym frees. */
static void look(void) {
    dlsym(RTLD_NEXT, "there_is_no_such_function");
    dlsym(RTLD_NEXT, "nor_such_a_one");
    dlsym(RTLD_NEXT, "free");
}

#ifdef EARLY
__attribute__((constructor)) static void early(void) { look(); }
#endif

#ifdef WRAPS
static bool looking;
static void (*next_free)(void *);
static void *(*next_malloc)(size_t);
static void find(void) {
    if (next_malloc || looking)
        return;
    looking = true;
    look();
    next_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    next_malloc = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    looking = false;
}
static char first[1 << 16];
static size_t used;
static bool is_first(void *memory) { return (char *)memory >= first && (char *)memory < first + sizeof first; }
void *malloc(size_t size) {
    find();
    if (next_malloc)
        return next_malloc(size);
    used += (size + 31) / 16 * 16;
    return used < sizeof first ? first + used - (size + 31) / 16 * 16 : NULL;
}
void free(void *memory) {
    find();
    if (next_free && memory && !is_first(memory))
        next_free(memory);
}
#endif

#ifdef ALIGNS
void *malloc(size_t size) {
    void *found = NULL;
    return posix_memalign(&found, 64, size) == 0 ? found : NULL;
}
void *calloc(size_t count, size_t size) {
    void *found = malloc(count * size);
    return found ? memset(found, 0, count * size) : NULL;
}
__attribute__((constructor)) static void early(void) { look(); }
#endif

#ifdef THREADS
static void *work(void *nothing) {
    look();
    for (int turn = 0; turn < 2000; turn++) {
        void *aligned = NULL;
        if (posix_memalign(&aligned, 64, 4096) != 0)
            abort();
        char *plain = realloc(malloc(100), 300);
        memset(aligned, 1, malloc_usable_size(aligned));
        memset(plain, 1, 300);
        free(aligned), free(plain);
    }
    return nothing;
}
__attribute__((constructor)) static void early(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}
#endif

#ifdef HIDES
/* Finds for others what follows itself, and not what follows them. */
void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real)
        real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", HIDES);
    return real(handle, name);
}
#endif

#ifdef SERVES
int posix_memalign(void **found, size_t alignment, size_t size) {
    *found = memalign(alignment, size);
    return 0;
}
#endif

#ifdef DIES
__attribute__((constructor)) static void early(void) {
    if (dlsym(RTLD_DEFAULT, "rota_reservoir_hold"))
        abort();
}
#endif
"""

_USES = """
import ctypes
from rota.runtime.reservoir import reservoir

MIB = 2**20
held = reservoir()
assert held.hold(24 * MIB)
libc = ctypes.CDLL(None)
libc.realloc.restype = libc.malloc.restype = ctypes.c_void_p
for size in (1000, 3 * MIB):
    place = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(place), ctypes.c_size_t(64), ctypes.c_size_t(size)) == 0
    assert held.has(place.value) == (size > MIB)
    ctypes.memset(place, 7, size)
    moved = libc.realloc(place, ctypes.c_size_t(2 * size))
    assert ctypes.string_at(moved, size) == bytes([7]) * size
    libc.free(ctypes.c_void_p(moved))
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size))))
assert held.counts_bytes[1] == 0
print("all was served")
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Compiles a library that does one thing of `_OTHER`."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "other.c").write_text(_OTHER)

    def make(what):
        path = folder / f"{what}.so"
        if not path.exists():
            # The version that dlsym has with this glibc is for the library that stands before it.
            version = '="GLIBC_2.34"' if what == "HIDES" else ""
            options = ["-shared", "-fPIC", "-fno-builtin", f"-D{what}{version}", "-o", str(path)]
            subprocess.run(["cc", *options, str(folder / "other.c"), "-ldl", "-lpthread"], check=True, timeout=60)
        return str(path)

    return make


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("what", ["EARLY", "WRAPS", "ALIGNS", "THREADS", "HIDES"])
def test_another_preloaded_library_may_allocate_and_look_for_functions_at_any_time(other, what, order):
    libraries = [str(compiled()), other(what)]
    done = subprocess.run(
        [sys.executable, "-c", _USES],
        env={**os.environ, "LD_PRELOAD": ":".join(libraries if order == "after" else libraries[::-1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "all was served\n"), done.stderr


def test_a_library_that_breaks_processes_here_is_left_out_and_told(other, monkeypatch):
    assert not no_library()
    monkeypatch.setenv("LD_PRELOAD", other("DIES"))
    environment = dict(os.environ)
    prepare(environment)
    assert environment["LD_PRELOAD"] == other("DIES")
    with pytest.raises(module.UnavailableError, match=r"killed by SIGABRT beside .*DIES\.so; start rota without"):
        module.preloaded(os.environ)


def test_it_is_left_out_where_another_allocator_stands_before_it(other, monkeypatch):
    """As where Python itself is linked with one. It would be told to hold memory, and never be asked for any."""
    both = f"{other('SERVES')}:{compiled()}"
    monkeypatch.setattr(module, "compiled", lambda: both)
    monkeypatch.setattr(module, "_stamp", lambda library: (0, 0, 0))
    monkeypatch.setattr(module, "_made_here", {both})
    assert no_library()
    with pytest.raises(module.UnavailableError, match="another allocator stands before it"):
        module.preloaded({})
