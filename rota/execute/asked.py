"""What the user said of how to run: it is kept with the run, so that a resume runs as the run did."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rota.cluster import Cluster, local
from rota.cluster.device import format_bytes
from rota.errors import InputError, StoreError, TooFewDevicesError, TooLittleMemoryError
from rota.execute.clusters import ray

_PLACE = ("cluster", "devices", "memory", "kind", "threads")
_FLAGS = {"profile": True, "strict": False}
"""With what holds where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options of a run; None is what nobody said anything about."""

    cluster: str | None = None
    """"local", "ray" or "ray=ADDRESS"."""
    devices: int | None = None
    memory: str | int | None = None
    """Of each device, as it was written."""
    kind: str | None = None
    threads: int | None = None
    """That compute on each CPU device."""
    strategy: str | None = None
    objective: str | None = None
    profile: bool | None = None
    retries: int | None = None
    strict: bool | None = None
    shards: str | None = None
    """The folder in which what leaves memory lies, each run's in one of its own."""

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Asked:
        """What `plain` gave; StoreError for anything else."""
        kinds: dict[str, tuple[type, ...]] = {"memory": (str, int)}
        kinds |= dict.fromkeys(("devices", "threads", "retries"), (int,)) | dict.fromkeys(_FLAGS, (bool,))
        for name, value in plain.items():
            if name not in cls.__dataclass_fields__ or type(value) not in kinds.get(name, (str,)):
                raise StoreError(f"the journal has an option {name} = {value!r} that cannot be understood")
        return cls(**plain)

    def plain(self) -> dict[str, Any]:
        """What was said, as JSON values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def over(self, before: Asked) -> Asked:
        """What holds when this is said after what was said before; devices of another cluster are other devices."""
        if self.cluster is not None and self.cluster != (before.cluster or "local"):
            before = replace(before, devices=None, memory=None, kind=None, threads=None)
        return Asked(**{**before.plain(), **self.plain()})

    def on(self, cluster: Cluster) -> Asked:
        """With the devices that a script has made itself, as far as they can be said in words."""
        place = dict.fromkeys(_PLACE) | dict(cluster.asked)
        return replace(self, **place)

    @property
    def address(self) -> str:
        """Of the cluster, where one was said."""
        return (self.cluster or "").partition("=")[2]

    def words(self) -> str:
        """As options of the command line."""
        said = self.plain()
        flags = {name: said.pop(name) for name in _FLAGS if name in said}
        words = [f"--{name} {shlex.quote(str(value))}" for name, value in said.items()]
        words += [f"--{name}" if value else f"--no-{name}" for name, value in flags.items() if value != _FLAGS[name]]
        return " ".join(words)

    def place(self, *, said: Asked) -> tuple[Cluster, list[str]]:
        """The devices, and what is not as it was asked for.

        What was `said` now must be there; of what was said when the run began, there may be less by now.
        """
        asked, notes = self, list[str]()
        while True:
            try:
                return _cluster(asked), notes
            except TooFewDevicesError as error:
                if said.devices is not None or asked.devices is None:
                    raise
                notes.append(
                    f"the run was begun with --devices {asked.devices}, and only {error.there} are here now; "
                    f"it goes on with {error.there}"
                )
                asked = replace(asked, devices=error.there)
            except TooLittleMemoryError as error:
                if said.memory is not None or asked.memory is None:
                    raise
                notes.append(
                    f"the run was begun with --memory {asked.memory}, and here each device can have at most "
                    f"{format_bytes(error.there_bytes)}; it goes on with that"
                )
                asked = replace(asked, memory=error.there_bytes)


def _cluster(asked: Asked) -> Cluster:
    manager, _, address = (asked.cluster or "local").partition("=")
    if manager == "local" and not address:
        return local(devices=asked.devices, memory=asked.memory, kind=asked.kind, threads=asked.threads)
    if manager != "ray":
        raise InputError(f"--cluster can be ray, ray=ADDRESS or local, not {asked.cluster!r}")
    if asked.kind is not None:
        raise InputError("--kind is for one machine; a Ray cluster has the devices that its nodes show")
    if asked.threads is not None:
        raise InputError("--threads is for one machine; on a Ray cluster a CPU device computes with one thread")
    return ray(address or None, devices=asked.devices, memory=asked.memory)
