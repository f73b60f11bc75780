"""Resharding: whatever the two layouts are, each element of each new piece comes from one place that has it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rota.plan.box import Box, weighted_widths
from rota.plan.layout import Layout, Piece
from rota.plan.reshard import copies_between


@st.composite
def _layout(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    devices = draw(st.integers(1, 4))
    pieces: list[Box] = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 2))):
        dim = draw(st.integers(0, len(shape) - 1))
        cut: list[Box] = []
        for box in pieces:
            size = box.shape[dim]
            place = draw(st.integers(0, size))
            cut += list(box.split(dim, (place, size - place))) if 0 < place < size else [box]
        pieces = cut
    found = {(draw(st.integers(0, devices - 1)), box) for box in pieces}
    found |= {
        (draw(st.integers(0, devices - 1)), draw(st.sampled_from(pieces))) for _ in range(draw(st.integers(0, 2)))
    }
    return tuple(Piece(device=device, box=box) for device, box in found)


@given(st.data())
def test_each_element_comes_from_one_place_and_from_home_where_it_can(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    old, new = data.draw(_layout(shape)), data.draw(_layout(shape))
    copies = list(copies_between(old, new))
    for target in new:
        seen: set[tuple[int, ...]] = set()
        at_home = [piece.box for piece in old if piece.device == target.device]
        for copy in (one for one in copies if one.target == target):
            assert copy.source in old
            assert copy.source.box.contains(copy.box)
            for element in itertools.product(*(range(*one) for one in copy.box.ranges)):
                assert element not in seen
                seen.add(element)
                here = any(all(a <= e < b for e, (a, b) in zip(element, box.ranges, strict=True)) for box in at_home)
                assert copy.travels == (not here)
        assert len(seen) == target.box.size


@given(st.integers(1, 200), st.lists(st.floats(0.05, 20), min_size=1, max_size=8), st.sampled_from([1, 4]))
def test_widths_follow_weights(size: int, weights: list[float], grain: int) -> None:
    if size < len(weights):
        return
    widths = weighted_widths(size, weights, grain=grain)
    assert sum(widths) == size
    assert min(widths) >= 1
    if grain > 1 or size // grain < len(weights):
        return
    worst = max(width / weight for width, weight in zip(widths, weights, strict=True))
    for source, target in itertools.permutations(range(len(weights)), 2):  # no move of one index makes it better
        if widths[source] > 1:
            moved = [w - (i == source) + (i == target) for i, w in enumerate(widths)]
            assert max(w / weight for w, weight in zip(moved, weights, strict=True)) >= worst * (1 - 1e-12)
