"""Random steps and budgets: what is read is there, nothing is lost or written in vain, and the budget always holds."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import FitError
from rota.memory.residency import Item, Rates, Stage, plan_residency, predict

RATES = Rates(read_byte_s=1.0, write_byte_s=1.0)


@st.composite
def steps(draw):
    """Stages that use lasting items at random, and make and end others."""
    count = draw(st.integers(1, 9))
    stages = [{"reads": set(), "changes": set(), "makes": set(), "ends": set()} for _ in range(count)]
    items = {}
    for number in range(draw(st.integers(0, 6))):
        name = f"lasting{number}"
        items[name] = Item(size_bytes=draw(st.integers(0, 5)), lasting=True, movable=draw(st.integers(0, 5)) > 0)
        for position in draw(st.sets(st.integers(0, count - 1), min_size=1)):
            stages[position]["reads"].add(name)
            if draw(st.booleans()):
                stages[position]["changes"].add(name)
    for number in range(draw(st.integers(0, 4))):
        name = f"made{number}"
        items[name] = Item(size_bytes=draw(st.integers(0, 5)), movable=draw(st.integers(0, 5)) > 0)
        first, *others = sorted(draw(st.sets(st.integers(0, count - 1), min_size=1)))
        stages[first]["makes"].add(name)
        for position in others:
            stages[position]["reads"].add(name)
            if draw(st.integers(0, 3)) == 0:
                stages[position]["changes"].add(name)
        stages[(others or [first])[-1]]["ends"].add(name)
    made = tuple(
        Stage(
            name=f"stage {position}",
            work_bytes=draw(st.integers(0, 3)),
            seconds=draw(st.floats(0, 4)),
            **{key: frozenset(value) for key, value in one.items()},
        )
        for position, one in enumerate(stages)
    )
    return made, items


def replay(residency, *, steps):
    """The most bytes that are ever there; AssertionError if something is missing, lost, or written without need."""
    items, count = residency.items, len(residency.stages)
    present = set().union(*residency.present_before(0))
    leaving = set()
    dirty = set()
    unsure = set(present)
    """Of which a step before the first one would have told whether they have changed."""
    stored = {name for name, item in items.items() if item.lasting}
    """Of which there is a true copy outside."""
    peak = 0
    for _, position in itertools.product(range(steps), range(count)):
        stage = residency.stages[position]
        for write in residency.writes:
            if write.by % count == position:
                leaving.discard(write.item)
        for load in residency.beginning[position]:
            assert load.item not in leaving, f"{load.item} comes back before it has left"
            assert load.item not in present, f"{load.item} is there already"
            assert load.item in stored, f"{load.item} is nowhere"
            present.add(load.item)
            unsure.discard(load.item)
        assert not stage.makes & present
        present |= stage.makes
        assert stage.holds <= present, f"{stage.name} lacks {sorted(stage.holds - present)}"
        peak = max(peak, stage.work_bytes + sum(items[name].size_bytes for name in present | leaving))
        dirty |= stage.changes | stage.makes
        stored -= stage.changes | stage.makes
        present -= stage.ends
        dirty -= stage.ends
        for dropped in residency.drops[position]:
            assert dropped not in dirty, f"{dropped} is lost"
            present.remove(dropped)
        for write in residency.writes:
            if write.stage == position:
                assert write.item in dirty | unsure, f"{write.item} is written and has not changed"
                present.remove(write.item)
                dirty.discard(write.item)
                stored.add(write.item)
                if write.by > position + 1:
                    leaving.add(write.item)
    return peak


def least_bytes(stages, items):
    """The smallest budget that works, found by trying."""
    for budget in itertools.count():
        try:
            plan_residency(stages, items, budget_bytes=budget, rates=RATES)
        except FitError:
            continue
        return budget


@settings(max_examples=400)
@given(steps(), st.integers(0, 12), st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_the_budget_holds_and_nothing_is_missing_or_lost(step, more, read_byte_s, write_byte_s):
    stages, items = step
    rates = Rates(read_byte_s=read_byte_s, write_byte_s=write_byte_s)
    budget = least_bytes(stages, items) + more
    residency, told = plan_residency(stages, items, budget_bytes=budget, rates=rates)
    assert replay(residency, steps=4) <= max(residency.used_bytes) <= budget
    assert told == predict(residency, rates)
    assert told.step_s >= told.compute_s * (1 - 1e-9)
    read_bytes, written_bytes = residency.moved_bytes
    assert told.step_s <= (told.compute_s + read_bytes * read_byte_s + written_bytes * write_byte_s) * (1 + 1e-9) + 1e-9


@given(steps())
def test_with_room_for_everything_nothing_moves(step):
    stages, items = step
    budget = sum(item.size_bytes for item in items.values()) + 3
    residency, told = plan_residency(stages, items, budget_bytes=budget, rates=RATES)
    assert residency.moved_bytes == (0, 0)
    assert told.step_s == pytest.approx(told.compute_s)
    assert told.limit == "compute"


@given(steps(), st.integers(0, 6))
def test_more_room_is_never_slower(step, more):
    stages, items = step
    budget = least_bytes(stages, items)
    small = plan_residency(stages, items, budget_bytes=budget, rates=RATES)[1]
    large = plan_residency(stages, items, budget_bytes=budget + 100 * more + 100, rates=RATES)[1]
    assert large.step_s <= small.step_s + 1e-9


# ---- the fewest loads ----


def fewest_loads(uses, room):
    """Of items of one byte that are used in turn, over and over: the fewest loads in a step, by trying everything."""
    count = len(uses)
    names = sorted(set(uses))
    states = [frozenset(one) for size in range(room + 1) for one in itertools.combinations(names, size)]

    @functools.cache
    def best(position, before, first):
        if position == count:
            return 0 if before == first else float("inf")
        item = uses[position]
        cost = item not in before
        within = before | {item}
        return cost + min(
            (best(position + 1, after, first) for after in states if after <= within and len(within) <= room),
            default=float("inf"),
        )

    return min(best(0, state, state) for state in states)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 5))
def test_no_other_choice_of_what_stays_needs_fewer_loads(uses, room):
    """With stages that take no time, so that nothing is gained by leaving room for what is on its way."""
    names = [str(item) for item in uses]
    items = {name: Item(size_bytes=1, lasting=True) for name in names}
    stages = [Stage(name=f"{i}", reads=frozenset({name})) for i, name in enumerate(names)]
    residency, _ = plan_residency(stages, items, budget_bytes=room, rates=RATES)
    assert len(residency.loads) == fewest_loads(names, room)


# ---- a model ----


def shards(count, *, weights=10, moments=20, kept=4, forward_s=10.0):
    """A chain: each shard forward, then backward with its update, in turn."""
    items = {}
    forward, backward = [], []
    for i in range(count):
        items |= {
            f"w{i}": Item(size_bytes=weights, lasting=True),
            f"m{i}": Item(size_bytes=moments, lasting=True),
            f"a{i}": Item(size_bytes=kept, movable=False),
            f"g{i}": Item(size_bytes=weights),
        }
        forward.append(
            Stage(name=f"forward {i}", reads=frozenset({f"w{i}"}), makes=frozenset({f"a{i}"}), seconds=forward_s)
        )
        backward += [
            Stage(
                name=f"update {i}",
                reads=frozenset({f"w{i}", f"m{i}", f"g{i}"}),
                changes=frozenset({f"w{i}", f"m{i}"}),
                ends=frozenset({f"g{i}"}),
                seconds=1.0,
            ),
            Stage(
                name=f"backward {i}",
                reads=frozenset({f"w{i}", f"a{i}"}),
                makes=frozenset({f"g{i}"}),
                ends=frozenset({f"a{i}"}),
                seconds=2 * forward_s,
            ),
        ]
    return [*forward, *reversed(backward)], items


def test_a_chain_keeps_what_it_turns_at_and_hides_what_moves():
    stages, items = shards(8)
    state = sum(item.size_bytes for item in items.values() if item.lasting)
    rates = Rates(read_byte_s=0.2, write_byte_s=0.2)
    residency, told = plan_residency(stages, items, budget_bytes=state // 2, rates=rates)
    assert replay(residency, steps=3) <= state // 2
    assert told.limit == "compute"
    assert not any(load.item == "w7" and load.stage == 8 for load in residency.loads), "the last shard stays"
    clean = {item for dropped in residency.drops for item in dropped}
    assert clean
    assert all(item.startswith("w") for item in clean), "weights that a forward pass read are dropped, not written"


def test_without_room_the_stage_and_the_least_budget_are_named():
    stages, items = shards(3)
    with pytest.raises(FitError, match=r"update \d needs 48 bytes at once.*at least 48"):
        plan_residency(stages, items, budget_bytes=40, rates=RATES)
    plan_residency(stages, items, budget_bytes=48, rates=RATES)
