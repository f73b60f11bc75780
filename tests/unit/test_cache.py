"""A cache that cannot be used costs measurements each time, which is said."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rota.store.cache import cache_folder, cache_trouble


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_cache_that_works_is_not_spoken_of(cache):
    assert cache_trouble() == []
    assert cache_folder() == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    assert list(cache.iterdir()) == []


def test_a_file_in_its_place_is_told_once_with_what_helps(cache):
    cache.touch()
    (told,) = cache_trouble()
    assert str(cache) in told
    assert told.endswith("see what lies in its place, or set ROTA_CACHE to another folder")


@pytest.mark.parametrize(("code", "helps"), [(errno.ENOSPC, "make room"), (errno.EROFS, "can be written")])
def test_a_cache_that_is_full_or_cannot_be_written_is_told(cache, monkeypatch, code, helps):
    def write_bytes(self, content):
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    (told,) = cache_trouble()
    assert os.strerror(code) in told
    assert helps in told
