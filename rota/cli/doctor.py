"""`rota doctor`: what is installed, what is missing, and what to do about it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sqlite3
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from rota import __version__
from rota.cli.options import json_option, print_json
from rota.cli.output import tell
from rota.cluster import local
from rota.cluster.device import format_bytes
from rota.errors import RotaError
from rota.runtime.reservoir import UnavailableError, preloaded

_NEEDED = ("torch", "numpy", "safetensors", "click", "rich", "psutil", "cloudpickle", "nvidia-ml-py")
_MODULES = {"nvidia-ml-py": "pynvml"}
_OPTIONAL = {"scikit-learn": "the vision example"}
_LOW_DISK_BYTES = 5 * 2**30
_OLDEST_TORCH = (2, 11)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: str
    """ok, warning or problem"""
    text: str


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check this installation and machine. Exits with 1 if something must be mended."""
    findings = [
        _python(),
        *map(_package, _NEEDED),
        *_optional(),
        _torch(),
        _devices(),
        _sqlite(),
        _disk(),
        _pinning(),
        _reservoir(),
    ]
    broken = any(finding.state == "problem" for finding in findings)
    if as_json:
        print_json({"ok": not broken, "rota": __version__, "findings": [asdict(finding) for finding in findings]})
    else:
        marks = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}
        for finding in findings:
            tell(f"{marks[finding.state]}  {finding.what}: {finding.text}")
    raise click.exceptions.Exit(1 if broken else 0)


def _python() -> Finding:
    return Finding(what="python", state="ok", text=".".join(map(str, sys.version_info[:3])))


def _package(name: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
        importlib.import_module(_MODULES.get(name, name))
    except (ImportError, OSError) as error:
        return Finding(what=name, state="problem", text=f"cannot be imported ({error}); run: pip install {name}")
    return Finding(what=name, state="ok", text=version)


def _optional() -> list[Finding]:
    found = []
    for name, purpose in _OPTIONAL.items():
        try:
            found.append(Finding(what=name, state="ok", text=importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            text = f"not installed; {purpose} needs it: pip install {name}"
            found.append(Finding(what=name, state="warning", text=text))
    return found


def _torch() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding(what="torch build", state="problem", text="no torch")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        return Finding(what="torch build", state="problem", text=f"{torch.__version__}; rota needs 2.11 or later")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return Finding(what="torch build", state="ok", text=build)


def _devices() -> Finding:
    try:
        devices = local().devices
    except RotaError as error:
        return Finding(what="devices", state="problem", text=str(error))
    import torch

    if devices[0].kind == "cuda" and not torch.cuda.is_available():
        text = f"{len(devices)} GPUs are here, but this torch cannot use them; install a CUDA build of torch"
        return Finding(what="devices", state="problem", text=text)
    names = ", ".join(f"{device.name} ({format_bytes(device.memory_bytes)})" for device in devices)
    return Finding(what="devices", state="ok", text=names)


def _sqlite() -> Finding:
    if sqlite3.sqlite_version_info < (3, 37):
        text = f"{sqlite3.sqlite_version}; the journal needs 3.37 or later, which comes with a newer Python"
        return Finding(what="sqlite", state="problem", text=text)
    return Finding(what="sqlite", state="ok", text=sqlite3.sqlite_version)


def _disk() -> Finding:
    free_bytes = shutil.disk_usage(Path.cwd()).free
    text = f"{format_bytes(free_bytes)} free here"
    if not os.access(Path.cwd(), os.W_OK):
        return Finding(what="disk", state="warning", text="this folder cannot be written; runs need out=...")
    if free_bytes < _LOW_DISK_BYTES:
        return Finding(what="disk", state="warning", text=f"{text}; checkpoints may not fit")
    return Finding(what="disk", state="ok", text=text)


def _pinning() -> Finding:
    if hasattr(os, "sched_setaffinity"):
        return Finding(what="pinning", state="ok", text="workers are pinned to their cores")
    return Finding(what="pinning", state="warning", text="this system cannot pin a process to a core; speeds may vary")


def _reservoir() -> Finding:
    what = "memory"
    try:
        preloaded(os.environ)
    except UnavailableError as error:
        text = f"what tensors of spilled tasks free is not held for the next ones, which is slower: {error}"
        return Finding(what=what, state="warning", text=text)
    return Finding(what=what, state="ok", text="what tensors of spilled tasks free is held for the next ones")
