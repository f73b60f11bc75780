"""The processes of a task meet and leave."""

import errno
from pathlib import Path

import pytest

from rota.runtime.gang import Gang


@pytest.mark.parametrize("error", [None, errno.EIO, errno.EACCES])
def test_a_leader_leaves_whatever_the_disk_says_of_the_meeting_place(tmp_path, monkeypatch, error):
    """Its task is over and told by then: an error would end the worker, and be taken for one of the task."""
    store = tmp_path / "gang-1"
    store.touch()
    gang = Gang(rank=0, size=2, store=store)
    if error is not None:

        def fail(path, missing_ok=False):
            raise OSError(error, "the disk")

        monkeypatch.setattr(Path, "unlink", fail)
    gang.part()
    assert store.exists() == (error is not None)
