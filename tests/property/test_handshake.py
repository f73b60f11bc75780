"""Whoever does not know the key of a run is sent away, whatever is said."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.execute.backends import handshake

KEYS = st.binary(min_size=32, max_size=32)


@given(KEYS, st.binary(max_size=100))
def test_arbitrary_bytes_are_nobodys_answer(key: bytes, said: bytes) -> None:
    assert handshake.number_of(key, handshake.challenge(), said) is None


@given(KEYS, KEYS, st.binary(min_size=16, max_size=16))
def test_the_answer_to_one_challenge_with_one_key_is_good_for_no_other(key: bytes, other: bytes, number: bytes) -> None:
    challenged = handshake.challenge()
    answered = handshake.answer(key, challenged, number)
    assert handshake.number_of(key, challenged, answered) == number
    assert handshake.number_of(key, handshake.challenge(), answered) is None
    if other != key:
        assert handshake.number_of(other, challenged, answered) is None


@given(KEYS, st.integers(0, handshake.ANSWER_BYTES - 1), st.integers(1, 255))
def test_an_altered_answer_is_nobodys(key: bytes, place: int, mask: int) -> None:
    challenged = handshake.challenge()
    answered = bytearray(handshake.answer(key, challenged, b"n" * handshake.NUMBER_BYTES))
    answered[place] ^= mask
    assert handshake.number_of(key, challenged, bytes(answered)) is None


@pytest.mark.parametrize("said", [b"", b"x", b"x" * 16, b"x" * 48, b"x" * 1000])
def test_a_worker_does_not_trust_who_does_not_know_the_key(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:

        def impostor() -> None:
            guest, _ = door.accept()
            with guest:
                guest.sendall(said)
                guest.settimeout(2)
                try:
                    guest.recv(100)
                except OSError:
                    return

        thread = threading.Thread(target=impostor, daemon=True)
        thread.start()
        with pytest.raises(OSError):  # noqa: PT011 - a broken connection, or one that is not ours
            handshake.connect(door.getsockname(), b"k" * 32, b"n" * 16, timeout_s=1.0)
        thread.join(5)
