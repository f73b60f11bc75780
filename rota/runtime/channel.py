"""Messages over a stream socket: framed, typed, and refused when they are not what they should be."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from rota import codec
from rota.errors import MessageError

_HEAD = struct.Struct("!4sHIQ")
_MAGIC = b"rota"
_MAX_TEXT_BYTES = 1 << 30


def frame(message: Any, payload: bytes = b"") -> bytes:
    """The bytes of a message, with opaque bytes (a pickled task) behind it."""
    kind, text = codec.encode(message)
    body = text.encode()
    return _HEAD.pack(_MAGIC, len(kind), len(body), len(payload)) + kind.encode() + body + payload


class Deframer:
    """Cuts a stream of bytes into messages again."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Any, bytes]]:
        """The messages that are complete with this data. MessageError if the stream is not one of messages."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            magic, kind_size, text_size, payload_size = _HEAD.unpack_from(self._bytes)
            if magic != _MAGIC or text_size > _MAX_TEXT_BYTES:
                raise MessageError("the stream does not hold rota's messages")
            kind_end = _HEAD.size + kind_size
            text_end = kind_end + text_size
            end = text_end + payload_size
            if len(self._bytes) < end:
                return
            # One copy out of the buffer, so that it can shrink while the message is handled.
            whole = bytes(self._bytes[:end])
            del self._bytes[:end]
            kind = whole[_HEAD.size : kind_end].decode(errors="replace")
            yield codec.decode(kind, whole[kind_end:text_end]), whole[text_end:]
