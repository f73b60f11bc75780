"""What the processes of a task say to each other is theirs, or it is not read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rota.errors import PeerError
from rota.runtime.gang import Gang

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


def gang(key: bytes) -> Gang:
    return Gang(rank=0, size=2, store="", key=key)


@given(VALUES, st.binary(max_size=40))
def test_what_is_sealed_is_opened_by_who_knows_the_key(value: object, key: bytes) -> None:
    assert gang(key)._opened(gang(key)._sealed(value)) == value


@given(VALUES, st.binary(min_size=1, max_size=16))
def test_it_is_not_opened_with_another_key(value: object, key: bytes) -> None:
    with pytest.raises(PeerError):
        gang(b"k" * 16)._opened(gang(b"k" * 16 + key + b"x")._sealed(value))


@given(VALUES, st.integers(0), st.integers(1, 255))
def test_an_altered_byte_is_noticed(value: object, place: int, mask: int) -> None:
    sealed = gang(b"key")._sealed(value)
    sealed[place % sealed.numel()] ^= mask
    with pytest.raises(PeerError):
        gang(b"key")._opened(sealed)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_never_unpickled(content: bytes) -> None:
    with pytest.raises(PeerError):
        gang(b"key")._opened(torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0))
