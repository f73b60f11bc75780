"""`rota simulate`: how a sweep would run on a cluster that one does not have, and what more devices would save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rota.cli.options import json_option, objective_option, print_json, saying, terminal_width
from rota.cli.output import tell
from rota.cli.sweep_file import load_source
from rota.cluster.file import Site, WhatIf, load_cluster, parse_what_if
from rota.errors import InputError
from rota.execute.preflight import resolve
from rota.report.forecast import Case, Listed, best_of_each, forecast_json, forecast_lines
from rota.schedule.problem import Objective, Option, Problem, check_problem

if TYPE_CHECKING:
    from rota.profile.estimate import Estimate
    from rota.profile.predict import Predictor
    from rota.profile.subjects import Profiled

Notice = Callable[[str], None]


@click.command(short_help="Ask how a sweep would run on another cluster.")
@click.argument("file", metavar="FILE[:NAME]")
@click.option("--cluster", "cluster", required=True, type=click.Path(path_type=Path), help="A TOML file with [[node]].")
@click.option("--what-if", "what_ifs", multiple=True, metavar="+NxKIND", help="What more devices would save.")
@objective_option
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="To solve each case.")
@json_option
def simulate(
    file: str, cluster: Path, what_ifs: tuple[str, ...], objective: Objective, seconds: float, as_json: bool
) -> None:
    """Predict how the sweep that FILE defines would run on the cluster that a TOML file describes. Nothing is trained.

    Models are made and captured on this machine's CPU. Step times and memory come from rota's search with the figures
    of the devices' data sheets, so they are estimates. --what-if +4xA100-40GB adds a node of four and says what it
    saves; it can be given several times.
    """
    site = load_cluster(cluster)
    asked = [parse_what_if(text, site) for text in what_ifs]
    if objective == "cost":
        _check_prices(site, asked)
    sweep = resolve(load_source(file).sweep, strategy=None)
    # Only from here on is torch needed; the other commands stay quick.
    from rota.profile.predict import Predictor
    from rota.profile.subjects import profiled

    with saying() as notice:
        tasks = profiled(sweep, notice=notice)
        predictor = Predictor(notice=notice)
        base = _solve(tasks, site, predictor, objective, seconds, notice, before=None)
        cases = [
            (one, _solve(tasks, site.plus(one.nodes), predictor, objective, seconds, notice, before=base))
            for one in asked
        ]
    listed = [Listed(name=one.task.name, steps=one.steps, alike=one.subject) for one in tasks]
    if as_json:
        print_json(forecast_json(listed, base, cases))
    else:
        tell("\n".join(forecast_lines(listed, base, cases, width=terminal_width())))


def _check_prices(site: Site, asked: list[WhatIf]) -> None:
    """InputError for devices that would seem to cost nothing."""
    for node in site.nodes:
        if not node.price_per_hour:
            raise InputError(
                f"the objective cost needs prices, and the node {node.name} has none; add price = ... (of a device for "
                "an hour) to it"
            )
    for one in asked:
        if any(not node.price_per_hour for node in one.nodes):
            raise InputError(
                f"--what-if {one.text}: the cluster file has no node with a price for {one.nodes[0].kind}, and the "
                "objective is cost; add such a node, or leave this out"
            )


# ---- predict and solve ----


def _solve(
    tasks: list[Profiled],
    site: Site,
    predictor: Predictor,
    objective: Objective,
    seconds: float,
    notice: Notice,
    *,
    before: Case | None,
) -> Case:
    """With the options of `before` first, so that its schedule is one of this case, too."""
    from rota.schedule.child import solve_in_child
    from rota.schedule.options import option_of
    from rota.schedule.solve import Limit

    estimates: dict[str, list[Estimate]] = {}
    options: list[Option] = [] if before is None else list(before.problem.options)
    for one in tasks:
        try:
            found = predictor.estimates(one.subject, site, steps=one.steps)
        except InputError as error:
            raise InputError(f"task {one.task.name!r}: {error}") from error
        estimates[one.task.name] = found
        options += [option_of(one.task.name, way, steps=one.steps) for way in best_of_each(found)]
    deadlines = {one.task.name: one.task.deadline_s for one in tasks if one.task.deadline_s is not None}
    problem = Problem(options=tuple(dict.fromkeys(options)), nodes=site.nodes, objective=objective, deadlines=deadlines)
    check_problem(problem)
    notice(f"solving for {site.words()}")
    hints = () if before is None else (before.solved.schedule,)
    solved = solve_in_child(problem, limit=Limit(seconds=seconds), hints=hints)
    return Case(words=site.words(), problem=problem, estimates=estimates, solved=solved)
