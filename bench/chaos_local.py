"""Faults that befall a run on one machine."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from bench.chaos_storm import Storm
from rota.state.checkpoint import committed

Fault = Callable[[Storm, random.Random], bool]
"""Befalls a run; False if there was nothing to befall."""

_DISK_MIB = 64
_FULL_S = 2.0
_NOTICED_S = 30.0


def kill_worker(storm: Storm, dice: random.Random) -> bool:
    """kill -9."""
    return _on_worker(storm, dice, lambda victim: victim.kill())


def stop_worker(storm: Storm, dice: random.Random) -> bool:
    """It stands still for good, and is woken when it should long have been replaced: it must be gone by then."""
    victims: list[psutil.Process] = []
    if not _on_worker(storm, dice, lambda victim: (victim.suspend(), victims.append(victim))):
        return False
    deadline_s = time.monotonic() + _NOTICED_S
    while victims[0].is_running() and victims[0].status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline_s:
            raise AssertionError("a worker that stands still was not replaced")
        time.sleep(0.1)
    with contextlib.suppress(psutil.Error):
        victims[0].resume()
    return True


def pause_worker(storm: Storm, dice: random.Random) -> bool:
    """It stands still for a moment."""

    def pause(victim: psutil.Process) -> None:
        victim.suspend()
        time.sleep(dice.uniform(0.5, 3.0))
        victim.resume()

    return _on_worker(storm, dice, pause)


def kill_controller(storm: Storm, dice: random.Random) -> bool:
    """kill -9, and another one resumes the run."""
    if not storm.alive():
        return False
    storm.process.kill()
    storm.resume()
    return True


def kill_everything(storm: Storm, dice: random.Random) -> bool:
    """As when the machine fails."""
    if not storm.alive():
        return False
    storm.kill_all()
    storm.resume()
    return True


def pause_controller(storm: Storm, dice: random.Random) -> bool:
    """It stands still for a moment."""
    if not storm.alive():
        return False
    os.kill(storm.process.pid, signal.SIGSTOP)
    time.sleep(dice.uniform(1.0, 4.0))
    os.kill(storm.process.pid, signal.SIGCONT)
    return True


def fill_disk(storm: Storm, dice: random.Random) -> bool:
    """No byte is left for a while."""
    ballast = storm.run.parent / "ballast"
    try:
        handle = os.open(ballast, os.O_WRONLY | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):
            while os.write(handle, b"\0" * 4096):
                pass
        os.close(handle)
        time.sleep(_FULL_S)
    finally:
        ballast.unlink(missing_ok=True)
    return True


def cut_checkpoint(storm: Storm, dice: random.Random) -> bool:
    """Everything is killed, and the newest checkpoint of a task loses its end."""
    return _damage(storm, dice, lambda path: os.truncate(path, path.stat().st_size * dice.randint(0, 99) // 100))


def flip_bits(storm: Storm, dice: random.Random) -> bool:
    """Everything is killed, and a byte of the newest checkpoint of a task is another."""

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[dice.randrange(len(content))] ^= dice.randint(1, 255)
        path.write_bytes(content)

    return _damage(storm, dice, flip)


FAULTS: Mapping[str, Fault] = {
    "kill worker": kill_worker,
    "kill controller": kill_controller,
    "stop worker": stop_worker,
    "kill everything": kill_everything,
    "fill disk": fill_disk,
    "cut checkpoint": cut_checkpoint,
    "pause worker": pause_worker,
    "flip bits": flip_bits,
    "pause controller": pause_controller,
}


def _on_worker(storm: Storm, dice: random.Random, act: Callable[[psutil.Process], object]) -> bool:
    workers = sorted(storm.workers(), key=lambda one: one.pid)
    if not workers:
        return False
    try:
        act(dice.choice(workers))
    except psutil.NoSuchProcess:
        return False
    return True


def _damage(storm: Storm, dice: random.Random, act: Callable[[Path], None]) -> bool:
    folders = [folder for folder in storm.run.glob("tasks/*/checkpoints") if committed(folder)]
    if not storm.alive() or not folders:
        return False
    storm.kill_all()
    newest = committed(dice.choice(sorted(folders)))
    if newest:
        act(dice.choice(sorted(newest[-1].iterdir())))
        storm.damaged = True
    storm.resume()
    return bool(newest)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk that is soon full, where this can be made; otherwise the folder."""
    place = folder / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "rota-chaos", str(place)], capture_output=True, check=False
    )
    try:
        yield place
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(place)], check=False)


def is_small(place: Path) -> bool:
    """Whether the disk is one that may be filled."""
    return os.statvfs(place).f_blocks * os.statvfs(place).f_frsize <= _DISK_MIB << 20
