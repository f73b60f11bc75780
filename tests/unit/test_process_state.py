"""What is put back in a process between two tasks: modules that an import left behind when it failed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from rota.runtime.process_state import preserved


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that cannot be imported while a file is there; both of its parts are imported before that shows."""
    folder = tmp_path / "halfway"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "from halfway.inner import deep\n"
        "import halfway_whole\n"
        "from pathlib import Path\n"
        "if (Path(__file__).parent / 'fails').exists():\n"
        "    raise MemoryError\n"
    )
    (folder / "inner" / "__init__.py").write_text("")
    (folder / "inner" / "deep.py").write_text("RUNS = []\n")
    (tmp_path / "halfway_whole.py").write_text("")
    (folder / "fails").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("halfway")]:
        del sys.modules[name]


def test_the_next_task_finds_nothing_of_a_package_whose_import_failed(package):
    with preserved(), pytest.raises(MemoryError):
        importlib.import_module("halfway")
    assert [name for name in sys.modules if name.startswith("halfway")] == ["halfway_whole"]
    (package / "fails").unlink()
    with preserved():
        whole = importlib.import_module("halfway")
    assert whole.inner.deep.RUNS == []
    assert sys.modules["halfway.inner.deep"] is whole.inner.deep  # what was imported whole stays


def test_within_a_task_an_import_that_failed_leaves_what_it_leaves_in_any_process(package):
    with preserved():
        with pytest.raises(MemoryError):
            importlib.import_module("halfway")
        assert "halfway.inner.deep" in sys.modules
