"""Frames on a stream: complete ones come out, broken ones are refused, and lengths are not believed blindly."""

from __future__ import annotations

import struct

import pytest

from rota.errors import MessageError
from rota.runtime.channel import Deframer, frame
from rota.runtime.messages import Beat, Halt, Shutdown, Stored

STORED = Stored(count=3)


def test_a_frame_gives_back_its_message_and_payload():
    payload = bytes(range(256)) * 10
    assert list(Deframer().feed(frame(STORED, payload))) == [(STORED, payload)]


def test_frames_come_out_in_the_order_they_went_in():
    stream = frame(STORED, b"one") + frame(Halt(task="a")) + frame(Shutdown())
    assert list(Deframer().feed(stream)) == [(STORED, b"one"), (Halt(task="a"), b""), (Shutdown(), b"")]


def test_half_a_frame_is_kept_until_the_rest_arrives():
    whole = frame(STORED, b"payload")
    deframer = Deframer()
    assert list(deframer.feed(whole[:-1])) == []
    assert list(deframer.feed(b"")) == []
    assert list(deframer.feed(whole[-1:])) == [(STORED, b"payload")]


def test_a_payload_may_look_like_a_frame():
    inner = frame(Halt(task="b"))
    assert list(Deframer().feed(frame(STORED, inner))) == [(STORED, inner)]


def test_a_stream_of_something_else_is_refused_at_once(refused):
    sentence = refused(lambda: list(Deframer().feed(b"HTTP/1.1 200 OK\r\n\r\n")), error=MessageError)
    assert "rota's messages" in sentence


def test_an_absurd_length_of_text_is_refused_before_anything_is_read():
    head = struct.pack("!4sHIQ", b"rota", 4, 2**32 - 1, 0)
    with pytest.raises(MessageError):
        list(Deframer().feed(head))


def test_an_announced_length_allocates_nothing():
    deframer = Deframer()
    head = struct.pack("!4sHIQ", b"rota", 4, 2, 2**63)
    assert list(deframer.feed(head + b"Beat{}")) == []
    assert len(deframer._bytes) == len(head) + 6


def test_a_message_that_cannot_be_decoded_does_not_damage_the_ones_before_it():
    stream = frame(Beat(step=1)) + frame(Beat(step=2)).replace(b"Beat", b"Beet")
    heard = []
    with pytest.raises(MessageError, match="Beet"):
        heard.extend(message for message, _ in Deframer().feed(stream))
    deframer = Deframer()
    messages = deframer.feed(stream)
    assert next(messages) == (Beat(step=1), b"")


def test_a_kind_that_is_not_text_is_refused():
    raw = struct.pack("!4sHIQ", b"rota", 2, 2, 0) + b"\xff\xfe{}"
    with pytest.raises(MessageError):
        list(Deframer().feed(raw))
