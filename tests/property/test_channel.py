"""However a stream is cut into chunks, the same messages come out; however it is damaged, only MessageErrors do."""

from __future__ import annotations

import contextlib
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import MessageError
from rota.runtime.channel import Deframer, frame
from rota.runtime.messages import Beat, Failed, Halt, Ready, Shutdown, Stored

TEXT = st.text(max_size=12)
COUNT = st.integers(0, 2**40)
MESSAGES = st.one_of(
    st.builds(Halt, task=TEXT),
    st.builds(Stored, count=COUNT),
    st.builds(Shutdown),
    st.builds(Ready, pid=COUNT),
    st.builds(Beat, task=TEXT, phase=TEXT, phase_s=st.floats(allow_nan=False), limit_s=st.none() | st.just(1.5)),
    st.builds(Failed, task=TEXT, attempt=COUNT, step=COUNT, reason=TEXT, traceback=TEXT),
)
FRAMES = st.lists(st.tuples(MESSAGES, st.binary(max_size=40)), max_size=6)


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(places)]


@given(sent=FRAMES, cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_any_cut_of_the_stream_gives_the_messages_that_were_sent(sent, cuts):
    stream = b"".join(frame(message, payload) for message, payload in sent)
    deframer = Deframer()
    assert [heard for piece in pieces(stream, cuts) for heard in deframer.feed(piece)] == sent


@settings(max_examples=15)
@given(sent=FRAMES)
def test_a_stream_that_arrives_byte_by_byte_gives_the_messages_that_were_sent(sent):
    stream = b"".join(frame(message, payload) for message, payload in sent)
    deframer = Deframer()
    assert [heard for i in range(len(stream)) for heard in deframer.feed(stream[i : i + 1])] == sent


@settings(max_examples=200)
@given(data=st.binary(max_size=80), head=st.sampled_from([b"", b"rota", b"rota\x00\x04\x00\x00\x00\x02"]))
def test_arbitrary_bytes_raise_nothing_but_message_errors(data, head):
    deframer = Deframer()
    with contextlib.suppress(MessageError):
        list(deframer.feed(head + data))
    assert len(deframer._bytes) <= len(head + data)


@settings(max_examples=300)
@given(sent=FRAMES.filter(bool), data=st.data())
def test_a_damaged_stream_raises_nothing_but_message_errors(sent, data):
    stream = bytearray(b"".join(frame(message, payload) for message, payload in sent))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(stream)))
        match data.draw(st.sampled_from(["replace", "insert", "delete"])):
            case "replace":
                stream[place : place + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "insert":
                stream[place:place] = data.draw(st.binary(min_size=1, max_size=8))
            case "delete":
                del stream[place : place + data.draw(st.integers(1, 8))]
    deframer = Deframer()
    heard = []
    with contextlib.suppress(MessageError):
        for piece in pieces(bytes(stream), data.draw(st.lists(st.integers(0, 10_000), max_size=3))):
            heard.extend(deframer.feed(piece))
    assert len(heard) <= len(sent) + 1
    assert len(deframer._bytes) <= len(stream)
