"""What the tests share: a hypothesis profile, a task that is never trained, a check of error sentences, and runs on
the virtual clock.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from rota.cli import main
from rota.errors import InputError
from rota.execute.backends.simulated import SimulatedBackend, SimulatedTask
from rota.execute.controller import Controller
from rota.execute.events import RunBegan, RunResumed
from rota.execute.record import RunRecord
from rota.execute.states import RunState
from rota.store.journal import Journal, read_events
from rota.store.run_folder import RunFolder
from rota.sweep import Sweep
from rota.task import Task

hypothesis.settings.register_profile("rota", deadline=None, max_examples=50)
hypothesis.settings.load_profile("rota")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Sums come out the same whatever else runs, and tests that run beside each other do not fight for cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Whoever starts a thread of rota's ends it and waits for it."""
    before = set(threading.enumerate())
    yield
    left = {thread for thread in threading.enumerate() if thread.name.startswith("rota-")} - before
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def make_task() -> Callable[..., Task]:
    """Makes a valid task; its factories are never called by the tests that use it."""

    def make(name: str = "a", **changes: Any) -> Task:
        fields: dict[str, Any] = {"model": object, "data": object, "optimizer": object, "loss": object}
        if "epochs" not in changes:
            fields["steps"] = 10
        return Task(name=name, **(fields | changes))

    return make


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """Calls what must be refused, checks that the error is one sentence for a person, and gives that sentence."""

    def call(
        function: Callable[..., Any], *arguments: Any, error: type[Exception] = InputError, **keywords: Any
    ) -> str:
        with pytest.raises(error) as caught:
            function(*arguments, **keywords)
        sentence = str(caught.value)
        assert "\n" not in sentence, f"more than one line: {sentence!r}"
        assert sentence == sentence.strip()
        assert len(sentence.split()) >= 4, f"not a sentence: {sentence!r}"
        return sentence

    return call


class SimulatedRun:
    """A run of tasks that behave as planned, with its journal in a folder. The backend outlives its controllers."""

    def __init__(
        self,
        tasks: list[Task],
        root: Path,
        plans: Mapping[str, SimulatedTask],
        *,
        devices: int,
        backend: type[SimulatedBackend] = SimulatedBackend,
        **options: Any,
    ) -> None:
        self.sweep = Sweep(tasks=tuple(tasks))
        self.folder = RunFolder(root)
        self.devices = [f"cpu:{i}" for i in range(devices)]
        self.backend = backend(lambda task, devices: plans[task.name], **options)
        self.record = RunRecord()

    def run(self, *, retried: tuple[str, ...] = (), **options: Any) -> RunState:
        """Begin the run, or take it up again from its journal; returns how it ended."""
        journal = Journal(self.folder.journal, durable=False)
        try:
            self.record = RunRecord.replay(read_events(self.folder.journal))
            tasks = tuple({"name": task.name, "steps": task.steps} for task in self.sweep)
            begin = RunBegan(name="run", source="", source_digest="", sweep_digest="", tasks=tasks, devices=())
            event = RunResumed(retried=retried) if self.record.tasks else begin
            self.record.apply(event, self.backend.now_s())
            journal.append(event, time_s=self.backend.now_s())
            journal.commit()
            self.controller = Controller(
                sweep=self.sweep,
                record=self.record,
                journal=journal,
                folder=self.folder,
                backend=self.backend,
                devices=self.devices,
                **options,
            )
            return self.controller.run()
        finally:
            journal.close()

    def events(self, *kinds: type) -> list[Any]:
        """What the journal holds, of these kinds."""
        return [event for _, event in read_events(self.folder.journal) if not kinds or isinstance(event, kinds)]


@pytest.fixture(scope="session")
def simulate(make_task: Callable[..., Task]) -> Callable[..., SimulatedRun]:
    """Makes a `SimulatedRun` of a plan for each task."""

    def make(root: Path, plans: Mapping[str, SimulatedTask], **options: Any) -> SimulatedRun:
        tasks = [make_task(name, steps=plan.steps) for name, plan in plans.items()]
        return SimulatedRun(tasks, root, plans, **options)

    return make


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Calls a command in this process; gives its exit code, its output and its errors."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        path, modules = list(sys.path), set(sys.modules)
        try:
            with pytest.raises(SystemExit) as ended:
                main([str(one) for one in arguments])
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if name.startswith("rota_sweep_"):
                    del sys.modules[name]
        done = capsys.readouterr()
        return ended.value.code, done.out, done.err

    return call
