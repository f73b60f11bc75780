"""Where rota keeps what it has measured, from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where what was measured is kept: $ROTA_CACHE, or rota's folder among the user's caches."""
    own = os.environ.get("ROTA_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rota"
