from __future__ import annotations

import html.parser
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rota.execute.events import Event, Launched, Lost, RunBegan, RunEnded, RunResumed, Stopped
from rota.execute.record import RunRecord
from rota.report import svg
from rota.report.format import duration
from rota.report.html import render, write_report
from rota.report.ranking import is_ranked, rank, ranking_metric
from rota.runtime.messages import Began, Failed, Finished, Measured, Noticed
from rota.store.journal import Journal
from rota.store.run_folder import RunFolder

BEGIN_S = 1.7e9
NASTY = "<script>alert('x')</script>&\"\\"


def began(names: Sequence[str], *, devices: int = 2, settings: dict[str, Any] | None = None) -> RunBegan:
    return RunBegan(
        name="a run",
        source="sweep.py",
        source_digest="",
        sweep_digest="",
        tasks=tuple({"name": name, "settings": settings or {"lr": i}, "steps": 100} for i, name in enumerate(names)),
        devices=tuple({"index": i, "kind": "cpu"} for i in range(devices)),
    )


def finished(task: str, **metrics: float) -> list[Event]:
    named = {key.replace("_", "/"): value for key, value in metrics.items()}
    return [
        Launched(task=task, attempt=1, devices=("cpu:0",)),
        Began(task=task, attempt=1, from_step=0, total_steps=100, parameters=1234),
        Finished(task=task, attempt=1, step=100, metrics=named),
    ]


def replayed(events: Sequence[Event]) -> RunRecord:
    """A record with ten seconds between events."""
    return RunRecord.replay((BEGIN_S + 10 * i, event) for i, event in enumerate(events))


def history(steps: int, *, valid: bool = True) -> list[dict[str, float]]:
    rows = [{"step": float(step), "train/loss": 2 + 1 / step} for step in range(1, steps + 1)]
    for row in rows[9::10] if valid else []:
        row["valid/loss"] = row["train/loss"] + 0.1
    return rows


def mixed_run() -> RunRecord:
    """A task in every state."""
    names = ["done", "lost", "failed", "diverged", "stopped", "running", "waiting"]
    return replayed(
        [
            began(names),
            *finished("done", train_loss=2.0, valid_loss=2.1, best_loss=2.05, best_step=90.0),
            Launched(task="lost", attempt=1, devices=("cpu:1",)),
            Lost(task="lost", attempt=1, device="cpu:1", reason="killed by signal 9", retried=True),
            Launched(task="lost", attempt=2, devices=("cpu:1",)),
            Finished(task="lost", attempt=2, step=100, metrics={"valid/loss": 3.0, "train/loss": 1.0}),
            Launched(task="failed", attempt=1, devices=("cpu:0",)),
            Failed(task="failed", attempt=1, step=3, reason="ValueError: no", traceback="line 1\n  line 2"),
            Launched(task="diverged", attempt=1, devices=("cpu:0",)),
            Failed(task="diverged", attempt=1, step=9, reason="the training loss became inf", diverged=True),
            Launched(task="stopped", attempt=1, devices=("cpu:0",)),
            Stopped(task="stopped", attempt=1, step=8),
            Launched(task="running", attempt=1, devices=("cpu:0",)),
            Noticed(task="running", attempt=1, text="something to know"),
        ]
    )


class Outline(html.parser.HTMLParser):
    """Which tags and attributes a page has, and whether every element is closed."""

    VOID = frozenset({"meta", "line", "path", "use", "rect", "circle", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attributes]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attributes]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


# ---- ranking ----


def test_finished_tasks_come_first_by_metric_and_then_the_others_by_state() -> None:
    names = [task.name for task in rank(mixed_run())]
    assert names == ["done", "lost", "running", "waiting", "stopped", "diverged", "failed"]


def test_nan_and_missing_metrics_come_last_among_the_finished() -> None:
    record = replayed(
        [
            began(["nan", "none", "inf", "high", "low", "waiting"]),
            *finished("nan", valid_loss=math.nan),
            *finished("none"),
            *finished("inf", valid_loss=math.inf),
            *finished("high", valid_loss=2.0),
            *finished("low", valid_loss=1.0),
        ]
    )
    assert [task.name for task in rank(record)] == ["low", "high", "inf", "nan", "none", "waiting"]
    assert [task.name for task in rank(record) if is_ranked(task, "valid/loss")] == ["low", "high", "inf"]


def test_metric_is_the_training_loss_where_nothing_was_validated() -> None:
    assert ranking_metric(mixed_run()) == "valid/loss"
    record = replayed([began(["a", "b"]), *finished("a", train_loss=2.0), *finished("b", train_loss=1.0)])
    assert ranking_metric(record) == "train/loss"
    assert [task.name for task in rank(record)] == ["b", "a"]


def test_rank_takes_another_metric_and_keeps_the_sweeps_order_among_equals() -> None:
    assert [task.name for task in rank(mixed_run(), "train/loss")][:2] == ["lost", "done"]
    record = replayed([began(["b", "a"]), *finished("a", valid_loss=1.0), *finished("b", valid_loss=1.0)])
    assert [task.name for task in rank(record)] == ["b", "a"]


# ---- charts ----


@pytest.mark.parametrize("count", [301, 1000, 12345])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.71])
def test_downsampling_keeps_the_ends_the_order_and_the_peak(count: int, share: float) -> None:
    peak = int(count * share)
    points = [(float(i), 9.0 if i == peak else math.sin(i / 50)) for i in range(count)]
    kept = svg.downsample(points, 300)
    assert len(kept) == 300
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert kept == sorted(set(kept) & set(points))
    assert points[peak] in kept


def test_short_curves_are_not_downsampled() -> None:
    points = [(float(i), float(i)) for i in range(300)]
    assert svg.downsample(points, 300) == points
    assert svg.downsample([]) == []


def test_trend_is_the_mean_and_has_the_steps_of_the_curve() -> None:
    points = [(float(i), 1.0 + (-1) ** i) for i in range(6001)]
    means = svg.trend(points)
    assert (means[0], means[-1][0]) == (points[0], points[-1][0])
    assert len(means) == 300
    assert all(abs(y - 1) < 0.03 for x, y in means if x > 100)
    assert svg.trend(points[:50]) == []


@given(low=st.floats(-1e12, 1e12), width=st.floats(1e-6, 1e12))
def test_ticks_are_round_and_inside(low: float, width: float) -> None:
    high = low + max(width, 1e-9 * abs(low))
    values = svg.ticks(low, high)
    step = values[1] - values[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(mantissa - factor) for factor in (1, 2, 5)) < 1e-2
    assert 2 <= len(values) <= 10
    assert all(low - 1e-6 * step <= value <= high + 1e-6 * step for value in values)
    assert all(abs(value / step - round(value / step)) < 1e-2 for value in values if abs(value) < 1e6 * step)


def test_ticks_are_what_a_person_would_write() -> None:
    assert svg.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert svg.ticks(2.31, 3.12) == [2.4, 2.6, 2.8, 3.0]
    assert svg.ticks(0, 3, whole=True) == [0, 1, 2, 3]
    assert [svg.tick_label(value, 0.2) for value in (0.0, 0.6)] == ["0.0", "0.6"]
    assert [svg.tick_label(value, 500) for value in (1500.0, 2_500_000.0)] == ["1,500", "2.5M"]


@pytest.mark.parametrize(
    ("total_s", "last"),
    [(0.5, "0.5 s"), (20, "20 s"), (100, "90 s"), (600, "10 min"), (5400, "90 min"), (36000, "10 h"), (9e5, "10 d")],
)
def test_times_on_the_axis_are_round(total_s: float, last: str) -> None:
    labels = svg.time_ticks(total_s)
    assert 3 <= len(labels) <= 11
    assert labels[0][0] == 0
    assert labels[-1][1] == last


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (59.96, "1 min 00 s"), (200, "3 min 20 s"), (3599.7, "1 h 00 min"), (2e5, "2 d 8 h")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats()), max_size=8))
@example([(0, 0.0), (0, 4e105), (0, 1e-200)])
def test_any_curve_can_be_drawn(points: list[tuple[float, float]]) -> None:
    line = svg.Line(style=0, points=svg.finite(points), title=NASTY)
    chart = svg.line_chart([line], label=NASTY, x_label="step", name="n")
    Outline(chart)
    assert "nan" not in chart
    assert "inf" not in chart


def test_a_spike_does_not_flatten_the_other_curves() -> None:
    calm = svg.Line(style=0, points=[(float(i), 2 + math.sin(i)) for i in range(100)], title="calm")
    wild = svg.Line(style=1, points=[(0.0, 2.0), (50.0, 5e6), (99.0, 2.0)], title="wild")
    chart = svg.line_chart([calm, wild], label="", x_label="step", name="n")
    assert "Values up to 5e+06 are above the axis" in chart
    assert "above the axis" not in svg.line_chart([calm], label="", x_label="step", name="n")


def test_styles_differ_for_thirty_tasks() -> None:
    assert len({svg.style_classes(i).rpartition(" ")[0] for i in range(32)}) == 32


def test_a_night_without_work_is_left_out_of_the_timeline() -> None:
    def bar(begin_s: float, end_s: float) -> svg.Bar:
        return svg.Bar(row=0, begin_s=begin_s, end_s=end_s, style=0, label="", title="")

    clock = svg.Clock([bar(0, 100), bar(101, 200), bar(40_000, 40_200)], begin_s=0, end_s=40_200)
    assert clock.shown_s == 400
    assert clock.pauses == [(0.5, 39_800)]
    assert [clock.place(time_s) for time_s in (0, 100, 20_000, 40_100, 40_200)] == [0, 0.25, 0.5, 0.75, 1]


# ---- the page ----


def tasks_of(count: int, *, valid: bool = True) -> tuple[RunRecord, dict[str, list[dict[str, float]]]]:
    names = [f"task-{i}" for i in range(count)]
    events: list[Event] = [began(names)]
    for i, name in enumerate(names):
        events += finished(name, train_loss=1.0 + i, **({"valid_loss": 2.0 + i} if valid else {}))
    return replayed([*events, RunEnded(state="finished")]), {name: history(500, valid=valid) for name in names}


def odd_runs() -> dict[str, tuple[RunRecord, dict[str, list[dict[str, float]]]]]:
    waiting = replayed([began(["a", "b"])])
    mixed = mixed_run()
    virtual = RunRecord.replay([(0.0, began(["a"])), (1.0, Launched(task="a", attempt=1, devices=("cpu:0",)))])
    resumed = replayed(
        [
            began(["a"]),
            Launched(task="a", attempt=1, devices=("cpu:0",)),
            RunEnded(state="interrupted"),
            RunResumed(devices=({"index": 7, "kind": "cuda", "name": "cuda:7"},)),
            Launched(task="a", attempt=2, devices=("cuda:7",)),
        ]
    )
    broken = [{"step": 1.0, "train/loss": math.nan}, {"step": 2.0, "train/loss": math.inf}]
    return {
        "one task": tasks_of(1),
        "thirty tasks": tasks_of(30),
        "no validation": tasks_of(3, valid=False),
        "every state": (mixed, {name: history(40) for name in mixed.tasks}),
        "still going": (mixed, {}),
        "nothing launched": (waiting, {}),
        "empty histories": (waiting, {"a": [], "b": []}),
        "no finite loss": (waiting, {"a": broken}),
        "one step": (tasks_of(1)[0], {"task-0": [{"step": 1.0, "train/loss": 2.0, "valid/loss": 2.0}]}),
        "a constant loss": (tasks_of(1)[0], {"task-0": [{"step": float(i), "train/loss": 0.0} for i in range(9)]}),
        "virtual time": (virtual, {}),
        "resumed elsewhere": (resumed, {}),
        "no events": (RunRecord(), {}),
    }


@pytest.mark.parametrize("kind", odd_runs())
def test_every_odd_run_has_a_sound_page(kind: str) -> None:
    record, histories = odd_runs()[kind]
    page = render(record, histories)
    outline = Outline(page)
    assert outline.tags.count("h1") == 1
    assert "script" not in outline.tags
    assert "http://" not in page
    assert "https://" not in page
    assert not [name for name, _ in outline.attributes if name in ("src", "onclick", "onerror", "srcset")]
    assert all(value.startswith(("#", "tasks/")) for name, value in outline.attributes if name == "href")
    identifiers = [value for name, value in outline.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    assert page == render(record, histories)


def test_page_names_the_run_its_state_date_time_and_devices() -> None:
    page = render(*tasks_of(2))
    assert "<title>a run – finished</title>" in page
    assert '<time datetime="2023-11-14T22:13:20Z">2023-11-14 22:13</time>' in page
    assert "<dd>1 min 10 s</dd>" in page
    assert "<dd>2 × cpu</dd>" in page
    assert 'name="viewport"' in page


def test_table_marks_the_best_and_leaves_the_unfinished_without_a_rank() -> None:
    page = render(mixed_run(), {})
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    rows = re.findall(r"<tr.*?</tr>", body)
    assert rows[0].startswith('<tr class="best"><td class="rank">1</td>')
    assert rows[1].startswith('<tr><td class="rank">2</td>')
    assert all('class="unranked"><td class="rank">–</td>' in row for row in rows[2:])
    assert "2.1000" in rows[0]
    assert "2.0500 <small>(90)</small>" in rows[0]
    assert body.count('class="best"') == 1


def test_settings_that_all_tasks_share_are_no_columns() -> None:
    page = render(replayed([began(["a", "b"], settings={"width": 64})]), {})
    assert "The same for all: width = 64." in page
    assert '<th scope="col" class="n">width</th>' not in page
    assert '<th scope="col" class="n">lr</th>' in render(replayed([began(["a", "b"])]), {})


def test_a_task_tells_how_it_ended_and_where_its_model_is() -> None:
    page = render(mixed_run(), {})
    assert 'href="tasks/done/model.safetensors"' in page
    assert 'href="tasks/failed/model.safetensors"' not in page
    assert "ValueError: no" in page
    assert "line 1\n  line 2</pre>" in page
    assert "killed by signal 9; going on from step 0" in page
    assert "something to know" in page


def test_timeline_marks_what_went_wrong_and_what_goes_on() -> None:
    page = render(mixed_run(), {})
    for kind, count in (("failed", 2), ("lost", 1), ("paused", 1), ("open", 1)):
        assert len(re.findall(rf'<g class="bar [^"]* {kind}">', page)) == count
    assert "lost on cpu:1\n40.0 s to 50.0 s (10.0 s)\nlost</title>" in page
    assert "lost on cpu:1, attempt 2\n" in page
    assert "still running</title>" in page


def test_everything_the_user_gave_is_escaped() -> None:
    record = replayed(
        [
            RunBegan(
                name=NASTY,
                source=NASTY,
                source_digest="",
                sweep_digest="",
                tasks=tuple(
                    {"name": f"{i}{NASTY}", "settings": {NASTY: [NASTY, i], "all": NASTY}, NASTY: NASTY} for i in "ab"
                ),
                devices=({"name": NASTY, "label": NASTY},),
            ),
            Launched(task=f"a{NASTY}", attempt=1, devices=(NASTY,)),
            Noticed(task=f"a{NASTY}", attempt=1, text=NASTY),
            Finished(task=f"a{NASTY}", attempt=1, step=1, metrics={f"valid/{NASTY}": 1.0, "valid/loss": 1.0}),
            Launched(task=f"b{NASTY}", attempt=1, devices=(NASTY,)),
            Failed(task=f"b{NASTY}", attempt=1, step=1, reason=NASTY, traceback=f"{NASTY}\x00\x1b[31m\udc80"),
        ]
    )
    page = render(record, {f"a{NASTY}": history(20)})
    outline = Outline(page)
    assert "script" not in outline.tags
    assert "<script" not in page
    assert "\x00" not in page
    assert "\x1b" not in page
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert "&lt;script&gt;" in page


def test_no_line_has_more_points_than_can_be_seen() -> None:
    record, _ = tasks_of(1)
    page = render(record, {"task-0": history(20_000)})
    paths = re.findall(r'd="M([^"]*,[^"]*)"', page)
    assert len(paths) == 3
    assert all(len(path.split()) <= 300 for path in paths)
    assert len(page) < 60_000


def test_report_is_written_from_the_journal(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.prepare()
    rows = tuple((step, {"train/loss": 1 / step}) for step in range(1, 6))
    events: list[Event] = [
        began(["a"]),
        Launched(task="a", attempt=1, devices=("cpu:0",)),
        Measured(task="a", attempt=1, number=1, rows=rows, latest={"train/loss": 0.2}, step_s=1.0),
        Failed(task="a", attempt=1, step=5, reason="no", traceback="\udc80"),
    ]
    journal = Journal(folder.journal, durable=False)
    for i, event in enumerate(events):
        journal.append(event, time_s=BEGIN_S + i)
    journal.commit()
    journal.close()
    path = write_report(folder)
    assert path == folder.report
    page = path.read_text(encoding="utf-8")
    assert "a: 0.2000 at step 5" in page
    assert [entry.name for entry in folder.path.glob("*report*")] == ["report.html"]
    assert not list(folder.path.glob(".*"))


def test_report_does_not_need_torch() -> None:
    code = "import sys, rota.report.html; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
