"""Solving in a process of its own, which can be asked for the best so far, and ended at any time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, BinaryIO

from rota.errors import InputError, RotaError
from rota.schedule.problem import Problem, Schedule, check_problem
from rota.schedule.serial import dump_request, dump_solved, load_request, load_solved
from rota.schedule.solve import Limit, Solved, begin, solve
from rota.threads import OwnedThread, ending_with_parent

_START = "from rota.schedule.child import main; main()"
_GRACE_S = 5.0
"""How long after its limit a child may still answer: it starts Python, loads OR-tools, and ends what it is at."""

_TELL_EVERY_S = 0.25
"""Better solutions that follow each other more quickly are told together: a large one has a megabyte."""


class Solving:
    """A child process that solves a problem. Close it, or use it in a `with`."""

    def __init__(self, process: subprocess.Popen[bytes], request: bytes, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors
        self._lock = threading.Lock()
        self._line = b""
        self._best: Solved | None = None
        self._closed = False
        # Both pipes in threads: a pipe is smaller than a large problem, and polling must not wait.
        self._threads = [
            OwnedThread(lambda: self._write(request), name="solve-ask", wake=process.kill),
            OwnedThread(self._read, name="solve-hear", wake=process.kill),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def start(cls, problem: Problem, *, limit: Limit, seed: int = 0, hints: Sequence[Schedule] = ()) -> Solving:
        """Begin; InputError if the problem cannot be solved."""
        check_problem(problem)
        request = dump_request(problem, limit, seed, hints)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        # -P: the current folder is only importable if it is here too.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        return cls(process, request, errors)

    def _write(self, request: bytes) -> None:
        assert self._process.stdin is not None
        # The pipe stays open: its end tells the child that nobody wants the answer any more.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(request)
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # A line that was cut off by a kill has no end.
            if line.endswith(b"\n"):
                with self._lock:
                    self._line = line

    def poll(self) -> Solved | None:
        """The best so far, without waiting; InputError if the child refused the problem."""
        with self._lock:
            line, self._line = self._line, b""
        if line:
            data = json.loads(line)
            if "refused" in data:
                raise InputError(data["refused"])
            self._best = load_solved(data)
        return self._best

    @property
    def done(self) -> bool:
        """Whether the child has ended and all that it said is here."""
        return self._closed or (self._process.poll() is not None and not self._threads[1].is_alive())

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is done, but no longer than this; whether it is."""
        started_s = time.monotonic()
        self._threads[1].join(seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(None if seconds is None else max(0.0, seconds - (time.monotonic() - started_s)))
        return self.done

    def words(self) -> str:
        """The last line that the child wrote about what went wrong."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with {self._process.returncode}"

    def close(self) -> None:
        """End the child, if it has not ended; what it has said can still be polled."""
        if self._closed:
            return
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.end()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # What was not written yet is for nobody.
                with contextlib.suppress(OSError):
                    pipe.close()
        self._closed = True
        self._errors.close()

    def __enter__(self) -> Solving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def solve_in_child(
    problem: Problem,
    *,
    limit: Limit,
    seed: int = 0,
    hints: Sequence[Schedule] = (),
    notice: Callable[[str], None] = lambda text: None,
    grace_s: float = _GRACE_S,
) -> Solved:
    """As `solve`, in a child that is ended when it takes longer than it should; its best answer counts.

    A child that gives none is no reason to fail: the heuristics answer here, and `notice` is told why.
    """
    with Solving.start(problem, limit=limit, seed=seed, hints=hints) as solving:
        ended = solving.wait(None if limit.seconds is None else max(0.0, limit.seconds + grace_s))
        words = "it took too long" if not ended else solving.words() if solving.poll() is None else ""
        solving.close()
        best = solving.poll()
    if best is not None:
        return best
    notice(f"the schedule is the best of the simple rules, because the solver gave no answer: {words}")
    return begin(problem, limit=limit, seed=seed, clock=time.monotonic, hints=hints).solved


class _Teller:
    """Writes solutions to the parent, not too often."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._told_s = float("-inf")
        self._told: Solved | None = None

    def hear(self, solved: Solved) -> None:
        if time.monotonic() - self._told_s >= _TELL_EVERY_S:
            self.tell(solved)

    def tell(self, solved: Solved) -> None:
        if solved is not self._told:
            self._told = solved
            self.write(dump_solved(solved))
            self._told_s = time.monotonic()

    def write(self, data: object) -> None:
        self._output.write(json.dumps(data).encode() + b"\n")
        self._output.flush()


def main() -> None:
    """Be the child: a request from stdin, solutions to stdout."""
    # The terminal sends Ctrl-C to every process; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # While tasks train, they come first.
    os.nice(19)
    # Unbuffered: what is buffered of the request's pipe the watching thread would not see.
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        line = _line(pipe)
    if not line:
        return
    # Nothing else may write to the pipe that the answers go through.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    teller = _Teller(output)
    try:
        with ending_with_parent():
            problem, limit, seed, hints = load_request(line)
            solved = solve(problem, limit=limit, seed=seed, clock=time.monotonic, better=teller.hear, hints=hints)
        teller.tell(solved)
    except InputError as error:
        teller.write({"refused": str(error)})
    except RotaError as error:
        sys.exit(str(error))
    # Other threads of the solver may still be at work; there is nothing to tidy up.
    os._exit(0)


def _line(pipe: BinaryIO) -> bytes:
    """The request; empty if the parent was gone before it was whole."""
    parts: list[bytes] = []
    while part := pipe.read(1 << 20):
        parts.append(part)
        if part.endswith(b"\n"):
            return b"".join(parts)
    return b""


if __name__ == "__main__":
    main()
