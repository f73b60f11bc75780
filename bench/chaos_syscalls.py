"""System calls fail in a run, one after another, in its controller and its workers; each run ends as if none had.

python -m bench.chaos_syscalls [--faults 200] [--seed 1] [--only SCENARIO] [--repeat NUMBER] [--cold] [--quick] [--json]

A first run of each scenario counts the calls on files below the run folder. A fault is drawn from these by its number
and the seed: the Nth call of one kind on one kind of file gives an error, comes back short, or kills its process before
it or after it; or the disk is full from that call on. Then `rota resume --failed` goes on, three times at most.
`--cold` starts each process anew instead of forking it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

import rota
from bench import harness
from bench.chaos_scenarios import SCENARIOS, SWEEPS, Scenario
from bench.chaos_warm import Forked, Nursery
from rota.execute.record import RunRecord
from rota.runtime import limits
from rota.store.journal import read_events, read_summary

FAULTS, QUICK_FAULTS = 200, 2
_QUICK_SCENARIOS = ("gang",)
_ENDS_S = 180.0
_FULL_S = 4.0
"""A disk that is full for a while is so for this long."""
_LEFT_S = 15.0
_RESUMES = 3
_WITHIN = 1e-9
_SOURCE = Path(__file__).with_name("syscall_faults.c")
_STATE_BYTES = 4096

_KILLS = ("kill-before", "kill-after")
_MODES: Mapping[str, tuple[str, ...]] = {
    "write": ("ENOSPC", "EIO", "EDQUOT", "EINTR", "short", *_KILLS),
    "pwrite": ("ENOSPC", "EIO", "EDQUOT", "EINTR", "short", *_KILLS),
    "fsync": ("EIO", "ENOSPC", "done EIO", *_KILLS),
    "rename": ("EIO", "ENOSPC", "EACCES", "done EIO", *_KILLS),
    "open": ("EMFILE", "ENFILE", "EIO", "EACCES", *_KILLS),
    "create": ("EMFILE", "ENOSPC", "EIO", "EROFS", *_KILLS),
    "mkdir": ("ENOSPC", "EIO", "EACCES", *_KILLS),
    "ftruncate": ("EIO", "ENOSPC", *_KILLS),
    "unlink": ("EIO", "EACCES", "EBUSY", *_KILLS),
    "read": ("EIO", "EINTR", "short", *_KILLS),
    "pread": ("EIO", "EINTR", "short", *_KILLS),
    "flock": ("EINTR", "ENOLCK", "EIO", *_KILLS),
}
_GROWING = "create,write,pwrite,mkdir,ftruncate"
_SELDOM = ("unlink", "read", "pread", "flock")
"""Not what loses data first."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Calls of one kind on files of one kind, in an undisturbed run."""

    phase: int
    """Of the commands of its scenario."""
    role: str
    call: str
    path: str
    """With * where names differ from run to run."""
    count: int


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What befalls a run."""

    number: int
    scenario: Scenario
    site: Site
    first: int
    count: int
    mode: str
    full: str = ""
    """Whether the disk is full from there on: "for a while" or "to the end" of the command."""

    def __str__(self) -> str:
        what = f"the disk is full {self.full} from" if self.full else f"{self.mode} at"
        many = f" and the next {self.count - 1}" if 1 < self.count < 1000 else ""
        which = f"{self.site.call} {self.first}{many} of {self.site.count}"
        where = f"{self.scenario.name}{f' (command {self.site.phase + 1})' if self.scenario.then else ''}"
        return f"{self.number}: {where}, {self.site.role}: {what} {which} on {self.site.path}"

    @property
    def error(self) -> int:
        """What the call says; 0 if it kills or is short."""
        return getattr(errno, self.mode.removeprefix("done "), 0)

    def spec(self) -> str:
        """As syscall_faults.c reads it."""
        how = {"short": "short", **{one: one for one in _KILLS}}.get(self.mode)
        how = how or f"{'done-' if self.mode.startswith('done') else ''}errno={self.error}"
        if self.full:
            # From the call on: it is the first fault that opens the door for all others.
            return f"controller,worker {_GROWING} * {self.first} {self.count} errno={errno.ENOSPC}"
        return f"{self.site.role} {self.site.call} {self.site.path} {self.first} {self.count} {how}"


@dataclass(kw_only=True)
class Outcome:
    """What became of a run."""

    resumes: int = 0
    fired: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """What each command printed, and how it ended."""


def sites_of(log: Path, phase: int) -> list[Site]:
    """What an undisturbed run did."""
    found: Counter[tuple[str, str, str]] = Counter()
    for line in log.read_text().splitlines():
        what, role, call, _, path = line.split(" ", 4)
        if what == "call":
            found[role, call, kind_of(path)] += 1
    return [
        Site(phase=phase, role=role, call=call, path=path, count=count)
        for (role, call, path), count in sorted(found.items())
    ]


def kind_of(path: str) -> str:
    """A path with * for what differs from run to run."""
    path = re.sub(r"\.tmp\w{6}$", ".tmp*", path)
    path = re.sub(r"\.disk-\w+", ".disk-*", path)
    return re.sub(r"\d+", "*", path)


class Runs:
    """Runs of the scenarios in a folder of their own."""

    def __init__(self, folder: Path, *, cold: bool) -> None:
        self.folder = folder
        self.file = folder / "sweep.py"
        self.file.write_text(SWEEPS)
        library = folder / "syscall_faults.so"
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SystemExit("system calls cannot fail here: there is no C compiler; install one (gcc or clang)")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)], check=True)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ROTA_CHAOS")},
            "LD_PRELOAD": str(library),
            "ROTA_CACHE": str(folder / "cache"),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        self._nursery = None if cold else self._warmed()
        self.references: dict[str, Path] = {}
        self.sites: dict[str, list[Site]] = {}
        self.kept: dict[str, set[str]] = {}

    def _warmed(self) -> Nursery:
        environment = dict(self._environment)
        limits.prepare(environment)  # workers come from it, too
        return Nursery.started(environment | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

    def close(self) -> None:
        """End what was started."""
        if self._nursery is not None:
            self._nursery.close()

    def reference(self, scenario: Scenario) -> None:
        """Run a scenario without a fault, and count its calls."""
        run = self.folder / f"{scenario.name}-reference"
        outcome = Outcome()
        for phase in range(1 + bool(scenario.then)):
            log = self.folder / f"{run.name}.log"
            log.unlink(missing_ok=True)
            code = self._command(run, scenario, phase, outcome, faults="", tracing=True)
            expected = 1 if phase == 0 and scenario.then else 0
            if code != expected:
                raise SystemExit(f"{scenario.name} ends with {code} without any fault:\n{outcome.said[-1]}")
            self.sites[scenario.name] = self.sites.get(scenario.name, []) + sites_of(log, phase)
        self.references[scenario.name] = run
        self.kept[scenario.name] = _names(run)

    def befall(self, fault: Fault) -> Outcome:
        """Run a scenario with a fault, and do as its commands say until it has ended."""
        run = self.folder / f"run-{fault.number}"
        outcome = Outcome()
        log = self.folder / f"{run.name}.log"
        phase, last = 0, int(bool(fault.scenario.then))
        arguments: tuple[str, ...] | None = None
        while True:
            spec = fault.spec() if phase >= fault.site.phase else ""
            code = self._command(run, fault.scenario, phase, outcome, faults=spec, full=fault.full, again=arguments)
            if code is None:
                outcome.wrong.append("a command did not end")
                break
            begun = _events(run) > 0
            if phase < last and begun:
                phase += 1  # another controller goes on in another way, as soon as there is something to go on with
                continue
            if code == 0 and phase == last:
                break
            if outcome.resumes == _RESUMES:
                outcome.wrong.append(f"the run has not ended after {_RESUMES} resumes")
                break
            outcome.resumes += 1
            arguments = ("resume", str(run), "--failed") if begun else None
        outcome.fired = [line for line in log.read_text().splitlines() if line.startswith("fault ")]
        self._judge(run, fault, outcome, log)
        return outcome

    # ---- one command ----

    def _command(
        self,
        run: Path,
        scenario: Scenario,
        phase: int,
        outcome: Outcome,
        *,
        faults: str,
        full: str = "",
        tracing: bool = False,
        again: Sequence[str] | None = None,
    ) -> int | None:
        state, temporary = self.folder / f"{run.name}.state", self.folder / f"{run.name}.tmp"
        temporary.mkdir(exist_ok=True)
        if not state.exists():
            state.write_bytes(bytes(_STATE_BYTES))
        environment = self._environment | {
            "TMPDIR": str(temporary),
            "ROTA_FAULTS": faults,
            "ROTA_FAULTS_BELOW": str(run),
            "ROTA_FAULTS_STATE": str(state),
            "ROTA_FAULTS_LOG": str(self.folder / f"{run.name}.log"),
            "ROTA_CHAOS_ROW_S": str(scenario.row_s),
        }
        if tracing:
            environment["ROTA_FAULTS_TRACE"] = "1"
        if scenario.rows is not None and phase == 0:
            environment["ROTA_CHAOS_ROWS"] = str(scenario.rows)
        if again is not None:
            arguments = again
        elif phase == 0:
            arguments = ("run", f"{self.file}:{scenario.name}", "--out", str(run), "--no-profile", *scenario.options)
        else:
            arguments = ("resume", str(run), "--failed", *scenario.then)
        said = self.folder / f"{run.name}.said"
        with open(said, "wb") as output:
            process = self._started(["-m", "rota", *arguments], environment, output.fileno())
            code = _ended(process, state, full)
        text = said.read_text(errors="replace")
        outcome.said.append(f"$ rota {' '.join(arguments)}\n{text}-> {code}")
        if left := _left_processes(process.pid):
            outcome.wrong.append(f"left behind: {left}")
        if code not in (0, 1, 2, None) and not (code == -signal.SIGKILL and "kill" in faults):
            outcome.wrong.append(f"a command ended with {code}")
        if "Traceback" in text:
            outcome.wrong.append("a traceback was printed")
        return code

    def _started(
        self, arguments: list[str], environment: dict[str, str], output: int
    ) -> Forked | subprocess.Popen[Any]:
        if self._nursery is None:
            return subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        with open(os.devnull, "rb") as nothing:
            files = {0: nothing.fileno(), 1: output, 2: output}
            return self._nursery.fork(
                arguments, environment=environment, files=files, session=True, folder=str(self.folder)
            )

    # ---- the end ----

    def _judge(self, run: Path, fault: Fault, outcome: Outcome, log: Path) -> None:
        outputs = "".join(path.read_text(errors="replace") for path in run.glob("tasks/*/output*.log"))
        if "Traceback" in outputs:
            outcome.wrong.append("a traceback is in the output of a task")
        said = "\n".join(outcome.said)
        if "please report it" in said:
            outcome.wrong.append("rota takes the disk's error for a defect of its own")
        ends = [one.rpartition("-> ")[2] for one in outcome.said]
        if fault.error and {"1", "2"} & set(ends[bool(fault.scenario.then) :]) and not _names_cause(said, fault.error):
            outcome.wrong.append(f"nothing names the cause ({os.strerror(fault.error)})")
        if any("not" in one and "ended" in one for one in outcome.wrong):
            with contextlib.suppress(rota.RotaError, OSError):
                outcome.said.append("\n".join(f"{time_s:.1f} {event}"[:300] for time_s, event in _last(run)))
            return
        outcome.wrong += _differences(run, self.references[fault.scenario.name], equal=fault.scenario.equal)
        names = _names(run)
        if left := names - self.kept[fault.scenario.name] - _last_state(names):
            outcome.wrong.append(f"left behind: {', '.join(sorted(left))}")
        temporary = self.folder / f"{run.name}.tmp"
        if left := {path.name for path in temporary.iterdir()}:
            outcome.wrong.append(f"left behind in the folder of temporary files: {', '.join(sorted(left))}")
        pids = {line.split(" ")[3] for line in log.read_text().splitlines() if line.startswith("began ")}
        with contextlib.suppress(FileNotFoundError):
            if left := {name for name in os.listdir("/dev/shm") if set(re.findall(r"\d+", name)) & pids}:
                outcome.wrong.append(f"left behind in shared memory: {', '.join(sorted(left))}")

    def forget(self, fault: Fault) -> None:
        """Nothing of a run is needed any more."""
        for path in self.folder.glob(f"run-{fault.number}*"):
            if path.stem == f"run-{fault.number}" or path.name == f"run-{fault.number}":
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _ended(process: Forked | subprocess.Popen[Any], state: Path, full: str) -> int | None:
    """The code with which a command ends; None if it does not. A full disk has room again after a while."""
    begun_s, full_since_s = time.monotonic(), None
    try:
        while time.monotonic() - begun_s < _ENDS_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.2)
            if full == "for a while":
                if full_since_s is None and _fired(state):
                    full_since_s = time.monotonic()
                elif full_since_s is not None and time.monotonic() - full_since_s > _FULL_S:
                    _end_faults(state)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    finally:
        if full and _fired(state):
            _end_faults(state)


def _fired(state: Path) -> bool:
    return any(state.read_bytes()[4 + 16 * 4 : 4 + 32 * 4])


def _end_faults(state: Path) -> None:
    with open(state, "r+b") as file:
        file.write(b"\1")


def _left_processes(session: int) -> list[str]:
    """What a command started and left; waited for, because death takes a moment."""
    deadline_s = time.monotonic() + _LEFT_S
    while True:
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) != session:
                    continue
                if process.status() == psutil.STATUS_ZOMBIE:
                    if process.ppid() == os.getpid():  # its parent was killed
                        os.waitpid(process.pid, os.WNOHANG)
                else:
                    left.append(f"process {process.pid} ({' '.join(process.cmdline())[:60]})")
        if not left:
            return []
        if time.monotonic() > deadline_s:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
            return left
        time.sleep(0.05)


def _names(run: Path) -> set[str]:
    return {kind_of(str(path.relative_to(run))) for path in run.rglob("*") if not path.is_dir()}


def _last_state(names: set[str]) -> set[str]:
    """The last state of tasks, which is whole or in shards: one that ends without a batch may have the other kind."""
    found: set[str] = set()
    for task in {name.split("/")[1] for name in names if name.startswith("tasks/")}:
        whole = {
            name for name in names if re.match(rf"tasks/{re.escape(task)}/checkpoints/checkpoint-\*/\w+\.\w+$", name)
        }
        shards = {name for name in names if re.match(rf"tasks/{re.escape(task)}/shards/\w[^/]*$", name)}
        found |= whole if not shards else shards if not whole else set()
    return found


def _events(run: Path) -> int:
    try:
        return sum(1 for _ in read_events(run / "journal.db"))
    except rota.RotaError:
        return 0


def _last(run: Path) -> list[tuple[float, Any]]:
    return list(read_events(run / "journal.db"))[-12:]


def _names_cause(said: str, error: int) -> bool:
    words = [os.strerror(error).lower(), "disk i/o error", "unable to open database file", "database or disk is full"]
    return any(one in said.lower() for one in words)


def _differences(run: Path, reference: Path, *, equal: bool) -> list[str]:
    """What is other than in the undisturbed run."""
    try:
        result, expected = rota.open_run(run), rota.open_run(reference)
        told = []
        for task in expected.tasks:
            mine = result.task(task.name)
            if mine.state != "finished":
                told.append(f"{task.name} is {mine.state}: {mine.reason}")
                continue
            assert mine.model_path is not None
            assert task.model_path is not None
            found, wanted = load_file(mine.model_path), load_file(task.model_path)
            if found.keys() != wanted.keys() or not all(_same(found[name], wanted[name], equal) for name in wanted):
                told.append(f"{task.name} has other weights")
            rows, right = result.history(task.name), expected.history(task.name)
            if [row.keys() for row in rows] != [row.keys() for row in right] or not all(
                _same(torch.tensor(list(one.values())), torch.tensor(list(other.values())), equal)
                for one, other in zip(rows, right, strict=True)
            ):
                told.append(f"{task.name} has another history")
        whole = RunRecord.replay(read_events(run / "journal.db"))
        brief = RunRecord.replay(read_summary(run / "journal.db"))
        if [task.state for task in whole.tasks.values()] != [task.state for task in brief.tasks.values()]:
            told.append("the journal does not replay to one state")
    except rota.RotaError as error:
        return [f"the run cannot be read: {error}"]
    return told


def _same(found: torch.Tensor, wanted: torch.Tensor, equal: bool) -> bool:
    if equal or not wanted.is_floating_point():
        return torch.equal(found, wanted)
    return torch.allclose(found, wanted, rtol=_WITHIN, atol=_WITHIN)


# ---- which faults ----


def drawn(sites: Mapping[str, Sequence[Site]], scenarios: Sequence[Scenario], *, seed: int) -> Iterator[Fault]:
    """Faults without end: one scenario after another, in each all kinds of calls of all roles in turn."""
    dice = random.Random(seed)
    queues: dict[str, list[tuple[int, str, str]]] = {one.name: [] for one in scenarios}
    number = 0
    while True:
        for scenario in scenarios:
            queue = queues[scenario.name]
            if not queue:
                groups = sorted({(one.phase, one.role, one.call) for one in sites[scenario.name]})
                queue += [one for one in groups if one[2] not in _SELDOM or dice.random() < 0.3]
                dice.shuffle(queue)
            group = queue.pop()
            number += 1
            there = [one for one in sites[scenario.name] if (one.phase, one.role, one.call) == group]
            yield _drawn(number, scenario, random.Random(f"{seed} {number}"), there)


def _drawn(number: int, scenario: Scenario, dice: random.Random, there: Sequence[Site]) -> Fault:
    site = dice.choice(there)
    if site.call in _GROWING.split(",") and dice.random() < 0.1:
        whole = _any_file(site, there)
        return Fault(
            number=number,
            scenario=scenario,
            site=whole,
            first=dice.randint(1, whole.count),
            count=10**6,
            mode="ENOSPC",
            full=dice.choice(("for a while", "to the end")),
        )
    # The last one of a kind is the one at the end of a task.
    first = dice.choice((1, site.count, site.count, dice.randint(1, site.count), dice.randint(1, site.count)))
    mode = dice.choice(_MODES[site.call])
    count = 1 if mode in _KILLS else dice.choice((1, 1, 1, 1, 2, 3))
    return Fault(number=number, scenario=scenario, site=site, first=first, count=count, mode=mode)


def _any_file(site: Site, there: Sequence[Site]) -> Site:
    """All files, of the calls that need room."""
    count = sum(one.count for one in there)
    return Site(phase=site.phase, role="controller,worker", call=_GROWING, path="*", count=count)


# ---- the command ----


def befall_all(
    scenarios: Sequence[Scenario], *, count: int, seed: int, cold: bool = False, first: int = 1, only: int | None = None
) -> tuple[Counter[str], list[str]]:
    """So many faults, one run each: what became of them, and what was wrong. `only` is the number of the one to try."""
    tally = Counter[str]()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rota-faults-") as place:
        runs = Runs(Path(place).resolve(), cold=cold)
        try:
            for scenario in scenarios:
                begun_s = time.monotonic()
                runs.reference(scenario)
                print(f"{scenario.name}: {time.monotonic() - begun_s:.1f} s", file=sys.stderr, flush=True)
            for fault in drawn(runs.sites, scenarios, seed=seed):
                if fault.number < first or only not in (None, fault.number):
                    continue
                if tally["faults"] == count:
                    break
                begun_s = time.monotonic()
                outcome = runs.befall(fault)
                took_s = time.monotonic() - begun_s
                if not outcome.fired:
                    tally["not met"] += 1
                else:
                    tally["faults"] += 1
                    tally["survived"] += not outcome.wrong
                    tally[f"resumes {outcome.resumes}"] += 1
                    tally[f"{fault.mode} at {fault.site.call}"] += 1
                word = "not met" if not outcome.fired else "ok" if not outcome.wrong else "WRONG"
                print(f"{fault}: {word}, {outcome.resumes} resumes, {took_s:.1f} s", file=sys.stderr, flush=True)
                if outcome.wrong:
                    wrong.append(f"{fault}:\n  " + "\n  ".join(outcome.wrong))
                if outcome.wrong or only:
                    print("\n".join([*outcome.wrong, *outcome.fired[:5], *outcome.said]), file=sys.stderr, flush=True)
                runs.forget(fault)
                if only:
                    break
        finally:
            runs.close()
    return tally, wrong


def some(quick: bool, name: str | None = None) -> list[Scenario]:
    """All scenarios, or the one of this name."""
    names = (name,) if name else _QUICK_SCENARIOS if quick else [one.name for one in SCENARIOS]
    return [one for one in SCENARIOS if one.name in names]


def show_sites(scenarios: Sequence[Scenario], *, cold: bool) -> None:
    """What calls there are."""
    with tempfile.TemporaryDirectory(prefix="rota-faults-") as place:
        runs = Runs(Path(place).resolve(), cold=cold)
        try:
            for scenario in scenarios:
                runs.reference(scenario)
                print("\n".join(map(str, runs.sites[scenario.name])))
        finally:
            runs.close()


def main() -> None:
    """Draw, befall, judge, tell."""
    parser = harness.parser(__doc__)
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="this scenario", choices=[one.name for one in SCENARIOS])
    parser.add_argument("--repeat", type=int, help="the fault of this number, and what its commands said")
    parser.add_argument("--from", type=int, default=1, dest="first", help="the number of the first fault")
    parser.add_argument("--cold", action="store_true", help="start each process anew")
    parser.add_argument("--sites", action="store_true", help="what calls there are")
    chosen = parser.parse_args()
    scenarios = some(chosen.quick, chosen.only)
    if chosen.sites:
        show_sites(scenarios, cold=chosen.cold)
        return
    count = QUICK_FAULTS if chosen.quick else chosen.faults
    tally, wrong = befall_all(
        scenarios, count=count, seed=chosen.seed, cold=chosen.cold, first=chosen.first, only=chosen.repeat
    )
    figures = {"faults": tally["faults"], "survived": tally["survived"], "wrong": len(wrong)}
    harness.finish("chaos_syscalls", figures, {"tally": dict(tally), "seed": chosen.seed, "wrong": wrong}, chosen)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
