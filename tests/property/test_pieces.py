"""A piece of a tensor is the same piece however views take its dims apart."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rota.plan.box import Box
from rota.runtime.pieces import box_of_dims, cut, dim_ranges

FACTORS = st.lists(st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=1, max_size=3).map(tuple)


@given(factors=FACTORS, data=st.data())
def test_the_range_of_dims_is_what_the_box_cuts(factors, data):
    sizes = list(itertools.chain.from_iterable(factors))
    ranges = []
    for size in sizes:
        low = data.draw(st.integers(0, size - 1))
        ranges.append((low, data.draw(st.integers(low + 1, size))))
    box, whole = Box(ranges=tuple(ranges)), Box.whole(tuple(sizes))
    shape = [math.prod(dim) for dim in factors]
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    found = dim_ranges(factors, box)
    part = cut(tensor, factors, whole, box)
    if found is not None:
        assert torch.equal(tensor[tuple(slice(*one) for one in found)], part)
        back = box_of_dims(factors, found)
        assert back is not None
        assert torch.equal(cut(tensor, factors, whole, back), part)
        undivided = tuple((size,) for size in shape)
        assert box_of_dims(undivided, found) == Box(ranges=found)
