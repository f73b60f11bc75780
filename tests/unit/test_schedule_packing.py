"""List scheduling, insertion and the left shift: exact cases."""

from rota.schedule.arrays import Arrays
from rota.schedule.insertion import insert
from rota.schedule.packing import left_shift, pack
from rota.schedule.problem import Node, Option, Placement, Problem, Schedule, check


def node(name="n", devices=4, kind="a", **changes):
    return Node(name=name, kind=kind, devices=tuple(f"{name}/{i}" for i in range(devices)), **changes)


def option(task, devices, seconds, kind="a", **changes):
    return Option(tasks=(task,), kind=kind, devices=devices, seconds=seconds, **changes)


def starts(options, nodes, how=pack, **keywords):
    problem = Problem(options=tuple(options), nodes=tuple(nodes))
    schedule = how(Arrays.of(problem), range(len(options)), **keywords)
    check(problem, schedule)
    found = {one.option: one for one in schedule.placements}
    return [found[i].start_s for i in range(len(options))], [set(found[i].devices) for i in range(len(options))]


def test_each_starts_when_enough_devices_of_a_node_are_free():
    options = [option("t", 3, 5.0), option("u", 1, 2.0), option("v", 2, 1.0), option("w", 1, 1.0)]
    assert starts(options, [node()])[0] == [0.0, 0.0, 5.0, 2.0]


def test_of_equal_starts_the_node_with_less_left_over_is_taken():
    options = [option("t", 2, 5.0), option("u", 2, 5.0), option("v", 4, 5.0)]
    begun, devices = starts(options, [node("n"), node("m", 2), node("o")])
    assert begun == [0.0, 0.0, 0.0]
    assert devices[0] == {"m/0", "m/1"}


def test_devices_that_waited_least_are_taken():
    options = [option("t", 1, 1.0), option("u", 1, 3.0), option("v", 2, 4.0), option("w", 1, 1.0), option("x", 1, 9.0)]
    # v waits for three of them (1, 3, 0): it takes those of 1 and 0 at 1; w the one of 3.
    assert starts(options, [node(devices=3)])[0] == [0.0, 0.0, 1.0, 3.0, 4.0]


def test_held_options_go_on_where_they_are():
    options = [option("t", 2, 5.0), option("u", 2, 3.0, held=("n/1", "n/2"))]
    begun, devices = starts(options, [node(devices=3)])
    assert begun == [3.0, 0.0]
    assert devices[1] == {"n/1", "n/2"}


def test_spanning_options_take_few_nodes():
    options = [option("t", 1, 9.0), option("u", 5, 1.0, spans=True), option("v", 3, 1.0, spans=True)]
    begun, devices = starts(options, [node("n", 2), node("m", 4), node("o", 4)])
    assert begun == [0.0, 0.0, 0.0]
    assert len({device.split("/")[0] for device in devices[2]}) == 1


def test_where_it_is_cheap():
    options = [option("t", 2, 5.0), option("u", 2, 5.0)]
    nodes = [node("n", 2, price_per_hour=2.0), node("m", 2, price_per_hour=1.0)]
    assert starts(options, nodes)[0] == [0.0, 0.0]
    assert starts(options, nodes, cheap=True) == ([0.0, 5.0], [{"m/0", "m/1"}] * 2)


def test_exactly_there():
    options = [option("t", 1, 5.0), option("u", 3, 5.0, spans=True)]
    begun, devices = starts(options, [node("n", 2), node("m", 2)], at={0: {1: 1}, 1: {0: 1, 1: 2}})
    assert begun == [0.0, 5.0]
    assert {"m/0", "m/1"} < devices[1]


def test_insertion_fills_holes():
    options = [option("t", 2, 5.0), option("u", 4, 5.0), option("v", 2, 5.0), option("w", 1, 6.0)]
    assert starts(options, [node()])[0] == [0.0, 5.0, 10.0, 10.0]
    assert starts(options, [node()], how=insert)[0] == [0.0, 5.0, 0.0, 10.0]


def test_the_left_shift_keeps_devices_and_order():
    problem = Problem(options=(option("t", 1, 2.0), option("u", 2, 3.0)), nodes=(node(devices=2),))
    late = Schedule.of(
        [
            Placement(option=0, start_s=1.0, devices=("n/1",)),
            Placement(option=1, start_s=7.0, devices=("n/0", "n/1")),
        ]
    )
    assert [one.start_s for one in left_shift(problem, late).placements] == [0.0, 2.0]
