"""A core of this machine for one process alone, among the processes that ask here."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ClaimedCore:
    """It is held until this is closed, or the process ends, however it ends."""

    core: int
    _name: socket.socket

    def close(self) -> None:
        """Let others have it."""
        self._name.close()


def claim_core(cores: Sequence[int], *, first: int = 0) -> ClaimedCore | None:
    """The first of some cores that nobody holds, beginning at one of them; None if all are held.

    Two runs of rota on one node know nothing of each other, and would otherwise pin their workers to the same cores. A
    name among the abstract sockets can be had once, and leaves no file behind; only Linux has them.
    """
    if sys.platform != "linux":
        return None
    for i in range(len(cores)):
        core = cores[(first + i) % len(cores)]
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0rota-core-{core}")
        except OSError:
            name.close()
            continue
        return ClaimedCore(core=core, _name=name)
    return None
