"""Says in one sentence what the system refused, for which file, and what to do about it: the one place for OSErrors."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from rota.errors import DiskError

_ADVICE: tuple[tuple[frozenset[int], str], ...] = (
    (frozenset({errno.ENOSPC, errno.EDQUOT}), "make room on the disk"),
    (frozenset({errno.EFBIG}), "raise the limit of the size of files (ulimit -f)"),
    (frozenset({errno.EMFILE}), "raise the limit of open files (ulimit -n)"),
    (frozenset({errno.ENFILE}), "close other programs, for the system has too many files open"),
    (frozenset({errno.EROFS}), "use a folder on a disk that can be written, or mount this one for writing"),
    (frozenset({errno.EACCES, errno.EPERM}), "get the right to read and write there, or use another folder"),
    (frozenset({errno.ENAMETOOLONG}), "use a shorter path"),
    (frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE}), "see that the folder is still there"),
    (frozenset({errno.ELOOP, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}), "see what lies in its place"),
    (frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}), "use a file system that has file locks"),
    (frozenset({errno.EBUSY, errno.ETXTBSY}), "close other programs that use it"),
    (frozenset({errno.EIO, errno.ENXIO, errno.ENODEV}), "check the disk and the system's log"),
    (frozenset({errno.ENOMEM, errno.EAGAIN}), "close other programs, for the system has no memory or processes left"),
)
_OTHERWISE = "see the system's log"
_DAMAGES = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO})
_IN_WORDS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EROFS, errno.EIO, errno.ENOLCK}
)
"""Libraries in other languages tell these in words of their own error."""
_RUST = re.compile(r"\(os error (\d+)\)")


def refusal(error: BaseException | None) -> OSError | None:
    """The refusal of the system that an exception is, or was raised from, also where a library told it in words."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error
        if isinstance(error, Exception) and (code := _told_in(str(error))):
            return OSError(code, os.strerror(code))
        error = error.__cause__
    return None


def is_damage(error: OSError) -> bool:
    """Whether it says that a file is not there or not whole, and not that it cannot be read now."""
    return error.errno in _DAMAGES


def reason(error: OSError) -> str:
    """Why, with the file where the system names one."""
    words = error.strerror or str(error)
    given = (error.filename, error.filename2)
    names = [os.fsdecode(one) for one in given if isinstance(one, str | bytes | os.PathLike)]
    return f"{words}: {' and '.join(names)}" if names else words


def advice(error: OSError) -> str:
    """What to do about it."""
    return next((words for codes, words in _ADVICE if error.errno in codes), _OTHERWISE)


def sentence(error: OSError) -> str:
    """Why, and what to do about it."""
    return f"the system refused: {reason(error)}; {advice(error)}"


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Turn what the system refuses in the block into a DiskError; `what` says what cannot be done."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"{what} ({reason(error)}); {advice(error)}") from error


def _told_in(text: str) -> int:
    if (match := _RUST.search(text)) is not None:
        return int(match[1])
    return next((code for code in sorted(_IN_WORDS) if os.strerror(code) in text), 0)
