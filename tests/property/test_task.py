"""Whatever text is tried as a task's name: what is accepted names one folder inside the run."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from rota.errors import InputError
from rota.store.run_folder import RunFolder

NAMES = st.one_of(
    st.text(max_size=140),
    st.text(alphabet="ab./\\-~\0\n", max_size=8),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._=,+@-]{0,127}", fullmatch=True),
)


@given(name=NAMES)
@example(name="..")
@example(name="a/../../b")
@example(name="a" * 128)
def test_an_accepted_name_is_one_folder_below_the_tasks_of_the_run(name, make_task):
    with contextlib.suppress(InputError):
        task = make_task(name)
        with tempfile.TemporaryDirectory() as root:
            folder = RunFolder(Path(root)).task(task.name)
            folder.mkdir(parents=True)
            assert folder.resolve().parent == (Path(root) / "tasks").resolve()
            assert [path.name for path in (Path(root) / "tasks").iterdir()] == [name]


@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._=,+@-]{0,127}", fullmatch=True))
def test_every_name_that_follows_the_rule_is_accepted(name, make_task):
    assert make_task(name).name == name
