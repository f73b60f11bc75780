"""Shard alternation on a virtual clock: never worse than simple rules on average, near the bound, near the optimum."""

import functools
import random
import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.memory.sharp import Pool, Work, at_random, first_come, longest_remaining, lower_bound_s, play

works = st.lists(
    st.builds(
        lambda units, steps: (tuple(units), steps),
        st.lists(st.floats(0.1, 3.0), min_size=1, max_size=5),
        st.integers(1, 6),
    ),
    min_size=1,
    max_size=8,
).map(lambda all: [Work(name=f"m{i}", units_s=units, steps=steps) for i, (units, steps) in enumerate(all)])


@settings(max_examples=300, deadline=None)
@given(works=works, devices=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_unit_runs_once_in_order_and_no_device_runs_two(works, devices, seed):
    dice = random.Random(seed)
    pool = Pool(pick=dice.choice([longest_remaining, first_come, at_random(seed)]))
    steps = {work.name: work.steps for work in works}
    ran = dict.fromkeys(steps, 0)
    for work in works:
        pool.add(work.name, work.units_s, after_s=(work.steps - 1) * sum(work.units_s))
    while not pool.done:
        for device in range(devices):
            if pool.coming(device) is None:
                pool.choose(device)
            coming = pool.coming(device)
            if coming is not None and pool.is_ready(coming) and pool.running(device) is None:
                pool.began(device)
        running = {device: pool.running(device) for device in range(devices) if pool.running(device) is not None}
        assert len(set(running.values())) == len(running), "a model's units run one after another"
        device = dice.choice(sorted(running))
        name = running[device]
        ran[name] += 1
        if pool.ended(device):
            steps[name] -= 1
            if steps[name]:
                work = next(work for work in works if work.name == name)
                pool.add(name, work.units_s, after_s=(steps[name] - 1) * sum(work.units_s))
            assert steps[name] or pool.coming(device) != name, "its last unit is not followed by another of its own"
    for work in works:
        assert ran[work.name] == len(work.units_s) * work.steps


@settings(max_examples=200, deadline=None)
@given(works=works, devices=st.integers(1, 5))
def test_it_is_never_shorter_than_the_bound(works, devices):
    assert play(works, devices) >= lower_bound_s(works, devices) * (1 - 1e-9)


def instances(count, *, models, devices, dominated=False):
    dice = random.Random(1)
    for _ in range(count):
        found = []
        for number in range(models):
            units = tuple(dice.uniform(0.5, 2) for _ in range(dice.randint(4, 12)))
            found.append(Work(name=f"m{number}", units_s=units, steps=dice.randint(5, 30)))
        longest = max(work.total_s for work in found)
        if dominated or longest <= 0.7 * sum(work.total_s for work in found) / devices:
            yield found


def test_it_is_not_worse_than_first_come_or_random_on_average_and_near_the_bound():
    of_bound, of_first, of_random = [], [], []
    for seed, works in enumerate(instances(60, models=10, devices=3)):
        ours = play(works, 3)
        of_bound.append(ours / lower_bound_s(works, 3))
        of_first.append(play(works, 3, pick=first_come) / ours)
        of_random.append(play(works, 3, pick=at_random(seed)) / ours)
    assert len(of_bound) >= 30
    assert statistics.mean(of_bound) <= 1.05
    assert statistics.mean(of_first) >= 1
    assert statistics.mean(of_random) >= 1


def test_where_one_model_dominates_it_runs_all_the_time():
    works = [
        Work(name="long", units_s=(1.0, 2.0), steps=20),
        *(Work(name=f"m{i}", units_s=(1.0,), steps=10) for i in range(3)),
    ]
    assert play(works, 2) <= 1.05 * lower_bound_s(works, 2)


def optimum(works, devices):
    """The shortest makespan, by trying everything; units have whole seconds."""

    rows = [list(work.units_s) * work.steps for work in works]

    @functools.cache
    def search(places, ready, free):
        if all(place == len(row) for place, row in zip(places, rows, strict=True)):
            return max(free + ready)
        now = free[0]
        found = float("inf")
        for model, (place, row) in enumerate(zip(places, rows, strict=True)):
            if place < len(row):
                end = max(now, ready[model]) + row[place]
                found = min(
                    found,
                    search(
                        (*places[:model], place + 1, *places[model + 1 :]),
                        (*ready[:model], end, *ready[model + 1 :]),
                        tuple(sorted((end, *free[1:]))),
                    ),
                )
        return found

    return search((0,) * len(rows), (0,) * len(rows), (0,) * devices)


def test_it_is_near_the_optimum_of_tiny_instances():
    ratios = []
    dice = random.Random(2)
    for _ in range(60):
        works = [
            Work(name=f"m{i}", units_s=tuple(float(dice.randint(1, 4)) for _ in range(2)), steps=dice.randint(1, 2))
            for i in range(3)
        ]
        ratios.append(play(works, 2) / optimum(works, 2))
    assert min(ratios) >= 1 - 1e-9, "nothing beats the optimum"
    assert statistics.mean(ratios) <= 1.06
    assert max(ratios) <= 4 / 3


def test_a_model_that_leaves_does_not_stop_the_others():
    pool = Pool()
    for name in "abc":
        pool.add(name, (1.0, 1.0))
    gone = pool.choose(0)
    pool.began(0)
    pool.leave(gone)
    for _ in range(2 * 2):
        assert pool.choose(0) in set("abc") - {gone}
        pool.began(0)
        pool.ended(0)
    assert pool.done


def test_loads_are_hidden_behind_other_units():
    works = [Work(name=f"m{i}", units_s=(1.0,) * 4, steps=5) for i in range(6)]
    hidden = play(works, 2, loads_s={work.name: 0.5 for work in works})
    assert hidden <= 1.05 * play(works, 2)


def test_more_devices_than_models_leave_some_idle():
    works = [Work(name=f"m{i}", units_s=(1.0, 1.0), steps=2) for i in range(2)]
    assert play(works, 5) == 4.0


def test_behind_the_last_unit_that_is_known_nothing_comes_where_it_must_be_known():
    for known in (False, True):
        pool = Pool()
        pool.add("a", (1.0, 1.0), after_s=2.0)
        assert pool.choose(0) == "a"
        pool.began(0)
        assert pool.choose(0, known=known) == "a"  # its second one
        pool.ended(0)
        pool.began(0)
        assert pool.choose(0, known=known) == (None if known else "a")
