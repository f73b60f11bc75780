"""Trains one task from its last checkpoint to its end, saving and reporting on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rota.cluster.device import format_bytes
from rota.errors import CheckpointError, PeerError, RotaError, TaskError, UnfitCheckpointError, WayError
from rota.refusals import advice, refusal, told
from rota.runtime import limits, saved
from rota.runtime.executor import Closes, Executor, HasPace, KeepsItself, Parts, setup_limit_s
from rota.runtime.gang import Gang
from rota.runtime.messages import Balanced, Began, Finished, Halted, Noticed, Report, Saved
from rota.runtime.metrics import MetricsLog
from rota.runtime.one_device import choose_alone, room_of, state_bytes
from rota.runtime.training import Training
from rota.state import checkpoint, files, inside
from rota.state.mirror import Mirror
from rota.state.writer import CheckpointWriter, Saver, Written
from rota.store.run_folder import CHECKPOINT_FOLDER, MODEL_FILE, STORE_FOLDER, again
from rota.task import Task

if TYPE_CHECKING:
    from rota.memory.pooled import Seat

_SAVE_EVERY_S = 30.0
# Saving may cost this share of the time; where it is slow, it happens less often.
_SAVE_SHARE = 0.01

_ALLOCATORS_BYTES = 128 * 2**20
# A disk or a storage that is slower counts as hung.
_SLOWEST_BYTES_PER_S = 2**20
# Of a device's memory: what code takes is told from there on.
_TOLD, _LEAST_TOLD_BYTES = 1 / 64, 2**20


class Surroundings(Protocol):
    """What the loop needs of the process it runs in."""

    def report(self, report: Report) -> None:
        """Tell the controller something; callable from any thread."""
        ...

    def watch(self, what: str, *, limit_s: float | None, retry: bool, step: int) -> None:
        """Say what is being done from now on, and how long it may take."""
        ...

    def halt_requested(self) -> bool:
        """Whether the task should save itself and leave."""
        ...

    def confirmed_number(self) -> int:
        """The last report of metrics that is in the journal."""
        ...


class Loop:
    """One attempt at a task."""

    def __init__(
        self,
        task: Task,
        *,
        attempt: int,
        folder: Path,
        device: torch.device,
        surroundings: Surroundings,
        gang: Gang | None = None,
        memory_bytes: int = 0,
        seat: Seat | None = None,
        storage: str = "",
        shards: tuple[Path, ...] = (),
        code_before_bytes: int = 0,
    ) -> None:
        """`seat` is that of a task which shares devices with others, shard by shard.

        `storage` is where its checkpoints and its model go beside the folder, `shards` where what leaves memory lies
        instead of the folder: the first, and what lies in the others is of before. `code_before_bytes` is what loaded
        code took before the task came.
        """
        with told(f"the folder {folder} cannot be used"):
            # Here and never later, and nothing above it: what vanishes meanwhile is not made again.
            files.make_private_subfolder(folder)
        self._task = task
        self._seat = seat
        self._attempt = attempt
        self._folder = folder
        self._shards = [place / STORE_FOLDER for place in (*shards, folder)]
        self._device = device
        self._outside = surroundings
        self._gang = gang
        self._leads = gang is None or gang.leads
        self._memory_bytes = memory_bytes
        self._metrics = MetricsLog(task.name, attempt, surroundings.report)
        self._mirror = Mirror(storage, attempt=attempt) if storage else None
        self._writer: Saver = CheckpointWriter(
            folder / CHECKPOINT_FOLDER, done=self._written, mirror=self._mirror, has_room=limits.has_room_for
        )
        self._room = room_of(task, device=device, folder=self._shards[0].parent, memory_bytes=memory_bytes, gang=gang)
        self._while_running = contextlib.ExitStack()
        self._saved_at_s = time.perf_counter()
        self._saved_at_step = 0
        self._committed_step = 0
        self._write_failures = 0
        self._total_steps = 0
        self._state_bytes = 0
        self._told_code_bytes = code_before_bytes
        self.step = 0
        """The last step taken, for the report of a failure."""

    def run(self) -> Finished | Halted:
        """Train to the end, or until told to halt. TaskError if the task cannot go on."""
        try:
            training = self._prepare()
            self._tell_loaded()
            return self._train(training)
        except RotaError as error:
            self._metrics.flush()
            if isinstance(error, TaskError | PeerError):
                raise
            refused = refusal(error)
            remedy = f"; {advice(refused)}, then run {again(self._folder)}" if refused is not None else ""
            raise TaskError(f"{error}{remedy}") from error
        finally:
            with self._while_running:
                self._watch_saving("the last checkpoint")
                self._writer.wait()
                # A move that is being prepared goes on to its next safe point, and threads finish what they write.
                self._outside.watch("leaving", limit_s=self._task.setup_timeout_s, retry=True, step=self.step)
            self._outside.watch("", limit_s=None, retry=False, step=self.step)

    def _prepare(self) -> Training:
        training = Training(
            self._task,
            device=self._device,
            watch=self._watch_setup,
            choose=self._choose,
            room=self._room,
            in_any=self._in_any,
        )
        if self._gang is not None:
            self._watch_setup("waiting for the other devices of the task")
            self._gang.meet(timeout_s=self._task.setup_timeout_s)
        self._state_bytes = state_bytes(training.model)
        self._watch_saving("restoring the checkpoint", retry=False)
        if self._room is not None:
            self._while_running.enter_context(limits.lifted())
        found = self._restore(training)
        if found is not None:
            self._metrics.load_state_dict(found["metrics"])
        self._check_alike(training.step)
        self.step = self._saved_at_step = self._committed_step = training.step
        self._total_steps = training.total_steps
        self._outside.report(
            Began(
                task=self._task.name,
                attempt=self._attempt,
                from_step=training.step,
                total_steps=training.total_steps,
                parameters=sum(p.numel() for p in training.model.parameters()),
            )
        )
        self._saved_at_s = time.perf_counter()
        self._metrics.restart_clock()
        return training

    def _restore(self, training: Training) -> Any:
        """Go on from the last checkpoint, and return its state.

        The leader clears up and sets aside; the others look when it is done.
        """
        if self._leads:
            inside.remove_each(self._folder, inside.MODEL_SIDE)
            inside.remove_each(self._folder, inside.DISK_LOOK, inside.SHARDS)
        if self._mirror is not None:
            self._fetch(self._mirror)
        found = self._latest(training, self._notice) if self._leads else None
        self._agree(True)
        return found if self._leads else self._latest(training, None)

    def _fetch(self, mirror: Mirror) -> None:
        """Copy what the storage has and this machine lacks; one process after another, for some share a disk."""
        rank, size = (0, 1) if self._gang is None else (self._gang.rank, self._gang.size)
        for turn in range(size):
            if turn == rank:
                mirror.fetch(self._folder / CHECKPOINT_FOLDER)
            self._agree(True)

    def _check_alike(self, step: int) -> None:
        """On several machines, each reads its own disk."""
        steps = [step] if self._gang is None else self._gang.everyone(step)
        if len(set(steps)) > 1:
            raise TaskError(
                f"the devices of the task do not find the same checkpoint (they are at steps {sorted(set(steps))}); "
                "use a run folder that all nodes see, or --storage"
            )

    def _latest(self, training: Training, notice: Callable[[str], None] | None) -> Any:
        """A whole checkpoint, or a commit of a store that shards are in; several only if one was not removed yet.

        Without `notice` nothing is changed on disk.
        """
        told: list[str] = []

        def use(tree: Any) -> None:
            told.clear()
            saved.check(tree, self._task, notice=told.append)
            training.load_state_dict(tree["training"], notice=told.append)

        folder = self._folder / CHECKPOINT_FOLDER
        fetch = None if self._mirror is None else partial(self._mirror.fetch, folder)
        try:
            whole = checkpoint.read_latest(folder, notice=notice, fetch=fetch, use=use)
            tree = None if whole is None else whole.tree
            for shards in filter(Path.is_dir, self._shards):
                from rota.memory import keeping

                than = None if tree is None else int(tree["training"]["step"])
                later = keeping.read_latest(shards, than=than, notice=notice, use=use)
                tree = tree if later is None else later
        except UnfitCheckpointError as error:
            if isinstance(error.__cause__, TaskError):  # the user's own code refused its state
                raise error.__cause__ from error
            raise
        for text in told if tree is not None else ():
            self._notice(text)
        return tree

    def _choose(self, parts: Parts, batch: Any) -> Executor:
        executor = self._chosen(parts, batch)
        self._while_running.close()
        limits.keep_freed_memory()
        if isinstance(executor, Closes):
            self._while_running.callback(executor.close)
        if isinstance(executor, HasPace):
            self._metrics.pace = executor.pace
        if isinstance(executor, KeepsItself):
            self._writer.wait()
            self._writer = executor.writer(self._written)
            if self._mirror is not None:
                self._notice("its shards stay on the disk of its machine: the storage gets its model only")
            limits.return_freed_memory(self._memory_bytes)
            self._while_running.callback(limits.keep_freed_memory)
            limits.give_back()
            if self._seat is None and self._device.type == "cpu":
                # It counts its own bytes; what allocators take beside them must not end it.
                self._while_running.enter_context(limits.limited(self._memory_bytes * 11 // 10 + _ALLOCATORS_BYTES))
            else:  # in a pool the arbiter counts, and what lies between shards is on no device; nor is a GPU's host
                self._while_running.enter_context(limits.lifted())
        return executor

    def _chosen(self, parts: Parts, batch: Any) -> Executor:
        notice = self._notice if self._leads else (lambda text: None)
        if self._seat is not None:
            from rota.memory.pooling import Pooling

            batches = self._total_steps * self._task.accumulate
            return Pooling(parts, batch, seat=self._seat, total_batches=batches, notice=notice)
        if self._gang is None:
            return choose_alone(parts, batch, notice=notice)
        from rota.runtime.balancing import silent
        from rota.runtime.choose import choose

        return choose(
            parts,
            batch,
            gang=self._gang,
            step=self.step,
            total_steps=self._total_steps,
            memory_bytes=self._memory_bytes,
            notice=notice,
            tell=self._tell_balance if self._leads else silent,
        )

    def _tell_balance(
        self, *, step: int, shares: tuple[float, ...], left_out: tuple[float, ...], pause_s: float, why: str
    ) -> None:
        self._outside.report(
            Balanced(
                task=self._task.name,
                attempt=self._attempt,
                step=step,
                shares=shares,
                left_out=left_out,
                pause_s=pause_s,
                why=why,
            )
        )

    def _agree(self, *wishes: bool) -> tuple[bool, ...]:
        """What depends on this process's clock or on the user is decided by the leader, for all."""
        return wishes if self._gang is None else self._gang.agree(*wishes)

    def _in_any(self, flag: bool) -> bool:
        """Whether something holds in any process of the task."""
        return flag if self._gang is None else any(self._gang.everyone(flag))

    def _train(self, training: Training) -> Finished | Halted:
        first = training.step
        while True:
            if training.unvalidated:
                self._metrics.flush()
                self._watch_step(f"validation after step {training.step}", training.step)
                valid = training.validate(interrupted=lambda: self._interrupts_validation(training.step))
                self._metrics.restart_clock()
                if valid is not None:
                    self._metrics.add(training.step, valid)
            due = training.batches == 0 and self._save_is_due(training.step)
            halt, save = self._agree(self._outside.halt_requested(), due)
            if halt:
                return self._halt(training)
            if training.step >= training.total_steps:
                return self._finish(training)
            if save:
                self._watch_saving("saving")
                self._save(training)
            if training.step == first:  # the first batch may have to open files or compile
                self._watch_setup(f"step {training.step + 1}")
                means = training.train_batch()
                self._tell_loaded()
            else:
                self._watch_step(f"step {training.step + 1}", training.step)
                means = training.train_batch()
            if means is not None:
                self.step = training.step
                self._metrics.add(training.step, means)

    # ---- saving ----

    def _save_is_due(self, step: int) -> bool:
        if step == self._saved_at_step or self._writer.busy:
            return False
        if self._task.checkpoint_every is not None:
            return step - self._saved_at_step >= self._task.checkpoint_every
        last = self._writer.last
        cost_s = self._writer.copy_s + (last.write_s if last is not None else 0.0)
        return time.perf_counter() - self._saved_at_s >= max(_SAVE_EVERY_S, cost_s / _SAVE_SHARE)

    def _save(self, training: Training) -> dict[str, Any] | None:
        """Hand the state to the writer. It is returned in the only process that writes: the leader.

        All processes take part, because the leader may have to gather what the others hold. Some executors return the
        whole state in each of them, and so does plain PyTorch where no batch was left to train.
        """
        state = training.state_dict()
        self._metrics.confirm(self._outside.confirmed_number())
        if not self._leads:
            state = None
        elif state is None:
            raise WayError("what runs the task has no state to save in the process that leads")
        else:
            self._writer.submit(
                {"training": state, "metrics": self._metrics.state_dict(), "task": saved.mark_of(self._task)},
                step=training.step,
                fresh=training.fresh,
            )
        self._saved_at_step = training.step
        self._saved_at_s = time.perf_counter()
        return state

    def _save_and_wait(self, training: Training) -> dict[str, Any] | None:
        self._writer.wait()
        state = self._save(training)
        self._writer.wait()
        return state

    def _halt(self, training: Training) -> Halted:
        self._watch_saving("saving")
        if training.begun:
            self._save_and_wait(training)
        return Halted(task=self._task.name, attempt=self._attempt, step=self._committed_step)

    def _finish(self, training: Training) -> Finished:
        self._tell_loaded()
        self._watch_saving("writing the model")
        # The checkpoint first: whatever is killed from here on finds the last step done.
        state = self._save_and_wait(training)
        written = self._writer.last
        if written is not None and written.error is not None:
            raise CheckpointError(written.error) from written.cause
        if state is not None:
            checkpoint.write_model(self._folder / MODEL_FILE, self._writer.whole(state["model"]))
            if self._mirror is not None:
                self._mirror.send_file(self._folder / MODEL_FILE)
        metrics = dict(training.last)
        if training.best is not None:
            metrics |= {"best/loss": training.best["loss"], "best/step": training.best["step"]}
        return Finished(task=self._task.name, attempt=self._attempt, step=training.step, metrics=metrics)

    def _written(self, written: Written) -> None:
        """Called by the writer's thread."""
        if written.error is None:
            self._write_failures = 0
            self._committed_step = written.step
            self._remove_other_checkpoints()
            self._outside.report(
                Saved(task=self._task.name, attempt=self._attempt, step=written.step, write_s=written.write_s)
            )
            return
        self._write_failures += 1
        if self._write_failures == 1:  # once is enough while the disk stays full
            self._notice(f"{written.error}; training goes on, and the checkpoint before it still stands")

    def _remove_other_checkpoints(self) -> None:
        """A task that was switched has older ones of the other kind, or elsewhere."""
        whole = isinstance(self._writer, CheckpointWriter)
        if not whole:
            inside.remove(self._folder / CHECKPOINT_FOLDER, inside.CHECKPOINTS)
        for shards in self._shards if whole else self._shards[1:]:
            inside.remove(shards, inside.SHARDS)

    def _interrupts_validation(self, step: int) -> bool:
        self._watch_step(f"validation after step {step}", step)
        return self._agree(self._outside.halt_requested())[0]

    # ---- telling ----

    def _notice(self, text: str) -> None:
        self._outside.report(Noticed(task=self._task.name, attempt=self._attempt, text=text))

    def _watch_setup(self, what: str, *, ours: bool = False) -> None:
        self._outside.watch(what, limit_s=setup_limit_s(self._task, ours=ours), retry=False, step=self.step)

    def _tell_loaded(self) -> None:
        """What code takes that the task has loaded, where that is much beside the memory of its device."""
        taken_bytes = limits.code_bytes() - self._told_code_bytes
        if taken_bytes > max(_LEAST_TOLD_BYTES, _TOLD * self._memory_bytes) and self._memory_bytes and self._leads:
            self._told_code_bytes += taken_bytes
            self._notice(
                f"the code that it loads takes {format_bytes(taken_bytes)}, which is not counted as its memory"
            )

    def _watch_saving(self, what: str, *, retry: bool = True) -> None:
        """What writes or reads a whole state has more time, the larger that is."""
        limit_s = self._task.setup_timeout_s + self._state_bytes / _SLOWEST_BYTES_PER_S
        self._outside.watch(what, limit_s=limit_s, retry=retry, step=self.step)

    def _watch_step(self, what: str, step: int) -> None:
        self._outside.watch(what, limit_s=self._task.step_timeout_s, retry=True, step=step)
