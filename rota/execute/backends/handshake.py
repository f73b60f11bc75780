"""How a worker on another machine and its controller make sure of each other: both know the key of the run.

The controller sends a random challenge; who connects answers with its number and a keyed hash of both; the controller
proves itself in turn. Who does not know the key gets nothing, and nothing that it says is read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

CHALLENGE_BYTES = 16
NUMBER_BYTES = 16
HASH_BYTES = 32
ANSWER_BYTES = NUMBER_BYTES + HASH_BYTES


def new_key() -> bytes:
    """Of a run."""
    return secrets.token_bytes(32)


def challenge() -> bytes:
    """What nobody can know beforehand."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def answer(key: bytes, challenged: bytes, number: bytes) -> bytes:
    """What one who connects says."""
    return number + _hash(key, b"worker", challenged, number)


def number_of(key: bytes, challenged: bytes, answered: bytes) -> bytes | None:
    """The number of one who knows the key; None of anybody else."""
    number, proof = answered[:NUMBER_BYTES], answered[NUMBER_BYTES:]
    return number if hmac.compare_digest(proof, _hash(key, b"worker", challenged, number)) else None


def welcome(key: bytes, challenged: bytes, number: bytes) -> bytes:
    """What the controller says to one who knows the key."""
    return _hash(key, b"controller", challenged, number)


def connect(address: tuple[str, int], key: bytes, number: bytes, *, timeout_s: float) -> socket.socket:
    """A connection to the controller; ConnectionError if it is not ours."""
    made = socket.create_connection(address, timeout=timeout_s)
    try:
        challenged = _exactly(made, CHALLENGE_BYTES)
        made.sendall(answer(key, challenged, number))
        if not hmac.compare_digest(_exactly(made, HASH_BYTES), welcome(key, challenged, number)):
            raise ConnectionError("what answers at the controller's address does not know the key of this run")
        made.settimeout(None)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except BaseException:
        made.close()
        raise
    return made


def _exactly(stream: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = stream.recv(count - len(found))
        if not part:
            raise ConnectionError("the controller closed the connection")
        found += part
    return found


def _hash(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()
