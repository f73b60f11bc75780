"""Reads the sweep that a Python file defines."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

import cloudpickle

from rota.errors import InputError
from rota.execute.run import Source
from rota.sweep import Sweep


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """A file as it was read, before it is run."""

    given: str
    """As the user named it, maybe with the name of a sweep."""
    path: Path
    name: str | None
    text: bytes

    @property
    def digest(self) -> str:
        """By which a change is noticed."""
        return hashlib.sha256(self.text).hexdigest()

    def load(self) -> Source:
        """Run what was read, and nothing that has taken its place since; the sweep that it defines."""
        sweep = _pick(_execute(self.path, self.text), self.path, self.name)
        return Source(sweep=sweep, file=self.given, digest=self.digest)


def read_source(file: str) -> SweepFile:
    """FILE or FILE:NAME; InputError if there is none."""
    path, name = split(file)
    try:
        return SweepFile(given=file, path=path, name=name, text=path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); see that it can be read by you") from error


def load_source(file: str) -> Source:
    """The sweep in FILE or FILE:NAME, with the file's digest."""
    return read_source(file).load()


def split(file: str) -> tuple[Path, str | None]:
    """The path and the name of the sweep in it. InputError if there is no such file."""
    path, name = Path(file), None
    if not path.exists() and ":" in file:
        head, _, tail = file.rpartition(":")
        path, name = Path(head), tail
    if not path.is_file():
        raise InputError(f"there is no file {path}; give the Python file that defines the sweep")
    return path, name


def _execute(path: Path, text: bytes) -> object:
    """Import a file as a module. What it defines travels to the workers by value, for they cannot import it.

    Compiled code that lies beside it is not used: it may be of something else.
    """
    module_name = f"rota_sweep_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path.absolute())
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise InputError(f"{path} is not a Python file; give one that defines a rota.Sweep")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    folder = str(path.absolute().parent)
    if folder not in sys.path:  # as `python FILE` does
        sys.path.insert(0, folder)
    try:
        exec(spec.loader.source_to_code(text, str(path.absolute())), module.__dict__)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except SyntaxError as error:
        raise InputError(f"{path}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{path}{_line(error, path)} raised {type(error).__name__}: {error}") from error
    cloudpickle.register_pickle_by_value(module)
    return module


def _line(error: BaseException, path: Path) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == str(path.absolute())]
    return f", line {own[-1].lineno}," if own else ""


def _pick(module: object, path: Path, name: str | None) -> Sweep:
    sweeps = {key: value for key, value in vars(module).items() if isinstance(value, Sweep)}
    if name is not None:
        found = vars(module).get(name)
        if not isinstance(found, Sweep):
            what = f"{name} is a {type(found).__name__}" if name in vars(module) else f"there is no {name}"
            raise InputError(f"{path}: {what}; give the name of a rota.Sweep{_known(sweeps)}")
        return found
    if not sweeps:
        raise InputError(f"{path} defines no rota.Sweep; add one, for example sweep = rota.grid(task, lr=[1e-3, 3e-4])")
    if len(set(map(id, sweeps.values()))) > 1:
        raise InputError(f"{path} defines several sweeps; say which: {path}:{next(iter(sweeps))}{_known(sweeps)}")
    return next(iter(sweeps.values()))


def _known(sweeps: dict[str, Sweep]) -> str:
    return f" (it defines {', '.join(sweeps)})" if sweeps else ""
