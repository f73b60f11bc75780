"""What the controller and a worker say to each other: commands go to the worker, reports come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.codec import Count, Seconds, Share, register

# ---- commands ----


@register
@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a task; the task itself follows as the message's payload."""

    task: str
    attempt: int
    folder: str
    """Where the task's checkpoints and model are kept."""
    import_path: tuple[str, ...]
    """The controller's `sys.path`, for the modules that the task's code imports."""
    rank: int = 0
    """This worker's place among those that train the task together; the first leads."""
    size: int = 1
    meeting: str = ""
    """Where they find each other, tcp://host:port; through a file in the folder if nothing is said."""
    key: str = ""
    """With it they seal what they say to each other."""
    storage: str = ""
    """Where checkpoints and the model go beside the folder: a URL."""
    shards: tuple[str, ...] = ()
    """The folders of what leaves memory, if that is not the task's own: the present one, and those before."""
    setup_timeout_s: float = 600.0
    """How long it may take to import what the task needs; the task says so, and is not there yet."""


@register
@dataclass(frozen=True, kw_only=True)
class Look:
    """Make a task, time a few of its steps on this device, and predict what it takes on more; nothing is kept of it."""

    task: str
    attempt: int
    """Counts what is asked, so that late answers are known as such."""
    folder: str
    """For what the task prints."""
    import_path: tuple[str, ...]
    counts: tuple[int, ...]
    """The numbers of devices that it may get."""
    known: str
    """The file of what was measured before."""
    alike: int = 1
    """How many tasks of the sweep cost the same: the more there are, the longer one may look."""
    search: bool = True
    """Whether to search for ways to run on several devices; without it, only if one device does not do."""
    setup_timeout_s: float = 600.0


@register
@dataclass(frozen=True, kw_only=True)
class Try:
    """Time a few steps of a task on several devices."""

    task: str
    attempt: int
    folder: str
    import_path: tuple[str, ...]
    rank: int = 0
    size: int = 1
    meeting: str = ""
    key: str = ""
    setup_timeout_s: float = 600.0


@register
@dataclass(frozen=True, kw_only=True)
class Halt:
    """Save the task that is being trained, and leave it."""

    task: str


@register
@dataclass(frozen=True, kw_only=True)
class Stored:
    """So many of the reports that came over this connection are in the journal; beats do not count."""

    count: int


@register
@dataclass(frozen=True, kw_only=True)
class Here:
    """The controller has heard the beat that the worker sent at this moment of its own clock."""

    at_s: float


@register
@dataclass(frozen=True, kw_only=True)
class Shutdown:
    """End the worker process."""


# ---- reports ----


@register
@dataclass(frozen=True, kw_only=True)
class Ready:
    """The worker has started, or has come over from another controller."""

    pid: int
    task: str = ""
    """What it trains, or has trained last."""
    attempt: int = 0


@register
@dataclass(frozen=True, kw_only=True)
class Beat:
    """The worker is alive, and what it is doing."""

    task: str = ""
    phase: str = ""
    """What the training thread is doing, for people: "the model factory", "step 17"."""
    phase_s: float = 0.0
    """For how long."""
    limit_s: float | None = None
    """For how long it may; None where nothing is expected of it."""
    retry: bool = False
    """Whether an overrun may be this device's fault, so that another attempt makes sense."""
    memory_bytes: int = 0
    step: int = 0
    at_s: float = 0.0
    """When it was sent, by the worker's own clock."""


@register
@dataclass(frozen=True, kw_only=True)
class Began:
    """The factories have run, the last checkpoint is restored, and training begins."""

    task: str
    attempt: Count
    from_step: Count
    total_steps: Count
    parameters: Count


@register
@dataclass(frozen=True, kw_only=True)
class Measured:
    """The metrics of the steps since the last such report."""

    task: str
    attempt: Count
    number: Count
    """Counts the reports of a task, over all attempts."""
    rows: tuple[tuple[Count, dict[str, float]], ...]
    """(step, metrics) for each step; a validated step may come twice."""
    latest: dict[str, float]
    """The latest value of each metric, also of those that these rows do not have."""
    step_s: Seconds | None
    """Seconds per step, lately; None before the first."""
    pace: tuple[Seconds, ...] = ()
    """Of several devices, the seconds that each computed in the latest step, without its waits for the others."""


@register
@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint is committed."""

    task: str
    attempt: Count
    step: Count
    write_s: Seconds


@register
@dataclass(frozen=True, kw_only=True)
class Noticed:
    """Something the user should know; the task goes on."""

    task: str
    attempt: Count
    text: str


@register
@dataclass(frozen=True, kw_only=True)
class Balanced:
    """Work was moved between the devices of a task, or is left out."""

    task: str
    attempt: Count
    step: Count
    """The last one that was taken before."""
    shares: tuple[Share, ...]
    """What each device has of the work that can be moved, from now on."""
    left_out: tuple[Share, ...]
    """Which part of its products each device leaves out."""
    pause_s: Seconds
    why: str


@register
@dataclass(frozen=True, kw_only=True)
class Finished:
    """The task took its last step and its model is written."""

    task: str
    attempt: Count
    step: Count
    metrics: dict[str, float]


@register
@dataclass(frozen=True, kw_only=True)
class Halted:
    """The task was told to halt, and did; `step` is what its checkpoint holds."""

    task: str
    attempt: Count
    step: Count


@register
@dataclass(frozen=True, kw_only=True)
class Left:
    """A worker that followed another is done with the task; the leader says how it ended."""

    task: str
    attempt: int
    peer_gone: bool = False
    """It left because another process was gone, which that process or its death explains."""
    reason: str = ""


@register
@dataclass(frozen=True, kw_only=True)
class Failed:
    """The task cannot go on, and trying again would not help."""

    task: str
    attempt: Count
    step: Count
    reason: str
    diverged: bool = False
    traceback: str = ""
    """The frames of the user's own code, where it raised."""
    way: bool = False
    """Whether it may be the fault of how the task was run, so that another way may do: memory, or a technique."""


@register
@dataclass(frozen=True, kw_only=True)
class Looked:
    """What a look at a task has shown."""

    task: str
    attempt: int
    signature: str
    """Tasks with the same one cost the same."""
    total_steps: int
    estimates: tuple[dict[str, Any], ...]
    """Of the ways in which it can run."""
    known: bool
    """They had been measured before."""
    counts: tuple[int, ...] = ()
    """The numbers of devices that were looked at."""
    notices: tuple[str, ...] = ()


@register
@dataclass(frozen=True, kw_only=True)
class Tried:
    """What some steps on several devices took."""

    task: str
    attempt: int
    step_s: float
    spread: float
    """The distance between the quartiles, as a part of the median."""
    start_s: float
    """Until the first step was done."""


Command = Train | Look | Try | Halt | Stored | Here | Shutdown
Report = (
    Ready | Beat | Began | Measured | Saved | Noticed | Balanced | Finished | Halted | Left | Failed | Looked | Tried
)
