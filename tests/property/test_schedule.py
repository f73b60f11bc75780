"""Random problems: every schedule is valid, none is worse than a heuristic's, none is below the bound; tiny ones are
compared with all schedules there are.
"""

import itertools

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from rota.errors import InputError
from rota.schedule.arrays import Arrays
from rota.schedule.bounds import lower_bound
from rota.schedule.cp_sat import Effort
from rota.schedule.heuristics import HEURISTICS
from rota.schedule.problem import (
    OBJECTIVES,
    Node,
    Option,
    Placement,
    Problem,
    Schedule,
    Value,
    check,
    check_problem,
    value_of,
)
from rota.schedule.serial import dump_request, load_request
from rota.schedule.solve import Limit, solve
from rota.schedule.windows import Pace, improve_windows

CLOSE = 1e-6


def clock():
    return 0.0


@st.composite
def nodes(draw, *, most_devices):
    found = []
    for index in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, most_devices))
        found.append(
            Node(
                name=f"n{index}",
                kind=draw(st.sampled_from("aab")),
                devices=tuple(f"n{index}/{device}" for device in range(size)),
                memory_bytes=draw(st.sampled_from((None, 8, 16))),
                price_per_hour=draw(st.sampled_from((0.0, 1.0, 2.5))),
            )
        )
    return tuple(found)


@st.composite
def problems(draw, *, most_tasks=6, most_devices=4, whole=False):
    """Kinds, nodes of unlike sizes, memory, spans, pools, held options, objectives and deadlines."""
    cluster = draw(nodes(most_devices=most_devices))
    tasks = [f"t{index}" for index in range(draw(st.integers(1, most_tasks)))]
    seconds = st.integers(1, 12) if whole else st.integers(1, 12) | st.floats(0.5, 20.0)
    shapes = st.tuples(
        st.sampled_from("aab"), st.integers(1, 5), seconds, st.sampled_from((0, 0, 8, 12, 20)), st.booleans()
    )
    options = []
    for task in tasks:
        for kind, devices, length_s, memory, spans in draw(st.lists(shapes, min_size=1, max_size=3)):
            options.append(make(task, kind, devices, length_s, memory, spans))
        if draw(st.integers(0, 4)):
            options.append(make(task, cluster[0].kind, 1, draw(seconds), 0, False))
    for _ in range(draw(st.integers(0, 2)) if len(tasks) > 1 else 0):
        together = draw(st.lists(st.sampled_from(tasks), min_size=2, max_size=3, unique=True))
        kind, devices, length_s, _, spans = draw(shapes)
        options.append(Option(tasks=tuple(together), kind=kind, devices=devices, seconds=length_s, spans=spans))
    for _ in range(draw(st.integers(0, 2))):
        # Mostly devices of one node, but also some that no option could go on with.
        node = draw(st.sampled_from(cluster))
        names = node.devices if draw(st.booleans()) else [one for each in cluster for one in each.devices]
        held = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        options.append(
            Option(
                tasks=(draw(st.sampled_from(tasks)),),
                kind=node.kind,
                devices=len(held) if draw(st.integers(0, 5)) else 1,
                seconds=draw(seconds),
                spans=draw(st.booleans()),
                held=tuple(held),
            )
        )
    due = st.integers(0, 30) if whole else st.floats(0.0, 30.0)
    deadlines = draw(st.dictionaries(st.sampled_from([*tasks, "another"]), due, max_size=2))
    objective = draw(st.sampled_from(("makespan", *OBJECTIVES)))
    return Problem(options=tuple(options), nodes=cluster, objective=objective, deadlines=deadlines)


def make(task, kind, devices, length_s, memory, spans):
    return Option(tasks=(task,), kind=kind, devices=devices, seconds=length_s, memory_bytes=memory, spans=spans)


def solvable(problem):
    """Whether its tasks fit somewhere, and its options can be chosen so that each task is there once."""
    try:
        check_problem(problem)
        HEURISTICS["max"](problem, 0)
    except InputError:
        return False
    return True


@pytest.mark.timeout(300)
@settings(max_examples=800, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(problem=problems(), seed=st.integers(0, 3))
def test_every_schedule_is_valid_and_none_is_better_than_the_bound(problem, seed):
    assume(solvable(problem))
    bound = lower_bound(problem)
    values = {}
    for name, heuristic in HEURISTICS.items():
        schedule = heuristic(problem, seed)
        check(problem, schedule)
        values[name] = value_of(problem, schedule)
        assert values[name].objective >= bound * (1 - CLOSE), name
    told = []
    solved = solve(problem, limit=Limit(steps=1), seed=seed, clock=clock, better=told.append)
    check(problem, solved.schedule)
    assert solved.value == value_of(problem, solved.schedule)
    assert solved.heuristics == values
    assert all(solved.value <= value for value in values.values())
    assert bound * (1 - CLOSE) <= solved.bound <= solved.value.objective * (1 + CLOSE)
    assert told[-1] == solved
    assert all(later.value <= earlier.value for earlier, later in itertools.pairwise(told))


WIDER_THAN_ANY_NODE = Problem(
    options=(
        Option(tasks=("t0",), kind="a", devices=2, seconds=1, spans=True),
        Option(tasks=("t0",), kind="a", devices=1, seconds=3),
    ),
    nodes=(Node(name="n0", kind="a", devices=("n0/0",)), Node(name="n1", kind="a", devices=("n1/0",))),
)


@pytest.mark.timeout(300)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(problem=problems(most_tasks=8), seed=st.integers(0, 3))
@example(problem=WIDER_THAN_ANY_NODE, seed=0)
def test_windows_keep_a_schedule_valid_and_make_it_no_worse(problem, seed):
    assume(solvable(problem))
    known = HEURISTICS["random"](problem, seed)
    told = []
    found = improve_windows(
        Arrays.of(problem),
        known,
        bound=lower_bound(problem),
        pace=Pace(window=Effort(work=0.005), windows=3),
        seed=seed,
        better=told.append,
    )
    values = [value_of(problem, schedule) for schedule in [known, *told, found]]
    for schedule in [*told, found]:
        check(problem, schedule)
    assert values == sorted(values, reverse=True)


@given(problem=problems(), seed=st.integers(0, 3))
def test_a_request_is_the_same_after_a_pipe(problem, seed):
    hint = Schedule(placements=(Placement(option=0, start_s=0.25, devices=("n0/0",)),))
    request = (problem, Limit(seconds=1.5, steps=None), seed, [hint])
    assert load_request(dump_request(*request)) == request


# ---- all schedules ----


def every_value(problem):
    """The values of all schedules in which nothing waits without need, by trying them all."""
    best = []

    def go_on(missing, free_s, placements):
        if not missing:
            schedule = Schedule.of(placements)
            check(problem, schedule)
            best.append(value_of(problem, schedule))
            return
        for index, option in enumerate(problem.options):
            if not missing.issuperset(option.tasks):
                continue
            for devices in groups(problem, option, free_s):
                start_s = max(free_s[device] for device in devices)
                # What starts earlier is placed earlier: every order of starts is tried anyway.
                if (placements and start_s < placements[-1].start_s) or (option.held and start_s > 0):
                    continue
                later_s = free_s | dict.fromkeys(devices, start_s + option.seconds)
                placed = Placement(option=index, start_s=start_s, devices=devices)
                go_on(missing - set(option.tasks), later_s, [*placements, placed])

    go_on(frozenset(problem.tasks), {one: 0.0 for node in problem.nodes for one in node.devices}, [])
    return min(best, default=None)


def groups(problem, option, free_s):
    """The sets of devices that an option may take; of those that are alike, one."""
    node_of = {device: node for node in problem.nodes for device in node.devices}
    if option.held:
        candidates = [option.held] if set(option.held) <= set(node_of) else []
    else:
        candidates = itertools.combinations(node_of, option.devices)
    seen = set()
    for devices in candidates:
        used = {node_of[device].name: node_of[device] for device in devices}.values()
        room = all(node.memory_bytes is None or option.memory_bytes <= node.memory_bytes for node in used)
        alike = tuple(sorted((node_of[device].name, free_s[device], device in held_of(problem)) for device in devices))
        if (
            len(devices) == option.devices
            and all(node.kind == option.kind for node in used)
            and (len(used) == 1 or option.spans)
            and (room or option.held)
            and alike not in seen
        ):
            seen.add(alike)
            yield tuple(devices)


def held_of(problem):
    return {device for option in problem.options for device in option.held}


@pytest.mark.timeout(300)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(problem=problems(most_tasks=3, most_devices=2, whole=True))
def test_tiny_problems_are_solved_to_the_optimum(problem):
    assume(solvable(problem))
    best = every_value(problem)
    assert isinstance(best, Value)
    solved = solve(problem, limit=Limit(steps=100), clock=clock)
    assert solved.value.late_s == pytest.approx(best.late_s, abs=1e-9)
    assert solved.value.objective == pytest.approx(best.objective, rel=1e-4, abs=1e-9)
    assert lower_bound(problem) <= best.objective * (1 + CLOSE)


@settings(max_examples=50, suppress_health_check=[HealthCheck.filter_too_much])
@given(problem=problems(most_tasks=3, most_devices=2))
def test_what_no_choice_of_options_covers_is_refused_and_has_no_schedule(problem):
    assume(not solvable(problem))
    with pytest.raises(InputError):
        solve(problem, limit=Limit(steps=1), clock=clock)
    assert every_value(problem) is None
