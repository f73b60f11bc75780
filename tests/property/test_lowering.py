"""Both lowerings against an executor that knows only what each kind of step does to arrays."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import CoverError
from rota.plan.box import Box, even_widths
from rota.plan.collectives import Link, lower
from rota.plan.layout import Kind, Piece, Step, canonical
from rota.plan.reference import lower_reference
from rota.plan.step_check import check_step

LOWERINGS = [lower_reference, lower]


# --- What the steps do ---------------------------------------------------------------------------------------------


def run(steps, held):
    """The arrays by piece after the steps; a step that reads what is not there fails."""
    arrays = dict(held)
    for step in steps:
        inputs = [arrays[piece] for piece in step.inputs]
        outputs = KINDS[step.kind](step, inputs)
        assert len(outputs) == len(step.outputs), str(step)
        for piece, array in zip(step.outputs, outputs, strict=True):
            assert array.shape == piece.box.shape, str(step)
            arrays[piece] = array
    return arrays


def cut_dim(pieces):
    """The one dim along which the ranges differ."""
    (dim,) = [i for i, ranges in enumerate(zip(*(p.box.ranges for p in pieces), strict=True)) if len(set(ranges)) > 1]
    return dim


def widths(pieces, dim):
    return [piece.box.shape[dim] for piece in pieces]


def split(array, sizes, dim):
    assert sum(sizes) == array.shape[dim]
    return np.split(array, list(itertools.accumulate(sizes))[:-1], axis=dim)


def run_local(step, inputs):
    (output,) = step.outputs
    assert {piece.device for piece in step.inputs} <= {output.device}
    if len(inputs) == 1 and step.inputs[0].box.contains(output.box):
        box = step.inputs[0].box
        array = inputs[0][output.box.inside(box)]
        return [array if box.share[0] == output.box.share[0] else np.zeros_like(array)]
    result = np.zeros(output.box.shape, dtype=np.int64)
    for piece, array in zip(step.inputs, inputs, strict=True):
        result[piece.box.inside(output.box)] += array
    return [result]


def run_send(step, inputs):
    assert step.inputs[0].device != step.outputs[0].device
    return inputs


def run_all_gather(step, inputs):
    return [np.concatenate(inputs, axis=cut_dim(step.inputs))] * len(inputs)


def run_all_reduce(step, inputs):
    return [np.sum(inputs, axis=0)] * len(inputs)


def run_reduce_scatter(step, inputs):
    dim = cut_dim(step.outputs)
    return split(np.sum(inputs, axis=0), widths(step.outputs, dim), dim)


def run_all_to_all(step, inputs):
    read, written = cut_dim(step.inputs), cut_dim(step.outputs)
    chunks = [split(array, widths(step.outputs, written), written) for array in inputs]
    return [np.concatenate(received, axis=read) for received in zip(*chunks, strict=True)]


KINDS = {
    Kind.LOCAL: run_local,
    Kind.SEND: run_send,
    Kind.ALL_GATHER: run_all_gather,
    Kind.ALL_REDUCE: run_all_reduce,
    Kind.REDUCE_SCATTER: run_reduce_scatter,
    Kind.ALL_TO_ALL: run_all_to_all,
}


# --- What should come out ------------------------------------------------------------------------------------------


class Values:
    """Each source share of each element is a random number, and sits where the share begins."""

    def __init__(self, source, shape, seed=0):
        generator = np.random.default_rng(seed)
        starts = sorted({piece.box.share[0] for piece in source})
        self._at = {start: np.zeros(shape, dtype=np.int64) for start in starts}
        for box in dict.fromkeys(piece.box for piece in source):
            where = tuple(slice(*one) for one in box.ranges)
            numbers = generator.integers(1, 1_000_000, size=box.shape)
            self._at[box.share[0]][where] = np.where(
                self._at[box.share[0]][where], self._at[box.share[0]][where], numbers
            )

    def __call__(self, box):
        where = tuple(slice(*one) for one in box.ranges)
        low, high = box.share
        parts = [array[where] for start, array in self._at.items() if low <= start < high]
        return np.sum(parts, axis=0) if parts else np.zeros(box.shape, dtype=np.int64)


def received(steps):
    return sum(step.received_elements for step in steps)


def check(steps, source, target, shape):
    values = Values(source, shape)
    there = set(source)
    for step in steps:
        assert check_step(step) is None
        assert there.isdisjoint(step.outputs), f"{step} makes what is there"
        there.update(step.outputs)
    arrays = run(steps, {piece: values(piece.box) for piece in source})
    for piece in target:
        np.testing.assert_array_equal(arrays[piece], values(piece.box), err_msg=str(piece))


def check_both(source, target, shape):
    reference, fast = lower_reference(source, target), lower(source, target)
    check(reference, source, target, shape)
    check(fast, source, target, shape)
    assert received(fast) <= received(reference)
    return fast


# --- Regular layouts -----------------------------------------------------------------------------------------------

AXES = ("R", "V", "D0", "D1")


def grid(degrees, shape, *, devices=None, order=AXES, uneven=False):
    """A layout with so many replicas, partial sums and parts of each dim; `order` has the slowest axis first."""
    degrees = dict.fromkeys(AXES, 1) | degrees
    count = math.prod(degrees.values())
    devices = list(range(count)) if devices is None else devices
    pieces = []
    for number, indices in enumerate(itertools.product(*(range(degrees[axis]) for axis in order))):
        at = dict(zip(order, indices, strict=True))
        box = Box.whole(shape)
        for dim in range(len(shape)):
            parts = degrees[f"D{dim}"]
            sizes = even_widths(shape[dim], parts)
            if uneven and parts > 1:
                sizes = (1,) * (parts - 1) + (shape[dim] - parts + 1,)
            box = box.split(dim, sizes)[at[f"D{dim}"]]
        pieces.append(Piece(device=devices[number], box=box.split_value(degrees["V"])[at["V"]]))
    return tuple(pieces)


def all_degrees(count):
    for parts in itertools.product(range(1, count + 1), repeat=len(AXES)):
        if math.prod(parts) == count:
            yield dict(zip(AXES, parts, strict=True))


@pytest.mark.parametrize("count", [*range(1, 7), *(pytest.param(count, marks=pytest.mark.deep) for count in (7, 8))])
def test_every_pair_of_regular_layouts(count):
    for shape in ((count, 2 * count), (count + 1, 2 * count + 3)):
        layouts = [grid(degrees, shape) for degrees in all_degrees(count)]
        for source, target in itertools.product(layouts, repeat=2):
            check_both(source, target, shape)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_regular_layouts_on_devices_in_any_order(data):
    count = data.draw(st.sampled_from([4, 6, 8]))
    shape = (count + data.draw(st.integers(0, 3)), count + data.draw(st.integers(0, 3)))
    layouts = [
        grid(
            data.draw(st.sampled_from(list(all_degrees(count)))),
            shape,
            devices=data.draw(st.permutations(range(10, 10 + count))),
            order=data.draw(st.permutations(AXES)),
            uneven=data.draw(st.booleans()),
        )
        for _ in range(2)
    ]
    check_both(*layouts, shape)


def test_the_order_of_a_group_is_that_of_its_parts():
    shape = (9, 10)
    shuffled = [2, 0, 3, 1]
    for axis, other, kind in (("D0", "R", Kind.ALL_GATHER), ("V", "D1", Kind.REDUCE_SCATTER)):
        source, target = (grid({degree: 4}, shape, devices=shuffled) for degree in (axis, other))
        (step,) = check_both(source, target, shape)
        assert step.kind is kind
        assert step.group == tuple(shuffled)


def test_groups_may_be_cut_in_different_places():
    top, bottom = Box.whole((4, 10)).split(0, [2, 2])
    source = tuple(Piece(device=i, box=box) for i, box in enumerate((*top.split_value(2), *bottom.split_value(2))))
    target = tuple(Piece(device=i, box=box) for i, box in enumerate((*top.split(1, [3, 7]), *bottom.split(1, [8, 2]))))
    assert kinds(check_both(source, target, (4, 10))) == [Kind.REDUCE_SCATTER] * 2


def kinds(steps):
    return [step.kind for step in steps if step.kind is not Kind.LOCAL]


TEXTBOOK = [
    ("V", "R", Kind.ALL_REDUCE),
    ("D0", "R", Kind.ALL_GATHER),
    ("D1", "R", Kind.ALL_GATHER),
    ("V", "D0", Kind.REDUCE_SCATTER),
    ("V", "D1", Kind.REDUCE_SCATTER),
    ("D0", "D1", Kind.ALL_TO_ALL),
    ("D1", "D0", Kind.ALL_TO_ALL),
]


@pytest.mark.parametrize("shape", [(64, 64), (67, 39)])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("before", "after", "kind"), TEXTBOOK)
def test_one_collective_where_one_does_it(before, after, kind, uneven, shape):
    for count in (2, 3, 4, 5, 6, 7, 8, 16, 32):
        source, target = (grid({axis: count}, shape, uneven=uneven) for axis in (before, after))
        steps = lower(source, target)
        assert [step.kind for step in steps] == [kind]
        check(steps, source, target, shape)


@pytest.mark.parametrize(("before", "after", "kind"), TEXTBOOK)
@pytest.mark.parametrize("kept", AXES)
@pytest.mark.parametrize("kept_first", [False, True])
def test_one_collective_per_group_beside_an_axis_that_stays(before, after, kind, kept, kept_first):
    shape = (12, 15)
    order = (kept, *(axis for axis in AXES if axis != kept))
    order = order if kept_first else order[::-1]
    for count, others in itertools.product((2, 3, 4), (2, 3)):
        if kept in (before, after):
            continue
        layouts = [grid({axis: count, kept: others}, shape, order=order) for axis in (before, after)]
        steps = lower(*layouts)
        assert [step.kind for step in steps] == [kind] * others
        check(steps, *layouts, shape)


@pytest.mark.parametrize("after", [{"D0": 8}, {"D1": 8}, {"V": 8}, {"D0": 2, "D1": 4}, {"V": 2, "D1": 2, "R": 2}])
def test_what_is_replicated_is_cut_where_it_is(after):
    shape = (11, 13)
    source, target = grid({"R": 8}, shape), grid(after, shape)
    steps = lower(source, target)
    assert all(step.kind is Kind.LOCAL and len(step.inputs) == 1 and step.inputs[0] in source for step in steps)
    assert len(steps) == 8
    check(steps, source, target, shape)


def test_nothing_is_done_for_what_is_there():
    layout = grid({"D0": 2, "V": 2}, (4, 4))
    assert lower(layout, layout) == lower_reference(layout, layout) == ()
    assert lower(layout, layout[:1]) == lower_reference(layout, layout[:1]) == ()
    assert lower(layout, ()) == lower_reference(layout, ()) == ()


def test_collectives_save_much_where_the_reference_is_poor():
    shape = (32, 8)
    source, target = grid({"V": 8}, shape), grid({"R": 8}, shape)
    assert received(lower_reference(source, target)) == 8 * 7 * 256
    assert received(lower(source, target)) == 2 * 7 * 256
    shape = (2048, 1024)
    source, target = grid({"V": 4, "D0": 2}, shape), grid({"R": 2, "D1": 4}, shape)
    assert received(lower(source, target)) < received(lower_reference(source, target))


def test_a_slow_start_makes_fewer_steps():
    """Replicas may share a reduction among them, if the bytes are worth the steps."""
    shape = (1024, 8)
    source, target = grid({"R": 2, "V": 4}, shape), grid({"R": 8}, shape)
    for link in (Link(latency_s=1.0), Link(latency_s=1e-12)):
        check(lower(source, target, link=link), source, target, shape)
    assert kinds(lower(source, target, link=Link(latency_s=1.0))) == [Kind.ALL_REDUCE] * 2


# --- Several pieces on a device ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"V": 8}, {"R": 4}, [Kind.ALL_REDUCE]),
        ({"D0": 8}, {"R": 4}, [Kind.ALL_GATHER]),
        ({"V": 8}, {"D0": 8}, [Kind.REDUCE_SCATTER]),
        ({"V": 4}, {"D1": 8}, [Kind.REDUCE_SCATTER]),
        ({"D0": 8}, {"D1": 8}, [Kind.ALL_TO_ALL]),
        ({"D0": 4}, {"D0": 8}, []),
        ({"D0": 8}, {"D0": 4}, []),
        ({"V": 8}, {"V": 4}, []),
    ],
)
def test_several_pieces_on_a_device_are_put_together_first(before, after, expected):
    shape = (16, 9)

    def on_four(degrees):
        count = math.prod(degrees.values())
        return grid(degrees, shape, devices=[i * 4 // count for i in range(count)])

    source, target = on_four(before), on_four(after)
    assert kinds(check_both(source, target, shape)) == expected


def test_pieces_that_do_not_fit_together_still_arrive():
    shape = (8, 4)
    source = grid({"D0": 8}, shape, devices=[0, 1, 2, 3, 0, 1, 2, 3])
    check_both(source, grid({"D1": 4}, shape), shape)
    check_both(grid({"D1": 4}, shape), source, shape)
    shares = grid({"V": 8}, shape, devices=[0, 1, 2, 3, 0, 1, 2, 3])
    check_both(shares, grid({"R": 4}, shape), shape)


def test_a_device_may_need_a_whole_and_its_parts():
    shape = (8, 4)
    target = (*grid({"R": 4}, shape), *grid({"D0": 4}, shape), *grid({"D1": 4}, shape))
    assert kinds(check_both(grid({"V": 4}, shape), target, shape)) == [Kind.ALL_REDUCE]
    assert kinds(check_both(grid({"D0": 4}, shape), target, shape)) == [Kind.ALL_GATHER]


def test_shares_that_were_added_are_not_taken_apart_again():
    """Both devices keep a share and need a part of the other's: what is added on the way must not stand in for it."""
    shape = (4, 4)
    source = grid({"V": 4}, shape, devices=[0, 0, 1, 1])
    target = (*grid({"V": 4}, shape, devices=[1, 1, 0, 0]), *grid({"R": 2}, shape))
    check_both(source, target, shape)
    check_both(source, grid({"V": 4}, shape, devices=[2, 2, 3, 3]), shape)
    check_both(source, grid({"V": 4, "R": 4}, shape, devices=range(2, 18)), shape)


def test_shares_are_added_only_for_those_who_need_no_part_of_the_sum():
    shape = (4, 4)
    source = grid({"V": 4}, shape, devices=[0, 0, 1, 1])
    half, quarter = Box.whole(shape).split_value(2)[0], Box.whole(shape).split_value(4)[0]
    check_both(source, (Piece(device=2, box=half), Piece(device=3, box=quarter)), shape)
    assert len(kinds(check_both(source, (Piece(device=2, box=half),), shape))) == 1


# --- Other devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 2), (4, 4), (2, 4), (6, 2), (3, 2)])
def test_from_some_devices_to_others(before, after):
    for shape in ((12, 12), (13, 7)):
        for one, other in itertools.product(all_degrees(before), all_degrees(after)):
            source, target = grid(one, shape), grid(other, shape, devices=range(before, before + after))
            check_both(source, target, shape)


def test_from_some_devices_to_some_of_the_same():
    shape = (8, 7)
    for one, other in itertools.product(all_degrees(4), repeat=2):
        check_both(grid(one, shape), grid(other, shape, devices=range(2, 6)), shape)


def test_between_stages_every_byte_is_sent_once():
    shape = (1024, 512)
    source, target = grid({"V": 4}, shape), grid({"R": 4}, shape, devices=range(4, 8))
    steps = check_both(source, target, shape)
    assert kinds(steps) == [Kind.REDUCE_SCATTER, *[Kind.SEND] * 4, Kind.ALL_GATHER]
    assert received(steps) == 7 * 1024 * 512
    same = check_both(grid({"R": 4}, shape), target, shape)
    assert kinds(same) == [Kind.SEND] * 4
    assert {step.inputs[0].device for step in same} == {0, 1, 2, 3}, "the load is on one of the replicas"


# --- Irregular layouts ---------------------------------------------------------------------------------------------


@st.composite
def tilings(draw, box, cuts):
    """Parts of a box by random cuts of dims and values."""
    boxes = [box]
    for _ in range(cuts):
        one = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(one.shape) if size > 1]
        dim = draw(st.sampled_from([*dims, None]))
        if dim is None:
            boxes.extend(one.split_value(draw(st.integers(2, 3))))
        else:
            first = draw(st.integers(1, one.shape[dim] - 1))
            boxes.extend(one.split(dim, [first, one.shape[dim] - first]))
    return boxes


@st.composite
def irregular_layouts(draw, shape):
    boxes = draw(tilings(Box.whole(shape), draw(st.integers(0, 5))))
    devices = st.integers(0, 4)
    pieces = [
        Piece(device=device, box=box)
        for box in boxes
        for device in draw(st.lists(devices, min_size=1, max_size=3, unique=True))
    ]
    return tuple(draw(st.permutations(pieces)))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_irregular_layouts(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    check_both(data.draw(irregular_layouts(shape)), data.draw(irregular_layouts(shape)), shape)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_one_irregular_box_on_each_device(data):
    shape = (5, 6)
    layouts = []
    for _ in range(2):
        boxes = data.draw(tilings(Box.whole(shape), 2))
        copies = 12 // len(boxes) if 12 % len(boxes) == 0 else 1
        layouts.append(tuple(Piece(device=i, box=box) for i, box in enumerate(boxes * copies)))
    check_both(*layouts, shape)


def test_a_device_that_has_a_piece_takes_no_part_in_gathering_it():
    shape = (5, 6)
    upper, lower_rows = Box.whole(shape).split(0, [3, 2])
    before = [lower_rows, *upper.split_value(3)] * 3
    after = [*upper.split(0, [1, 2]), lower_rows] * 4
    layouts = [tuple(Piece(device=i, box=box) for i, box in enumerate(boxes)) for boxes in (before, after)]
    check_both(*layouts, shape)


def test_a_scalar_and_an_empty_tensor():
    source = tuple(Piece(device=i, box=box) for i, box in enumerate(Box.whole(()).split_value(3)))
    target = tuple(Piece(device=i, box=Box.whole(())) for i in range(3))
    assert kinds(check_both(source, target, ())) == [Kind.ALL_REDUCE]
    source = (Piece(device=0, box=Box.whole((0, 3))),)
    target = tuple(Piece(device=i, box=Box.whole((0, 3))) for i in range(2))
    check_both(source, target, (0, 3))


# --- What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("degrees", [{"D0": 4}, {"V": 4}, {"D0": 2, "V": 2}])
def test_a_layout_with_a_hole_is_refused(lowering, degrees):
    shape = (8, 4)
    source = grid(degrees, shape)
    for i in range(4):
        with pytest.raises(
            CoverError, match=r"device 0 needs \[0:8, 0:4\], of which \[.* cannot be made from"
        ) as caught:
            lowering(source[:i] + source[i + 1 :], grid({"R": 4}, shape))
        assert str(source[i].box) in str(caught.value)
    with pytest.raises(CoverError, match="from the layout nothing"):
        lowering((), source)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_overlap_does_not_make_up_for_a_hole(lowering):
    source = tuple(Piece(device=i, box=Box(ranges=(one,))) for i, one in enumerate([(0, 2), (1, 3)]))
    with pytest.raises(CoverError, match=r"\[3:4\] cannot be made"):
        lowering(source, tuple(Piece(device=i, box=Box.whole((4,))) for i in range(2)))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_values_that_are_shared_out_in_two_ways_are_not_mixed(lowering):
    shape = (4,)
    whole = Box.whole(shape)
    half, other_half = whole.split_value(2)
    source = (Piece(device=0, box=whole), Piece(device=1, box=half))
    with pytest.raises(CoverError, match=r"1/2\.\.1 cannot be made"):
        lowering(source, (Piece(device=1, box=other_half),))
    assert kinds(lowering(source, (Piece(device=1, box=whole),))) == [Kind.SEND]


# --- The check of steps --------------------------------------------------------------------------------------------


def some_steps():
    """Steps of all kinds, by both lowerings."""
    shape = (9, 10)
    layouts = [grid(degrees, shape) for degrees in all_degrees(4)]
    for source, target in itertools.product(layouts, repeat=2):
        yield from lower(source, target)
        yield from lower_reference(source, target)


STEPS = list(dict.fromkeys(some_steps()))


def with_box(layout, i, box):
    return (*layout[:i], replace(layout[i], box=box), *layout[i + 1 :])


def shifted(layout, i, dim, by):
    start, stop = layout[i].box.ranges[dim]
    ranges = layout[i].box.ranges
    return with_box(
        layout, i, replace(layout[i].box, ranges=(*ranges[:dim], (start + by, stop + by), *ranges[dim + 1 :]))
    )


def mutants(step):
    """Steps that are all wrong."""
    for kind in Kind:
        if kind is not step.kind:
            yield replace(step, kind=kind)
    for side in ("inputs", "outputs"):
        layout = getattr(step, side)
        for i in range(len(layout)):
            yield replace(step, **{side: layout[:i] + layout[i + 1 :]})
            yield replace(step, **{side: (*layout, layout[i])})
            if step.kind is not Kind.SEND:  # may go from anywhere to anywhere
                yield replace(step, **{side: (*layout[:i], replace(layout[i], device=77), *layout[i + 1 :])})
            low, high = layout[i].box.share
            yield replace(step, **{side: with_box(layout, i, replace(layout[i].box, share=(low - 1, high - 1)))})
            for dim in range(len(layout[i].box.ranges)):
                # A slice may begin elsewhere and be right; a slice of what is not there is never right.
                is_slice = step.kind is Kind.LOCAL and len(step.inputs) == 1
                for by in (100, -100) if is_slice else (1, -1):
                    yield replace(step, **{side: shifted(layout, i, dim, by)})
        for i, j in itertools.combinations(range(len(layout)), 2):
            swapped = list(layout)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            if step.kind is not Kind.LOCAL:
                yield replace(step, **{side: tuple(swapped)})
            if layout[i].box != layout[j].box and (
                side == "outputs" or step.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL)
            ):
                yield replace(step, **{side: with_box(with_box(layout, i, layout[j].box), j, layout[i].box)})
    if step.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL):
        yield replace(step, inputs=step.inputs[::-1], outputs=step.outputs[::-1])


def test_steps_of_all_kinds_pass():
    assert {step.kind for step in STEPS} == set(Kind)
    assert [check_step(step) for step in STEPS] == [None] * len(STEPS)


def test_wrong_steps_are_caught():
    for step in STEPS:
        for mutant in mutants(step):
            problem = check_step(mutant)
            assert problem is not None, f"{step} became {mutant}"
            assert problem.startswith(str(mutant))


def test_wrong_steps_by_hand():
    low, high = Box.whole((4,)).split(0, [2, 2])
    whole = Box.whole((4,))
    half = Fraction(1, 2)

    def local(*boxes, output=whole):
        inputs = tuple(Piece(device=0, box=box) for box in boxes)
        return check_step(Step(kind=Kind.LOCAL, inputs=inputs, outputs=(Piece(device=0, box=output),)))

    assert local(low, high) is None
    assert local(whole, output=low) is None
    assert local(whole, output=replace(low, share=(half, Fraction(1)))) is None
    assert "no input has [2:4]" in local(low)
    assert "overlap" in local(low, high, high)
    assert "overlap" in local(low, Box(ranges=((1, 4),)))
    assert "not a part" in local(whole, high, output=low)
    assert "one of the inputs" in local(whole)
    assert "no input has" in local()
    assert local(output=Box.whole((0,))) is None

    def between(kind, inputs, outputs):
        layouts = [tuple(Piece(device=i, box=box) for i, box in enumerate(boxes)) for boxes in (inputs, outputs)]
        return check_step(Step(kind=kind, inputs=layouts[0], outputs=layouts[1]))

    assert "another dim" in between(Kind.ALL_TO_ALL, whole.split(0, [2, 2]), whole.split(0, [1, 3]))
    assert "another dim" in between(Kind.REDUCE_SCATTER, whole.split_value(2), whole.split_value(2))


def test_layouts_in_any_order_are_the_same():
    source, target = grid({"V": 4}, (4, 4)), grid({"R": 4}, (4, 4))
    assert lower(source[::-1], (*target, *target)) is lower(canonical(source), target)
