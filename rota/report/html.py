"""The report of a run as one HTML page: ranking, curves, timeline and the end of each task."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rota.execute.record import Balance, RunRecord, Span, TaskRecord
from rota.execute.states import RunState, TaskState
from rota.report import markup, svg
from rota.report.format import duration, shorten
from rota.report.format import metric as format_metric
from rota.report.ranking import TRAIN_LOSS, VALID_LOSS, is_ranked, rank, ranking_metric
from rota.state.files import replacing
from rota.store.journal import read_metrics
from rota.store.run_folder import MODEL_FILE, OUTPUT_FILE, RunFolder

History = list[dict[str, float]]
"""A task's metrics: a dict per step with "step" and each metric."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """As much of a metric's history as is drawn."""

    points: list[svg.Point]
    trend: list[svg.Point]


Curves = dict[str, Curve]
"""metric -> curve"""

_METRIC_NAMES = {VALID_LOSS: "Validation loss", TRAIN_LOSS: "Training loss"}
_BEST_LOSS, _BEST_STEP = "best/loss", "best/step"
_MAX_SETTINGS_COLUMNS = 8
_MAX_EXTRA_METRICS = 3
_ENDS: dict[str, svg.End] = {
    "failed": "failed",
    "diverged": "failed",
    "lost": "lost",
    "stopped": "paused",
    "switched": "paused",
    "interrupted": "paused",
}
_BADGE_MEANINGS: dict[svg.End, str] = {
    "failed": "failed or diverged",
    "lost": "worker lost",
    "paused": "stopped, interrupted or switched",
    "open": "still running",
}


def write_report(folder: RunFolder) -> Path:
    """Make the report of a run from its journal, in the run's folder."""
    record = RunRecord.as_it_stands(folder)
    # One at a time: the histories of all tasks together may be larger than memory.
    page = _page(record, {name: _curves(read_metrics(folder.journal, name)) for name in record.tasks})
    with replacing(folder.report) as side:
        # What a task printed into its error may not be valid Unicode.
        side.write_text(page, encoding="utf-8", errors="replace")
    return folder.report


def render(record: RunRecord, histories: Mapping[str, History]) -> str:
    """The page of a run. `histories` has the metrics of each task by its name."""
    return _page(record, {name: _curves(history) for name, history in histories.items()})


def _page(record: RunRecord, curves: Mapping[str, Curves]) -> str:
    title = f"{record.name or 'run'} – {record.state.value}"
    ranked = rank(record)
    sections = [
        _ranking_section(record, ranked),
        _curves_section(record, ranked, curves),
        _timeline_section(record),
        _tasks_section(record, ranked),
        _notices_section(record),
    ]
    body = f"{_header(record, ranked)}\n<main>\n{''.join(sections)}</main>\n{_footer(record)}"
    return document(title, body, styles=len(record.tasks))


def document(title: str, body: str, *, styles: int) -> str:
    """A whole page; `styles` is how many tasks have a look of their own."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # The page may quote anything; whatever slips through still neither runs nor loads.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{markup.text(title)}</title>\n<style>\n{_stylesheet()}{_highlights(styles)}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


# ---- the head of the page ----


def _header(record: RunRecord, ranked: Sequence[TaskRecord]) -> str:
    facts = [
        ("Started", markup.moment(record.begin_s)),
        ("Total time", _total_time(record)),
        ("Devices", markup.text(_device_summary(record))),
        ("Tasks", markup.text(_task_summary(record))),
    ]
    return (
        f'<header>\n<p class="eyebrow">rota run report</p>\n'
        f"<h1>{markup.text(record.name or 'run')} {markup.chip(record.state.value)}</h1>\n"
        f"{markup.definitions(facts, kind='facts')}\n{_lead(record, ranked)}</header>"
    )


def _lead(record: RunRecord, ranked: Sequence[TaskRecord]) -> str:
    """The sentence that most readers came for."""
    metric = ranking_metric(record)
    if not ranked or not is_ranked(ranked[0], metric):
        return ""
    best = ranked[0]
    so_far = " so far" if record.state is RunState.RUNNING else ""
    return (
        f'<p class="lead">Best{so_far}: <a href="#{_anchor(best)}"><strong>{markup.text(best.name)}</strong></a> '
        f"with a {_METRIC_NAMES[metric].lower()} of <strong>{format_metric(best.metrics[metric])}</strong> after "
        f"{best.step:,} steps. {_model_link(best)}</p>\n"
    )


def _total_time(record: RunRecord) -> str:
    bars = _bars(record)
    clock = svg.Clock(bars, begin_s=record.begin_s, end_s=record.last_s)
    passed = duration(record.elapsed_s)
    if clock.pauses:
        passed += f" <small>({duration(clock.shown_s)} without pauses)</small>"
    return passed


def _device_summary(record: RunRecord) -> str:
    count = len(record.devices)
    kinds = sorted({str(device.get("label") or device.get("kind") or "") for device in record.devices} - {""})
    return f"{count} × {', '.join(kinds)}" if kinds else f"{count}"


def _task_summary(record: RunRecord) -> str:
    counts = record.counts()
    parts = [f"{counts[state.value]} {state.value}" for state in TaskState if state.value in counts]
    return ", ".join(sorted(parts, key=lambda part: not part.endswith("finished"))) or "none"


def _footer(record: RunRecord) -> str:
    source = f" from <code>{markup.text(record.source)}</code>" if record.source else ""
    return f"<footer>Made by rota{source}; the run as of {markup.moment(record.last_s)}. Times are in UTC.</footer>"


# ---- the ranking ----


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the ranking."""

    head: str
    cell: Callable[[TaskRecord], str]
    """A task's cell, as HTML."""
    numeric: bool = True


def _ranking_section(record: RunRecord, ranked: Sequence[TaskRecord]) -> str:
    metric = ranking_metric(record)
    settings, common = _settings(ranked)
    columns = [*(_setting_column(key, ranked) for key in settings), *_result_columns(record, ranked)]
    head = "".join(
        f'<th scope="col"{markup.class_attribute("n" * column.numeric)}>{markup.text(column.head)}</th>'
        for column in columns
    )
    rows = [_row(task, columns, place if is_ranked(task, metric) else None) for place, task in enumerate(ranked, 1)]
    caption = f"By {_METRIC_NAMES[metric].lower()}, lowest first."
    if common:
        caption += f" The same for all: {', '.join(f'{key} = {shorten(value)}' for key, value in common.items())}."
    return (
        f'<section>\n<h2>Ranking</h2>\n<p class="note">{markup.text(caption)}</p>\n'
        '<div class="scroll" tabindex="0" role="region" aria-label="Ranking of the tasks">\n<table>\n'
        f'<thead><tr><th scope="col" class="rank">#</th><th scope="col">Task</th>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n</table>\n</div>\n</section>\n"
    )


def _row(task: TaskRecord, columns: Sequence[Column], place: int | None) -> str:
    kind = "unranked" if place is None else "best" if place == 1 else ""
    name = f'{svg.swatch(task.index)}<a href="#{_anchor(task)}">{markup.text(task.name)}</a>'
    cells = "".join(f"<td{markup.class_attribute('n' * column.numeric)}>{column.cell(task)}</td>" for column in columns)
    head = f'<td class="rank">{place or "–"}</td><th scope="row">{name}</th>'
    return f"<tr{markup.class_attribute(kind)}>{head}{cells}</tr>\n"


def _result_columns(record: RunRecord, tasks: Sequence[TaskRecord]) -> list[Column]:
    known = {name for task in tasks for name in task.metrics}
    columns = [_metric_column("Valid. loss", VALID_LOSS)] if VALID_LOSS in known else []
    if _BEST_LOSS in known:
        columns.append(Column(head="Best (step)", cell=_best))
    # What the user measures in validation beside the loss.
    extras = sorted(name for name in known if name.startswith("valid/") and name != VALID_LOSS)
    columns += [_metric_column(name.removeprefix("valid/"), name) for name in extras[:_MAX_EXTRA_METRICS]]
    return [
        *columns,
        _metric_column("Train. loss", TRAIN_LOSS),
        Column(head="Steps", cell=_steps),
        Column(head="Parameters", cell=_parameters),
        Column(head="Time", cell=lambda task: _busy(task, record)),
        Column(head="State", cell=lambda task: markup.chip(task.state.value), numeric=False),
    ]


def _metric_column(head: str, metric: str) -> Column:
    return Column(head=head, cell=lambda task: format_metric(task.metrics[metric]) if metric in task.metrics else "")


def _setting_column(key: str, tasks: Sequence[TaskRecord]) -> Column:
    def cell(task: TaskRecord) -> str:
        text = markup.setting(task.settings[key]) if key in task.settings else ""
        short = shorten(text)
        return markup.text(text) if short == text else f'<span title="{markup.text(text)}">{markup.text(short)}</span>'

    values = [task.settings[key] for task in tasks if key in task.settings]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return Column(head=key, cell=cell, numeric=numeric)


def _settings(tasks: Sequence[TaskRecord]) -> tuple[list[str], dict[str, str]]:
    """The settings that tell tasks apart, and those that all have in common with their value."""
    keys = dict.fromkeys(key for task in sorted(tasks, key=lambda task: task.index) for key in task.settings)
    common = {}
    for key in keys:
        values = {markup.setting(task.settings[key]) if key in task.settings else None for task in tasks}
        value = values.pop()
        if not values and value is not None and len(tasks) > 1:
            common[key] = value
    return [key for key in keys if key not in common][:_MAX_SETTINGS_COLUMNS], common


def _best(task: TaskRecord) -> str:
    if _BEST_LOSS not in task.metrics:
        return ""
    step = task.metrics.get(_BEST_STEP)
    at = "" if step is None else f" <small>({step:,.0f})</small>"
    return f"{format_metric(task.metrics[_BEST_LOSS])}{at}"


def _parameters(task: TaskRecord) -> str:
    if task.parameters is None:
        return ""
    return f'<span title="{task.parameters:,}">{markup.count(task.parameters)}</span>'


# ---- the curves ----


def _curves(history: History) -> Curves:
    """The curves of a task. Training losses are noisy, validation losses are means already."""
    curves = {}
    for metric in (VALID_LOSS, TRAIN_LOSS):
        points = svg.finite([(row["step"], row[metric]) for row in history if metric in row])
        trend = svg.trend(points) if metric == TRAIN_LOSS else []
        curves[metric] = Curve(points=svg.downsample(points), trend=trend)
    return curves


def _curves_section(record: RunRecord, ranked: Sequence[TaskRecord], curves: Mapping[str, Curves]) -> str:
    best = ranked[0] if ranked and is_ranked(ranked[0], ranking_metric(record)) else None
    figures = []
    for metric in (VALID_LOSS, TRAIN_LOSS):
        known = [(task, curves[task.name][metric]) for task in ranked if task.name in curves]
        lines = [_line(task, curve, strong=task is best) for task, curve in known if curve.points]
        if lines:
            figures.append(_figure(metric, lines))
    body = f'<div class="charts">\n{"".join(figures)}</div>\n{_key(record, ranked)}'
    if not figures:
        body = '<p class="empty">No loss was reported yet.</p>\n'
    return f"<section>\n<h2>Loss</h2>\n{body}</section>\n"


def _figure(metric: str, lines: Sequence[svg.Line]) -> str:
    name = _METRIC_NAMES[metric]
    chart = svg.line_chart(
        lines, label=f"{name} of {len(lines)} tasks by step", x_label="step", name=metric.replace("/", "-")
    )
    smoothed = " <small>running mean</small>" if any(line.trend for line in lines) else ""
    return f"<figure>\n<figcaption>{name}{smoothed}</figcaption>\n{chart}\n</figure>\n"


def _line(task: TaskRecord, curve: Curve, *, strong: bool) -> svg.Line:
    step, value = curve.points[-1]
    return svg.Line(
        style=task.index,
        points=curve.points,
        trend=curve.trend,
        title=f"{task.name}: {format_metric(value)} at step {step:,.0f}",
        broken=task.state in (TaskState.FAILED, TaskState.DIVERGED),
        strong=strong,
    )


def _key(record: RunRecord, ranked: Sequence[TaskRecord]) -> str:
    metric = ranking_metric(record)
    entries = []
    for task in ranked:
        value = task.metrics.get(metric)
        shown = "" if value is None else f'<span class="n">{format_metric(value)}</span>'
        look = svg.style_classes(task.index)
        entries.append(
            f'<li><a class="key {look}" href="#{_anchor(task)}">{svg.swatch(task.index)}'
            f'<span class="name">{markup.text(task.name)}</span>{shown}</a></li>\n'
        )
    return f'<ul class="keys" aria-label="Key: the tasks and their lines">\n{"".join(entries)}</ul>\n'


def _highlights(count: int) -> str:
    """What the pointer or the keyboard is on stands out, and the other tasks step back."""
    chosen = "main:has(.t{}:is(.key,.line,.bar):is(:hover,:focus-visible))"
    return "".join(
        f"{chosen.format(i)} :is(.line,.noise,.mark,.bar,.bar-end):not(.t{i}){{opacity:.13}}\n" for i in range(count)
    )


# ---- the timeline ----


def _timeline_section(record: RunRecord) -> str:
    bars = _bars(record)
    if not bars:
        return '<section>\n<h2>Devices over time</h2>\n<p class="empty">No task was started yet.</p>\n</section>\n'
    rows = _rows(record)
    chart = svg.timeline(
        bars,
        rows=rows,
        begin_s=record.begin_s,
        end_s=record.last_s,
        label=f"Which of {len(rows)} devices ran which task when",
    )
    clock = svg.Clock(bars, begin_s=record.begin_s, end_s=record.last_s)
    share = sum(bar.end_s - bar.begin_s for bar in bars) / (len(rows) * clock.shown_s)
    note = f"The devices were busy {min(1.0, share):.0%} of the time."
    if clock.pauses:
        note += " Dotted lines stand for pauses of the whole run, which are left out."
    ends = {bar.end for bar in bars}
    signs = "".join(
        f'<li><svg class="sign" aria-hidden="true">{svg.end_badge(end, x="50%", y="50%")}</svg>{meaning}</li>'
        for end, meaning in _BADGE_MEANINGS.items()
        if end in ends
    )
    signs = f'<ul class="signs">{signs}</ul>\n' if signs else ""
    return (
        f'<section>\n<h2>Devices over time</h2>\n<p class="note">{note}</p>\n'
        f"<figure>\n{chart}\n</figure>\n{signs}</section>\n"
    )


def _rows(record: RunRecord) -> list[str]:
    """The run's devices, and those that it had before a resume on others."""
    names = [_device_name(device) for device in record.devices]
    return list(dict.fromkeys([*names, *(span.device for task in record.tasks.values() for span in task.spans)]))


def _device_name(device: Mapping[str, Any]) -> str:
    return str(device.get("name") or f"{device.get('kind', 'device')}:{device.get('index', 0)}")


def _bars(record: RunRecord) -> list[svg.Bar]:
    rows = {name: number for number, name in enumerate(_rows(record))}
    short = _short_names(record.tasks)
    return [
        svg.Bar(
            row=rows[span.device],
            begin_s=span.begin_s,
            end_s=_end_s(span, record),
            style=task.index,
            label=short[task.name],
            title=_span_title(task, span, record),
            end="open" if span.end_s is None else _ENDS.get(span.end, ""),
        )
        for task in record.tasks.values()
        for span in task.spans
    ]


def _span_title(task: TaskRecord, span: Span, record: RunRecord) -> str:
    begin_s, end_s = span.begin_s - record.begin_s, _end_s(span, record) - record.begin_s
    how = span.end or ("still running" if span.end_s is None else "ended")
    attempt = f", attempt {span.attempt}" if span.attempt > 1 else ""
    return (
        f"{task.name} on {span.device}{attempt}\n{duration(begin_s)} to {duration(end_s)} "
        f"({duration(end_s - begin_s)})\n{how}"
    )


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """Names without the words that all of them begin with, for places where there is little room."""
    words = {name: re.split(r"(?<=[-_,+@])", name) for name in names}
    shared = 0
    for column in zip(*words.values(), strict=False):
        if len(words) == 1 or len(set(column)) > 1:
            break
        shared += 1
    return {name: "".join(parts[shared:]) or name for name, parts in words.items()}


# ---- each task ----


def _tasks_section(record: RunRecord, ranked: Sequence[TaskRecord]) -> str:
    return f"<section>\n<h2>Tasks</h2>\n{''.join(_task(task, record) for task in ranked)}</section>\n"


def _task(task: TaskRecord, record: RunRecord) -> str:
    ended_badly = task.state in (TaskState.FAILED, TaskState.DIVERGED)
    groups = [
        ("Settings", [(key, markup.text(markup.setting(value))) for key, value in task.settings.items()]),
        ("Result", _result(task, record)),
        ("Task", [(key, markup.text(markup.setting(value))) for key, value in task.facts.items() if value is not None]),
    ]
    columns = "".join(
        f"<div>\n<h3>{name}</h3>\n{markup.definitions(pairs)}\n</div>\n" for name, pairs in groups if pairs
    )
    reason = f'<p class="reason">{markup.text(task.reason)}</p>\n' if task.reason else ""
    trace = f'<pre tabindex="0">{markup.text(task.traceback.rstrip())}</pre>\n' if task.traceback else ""
    notices = "".join(f"<li>{markup.text(notice)}</li>" for notice in task.notices)
    notices = f"<h3>Notices</h3>\n<ul>{notices}</ul>\n" if notices else ""
    # The anchor is inside, so that a link to it opens the details.
    return (
        f"<details{' open' if ended_badly else ''}>\n<summary>{svg.swatch(task.index)}"
        f'<span class="name">{markup.text(task.name)}</span>{markup.chip(task.state.value)}</summary>\n'
        f'<div class="body" id="{_anchor(task)}">\n{reason}{trace}<div class="columns">\n{columns}</div>\n'
        f"{_attempts(task, record)}{_balance(task)}{notices}</div>\n</details>\n"
    )


def _result(task: TaskRecord, record: RunRecord) -> list[tuple[str, str]]:
    pairs = [(name, format_metric(value)) for name, value in sorted(task.metrics.items()) if name != _BEST_STEP]
    if _BEST_STEP in task.metrics:
        pairs.append((_BEST_STEP, f"{task.metrics[_BEST_STEP]:,.0f}"))
    pairs.append(("steps", _steps(task)))
    if task.step_s is not None:
        pairs.append(("time per step", markup.step_time(task.step_s)))
    if task.strategy:
        pairs.append(("strategy", markup.text(task.strategy)))
    if task.switches:
        pairs.append(("switches", f"{task.switches}, {duration(task.switch_s)} in all"))
    if task.parameters is not None:
        pairs.append(("parameters", f"{task.parameters:,}"))
    if task.spans:
        pairs.append(("time on devices", _busy(task, record)))
    if task.state is TaskState.FINISHED:
        pairs.append(("model", _model_link(task)))
    elif task.spans:
        pairs.append(("output", _link(task, OUTPUT_FILE)))
    return pairs


def _attempts(task: TaskRecord, record: RunRecord) -> str:
    """Where it ran, if that is more than one line can say."""
    if not task.spans:
        return ""
    rows = "".join(
        f'<tr><td class="n">{span.attempt}</td><td>{markup.text(span.device)}</td>'
        f'<td class="n">{duration(span.begin_s - record.begin_s)}</td>'
        f'<td class="n">{duration(_end_s(span, record) - span.begin_s)}</td>'
        f"<td>{markup.text(span.end or 'running')}</td></tr>\n"
        for span in task.spans
    )
    return (
        '<h3>Attempts</h3>\n<div class="scroll">\n<table class="small">\n<thead><tr><th scope="col" class="n">#</th>'
        '<th scope="col">Device</th><th scope="col" class="n">Began after</th><th scope="col" class="n">Time</th>'
        f'<th scope="col">End</th></tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n'
    )


def _balance(task: TaskRecord) -> str:
    """How its work was divided between devices, from which step on."""
    if not task.balance:
        return ""
    last = max(task.step, task.balance[-1].step + 1)
    lines = []
    for device in range(max(len(one.shares) for one in task.balance)):
        points: list[tuple[float, float]] = []
        for one, end in zip(task.balance, [*(later.step for later in task.balance[1:]), last], strict=True):
            if device < len(one.shares):
                points += [(one.step, 100 * one.shares[device]), (end, 100 * one.shares[device])]
        lines.append(svg.Line(style=device, points=points, title=f"device {device}: {points[-1][1]:.0f}%"))
    chart = svg.line_chart(
        lines, label="share of the work of each device by step", x_label="step", name=f"balance-{task.index}"
    )
    rows = "".join(
        f'<tr><td class="n">{one.step:,}</td><td class="n">{" ".join(f"{share:.0%}" for share in one.shares)}</td>'
        f'<td class="n">{one.pause_s:.2f} s</td><td>{markup.text(balance_reason(one))}</td></tr>\n'
        for one in task.balance
    )
    return (
        f"<h3>Balance</h3>\n<figure>\n<figcaption>share of the work, in percent</figcaption>\n{chart}\n</figure>\n"
        '<div class="scroll">\n<table class="small">\n<thead><tr><th scope="col" class="n">After step</th>'
        '<th scope="col" class="n">Shares</th><th scope="col" class="n">Pause</th><th scope="col">Why</th></tr>\n'
        f"</thead><tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )


def balance_reason(one: Balance) -> str:
    """Why work was moved, and what is left out."""
    gone = ", ".join(f"device {i} leaves out {part:.0%}" for i, part in enumerate(one.left_out) if part)
    return f"{gone}: {one.why}" if gone else one.why


def _notices_section(record: RunRecord) -> str:
    if not record.notices:
        return ""
    rows = "".join(
        f'<li><span class="when">{duration(time_s - record.begin_s)}</span> '
        f"<span><strong>{markup.text(task)}</strong> {markup.text(text)}</span></li>\n"
        for time_s, task, text in record.notices
    )
    return f'<section>\n<h2>Notices</h2>\n<ul class="notices">\n{rows}</ul>\n</section>\n'


# ---- pieces ----


def _stylesheet() -> str:
    return resources.files("rota.report").joinpath("report.css").read_text(encoding="utf-8")


def _anchor(task: TaskRecord) -> str:
    return f"task-{task.index}"


def _model_link(task: TaskRecord) -> str:
    return _link(task, MODEL_FILE)


def _link(task: TaskRecord, file: str) -> str:
    return f'<a class="file" href="tasks/{markup.text(quote(task.name, safe="=,+@"))}/{file}">{file}</a>'


def _end_s(span: Span, record: RunRecord) -> float:
    return record.last_s if span.end_s is None else span.end_s


def _busy(task: TaskRecord, record: RunRecord) -> str:
    if not task.spans:
        return ""
    return duration(task.busy_s(now_s=record.last_s))


def _steps(task: TaskRecord) -> str:
    if task.total_steps is None or task.step == task.total_steps:
        return f"{task.step:,}"
    return f"{task.step:,} / {task.total_steps:,}"
