"""Replanning recovers most of what wrong estimates lose, and loses nothing where they are right; on a virtual clock."""

import pytest

from rota.schedule.problem import Node
from rota.testing.clusters import misjudged, play, random_tasks

NODES = (Node(name="n", kind="fake", devices=("d0", "d1", "d2", "d3")),)
SEEDS = range(100, 104)
"""Not those that the rules were made with."""


def sweep(seed):
    return random_tasks(seed, tasks=7, widths=(1, 2, 4))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("each_way", [False, True])
def test_replanning_recovers_half_of_what_wrong_estimates_lose(each_way):
    lost = recovered = 0.0
    for seed in SEEDS:
        tasks = sweep(seed)
        wrong = misjudged(tasks, seed, most=0.5, each_way=each_way)
        right = play(tasks, NODES, replan=False, steps=1).makespan_s
        without = play(tasks, NODES, estimates=wrong, replan=False, steps=1).makespan_s
        with_it = play(tasks, NODES, estimates=wrong, steps=1).makespan_s
        lost += without - right
        recovered += without - with_it
    assert lost > 0
    assert recovered >= 0.5 * lost


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", SEEDS)
def test_replanning_loses_nothing_where_estimates_are_right(seed):
    tasks = sweep(seed)
    assert play(tasks, NODES, steps=1).makespan_s <= 1.02 * play(tasks, NODES, replan=False, steps=1).makespan_s


@pytest.mark.timeout(120)
def test_no_step_is_taken_twice_by_switching():
    tasks = sweep(1)
    played = play(tasks, NODES, estimates=misjudged(tasks, 1, most=0.5, each_way=False), steps=1)
    assert played.switches > 0
    for task in tasks:
        record = played.record.tasks[task.name]
        assert record.state.value == "finished"
        trained_s = sum(
            (spans[0].end_s - spans[0].begin_s)
            for spans in ([s for s in record.spans if s.attempt == a] for a in {s.attempt for s in record.spans})
        )
        # At most every step at its slowest, and a start for each attempt.
        slowest_s = max(way.step_s for way in task.ways) * task.steps
        assert trained_s <= slowest_s + 3.0 * record.attempt
