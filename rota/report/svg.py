"""Draws charts as inline SVG whose text keeps its size at any width, because all positions are percentages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rota.report import markup
from rota.report.format import duration

Point = tuple[float, float]
End = Literal["", "open", "paused", "lost", "failed"]
"""How a bar ends: well, not yet, to go on later, with its worker lost, or with its task."""

POINTS_PER_LINE = 300
# A shorter curve is shown as it is; the mean of a longer one is taken over this share of it, to each side.
_TREND_POINTS, _TREND_SHARE = 100, 1 / 60
# Behind more lines than this, the noise of each would only be a grey band.
_MAX_NOISY_LINES = 12

# The colours and dashes themselves are in report.css. 8 x 4 styles tell 32 tasks apart.
_COLOURS = 8
_DASHES = 4
# Both sides of the square that curves are drawn in before it is stretched over the plot.
_SQUARE = 1000
# What lies so many plots above the axis need not lie higher: browsers cannot draw to numbers of any size.
_FAR = -100.0
_TIME_STEPS_S = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
# A pause in which no device was busy is left out of the timeline if it is longer than this share of the busy time.
_PAUSE_SHARE = 0.25
# The plot's width where the page is widest and on a phone, and of a character in a bar.
_WIDE_PX, _NARROW_PX, _CHARACTER_PX = 960, 270, 6.6
_SHORTEST_LABEL = 6


@dataclass(frozen=True, kw_only=True)
class Line:
    """One task's curve."""

    style: int
    """Which colour and dash; the same number looks the same in all charts."""
    points: Sequence[Point]
    title: str
    trend: Sequence[Point] = ()
    """The points without their noise; where there is one, the points themselves are drawn faintly behind it."""
    broken: bool = False
    """Whether the task ended badly where the curve ends."""
    strong: bool = False
    """Whether the curve stands out."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stretch of time on a device."""

    row: int
    begin_s: float
    end_s: float
    style: int
    label: str
    title: str
    end: End = ""


def style_classes(style: int) -> str:
    """The CSS classes of a task's look: its colour, its dash, and its own name for highlighting."""
    return f"c{style % _COLOURS} d{style // _COLOURS % _DASHES} t{style}"


def swatch(style: int) -> str:
    """A short piece of a task's line, for keys."""
    line = '<line x1="0" x2="100%" y1="50%" y2="50%"/>'
    return f'<svg class="swatch {style_classes(style)}" aria-hidden="true">{line}</svg>'


# ---- curves ----


def line_chart(lines: Sequence[Line], *, label: str, x_label: str, name: str) -> str:
    """Curves over a common axis; the first line is drawn on top. `name` is unique in the page, `label` is read out."""
    lines = [line for line in lines if line.points]
    if not lines:
        return '<p class="empty">Nothing was measured yet.</p>'
    noisy = len(lines) <= _MAX_NOISY_LINES
    shown = [point for line in lines for point in (line.points if noisy else line.trend or line.points)]
    x_low, x_high = _x_range([x for x, _ in shown])
    y_low, y_high = _y_range([y for _, y in shown])
    highest = max(y for _, y in shown)

    def place(points: Sequence[Point]) -> list[Point]:
        return [((x - x_low) / (x_high - x_low), max(_FAR, (y_high - y) / (y_high - y_low))) for x, y in points]

    noise, curves, marks = [], [], []
    for number, line in reversed(list(enumerate(lines))):
        placed = place(line.trend or line.points)
        curves.append(_curve(line, placed, identifier=f"{name}-{number}"))
        if line.trend and noisy:
            noise.append(_noise(line, place(line.points)))
        if placed[-1][1] >= 0:
            marks.append(_end_mark(line, placed[-1]))
    note = f'<p class="note">Values up to {highest:.4g} are above the axis.</p>' if highest > y_high else ""
    return (
        f'<svg class="chart" role="img" aria-label="{markup.text(label)}">'
        f"{_y_axis(y_low, y_high)}{_x_axis(x_low, x_high)}"
        f'<text class="axis-label" x="-48" y="100%" dy="1.5em">{markup.text(x_label)}</text>'
        f'<svg class="plot" viewBox="0 0 {_SQUARE} {_SQUARE}" preserveAspectRatio="none" width="100%" height="100%">'
        f"{''.join(noise)}{''.join(curves)}</svg>{''.join(marks)}</svg>{note}"
    )


def finite(points: Sequence[Point]) -> list[Point]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if math.isfinite(x) and abs(y) < 1e200]


def downsample(points: Sequence[Point], limit: int = POINTS_PER_LINE) -> list[Point]:
    """At most `limit` points that look like all of them: the first, the last, and of each group between them one.

    From each group it takes the point that spans the largest triangle with the point taken before and the middle of the
    next group, so that peaks stay.
    """
    if len(points) <= limit:
        return list(points)
    assert limit >= 3
    inner = len(points) - 2
    bounds = [1 + inner * i // (limit - 2) for i in range(limit - 1)]
    kept = [points[0]]
    for i in range(limit - 2):
        after = points[bounds[i + 1] : bounds[i + 2]] if i < limit - 3 else points[-1:]
        middle = (sum(x for x, _ in after) / len(after), sum(y for _, y in after) / len(after))
        before = kept[-1]
        kept.append(max(points[bounds[i] : bounds[i + 1]], key=lambda p: _triangle(before, p, middle)))
    return [*kept, points[-1]]


def trend(points: Sequence[Point], limit: int = POINTS_PER_LINE) -> list[Point]:
    """At most `limit` points of the running mean of a long curve; nothing for a short one.

    It narrows towards the beginning, where losses fall fast, but not towards the end, where the noise of the last value
    would look like a turn.
    """
    count = len(points)
    if count < _TREND_POINTS:
        return []
    widest = round(count * _TREND_SHARE)
    places = range(count) if count <= limit else [i * (count - 1) // (limit - 1) for i in range(limit)]
    means = []
    for i in places:
        near = points[i - min(i, widest) : i + min(i, widest) + 1]
        means.append((points[i][0], math.fsum(y for _, y in near) / len(near)))
    return means


def ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """About `count` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    step = _round_step((high - low) / count)
    if whole:
        step = max(1.0, step)
    digits = _decimals(step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, digits) + 0.0 for i in range(first, last + 1)]


def tick_label(value: float, step: float) -> str:
    """A tick's number, with as many decimals as its neighbours need."""
    if abs(value) >= 1e15 or step < 1e-5:
        return f"{value:.6g}"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.6g}{unit}"
    return f"{value:,.{_decimals(step)}f}"


def _triangle(a: Point, b: Point, c: Point) -> float:
    return abs((a[0] - c[0]) * (b[1] - a[1]) - (a[0] - b[0]) * (c[1] - a[1]))


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, whichever is nearest by ratio."""
    power = 10.0 ** math.floor(math.log10(rough))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _x_range(values: Sequence[float]) -> tuple[float, float]:
    """Steps are shown from 0 unless all of them are far from it."""
    low, high = min(values), max(values)
    if low <= high / 2 or low == high:
        low = 0.0
    return (low, high) if high > low else (low, low + 1)


def _y_range(values: Sequence[float]) -> tuple[float, float]:
    """All values with some air, except for a few that are so high that the rest would be a flat line."""
    ordered = sorted(values)
    low, high, usual = ordered[0], ordered[-1], ordered[int(0.95 * (len(ordered) - 1))]
    if usual > low and high - low > 6 * (usual - low):
        high = low + 2 * (usual - low)
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-200):
        room = 0.1 * size if size > 1e-200 else 1.0
    else:
        room = 0.05 * (high - low)
    return low - room, high + room


def _curve(line: Line, placed: Sequence[Point], *, identifier: str) -> str:
    strong = " strong" if line.strong else ""
    # The copy is wide and invisible, so that the pointer finds a thin line.
    return (
        f'<g class="line {style_classes(line.style)}{strong}"><title>{markup.text(line.title)}</title>'
        f'<path id="{identifier}" d="{_path(placed)}"/><use class="hit" href="#{identifier}"/></g>'
    )


def _noise(line: Line, placed: Sequence[Point]) -> str:
    return f'<path class="noise {style_classes(line.style)}" d="{_path(placed)}"/>'


def _path(placed: Sequence[Point]) -> str:
    return "M" + " ".join(f"{_SQUARE * x:.5g},{_SQUARE * y:.5g}" for x, y in placed)


def _end_mark(line: Line, at: Point) -> str:
    shape = '<path d="M-3.5-3.5 3.5 3.5M-3.5 3.5 3.5-3.5"/>' if line.broken else '<circle r="3"/>'
    place = f'x="{_percent(at[0])}" y="{_percent(at[1])}" width="1" height="1"'
    return (
        f'<svg class="mark {style_classes(line.style)}" {place}><title>{markup.text(line.title)}</title>{shape}</svg>'
    )


def _y_axis(low: float, high: float) -> str:
    values = ticks(low, high)
    step = values[1] - values[0] if len(values) > 1 else abs(values[0]) or 1.0
    parts = []
    for value in values:
        y = _percent((high - value) / (high - low))
        text = tick_label(value, step)
        parts.append(f'<line x1="0" x2="100%" y1="{y}" y2="{y}"/><text x="-8" y="{y}" dy=".32em">{text}</text>')
    return f'<g class="axis y">{"".join(parts)}</g>'


def _x_axis(low: float, high: float) -> str:
    values = ticks(low, high, whole=True)
    step = values[1] - values[0] if len(values) > 1 else 1.0
    labels = [((value - low) / (high - low), tick_label(value, step)) for value in values]
    return f'<g class="axis x">{_x_labels(labels)}</g>'


def _x_labels(labels: Sequence[tuple[float, str]]) -> str:
    """Every other one is left out where the page is narrow."""
    kinds = ("", ' class="wide"')
    return "".join(
        f'<text x="{_percent(at)}" y="100%" dy="1.5em"{kinds[number % 2]}>{text}</text>'
        for number, (at, text) in enumerate(labels)
    )


# ---- timeline ----


def timeline(bars: Sequence[Bar], *, rows: Sequence[str], begin_s: float, end_s: float, label: str) -> str:
    """A row for each device and a bar for each stretch that a task spent on it."""
    clock = Clock(bars, begin_s=begin_s, end_s=end_s)
    pitch = 30 if len(rows) <= 24 else 18
    height = pitch * len(rows)
    margin = min(14, max((len(row) for row in rows), default=0)) * 7 + 10
    return (
        f'<svg class="timeline" role="img" aria-label="{markup.text(label)}" '
        f'style="height:{height}px;--labels:{margin}px">'
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line x1="0" x2="0" y1="0" y2="6"/></pattern></defs>'
        f"{_time_axis(clock)}{_row_labels(rows, pitch=pitch)}{_pauses(clock)}"
        f"{''.join(_bar(bar, clock, pitch=pitch) for bar in bars)}"
        f"{''.join(_bar_end(bar, clock, pitch=pitch) for bar in bars)}</svg>"
    )


class Clock:
    """Where moments lie on the timeline, from 0 to 1. Long pauses in which no device was busy are left out."""

    def __init__(self, bars: Sequence[Bar], *, begin_s: float, end_s: float) -> None:
        busy = _merged([(begin_s, begin_s), (end_s, end_s), *((bar.begin_s, bar.end_s) for bar in bars)])
        longest_s = _PAUSE_SHARE * sum(end - begin for begin, end in busy)
        kept: list[tuple[float, float]] = []
        for begin, end in busy:
            if kept and (begin - kept[-1][1] <= longest_s or longest_s == 0):
                kept[-1] = (kept[-1][0], end)
            else:
                kept.append((begin, end))
        # The run's own begin and end are no reason to show a pause before or after them.
        self._stretches = [stretch for stretch in kept if stretch[1] > stretch[0]] or [(begin_s, begin_s + 1)]
        self.shown_s = sum(end - begin for begin, end in self._stretches)
        self.pauses: list[tuple[float, float]] = []
        """(place, seconds) of what is left out."""
        for (_, end), (begin, _) in zip(self._stretches, self._stretches[1:], strict=False):
            self.pauses.append((self.place(end), begin - end))

    def place(self, time_s: float) -> float:
        """Where a moment lies."""
        before_s = 0.0
        for begin, end in self._stretches:
            if time_s <= end:
                return (before_s + max(0.0, time_s - begin)) / self.shown_s
            before_s += end - begin
        return 1.0


def time_ticks(total_s: float, *, count: int = 7) -> list[tuple[float, str]]:
    """About `count` round times from 0 to `total_s`, each with its label."""
    if total_s < count * _TIME_STEPS_S[0]:
        values = ticks(0, total_s, count=count)
        return [(value, f"{value:g} s") for value in values]
    step = next((step for step in _TIME_STEPS_S if step * count >= total_s), 0.0)
    step = step or 86400 * max(1.0, _round_step(total_s / 86400 / count))
    size, unit = next((s, u) for s, u in ((86400, "d"), (1800, "h"), (60, "min"), (1, "s")) if step >= s)
    size = 3600 if unit == "h" else size
    return [(i * step, f"{i * step / size:g} {unit}") for i in range(int(total_s / step + 1e-9) + 1)]


def _merged(stretches: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _time_axis(clock: Clock) -> str:
    labels = [(at_s / clock.shown_s, text) for at_s, text in time_ticks(clock.shown_s)]
    lines = "".join(f'<line x1="{_percent(x)}" x2="{_percent(x)}" y1="0" y2="100%"/>' for x, _ in labels)
    return f'<g class="axis x">{lines}{_x_labels(labels)}</g>'


def _row_labels(rows: Sequence[str], *, pitch: int) -> str:
    texts = []
    for number, row in enumerate(rows):
        text = row if len(row) <= 14 else f"{row[:13]}…"
        texts.append(
            f'<text x="-10" y="{pitch * number + pitch / 2:g}" dy=".32em">'
            f"<title>{markup.text(row)}</title>{markup.text(text)}</text>"
        )
    return f'<g class="axis y rows">{"".join(texts)}</g>'


def _pauses(clock: Clock) -> str:
    return "".join(
        f'<g class="pause"><title>{duration(length_s)} without a running task, left out</title>'
        f'<line x1="{_percent(at)}" x2="{_percent(at)}" y1="0" y2="100%"/></g>'
        for at, length_s in clock.pauses
    )


def _bar(bar: Bar, clock: Clock, *, pitch: int) -> str:
    begin, end = clock.place(bar.begin_s), clock.place(bar.end_s)
    top, height = pitch * bar.row + 3, pitch - 6
    box = f'x="{_percent(begin)}" y="{top}" width="{_percent(max(end - begin, 0.001))}" height="{height}" rx="3"'
    hatch = f'<rect class="hatch" {box} fill="url(#hatch)"/>' if bar.end in ("lost", "failed") else ""
    return (
        f'<g class="bar {style_classes(bar.style)} {bar.end}"><title>{markup.text(bar.title)}</title>'
        f'<rect class="back" {box}/><rect class="fill" {box}/>{hatch}'
        f"{_bar_label(bar.label, begin, end, middle=top + height / 2) if pitch >= 24 else ''}</g>"
    )


def _bar_end(bar: Bar, clock: Clock, *, pitch: int) -> str:
    x, y = _percent(clock.place(bar.end_s)), f"{pitch * bar.row + pitch / 2:g}"
    return f'<g class="bar-end t{bar.style}">{end_badge(bar.end, x=x, y=y)}</g>' if bar.end else ""


def _bar_label(text: str, begin: float, end: float, *, middle: float) -> str:
    """As much of the label as the bar holds: one version for wide pages, one for narrow ones."""
    parts = []
    for width_px, kind in ((_WIDE_PX, "wide"), (_NARROW_PX, "narrow")):
        room = int(((end - begin) * width_px - 20) / _CHARACTER_PX)
        shown = text if len(text) <= room else f"{text[: room - 1]}…"
        if room >= min(_SHORTEST_LABEL, len(text)):
            at = f'x="{_percent(begin)}" dx="7" y="{middle:g}" dy=".34em"'
            parts.append(f'<text class="{kind}" {at}>{markup.text(shown)}</text>')
    return "".join(parts)


_BADGES: dict[str, str] = {
    "failed": '<circle r="6.5"/><path d="M-2.5-2.5 2.5 2.5M-2.5 2.5 2.5-2.5"/>',
    "lost": '<circle r="6.5"/><path d="M0-3.5V.8M0 3.2V3.4"/>',
    "paused": '<circle r="6.5"/><path d="M-1.8-2.6V2.6M1.8-2.6V2.6"/>',
    "open": '<path class="arrow" d="M-2-5 4 0-2 5Z"/>',
}


def end_badge(end: End, *, x: str, y: str) -> str:
    """The sign at the end of a bar that did not end well; nothing if it did."""
    if end not in _BADGES:
        return ""
    return f'<svg class="badge {end}" x="{x}" y="{y}" width="1" height="1">{_BADGES[end]}</svg>'


def _percent(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"
