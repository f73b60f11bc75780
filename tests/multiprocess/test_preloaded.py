"""Libraries of the user's own that are preloaded into workers: they may not bear rota's, or end every worker."""

import subprocess
import sys

import pytest

import rota

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")

LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* In workers only, and not in the process that tries whether libraries get on. */
__attribute__((constructor)) static void begin(void) {
    char words[4096] = {0};
    int file = open("/proc/self/cmdline", O_RDONLY);
    ssize_t count = read(file, words, sizeof words - 1);
    close(file);
    for (ssize_t i = 0; i < count; i++)
        words[i] = words[i] ? words[i] : ' ';
    if (!strstr(words, "rota.runtime.worker"))
        return;
    if (BEARS_NONE || dlsym(RTLD_DEFAULT, "rota_reservoir_hold")) {
        fputs("there is no licence for this process\n", stderr);
        abort();
    }
}
"""


@pytest.fixture
def library(tmp_path):
    """Compiles it."""

    def make(bears_none):
        (tmp_path / "library.c").write_text(LIBRARY)
        path = tmp_path / "library.so"
        options = ["-shared", "-fPIC", f"-DBEARS_NONE={int(bears_none)}", "-o", str(path)]
        subprocess.run(["cc", *options, str(tmp_path / "library.c"), "-ldl"], check=True, timeout=60)
        return str(path)

    return make


def test_workers_that_die_of_the_preloaded_library_are_started_without_it(cli, sweep_file, tmp_path, library):
    preload = {"LD_PRELOAD": library(bears_none=False)}
    done = cli.run("run", sweep_file(steps=4), "--out", "run", "--no-profile", env=preload)
    assert done.returncode == 0, done.stderr
    assert "workers are started without the library that holds their memory" in done.stderr
    assert "killed by SIGABRT before it was ready (there is no licence for this process)" in done.stderr


def test_workers_that_die_at_once_are_told_with_their_last_words(cli, sweep_file, tmp_path, library):
    preload = {"LD_PRELOAD": library(bears_none=True)}
    done = cli.run("run", sweep_file(steps=4), "--out", "run", "--no-profile", env=preload)
    assert done.returncode == 1
    for task in rota.open_run(tmp_path / "run").tasks:
        assert "there is no licence for this process" in task.reason
        assert "output.log" not in task.reason  # there is none
