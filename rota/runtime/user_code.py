"""Calls the user's functions, and turns what they raise into one sentence with the place in their file."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

import torch

from rota.errors import CheckpointError, DivergedError, InputError, PeerError, TaskError

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LONGEST = 400
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "cannot allocate memory")


@contextlib.contextmanager
def calling(what: str) -> Iterator[None]:
    """Run the user's code; `what` names it in the error: "the model factory"."""
    try:
        yield
    except (TaskError, DivergedError, PeerError, CheckpointError):
        raise  # the last is what a disk says to what leaves memory: it happens within the user's code, and is not of it
    except InputError as error:  # raised by Data, Task or a cursor: already a sentence
        raise TaskError(f"{what}: {error}") from error
    except (Exception, SystemExit) as error:
        frames = _user_frames(error)
        place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        text = "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error))
        if is_out_of_memory(error):
            raise TaskError(
                f"{what} ran out of memory{place}; use a smaller model or batch, or a device with more memory",
                traceback=text,
            ) from error
        message = _shortened(" ".join(str(error).split()))
        raise TaskError(f"{what} raised {type(error).__name__}: {message}{place}", traceback=text) from error


def _shortened(message: str) -> str:
    """Some errors quote a whole model; all of it is in the traceback."""
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the CPU or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(sign in str(error).lower() for sign in _OUT_OF_MEMORY)


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames without ours; the last of them that is not inside an installed package comes last."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not os.path.abspath(frame.filename).startswith(_OURS) and frame.filename != contextlib.__file__
    ]
    while len(frames) > 1 and "site-packages" in frames[-1].filename:
        if all("site-packages" in frame.filename for frame in frames):
            break
        frames.pop()
    return frames
