"""A schedule that was only thought of, as one HTML page: timeline, options of each task, and what else could be."""

from __future__ import annotations

from collections.abc import Sequence

from rota.report import markup, svg
from rota.report.forecast import Case, Listed, options_table, outcome_facts
from rota.report.format import duration
from rota.report.html import document
from rota.schedule.problem import makespan_s

_MOST_ROWS = 64


def plan_page(title: str, tasks: Sequence[Listed], case: Case) -> str:
    """The page."""
    facts = markup.definitions([(term, markup.text(value)) for term, value in outcome_facts(case)], kind="facts")
    header = f'<header>\n<p class="eyebrow">rota plan</p>\n<h1>{markup.text(title)}</h1>\n{facts}\n</header>'
    body = f"{header}\n<main>\n{_timeline(tasks, case)}{_options(tasks, case)}</main>"
    return document(f"{title} – plan", body, styles=len(tasks))


def _timeline(tasks: Sequence[Listed], case: Case) -> str:
    problem, schedule = case.problem, case.solved.schedule
    rows = [device for node in problem.nodes for device in node.devices][:_MOST_ROWS]
    places = {name: place for place, name in enumerate(rows)}
    styles = {task.name: number for number, task in enumerate(tasks)}
    bars = []
    for one in schedule.placements:
        option = problem.options[one.option]
        name = " + ".join(option.tasks)
        end_s = one.start_s + option.seconds
        title = f"{name} as {option.label}, {duration(one.start_s)} to {duration(end_s)}"
        bars += [
            svg.Bar(
                row=places[device],
                begin_s=one.start_s,
                end_s=end_s,
                style=styles.get(option.tasks[0], 0),
                label=name,
                title=title,
            )
            for device in one.devices
            if device in places
        ]
    drawn = svg.timeline(
        bars, rows=rows, begin_s=0.0, end_s=makespan_s(problem, schedule), label="what runs where and when"
    )
    hidden = sum(len(node.devices) for node in problem.nodes) - len(rows)
    more = f"<p>and {hidden} more devices</p>" if hidden > 0 else ""
    return f"<section>\n<h2>Schedule</h2>\n{drawn}{more}</section>\n"


def _options(tasks: Sequence[Listed], case: Case) -> str:
    table = options_table(tasks, case)
    head = "".join(f"<th>{markup.text(one)}</th>" for one in table.columns)
    rows = "".join(
        f"<tr{markup.class_attribute('best' if row[0] else '')}>"
        + "".join(f"<td>{markup.text(cell)}</td>" for cell in row)
        + "</tr>\n"
        for row in table.rows
    )
    return (
        '<section>\n<h2>Ways to run</h2>\n<div class="scroll"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n</section>\n"
    )
