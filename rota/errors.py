"""Every exception that rota raises on purpose.

::

    RotaError
    ├── InputError               what the user gave is wrong: a task, a sweep file, an option
    │   ├── RunMismatchError     the run folder belongs to another sweep, or the sweep changed since
    │   ├── TooFewDevicesError   more devices were asked for than there are
    │   └── TooLittleMemoryError devices were to have more memory than there is
    ├── RunInUseError            another process is running this run
    ├── StoreError               what a run keeps on disk cannot be used, such as its journal
    │   ├── RunFolderError       the folder has a link, or something else that is not rota's, where rota writes
    │   └── DiskError            the system refused it: no room, no right, no more open files, ...
    ├── CheckpointError          a checkpoint cannot be written, or does not fit the task
    │   ├── CorruptCheckpointError   its files are truncated or altered
    │   ├── UnfitCheckpointError     it is whole, and is not of what the factories make
    │   └── FullDiskError            there is no room for it
    ├── CaptureError             a model cannot be turned into a graph
    ├── PlanError                a plan cannot be made, compiled or run
    │   ├── RuleError            the rule of an op is wrong, or does not fit it
    │   ├── CutError             an op cannot be cut in this way
    │   ├── PlacementError       an op has no device, or one that is not there
    │   ├── CoverError           the parts that are there do not make up what is needed
    │   ├── CycleError           the order that was asked for contradicts itself or the data flow
    │   ├── FitError             a device has too little memory for what the plan puts on it
    │   └── ProgramError         a compiled program is wrong: a defect of rota, or a program that was altered
    ├── ScheduleError            a schedule is not one: a defect of rota, or of a solver
    ├── MessageError             a message between processes cannot be understood
    ├── PeerError                another process that trains the same task is gone
    └── TaskError                a task cannot go on; carries what the user should read
        ├── DivergedError        its loss became NaN or infinite
        └── WayError             the way in which it runs has failed; another may do

The message of each is one sentence for the user: what is wrong, where, and what to do.
"""

from __future__ import annotations


class RotaError(Exception):
    """The root of rota's exceptions; catch it to catch them all."""


class InputError(RotaError, ValueError):
    """What the user gave cannot be used."""


class RunMismatchError(InputError):
    """The run folder holds a run of another sweep."""


class TooFewDevicesError(InputError):
    """More devices were asked for than `there` are."""

    def __init__(self, message: str, *, there: int) -> None:
        super().__init__(message)
        self.there = there


class TooLittleMemoryError(InputError):
    """Devices were to have more memory each than the `there_bytes` that they can have."""

    def __init__(self, message: str, *, there_bytes: int) -> None:
        super().__init__(message)
        self.there_bytes = there_bytes


class RunInUseError(RotaError):
    """Another process holds the run folder."""


class StoreError(RotaError):
    """What a run keeps on disk cannot be used: its journal, or its folder."""


class RunFolderError(StoreError):
    """A run folder has a link, or another thing that rota did not make, at a name that rota uses."""


class DiskError(StoreError):
    """The system refused to read or write; the run itself is not damaged."""


class CheckpointError(RotaError):
    """A checkpoint cannot be written or does not fit."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint's files are not what was committed."""


class UnfitCheckpointError(CheckpointError):
    """A checkpoint is whole and does not fit the model, the optimizer or the data of its task."""


class FullDiskError(CheckpointError):
    """There is no room on the disk for what must be written."""


class CaptureError(RotaError):
    """A model's code cannot be turned into a graph."""


class PlanError(RotaError):
    """A plan cannot be made, compiled or run."""


class RuleError(PlanError):
    """The rule of an op is wrong, or does not fit it."""


class CutError(PlanError):
    """An op cannot be cut in this way."""


class PlacementError(PlanError):
    """An op has no device, or one that is not there."""


class CoverError(PlanError):
    """The parts that are there do not make up what is needed."""


class CycleError(PlanError):
    """The order that was asked for contradicts itself or the data flow; the message shows the cycle."""


class FitError(PlanError):
    """A device has too little memory for what the plan puts on it; `needed_bytes` would do, if that is known."""

    def __init__(self, message: str, *, needed_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class ProgramError(PlanError):
    """A compiled program does not do what its plan says."""


class ScheduleError(RotaError):
    """A schedule breaks a rule of its problem."""


class MessageError(RotaError):
    """Bytes from another process or from disk do not form a known message."""


class PeerError(RotaError):
    """Another process that trains the same task is gone; that process knows why."""


class TaskError(RotaError):
    """A task cannot go on; `traceback` holds the user's own frames, if it was their code that raised."""

    def __init__(self, message: str, *, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class WayError(TaskError):
    """The way in which a task runs has failed, and not the task: another way may do."""


class DivergedError(TaskError):
    """The loss became NaN or infinite at `step`."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step
