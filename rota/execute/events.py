"""What the journal holds beside the workers' reports: what the controller decided, and what befell it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from rota.codec import Count, Fits, Keys, Seconds, register
from rota.runtime.messages import Balanced, Began, Failed, Finished, Halted, Measured, Noticed, Saved
from rota.task import NAME_RULE, is_safe_name

Named = Annotated[str, Fits(is_safe_name, NAME_RULE)]
Described = Annotated[
    dict[str, Any], Keys(needed={"name": Named}, optional={"settings": dict[str, Any], "steps": Count | None})
]
Place = Annotated[
    dict[str, Any],
    Keys(
        needed={},
        optional={"name": str, "kind": str, "index": Count, "label": str, "node": str, "cores": tuple[Count, ...]},
    ),
]


@register
@dataclass(frozen=True, kw_only=True)
class RunBegan:
    """The first event of every run: what was asked for."""

    name: str
    source: str
    """The sweep file as the user named it, or empty for a sweep made in a script or notebook."""
    source_digest: str
    """The file's SHA-256, so that a resume notices a change."""
    sweep_digest: str
    tasks: tuple[Described, ...]
    """For each task its name, settings, and the numbers that describe it."""
    devices: tuple[Place, ...]
    session: str = ""
    """By which workers that outlive their controller are found again; empty where none do."""
    storage: str = ""
    """Where checkpoints and models go beside the run folder: a URL."""
    shards: tuple[str, ...] = ()
    """Where what leaves memory lies, if not in the run folder; behind the first, where it lay before."""
    seal: str = ""
    """By which a resume knows that the user named these places, and the cluster (`store/seal.py`)."""
    asked: dict[str, Any] = field(default_factory=dict)
    """What the user said of how to run (`asked.py`), so that a resume runs alike."""


@register
@dataclass(frozen=True, kw_only=True)
class RunResumed:
    """A controller took the run up again; tasks that were running are pending again, and so are these."""

    session: str = ""
    storage: str = ""
    shards: tuple[str, ...] = ()
    seal: str = ""
    kept: tuple[str, ...] = ()
    """Tasks that were running and still are, on workers that outlived the controller before."""
    retried: tuple[str, ...] = ()
    """Tasks that had ended without finishing, and are tried again."""
    devices: tuple[Place, ...] = ()
    asked: dict[str, Any] = field(default_factory=dict)
    """What holds from now on."""


@register
@dataclass(frozen=True, kw_only=True)
class Launched:
    """A task was given to devices; the first leads."""

    task: str
    attempt: Count
    devices: tuple[str, ...]
    strategy: str = ""
    """How it runs there; empty for what the task itself says."""


@register
@dataclass(frozen=True, kw_only=True)
class Requeued:
    """A task has saved itself and left its devices, to go on in another way."""

    task: str
    attempt: Count
    reason: str
    save_s: Seconds = 0.0
    """What it took to save itself."""


@register
@dataclass(frozen=True, kw_only=True)
class RunNoted:
    """Something about the whole run that the user should know: what was measured, decided, changed."""

    text: str


@register
@dataclass(frozen=True, kw_only=True)
class Lost:
    """A worker died or hung while it trained the task."""

    task: str
    attempt: Count
    device: str
    reason: str
    retried: bool
    """Whether the task goes on from its last checkpoint; otherwise it has failed."""


@register
@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The user stopped the task."""

    task: str
    attempt: Count
    step: Count


@register
@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """The controller left the run in this state."""

    state: str


Event = (
    RunBegan
    | RunResumed
    | RunNoted
    | Launched
    | Requeued
    | Began
    | Measured
    | Saved
    | Noticed
    | Balanced
    | Halted
    | Finished
    | Failed
    | Lost
    | Stopped
    | RunEnded
)
