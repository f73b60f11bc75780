"""What a task's code may change for its whole process, and what is put back before the next task."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Run one task in a process that others use after it: its settings of torch and of the process end with it."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    folder, environment, path = os.getcwd(), dict(os.environ), list(sys.path)
    modules = set(sys.modules)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_grad_enabled(True)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        _drop_half_imported(besides=modules)
        # A model and its optimizer may hold each other; the next task needs the memory now.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _drop_half_imported(*, besides: set[str]) -> None:
    """Forget the parts of packages whose own import failed: the next import makes them anew, as in a new process."""
    for name in sorted(set(sys.modules) - besides):
        parent = name.rpartition(".")[0]
        if parent and parent not in sys.modules:  # its parts come after it in this order
            del sys.modules[name]
