"""Tells whether a trained model's file is whole, by its header and its size; needs no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rota.errors import RunFolderError
from rota.state import inside

_MOST_HEADER_BYTES = 100_000_000
"""What safetensors itself reads at most."""


def is_whole(path: Path) -> bool:
    """Whether a file is there, and has as many bytes as its header says; its values are not compared."""
    try:
        with open(inside.opened(path, os.O_RDONLY), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= min(_MOST_HEADER_BYTES, size_bytes - 8):
                return False
            header = json.loads(file.read(header_bytes))
            ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
            return size_bytes == 8 + header_bytes + int(max(ends, default=0))
    except (OSError, RunFolderError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
