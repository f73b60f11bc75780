"""Progress while a run goes: lines, a table on a terminal, and one output of a notebook that has no widgets."""

from __future__ import annotations

import io
import sys
import types
import warnings
from typing import Any

import pytest
from rich.console import Console

from rota.execute.events import Launched, RunBegan
from rota.execute.record import RunRecord
from rota.report import live
from rota.report.live import profile_progress, progress_observer
from rota.runtime.messages import Beat, Began, Measured, Noticed


def running(*, step: int = 0) -> RunRecord:
    record = RunRecord()
    tasks = ({"name": "a", "steps": 10}, {"name": "b", "steps": 10})
    begin = RunBegan(name="run", source="", source_digest="", sweep_digest="", tasks=tasks, devices=())
    record.apply(begin, 0.0)
    record.apply(Launched(task="a", attempt=1, devices=("cpu:0",), strategy=""), 1.0)
    if step:
        record.apply(Began(task="a", attempt=1, from_step=0, total_steps=10, parameters=1), 2.0)
        loss = {"train/loss": 0.5}
        rows = Measured(task="a", attempt=1, number=1, rows=((step, loss),), latest=loss, step_s=0.1)
        record.apply(rows, 3.0)
    return record


class Notebook:
    """What a notebook shows: outputs in order, each of which may be replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outputs: list[dict[str, str]] = []
        module = types.ModuleType("IPython.display")
        module.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
        monkeypatch.setitem(sys.modules, "IPython.display", module)
        monkeypatch.setitem(sys.modules, "ipywidgets", None)  # not installed
        self.console = Console(force_jupyter=True, file=io.StringIO())

    def display(self, what: Any, *, raw: bool = False, display_id: bool = False) -> Any:
        place = len(self.outputs)
        self.outputs.append(what if raw else what._repr_mimebundle_([], []))

        def update(data: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.outputs[place] = data

        return types.SimpleNamespace(update=update) if display_id else None


@pytest.fixture
def notebook(monkeypatch):
    return Notebook(monkeypatch)


def test_a_notebook_without_widgets_shows_one_table_that_is_drawn_anew(notebook, monkeypatch):
    monkeypatch.setattr(live, "_DRAW_EVERY_S", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with progress_observer(notebook.console) as observe:
            observe(running(), None)
            assert "0/10" in notebook.outputs[0]["text/plain"]
            observe(running(step=4), Noticed(task="a", attempt=1, text="look [here]"))
            observe(running(step=9), None)
    table, remark = notebook.outputs
    assert "9/10" in table["text/plain"]
    assert "cpu:0" in table["text/html"]
    assert "a: look [here]" in remark["text/plain"]


def test_a_notebook_shows_what_is_found_out_before_a_run_in_one_line(notebook):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with profile_progress(notebook.console) as show:
            for done, name in enumerate("abc"):
                show(f"looking at <{name}>", done, 3)
    (line,) = notebook.outputs
    assert line["text/plain"] == "before the run: looking at <c> (2 of 3)\n"
    assert "&lt;c&gt;" in line["text/html"]


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, force_jupyter=False, width=200)


@pytest.mark.parametrize("step", [0, 4])
def test_what_takes_long_is_told_in_lines(step, monkeypatch):
    monkeypatch.setattr(live, "_LINES_EVERY_S", -1.0)
    console = plain()
    with progress_observer(console) as observe:
        observe(running(step=step), Beat(task="a", phase="the model factory", phase_s=20.0))
        observe(running(step=step), None)
    told = console.file.getvalue()
    assert f"[0/2] a: step {step}/10" in told
    assert "the model factory for 20.0 s" in told
    assert "b:" not in told


def test_what_takes_no_time_is_not_told(monkeypatch):
    monkeypatch.setattr(live, "_LINES_EVERY_S", -1.0)
    console = plain()
    with progress_observer(console) as observe:
        observe(running(), Beat(task="a", phase="the model factory", phase_s=1.0))
        observe(running(), None)
    assert console.file.getvalue() == ""


def test_the_table_says_what_takes_long():
    console = Console(file=io.StringIO(), force_terminal=True, force_jupyter=False, width=200)
    with progress_observer(console) as observe:
        observe(running(), Beat(task="a", phase="the model factory", phase_s=20.0))
    assert "running: the model factory for 20" in console.file.getvalue()
