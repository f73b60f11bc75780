"""Where rota keeps what it has measured, from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path

from rota.refusals import advice, reason
from rota.scratch import scratch
from rota.state.files import make_private_folder

_PROBE_BYTES = 2**16


def cache_folder() -> Path:
    """Where what was measured is kept: $ROTA_CACHE, or rota's folder among the user's caches."""
    own = os.environ.get("ROTA_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rota"


def cache_trouble() -> list[str]:
    """What to say where nothing that is measured can be kept; nothing is said of a cache that works."""
    folder = cache_folder()
    try:
        make_private_folder(folder)
        with scratch("probe", place=folder) as place:
            (place / "probe").write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        return [
            f"what is measured is not kept for the next run, since the cache {folder} cannot be used "
            f"({reason(error)}); {advice(error)}, or set ROTA_CACHE to another folder"
        ]
    return []
