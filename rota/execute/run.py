"""Runs a sweep from beginning to end: `rota.run`, and what the command line does with a file."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rota.cluster import Cluster
from rota.cluster.discover import available_cores
from rota.errors import CheckpointError, DiskError, InputError, RotaError, RunFolderError, RunMismatchError
from rota.execute import preflight
from rota.execute.asked import Asked
from rota.execute.backends.local import LocalBackend
from rota.execute.controller import Controller, Observer
from rota.execute.events import Event, RunBegan, RunResumed
from rota.execute.identity import describe, digest, fixed_facts
from rota.execute.mend import mend_model
from rota.execute.policy import LongestFirst, Policy
from rota.execute.pools import Sharing
from rota.execute.record import RunRecord
from rota.execute.states import RunState, TaskState
from rota.given import check_fields, quoted, text
from rota.refusals import advice, reason, sentence
from rota.report.format import one_line
from rota.report.html import write_report
from rota.report.live import profile_progress, progress_observer
from rota.report.summary import going_on
from rota.result import Result
from rota.schedule.problem import OBJECTIVES, Objective
from rota.state import inside, model_file
from rota.state.files import make_private_folder
from rota.store.cache import cache_trouble
from rota.store.journal import Journal, add, read_summary
from rota.store.run_folder import PROFILE_FOLDER, RunFolder, new_run_path
from rota.store.seal import is_sealed, seal_of
from rota.streams import open_standard
from rota.sweep import Sweep
from rota.written import check_readable

RETRIES = 2
"""Of a task whose worker died, by default."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A sweep and where it came from."""

    sweep: Sweep
    file: str = ""
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run, beside what."""

    cluster: Cluster | None = None
    """The devices; by default what `asked` says of them."""
    asked: Asked = field(default_factory=Asked)
    """What the user said; a resumed run knows what was said before."""
    out: Path | None = None
    """The run folder; by default a new one below runs/."""
    progress: bool = True
    """Whether to show progress on standard error."""
    retry_failed: bool = False
    """Whether failed tasks of a resumed run are tried again."""
    allow_changes: bool = False
    """Whether a run may be resumed although its sweep has changed."""
    storage: str = ""
    """Where checkpoints and models go beside the run folder: a URL that fsspec knows; a resumed run knows its own."""
    code: Path | None = None
    """The folder of the sweep: its Python files go to machines that do not have them."""

    def __post_init__(self) -> None:
        check_fields(self, "rota.run", least=0)
        check_fields(self.asked, "rota.run", least=0)
        if self.objective not in OBJECTIVES:
            raise InputError(f"the objective {quoted(self.objective)} is unknown; it can be {', '.join(OBJECTIVES)}")
        if self.strategy is not None:
            check_readable(self.strategy)
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            raise InputError(f"cluster must be a rota.Cluster such as rota.local(), not {type(self.cluster).__name__}")

    @property
    def retries(self) -> int:
        """How often a task goes on after its worker died or hung."""
        return RETRIES if self.asked.retries is None else self.asked.retries

    @property
    def strategy(self) -> str | None:
        """How all tasks run on their devices, instead of what they say."""
        return self.asked.strategy

    @property
    def objective(self) -> Objective:
        """What the schedule is for: the end of the last task, the mean of the ends of all, or device hours."""
        return cast(Objective, self.asked.objective or "makespan")

    @property
    def profile(self) -> bool:
        """Whether tasks are measured and scheduled before they run; otherwise the longest go first."""
        return self.asked.profile is not False

    @property
    def strict(self) -> bool:
        """Whether a task that cannot run as asked refuses the sweep, also where one device could train it."""
        return self.asked.strict is True


def run(
    sweep: Sweep,
    *,
    cluster: Cluster | None = None,
    out: str | Path | None = None,
    retries: int | None = None,
    progress: bool = True,
    retry_failed: bool = False,
    allow_changes: bool = False,
    strategy: str | None = None,
    objective: Objective | None = None,
    profile: bool | None = None,
    strict: bool | None = None,
    storage: str = "",
    shards: str | Path | None = None,
) -> Result:
    """Train every task of a sweep and return the result.

    `retries` is how often a task goes on after its worker died (2), `objective` what counts ("makespan"), `profile`
    whether tasks are measured before they run (True). A model that cannot be captured runs on one device where its
    strategy needs a graph, and the others run as asked; `strict` refuses the sweep instead. With `out` naming the
    folder of an earlier run of the same sweep, that run goes on from its checkpoints, with what it had of what is not
    given now. `shards` is a folder, maybe on another disk, for what does not fit into memory; by default that lies in
    the run folder. Ctrl-C saves every task and raises KeyboardInterrupt; the same call resumes.
    """
    if not isinstance(sweep, Sweep):
        raise InputError(f"rota.run needs a rota.Sweep, not {type(sweep).__name__}; make one with rota.grid(...)")
    shards_folder = _path(shards, "shards")
    options = RunOptions(
        cluster=cluster,
        out=_path(out, "out"),
        asked=Asked(
            strategy=strategy,
            objective=objective,
            profile=profile,
            retries=retries,
            strict=strict,
            shards=None if shards_folder is None else str(shards_folder.absolute()),
        ),
        progress=progress,
        retry_failed=retry_failed,
        allow_changes=allow_changes,
        storage=storage,
    )
    result = run_source(lambda: Source(sweep=sweep), options)
    if result.state is RunState.INTERRUPTED:
        raise KeyboardInterrupt(f"the run was interrupted; run the same sweep with out={str(result.path)!r} to resume")
    return result


def _path(given: str | Path | None, what: str) -> Path | None:
    """A folder as the user gave it."""
    if given is None or isinstance(given, Path):
        return given
    return Path(text(given, f"rota.run: {what}"))


@dataclass(kw_only=True)
class _Place:
    """Where a run is, as soon as that is known."""

    path: Path | None
    file: str | None = None
    """The sweep file, or nothing for a script."""

    def how_to_go_on(self) -> str:
        """What to do when that which stopped the run is mended."""
        with contextlib.suppress(RotaError, OSError):
            if self.path is not None and RunFolder(self.path).exists():
                if self.file is None:
                    self.file = RunRecord.replay(read_summary(RunFolder(self.path).journal)).source
                return f"go on with: {going_on(self.path, self.file)}"
        return "run it again"


@contextlib.contextmanager
def _advising(path: Path | None) -> Iterator[_Place]:
    """Turn what the system refuses a run into a DiskError that says how the run goes on."""
    place = _Place(path=path)
    try:
        yield place
    except (DiskError, OSError) as error:
        told = str(error) if isinstance(error, DiskError) else sentence(error)
        raise DiskError(f"{told}, then {place.how_to_go_on()}") from error


def run_source(load: Callable[[], Source], options: RunOptions) -> Result:
    """Run the sweep that `load` gives. Workers start first: they import torch while the sweep is read."""
    open_standard()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(_advising(options.out))
        named = None if options.out is None else RunFolder(options.out)
        held = named is not None and named.exists()
        before = RunRecord()
        if named is not None and held:
            stack.enter_context(named.held())  # if it is in use, say so at once
            before = _before(named)
        session = before.session
        if options.out is not None:
            _check_named(options.out, before, options)
        cluster, options, notes = _as_before(options, before)
        preflight.check_memory(cluster)
        if cluster.manager == "local" and options.asked.shards:
            _prepare_shards(Path(options.asked.shards), had=Asked.of(before.asked).shards)
        # Workers that are taken over want to be heard at once, and wait longer for somebody who comes.
        loaded = load() if session and cluster.manager != "local" else None
        backend = stack.enter_context(contextlib.closing(backend_of(cluster, code=options.code, session=session)))
        if options.strategy is None:
            backend.warm_up(min(len(cluster.devices), len(available_cores()), 2))
        source = loaded or load()
        asked_for = preflight.resolve(source.sweep, strategy=options.strategy)
        ready = preflight.ready(asked_for, cluster, strict=options.strict)
        source = replace(source, sweep=ready.sweep)
        if options.storage:
            from rota.state import mirror

            mirror.check(options.storage)
        folder = named or RunFolder(new_run_path(source.sweep.name or _script_name()))
        place.path, place.file = folder.path, source.file
        if not held:  # it may have come into being meanwhile, by another process with the same idea
            folder.prepare()
            stack.enter_context(folder.held())
        folder.check_there()
        record = _begin_or_resume(folder, source, cluster, options, backend)
        backend.shards = record.shards
        if not all(task.state.ended for task in record.tasks.values()):
            _carry_out(folder, source.sweep, record, cluster, backend, options, ready.widths, [*notes, *ready.notes])
        _collect(folder, record)
        lost = _mend(folder, record) if cluster.manager == "local" else []
        _report(folder)
        if lost:
            raise RunFolderError(lost[0] if len(lost) == 1 else f"{lost[0]}; so are {len(lost) - 1} more")
    return Result(folder, record, sweep=source.sweep)


def _prepare_shards(path: Path, *, had: str | None) -> None:
    """Make the folder for what leaves memory, for this user alone. One that the run `had` is on a disk that is gone."""
    if str(path) == had and not path.is_dir():
        raise InputError(f"there is no folder {path}, where the run has its shards; mount its disk, or give --shards")
    try:
        make_private_folder(path)
    except OSError as error:
        raise InputError(f"the folder {path} for --shards cannot be made ({reason(error)}); {advice(error)}") from error


def _before(folder: RunFolder) -> RunRecord:
    """The run as it stands: how it ran, and by which session its workers are found."""
    record = RunRecord.replay(read_summary(folder.journal))
    folder.check(record.tasks)
    return record


def _as_before(options: RunOptions, before: RunRecord) -> tuple[Cluster, RunOptions, list[str]]:
    """The devices, the options with what the run had of those that are not given, and what to say about both."""
    said = options.asked if options.cluster is None else options.asked.on(options.cluster)
    asked = said.over(Asked.of(before.asked))
    if options.cluster is not None:
        notes = _digits(before.devices, options.cluster)
        return options.cluster, replace(options, asked=asked.on(options.cluster)), notes
    notes = []
    if asked != said:
        notes.append(f"the run goes on as it was begun, with {asked.words()}; options of `rota resume` change that")
    cluster, lacking = asked.place(said=said)
    if not lacking and said.devices is None and said.kind is None and said.cluster is None:
        lacking = _lacking(before.devices, cluster)
    return cluster, replace(options, asked=asked), notes + lacking + _digits(before.devices, cluster)


def _lacking(had: list[dict[str, Any]], cluster: Cluster) -> list[str]:
    """What to say where this machine no longer has the devices that a run had."""
    before = [len(device.get("cores", ())) for device in had]
    now = [len(device.cores) for device in cluster.devices]
    if cluster.manager != "local" or (len(now) >= len(before) and set(now) <= set(before)) or not before:
        return []
    return [
        f"the run had {_counted(before)}, and here there {'is' if len(now) == 1 else 'are'} {_counted(now)}; "
        "it goes on with that"
    ]


def _counted(cores: list[int]) -> str:
    each = "/".join(map(str, sorted(set(cores))))
    devices = f"{len(cores)} device{'s' if len(cores) > 1 else ''}"
    return f"{devices} of {each} core{'' if each == '1' else 's'}" if any(cores) else devices


def _digits(had: list[dict[str, Any]], cluster: Cluster) -> list[str]:
    """What to say where threads differ, between devices or from those that a run had: sums depend on their number."""
    before = {
        device.get("threads") or max(1, len(device.get("cores", ()))) for device in had if device.get("kind") == "cpu"
    }
    now = {device.thread_count for device in cluster.devices if device.kind == "cpu"}
    least = min(before or now, default=1)
    if before and not now <= before:
        return [
            f"each device had {_or(before)} and has {_or(now)} now, so numbers may differ in their last digits from "
            f"here on; --threads {least} keeps them"
        ]
    if len(now) > 1:
        return [
            f"devices compute with {_or(now)}, so the last digits of a task depend on where it runs; "
            f"--threads {least} makes them alike"
        ]
    return []


def _or(counts: set[int]) -> str:
    return f"{' or '.join(map(str, sorted(counts)))} thread{'' if counts == {1} else 's'}"


def backend_of(cluster: Cluster, *, code: Path | None = None, session: str = "") -> LocalBackend:
    """What starts processes on a cluster's devices.

    `code` is the folder whose Python files its tasks need; workers of a `session` that outlived their controller are
    taken over.
    """
    if cluster.manager == "local":
        return LocalBackend(cluster)
    from rota.execute.backends.ray import RayBackend

    return RayBackend(cluster, code=code, session=session)


def _report(folder: RunFolder) -> None:
    """A trained model is worth more than its report: a disk that is full must not lose the result."""
    try:
        write_report(folder)
    except OSError as error:
        text = f"the report could not be written ({reason(error)}); run `rota report {folder.path}` later"
        warnings.warn(one_line(text), stacklevel=2)


def _begin_or_resume(
    folder: RunFolder, source: Source, cluster: Cluster, options: RunOptions, backend: LocalBackend
) -> RunRecord:
    """The record of the run as it stands, with the beginning or resumption journalled."""
    folder.check([task.name for task in source.sweep])
    record = RunRecord()
    event: Event
    devices = tuple(_device_facts(cluster))
    if folder.exists():
        record = RunRecord.replay(read_summary(folder.journal))
        backend.clock.not_before(record.last_s)
    if record.tasks:
        _check_same(folder, record, source, options)
        again = {TaskState.STOPPED} | ({TaskState.FAILED} if options.retry_failed else set())
        retried = tuple(task.name for task in record.tasks.values() if task.state in again)
        if not retried and all(task.state.ended for task in record.tasks.values()):
            return record
        seats = {} if options.allow_changes else _still_running(record, backend.taken_over())
        backend.keep(seats)
        kept = tuple({task: None for task, _ in seats.values()})
        places = _places(options, folder, record)
        event = RunResumed(
            retried=retried,
            devices=devices,
            session=backend.session,
            kept=kept,
            **places,
            asked=options.asked.plain(),
        )
    else:
        event = RunBegan(
            name=folder.path.name,
            source=source.file,
            source_digest=source.digest,
            sweep_digest=digest(source.sweep),
            tasks=tuple(describe(task) for task in source.sweep),
            devices=devices,
            session=backend.session,
            **_places(options, folder, record),
            asked=options.asked.plain(),
        )
    time_s = backend.now_s()
    record.apply(event, time_s)
    add(folder.journal, event, time_s=time_s)
    return record


_OF_RUN = re.compile(r"[^/]+-[0-9a-f]{8}")


def _places(options: RunOptions, folder: RunFolder, before: RunRecord) -> dict[str, Any]:
    """What a run has outside of its folder: never what another of the same name has, which it would take for its own.

    Of what was before, that the user named.
    """
    fresh = f"{folder.path.resolve().name}-{secrets.token_hex(4)}"
    storage, shards = before.storage, before.shards
    if options.storage:
        root = options.storage.rstrip("/") if "://" in options.storage else str(Path(options.storage).absolute())
        if not _is_in(storage, root):
            storage = f"{root}/{fresh}"
    if root := options.asked.shards or "":
        if not _knows(before):
            shards = tuple(place for place in shards if _is_in(place, root))
        own = Path(shards[0]).name if shards else fresh
        shards = tuple(dict.fromkeys((str(Path(root) / own), *shards)))
    return {
        "storage": storage,
        "shards": shards,
        "seal": seal_of(_sealed(storage, options.asked, shards)),
    }


def _is_in(place: str, root: str) -> bool:
    """Whether a place is one that rota made for a run right below a root."""
    head, _, last = place.rpartition("/")
    return head == root.rstrip("/") and _OF_RUN.fullmatch(last) is not None


def _sealed(storage: str, asked: Asked, shards: tuple[str, ...]) -> tuple[str, ...]:
    """All places that a run uses outside of its folder."""
    return storage, asked.address, asked.shards or "", *shards


def _knows(before: RunRecord) -> bool:
    """Whether the places that a journal names were named by the user, on this machine."""
    return is_sealed(_sealed(before.storage, Asked.of(before.asked), before.shards), before.seal)


def _check_named(path: Path, before: RunRecord, options: RunOptions) -> None:
    """InputError where only the journal says which place is used: nothing is fetched from there, or written."""
    if _knows(before):
        return
    asked = options.asked if options.cluster is None else options.asked.on(options.cluster)
    storage, address, shards = before.storage, Asked.of(before.asked).address, before.asked.get("shards")
    for place, option, said in (
        (storage, f"--storage {storage.rpartition('/')[0]}", options.storage),
        (address, f"--cluster ray={address}", options.cluster or asked.cluster),
        (shards or "".join(before.shards[:1]), f"--shards {shards or 'DIR'}", asked.shards),
    ):
        if place and not said:
            raise InputError(
                f"the journal of {path} names {place}, and you have not named that on this machine; a run folder of "
                f"somebody else may name any place: if it is the run's, add {option}"
            )


def _collect(folder: RunFolder, record: RunRecord) -> None:
    """Models that were trained on machines that do not see the run folder are in the storage."""
    finished = [task for task in record.tasks.values() if task.state is TaskState.FINISHED]
    missing = [task for task in finished if not model_file.is_whole(folder.model(task.name))]
    if record.storage and missing:
        from rota.state.mirror import Mirror

        for task in missing:
            try:
                inside.enter(folder.task(task.name))
                Mirror(f"{record.storage}/{task.name}").fetch_file(folder.model(task.name))
            except CheckpointError as error:
                text = f"the model of {task.name} stays where it is: {error}"
                warnings.warn(one_line(text), stacklevel=2)


def _mend(folder: RunFolder, record: RunRecord) -> list[str]:
    """Write models that are lost or damaged again, and say which cannot be."""
    lost = []
    for task in record.tasks.values():
        if task.state is TaskState.FINISHED and not model_file.is_whole(folder.model(task.name)):
            try:
                mend_model(folder, task.name, shards=record.shards)
            except RunFolderError as error:
                lost.append(str(error))
            else:
                text = f"the model of {task.name} was lost or damaged; it was written again from its last checkpoint"
                warnings.warn(one_line(text), stacklevel=2)
    return lost


def _still_running(record: RunRecord, found: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Of the workers that were found, those whose whole task still runs as the journal has it."""
    return {
        device: (task.name, task.attempt)
        for task in record.tasks.values()
        if task.state is TaskState.RUNNING
        and all(found.get(device) == (task.name, task.attempt) for device in task.devices)
        for device in task.devices
    }


def _check_same(folder: RunFolder, record: RunRecord, source: Source, options: RunOptions) -> None:
    names = [task.name for task in source.sweep]
    if names != list(record.tasks):
        raise RunMismatchError(
            f"{folder.path} holds the run of another sweep (its tasks are {_some(list(record.tasks))}; "
            f"yours are {_some(names)}); give another out folder"
        )
    if options.allow_changes:
        return
    if source.digest and record.source_digest:
        check_unchanged(folder, source.file, before=record.source_digest, now=source.digest)
        _check_facts(folder, record, source)
        return
    if digest(source.sweep) != record.sweep_digest:
        raise RunMismatchError(
            f"the sweep has changed since the run in {folder.path} began; undo the change, give another out folder, "
            "or resume with allow_changes=True"
        )


def check_unchanged(folder: RunFolder, file: str, *, before: str, now: str) -> None:
    """RunMismatchError if a sweep's file is not what it was when the run began."""
    if before != now:
        raise RunMismatchError(
            f"{file} has changed since the run in {folder.path} began; undo the change, start a new run, "
            "or resume with --allow-changes (allow_changes=True)"
        )


def _check_facts(folder: RunFolder, record: RunRecord, source: Source) -> None:
    """The same file makes other tasks where it looks at something else: the environment, another file."""
    for task in source.sweep:
        before, now = record.tasks[task.name].facts, fixed_facts(describe(task))
        for key, value in fixed_facts(before).items():
            if key in now and now[key] != value:
                raise RunMismatchError(
                    f"{source.file} is the same as when the run in {folder.path} began, but now makes another "
                    f"{task.name} ({key} was {value!r} and is {now[key]!r}); restore what it looks at, start a new "
                    "run, or resume with --allow-changes (allow_changes=True)"
                )


def _carry_out(
    folder: RunFolder,
    sweep: Sweep,
    record: RunRecord,
    cluster: Cluster,
    backend: LocalBackend,
    options: RunOptions,
    widths: dict[str, int],
    notes: list[str],
) -> None:
    journal = Journal(folder.journal)
    try:
        with _observing(options, backend) as observer:
            controller = Controller(
                sweep=sweep,
                record=record,
                journal=journal,
                folder=folder,
                backend=backend,
                devices=[device.name for device in cluster.devices],
                widths=widths,
                retries=options.retries,
                observer=observer,
            )
            for text in notes:
                controller.note(text)
            for node in backend.unseen(folder.journal) if not record.storage else []:
                controller.note(
                    f"node {node} does not see {folder.path}: what is trained there stays on its own disk and is lost "
                    "with it; use a folder that all nodes see, or --storage"
                )
            with (
                _interruptible(controller),
                _scheduled(controller, sweep, record, cluster, backend, folder, options, widths),
            ):
                controller.run()
    finally:
        journal.close()


_GAP = 0.01
"""To the best possible: with less, nothing better is searched for."""


@contextlib.contextmanager
def _scheduled(
    controller: Controller,
    sweep: Sweep,
    record: RunRecord,
    cluster: Cluster,
    backend: LocalBackend,
    folder: RunFolder,
    options: RunOptions,
    widths: dict[str, int],
) -> Iterator[None]:
    """Have the controller follow a schedule, where there is something to decide."""
    pending = [task for task in sweep if record.tasks[task.name].state is TaskState.PENDING]
    devices = [device.name for device in cluster.devices]
    forced = {task.name for task in pending if getattr(task.strategy, "pooled", False)}
    if forced:
        controller.follow(Sharing(LongestFirst(), tasks=forced, devices=devices, chosen=False))
    pending = [task for task in pending if task.name not in forced]
    if not pending or not options.profile or not preflight.undecided(pending, cluster, widths, options.objective):
        yield
        return
    if any(task.state is TaskState.RUNNING for task in record.tasks.values()):
        controller.note("tasks go on where they run; those that wait follow them, the longest first")
        yield
        return
    # numpy and what needs it: not for those who only look at a run
    from rota.execute.forecast import forecast
    from rota.execute.scheduled import Scheduled
    from rota.execute.solvers import ChildSolver

    # Where shards go: how fast that disk is, is measured, too.
    profile = Path(record.shards[0] if record.shards else folder.path) / PROFILE_FOLDER
    begin_s = backend.now_s()
    deadlines = {task.name: record.begin_s + task.deadline_s for task in pending if task.deadline_s is not None}
    for trouble in cache_trouble():
        controller.note(trouble)
    with profile_progress() if options.progress else contextlib.nullcontext(lambda *told: None) as progress:
        found = forecast(
            replace(sweep, tasks=tuple(pending)),
            cluster=cluster,
            backend=backend,
            folder=profile,
            widths=widths,
            done={task.name: record.tasks[task.name].saved_step for task in pending},
            objective=options.objective,
            deadlines={name: at_s - begin_s for name, at_s in deadlines.items()},
            progress=progress,
            interrupted=controller.leaving,
            seconds=0.0,  # a better one is searched for while the first tasks run
        )
    inside.remove(profile, inside.PROFILE)
    for name, words in found.profile.notices:
        controller.note(f"{name}: {words}")
    if found.solved is None:
        yield
        return
    controller.note(found.sentence())
    solver = ChildSolver()
    now_s = backend.now_s()
    shared = set() if found.pool is None else set(found.pool.tasks)
    policy: Policy = Scheduled(
        estimates=found.profile.estimates,
        classes=found.profile.classes,
        nodes=found.nodes,
        solver=solver,
        objective=options.objective,
        deadlines=deadlines,
        own={task.name for task in pending if task.strategy != "auto"},
        aside=shared,
        # What the others do after a pool is planned when that is over.
        intents=[] if shared else [replace(one, start_s=one.start_s + now_s) for one in found.intents],
        improve=found.solved.gap > _GAP,
    )
    if shared:
        policy = Sharing(policy, tasks=shared, devices=devices, chosen=True)
    if forced:
        policy = Sharing(policy, tasks=forced, devices=devices, chosen=False)
    controller.follow(policy)
    try:
        yield
    finally:
        solver.close()


@contextlib.contextmanager
def _observing(options: RunOptions, backend: LocalBackend) -> Iterator[Observer | None]:
    if not options.progress:
        yield None
        return
    with progress_observer(now_s=backend.now_s) as observer:
        yield observer


@contextlib.contextmanager
def _interruptible(controller: Controller) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the run in order. A second Ctrl-C ends it at once; the last checkpoints stand."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        controller.interrupt()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _script_name() -> str:
    """The name of the script that is running; a notebook or prompt has none."""
    return Path(sys.argv[0]).stem if sys.argv[0].endswith(".py") else "sweep"


def _device_facts(cluster: Cluster) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(device), "name": device.name} for device in cluster.devices]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
