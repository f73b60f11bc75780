"""Boxes against sets of points: each element's value is 12 drops, and a share is some of them."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import InputError
from rota.plan.box import Box, even_widths, first_overlap, missing

DROPS = 12


def points(box):
    """The (index, ..., drop) points of a box."""
    low, high = (int(edge * DROPS) for edge in box.share)
    return set(itertools.product(*(range(start, stop) for start, stop in box.ranges), range(low, high)))


def intervals(size):
    starts = st.integers(0, size - 1)
    return starts.flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, size)))


@st.composite
def boxes(draw, shape):
    low, high = draw(intervals(DROPS))
    return Box(
        ranges=tuple(draw(intervals(size)) for size in shape), share=(Fraction(low, DROPS), Fraction(high, DROPS))
    )


shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def several_boxes(draw, at_most=5):
    shape = draw(shapes)
    return shape, draw(st.lists(boxes(shape), min_size=1, max_size=at_most))


@given(several_boxes(at_most=2))
def test_intersection_containment_and_volume_are_those_of_the_points(drawn):
    _, found = drawn
    one, other = found[0], found[-1]
    common = one.intersect(other)
    assert (points(common) if common else set()) == points(one) & points(other)
    assert one.contains(other) == (points(other) <= points(one))
    assert one.volume * DROPS == len(points(one))
    assert one.size * DROPS == len(points(Box(ranges=one.ranges)))


@given(several_boxes(at_most=2))
def test_what_is_left_is_disjoint_and_exactly_the_rest(drawn):
    _, found = drawn
    one, other = found[0], found[-1]
    left = one.minus(other)
    assert set().union(*map(points, left)) == points(one) - points(other)
    assert sum(len(points(piece)) for piece in left) == len(points(one) - points(other))


@settings(max_examples=150)
@given(several_boxes())
def test_what_is_missing_is_what_no_box_has(drawn):
    shape, (target, *others) = drawn
    assert set().union(*map(points, missing(target, others))) == points(target) - set().union(*map(points, others))
    assert (missing(Box.whole(shape), others) == ()) == (points(Box.whole(shape)) <= set().union(*map(points, others)))


@given(several_boxes())
def test_an_overlap_is_found_if_and_only_if_different_boxes_share_a_point(drawn):
    _, found = drawn
    pairs = itertools.combinations(dict.fromkeys(found), 2)
    expected = any(points(one) & points(other) for one, other in pairs)
    assert (first_overlap(found) is not None) == expected


@given(several_boxes(at_most=1), st.data())
def test_a_part_of_a_part_is_where_it_should_be(drawn, data):
    _, (outer,) = drawn
    inner = data.draw(boxes(outer.shape))
    found = outer.part(inner)
    assert outer.contains(found)
    assert found.volume == inner.volume * (outer.share[1] - outer.share[0])
    assert found.inside(outer) == tuple(slice(start, stop) for start, stop in inner.ranges)
    deeper = data.draw(boxes(inner.shape))
    assert outer.part(inner.part(deeper)) == outer.part(inner).part(deeper)


@given(several_boxes(at_most=1), st.data())
def test_splits_are_disjoint_and_cover(drawn, data):
    shape, (box,) = drawn
    if shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        width = box.shape[dim]
        parts = data.draw(st.integers(1, width))
        pieces = box.split(dim, even_widths(width, parts))
        assert len(pieces) == parts
        assert max(p.shape[dim] for p in pieces) - min(p.shape[dim] for p in pieces) <= 1
        assert missing(box, pieces) == ()
        assert first_overlap(pieces) is None
    shares = box.split_value(data.draw(st.sampled_from([1, 2, 3, 5])))
    assert sum(piece.volume for piece in shares) == box.volume
    assert missing(box, shares) == ()
    assert first_overlap(shares) is None


def test_a_scalar_and_an_empty_tensor_are_boxes_too():
    scalar = Box.whole(())
    assert scalar.size == 1
    assert missing(scalar, scalar.split_value(3)) == ()
    assert missing(scalar, scalar.split_value(3)[:2]) == (Box(ranges=(), share=(Fraction(2, 3), Fraction(1))),)
    assert missing(Box.whole((0, 4)), []) == ()


@pytest.mark.parametrize(("size", "parts"), [(3, 0), (3, 4), (0, 1), (3, -1)])
def test_impossible_cuts_are_refused(size, parts):
    with pytest.raises(InputError, match="cannot be cut"):
        even_widths(size, parts)
    with pytest.raises(InputError, match="add up to 6"):
        Box.whole((6,)).split(0, [2, 2])


def test_boxes_read_like_slices():
    assert str(Box.whole((4, 8))) == "[0:4, 0:8]"
    assert str(Box.whole((4,)).split_value(2)[1]) == "[0:4] 1/2..1"
