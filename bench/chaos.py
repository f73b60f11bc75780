"""Seeded faults befall runs, on one machine and on a Ray cluster; each must end as an undisturbed one does.

python -m bench.chaos [--faults 45] [--calls 200] [--seed 1] [--only local|ray|calls] [--quick] [--json] [--keep]

Workers, controllers, actors and raylets are killed; workers stand still, for a moment or until they are replaced; the
disk is full for a while; checkpoints lose their end or get other bits; a node is cut off from the others. Then system
calls fail, one in each run (`bench.chaos_syscalls`).
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import chaos_local, chaos_syscalls, harness
from bench.chaos_retrace import WHERE
from bench.chaos_storm import CHECKPOINT_EVERY, SWEEP, Storm

_STEPS, _QUICK_STEPS = 400, 100
_FAULTS_PER_RUN, _QUICK_FAULTS = 4, 3
"""The few of a quick storm befall one run: what follows after the last one of a run takes as long as the faults."""


@dataclass(kw_only=True)
class Tally:
    """What has happened."""

    faults: int = 0
    survived: int = 0
    lost_steps_max: int = 0
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What all storms share."""

    dice: random.Random
    reference: Path
    """An undisturbed run."""
    tally: Tally
    most: int
    """Faults of one run."""


def storms(
    folder: Path,
    name: str,
    *,
    where: tuple[str, ...],
    faults: Mapping[str, chaos_local.Fault],
    count: int,
    weather: Weather,
) -> None:
    """Run after run, until so many faults have befallen them."""
    dice, reference, tally = weather.dice, weather.reference, weather.tally
    mark = secrets.token_hex(8) if name == "local" else name
    queue: list[str] = []
    number, left = 0, count
    while left > 0:
        number += 1
        storm = Storm(run=folder / f"{name}-{number}", file=reference.parent / "sweep.py", where=where, mark=mark)
        while left > 0 and len(storm.faults) < weather.most:
            storm.wait_for_progress(dice.randint(2, 8))
            time.sleep(dice.uniform(0.0, 0.5))
            if not storm.alive():
                break
            if not queue:  # each kind once, in a random order, before any comes again
                queue = dice.sample(list(faults), len(faults))
            kind = queue.pop()
            try:
                if not faults[kind](storm, dice):
                    continue
            except AssertionError as error:
                tally.wrong.append(f"{storm.run.name}, {kind}: {error}")
            storm.faults.append(kind)
            tally.kinds[kind] = tally.kinds.get(kind, 0) + 1
            tally.faults += 1
            left -= 1
            print(f"{storm.run.name}: {kind}", file=sys.stderr, flush=True)
        _end(storm, reference, tally)


def _end(storm: Storm, reference: Path, tally: Tally) -> None:
    if not storm.end():
        tally.wrong.append(f"{storm.run.name} did not end after {', '.join(storm.faults)}:\n{storm.last_words()}")
        return
    verdict = storm.judge(reference)
    told = [f"{storm.run.name} after {', '.join(storm.faults)}: {text}" for text in verdict.wrong]
    tally.wrong += told
    tally.leaked += [f"{storm.run.name}: {text}" for text in verdict.leaked]
    tally.lost_steps_max = max(tally.lost_steps_max, verdict.lost_steps)
    if not told and not verdict.leaked:
        tally.survived += len(storm.faults)
        shutil.rmtree(storm.run)  # the disk is small


def main() -> None:
    """Local storms, storms on Ray, then calls that fail."""
    parser = harness.parser(__doc__)
    parser.add_argument("--faults", type=int, default=45, help="how many in all; a third of them on Ray")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=chaos_syscalls.FAULTS, help="how many system calls fail")
    parser.add_argument("--only", choices=["local", "ray", "calls"])
    chosen = parser.parse_args()
    count = _QUICK_FAULTS if chosen.quick else chosen.faults
    calls = chaos_syscalls.QUICK_FAULTS if chosen.quick else chosen.calls
    on_ray = {"local": 0, "ray": count, "calls": 0, None: 0 if chosen.quick else count // 3}[chosen.only]
    tally = Tally()
    if chosen.only != "calls":
        _storms(chosen, count=count, on_ray=on_ray, tally=tally)
    if chosen.only in (None, "calls"):
        _calls(chosen, calls, tally)
    figures: dict[str, Any] = {
        "faults": tally.faults,
        "survived": tally.survived,
        "lost_steps_max": tally.lost_steps_max,
        "wrong_results": len(tally.wrong),
        "leaked_processes": len(tally.leaked),
    }
    details = {"kinds": tally.kinds, "seed": chosen.seed, "wrong": tally.wrong, "leaked": tally.leaked}
    harness.finish("chaos", figures, details, chosen)
    if tally.wrong or tally.leaked or tally.survived < tally.faults:
        raise SystemExit("\n".join([*tally.wrong, *tally.leaked]) or "not every fault was survived")


def _storms(chosen: argparse.Namespace, *, count: int, on_ray: int, tally: Tally) -> None:
    with tempfile.TemporaryDirectory(prefix="rota-chaos-") as place:
        folder = Path(place)
        (folder / "sweep.py").write_text(
            SWEEP.format(steps=_QUICK_STEPS if chosen.quick else _STEPS, every=CHECKPOINT_EVERY)
        )
        reference = folder / "reference"
        command = [sys.executable, "-m", "rota", "run", str(folder / "sweep.py"), "--out", str(reference), *WHERE]
        subprocess.run([*command, "--no-profile", "--quiet"], check=True, timeout=300, stdout=subprocess.DEVNULL)
        most = _QUICK_FAULTS if chosen.quick else _FAULTS_PER_RUN
        weather = Weather(dice=random.Random(chosen.seed), reference=reference, tally=tally, most=most)
        if count > on_ray:
            with chaos_local.small_disk(folder) as disk:
                faults = dict(chaos_local.FAULTS)
                if not chaos_local.is_small(disk):
                    del faults["fill disk"]
                storms(disk, "local", where=WHERE, faults=faults, count=count - on_ray, weather=weather)
        if on_ray:
            _on_ray(folder, on_ray, weather)


def _calls(chosen: argparse.Namespace, count: int, tally: Tally) -> None:
    found, wrong = chaos_syscalls.befall_all(chaos_syscalls.some(chosen.quick), count=count, seed=chosen.seed)
    tally.faults += found["faults"]
    tally.survived += found["survived"]
    tally.wrong += wrong
    tally.kinds |= {kind: times for kind, times in found.items() if " at " in kind}


def _on_ray(folder: Path, count: int, weather: Weather) -> None:
    from bench import chaos_ray

    nodes = chaos_ray.Nodes("ray")
    try:
        where = ("--memory", "1GiB", "--cluster", f"ray={nodes.address}")
        faults = chaos_ray.faults_of(nodes)
        storms(folder, "ray", where=where, faults=faults, count=count, weather=weather)
    finally:
        nodes.close()


if __name__ == "__main__":
    main()
