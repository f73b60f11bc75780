"""The processes that train one task together: they meet, agree, and learn of it when one of them is gone.

All of them run the same code on the same data. The first, the leader, decides what depends on clocks and on the user
(when to save, when to leave), reports and writes; the others follow.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rota.errors import PeerError
from rota.runtime import comm
from rota.state import inside

_SEAL_BYTES = 32

# How a process notices that another has closed its end, in the words of gloo, of its store, and of NCCL.
_LOST = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "socket timeout", "timed out", "nccl")


@dataclass(kw_only=True)
class Gang:
    """One process's place among the others."""

    rank: int
    size: int
    store: Path | str
    """Where they find each other: a file, or tcp://host:port of the leader."""
    kind: str = "cpu"
    key: bytes = b""
    """Known to these processes and their controller only: plain values are sealed with it."""

    def __post_init__(self) -> None:
        self.groups = comm.Groups()

    @property
    def leads(self) -> bool:
        """Whether this is the process that decides, reports and writes."""
        return self.rank == 0

    def meet(self, *, timeout_s: float) -> None:
        """Wait for the others."""
        with talking():
            store = self._store(timeout_s)
            comm.connect(rank=self.rank, size=self.size, store=store, kind=self.kind, timeout_s=timeout_s)
            dist.barrier()

    def part(self) -> None:
        """Leave; those that still wait for this process notice."""
        with contextlib.suppress(Exception):
            comm.disconnect()
        if self.leads and isinstance(self.store, Path):
            with contextlib.suppress(OSError):  # the controller removes it before the next attempt
                self.store.unlink()

    def _store(self, timeout_s: float) -> Any:
        if isinstance(self.store, Path):
            # Whoever of the gang comes first makes it, for this user alone: PyTorch goes by the umask.
            os.close(inside.opened(self.store, os.O_RDWR | os.O_CREAT))
            return dist.FileStore(str(self.store), self.size)  # type: ignore[attr-defined]
        host, _, port = self.store.removeprefix("tcp://").rpartition(":")
        timeout = datetime.timedelta(seconds=timeout_s)
        return dist.TCPStore(host, int(port), self.size, is_master=self.leads, timeout=timeout)  # type: ignore[attr-defined]

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """What the leader says."""
        if self.size == 1:
            return flags
        told = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        with talking():
            dist.broadcast(told, src=0)
        return tuple(bool(one) for one in told.tolist())

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        if self.size > 1:
            numbers = numbers.to(self._device)
            with talking():
                dist.all_reduce(numbers)
        return numbers.cpu()

    def told(self, value: Any = None) -> Any:
        """A plain value of the leader's, for all."""
        if self.size == 1:
            return value
        sealed = self._sealed(value) if self.leads else torch.empty(0, dtype=torch.uint8, device=self._device)
        size = torch.tensor([sealed.numel()], device=self._device)
        with talking():
            dist.broadcast(size, src=0)
            if not self.leads:
                sealed = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            dist.broadcast(sealed, src=0)
        return value if self.leads else self._opened(sealed)

    def everyone(self, value: Any) -> list[Any]:
        """A plain value of each process, in the order of ranks."""
        if self.size == 1:
            return [value]
        sealed = self._sealed(value)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        with talking():
            dist.all_gather(sizes, torch.tensor([sealed.numel()], device=self._device))
            most = int(max(sizes))
            found = [torch.empty(most, dtype=torch.uint8, device=self._device) for _ in sizes]
            dist.all_gather(found, torch.nn.functional.pad(sealed, (0, most - sealed.numel())))
        return [self._opened(one[: int(size)]) for one, size in zip(found, sizes, strict=True)]

    def _sealed(self, value: Any) -> torch.Tensor:
        """Bytes that only these processes can have made: whoever else connects to their ports runs no code here."""
        plain = pickle.dumps(value)
        return torch.frombuffer(bytearray(self._seal(plain) + plain), dtype=torch.uint8).to(self._device)

    def _opened(self, sealed: torch.Tensor) -> Any:
        content = sealed.cpu().numpy().tobytes()
        seal, plain = content[:_SEAL_BYTES], content[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(plain)):
            raise PeerError("what came over the network is of no process of this task")
        return pickle.loads(plain)

    def _seal(self, plain: bytes) -> bytes:
        return hmac.digest(self.key, plain, "sha256")

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def talking() -> Iterator[None]:
    """Turn the many ways in which a lost peer shows into one error."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if isinstance(error, dist.DistError) or any(sign in text for sign in _LOST):
            raise PeerError(f"another process of the task is gone ({' '.join(str(error).split())[:200]})") from error
        raise
