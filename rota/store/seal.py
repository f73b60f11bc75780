"""Tells places outside of run folders that this user named on this machine from those that only a journal names.

A journal says where checkpoints are copied to, where shards lie and which cluster is used. Whoever wrote the journal
could name any place. So what the user names is sealed with a key of the user's own, and a resume believes no other.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence

from rota.state.files import write_private
from rota.store.cache import cache_folder

_KEY = "seal.key"


def seal_of(places: Sequence[str]) -> str:
    """The seal of places that the user has named; empty where there are none, or where no key can be kept."""
    if not any(places):
        return ""
    path = cache_folder() / _KEY
    try:
        if not path.exists():
            write_private(path, secrets.token_hex(32))
        key = path.read_bytes()
    except OSError:  # a resume then asks for the places again
        return ""
    return hmac.new(key, json.dumps(list(places)).encode(), hashlib.sha256).hexdigest()


def is_sealed(places: Sequence[str], seal: str) -> bool:
    """Whether they were named here, all of them."""
    return bool(seal) and hmac.compare_digest(seal.encode(), seal_of(places).encode())
