"""Schedules as text."""

from rota.report.gantt import gantt_lines
from rota.schedule.problem import Node, Option, Placement, Problem, Schedule


def node(name="n", devices=2):
    return Node(name=name, kind="cpu", devices=tuple(f"{name}:{i}" for i in range(devices)))


def option(task, devices=1, seconds=10.0):
    return Option(tasks=(task,), kind="cpu", devices=devices, seconds=seconds, label="data")


def place(index, start_s, *devices):
    return Placement(option=index, start_s=start_s, devices=devices)


def test_each_device_has_a_row_in_which_tasks_take_their_time():
    problem = Problem(options=(option("first", 2, 5.0), option("second"), option("third", 1, 5.0)), nodes=(node(),))
    schedule = Schedule.of([place(0, 0.0, "n:0", "n:1"), place(1, 5.0, "n:0"), place(2, 5.0, "n:1")])
    lines = gantt_lines(problem, schedule, 34)
    assert lines[0].split() == ["0", "15.0", "s"]
    assert lines[1] == "n:0 " + "a" * 10 + "b" * 20
    assert lines[2] == "n:1 " + "a" * 10 + "c" * 10 + "." * 10
    assert lines[4].startswith("a  first   data on 2 cpu, 0.0 s")
    assert max(map(len, lines)) <= 34


def test_nothing_to_show():
    assert gantt_lines(Problem(options=(), nodes=(node(),)), Schedule(placements=()), 80) == ["nothing is scheduled"]


def test_a_wide_option_is_on_all_of_its_devices_and_long_names_are_cut():
    problem = Problem(
        options=(Option(tasks=("a",), kind="cpu", devices=3, seconds=1.0, spans=True),),
        nodes=(node("a-very-long-name-of-a-node", 2), node("b", 1)),
    )
    devices = [device for one in problem.nodes for device in one.devices]
    lines = gantt_lines(problem, Schedule.of([place(0, 0.0, *devices)]), 60)
    rows = [line for line in lines if line.rstrip().endswith("aaa")]
    assert len(rows) == 3
    assert rows[0].startswith("a-very-long-nam…")


def test_many_devices_are_shown_by_node():
    nodes = tuple(node(f"n{i}", 16) for i in range(4))
    options = (option("half", 8, 10.0), option("all", 16, 10.0))
    problem = Problem(options=options, nodes=nodes)
    schedule = Schedule.of([place(0, 0.0, *nodes[0].devices[:8]), place(1, 0.0, *nodes[1].devices)])
    lines = gantt_lines(problem, schedule, 40)
    assert len(lines) == 6
    assert set(lines[1].split()[1]) == {"▒"}
    assert set(lines[2].split()[1]) == {"█"}
    assert lines[3].split() == ["n2"]
    assert max(map(len, lines)) <= 70


def test_many_tasks_are_not_all_named():
    options = tuple(option(f"t{i:03}", 1, 1.0) for i in range(100))
    problem = Problem(options=options, nodes=(node(devices=1),))
    schedule = Schedule.of([place(i, float(i), "n:0") for i in range(100)])
    lines = gantt_lines(problem, schedule, 104)
    assert lines[1].startswith("n:0 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789abc")
    assert lines[-1].strip() == "and 52 more"


def test_a_short_task_beside_a_long_idle_time_shows_as_idle():
    problem = Problem(options=(option("a", 1, 100.0), option("b", 1, 0.1)), nodes=(node(),))
    lines = gantt_lines(problem, Schedule.of([place(0, 0.0, "n:0"), place(1, 50.0, "n:1")]), 14)
    assert lines[2] == "n:1 " + "." * 10
