"""Modules and libraries that are loaded while a task runs: their memory is not the task's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import zipimport
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from typing import Any

from rota.runtime import limits

_LOADS: tuple[tuple[type, str], ...] = (
    (SourceFileLoader, "exec_module"),
    (SourcelessFileLoader, "exec_module"),
    (zipimport.zipimporter, "exec_module"),
    (ExtensionFileLoader, "create_module"),
    (ExtensionFileLoader, "exec_module"),
    (ctypes.CDLL, "__init__"),
)
"""What loads code from files, whoever calls it: an import, a lazy module, a file that is loaded by its path."""


@contextlib.contextmanager
def code_is_free() -> Iterator[None]:
    """From here on, all code is loaded without the limit of memory, at any time and by any thread.

    A library that is loaded under a limit may do worse than fail: OpenBLAS tries for ever to get its buffers.
    """
    with contextlib.ExitStack() as undoing:
        for owner, name in _LOADS:
            undoing.enter_context(_replaced(owner, name, _free(getattr(owner, name))))
        yield


def _free(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loaded(this: Any, *arguments: Any, **options: Any) -> Any:
        if None in arguments[:1]:  # CDLL(None): nothing is loaded, and the measuring itself asks for it
            return load(this, *arguments, **options)
        with limits.loading():
            return load(this, *arguments, **options)

    return loaded


@contextlib.contextmanager
def _replaced(owner: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if own is None:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, own)
