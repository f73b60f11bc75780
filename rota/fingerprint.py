"""What a function does, as text: its code and the plain values that it refers to."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any


def code_parts(function: Any, seen: set[int]) -> Iterator[str]:
    """What a function does, as far as it can be told without running it."""
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        yield type(function).__qualname__ if not isinstance(function, type) else function.__qualname__
        return
    seen.add(id(code))
    yield from _of_code(code)
    for value in (function.__defaults__ or ()) + tuple((function.__kwdefaults__ or {}).values()):
        yield _plain(value)
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
        yield from code_parts(value, seen) if isinstance(value, Callable) else iter([_plain(value)])  # type: ignore[arg-type]


def _of_code(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield " ".join(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _of_code(constant)
        else:
            yield _plain(constant)


def _plain(value: Any) -> str:
    """Numbers and strings as they are; of anything else only its type, for its text may hold an address."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(_plain(item) for item in value)}]"
    if isinstance(value, frozenset | set):
        return f"set[{', '.join(sorted(_plain(item) for item in value))}]"
    if isinstance(value, dict):
        return f"dict[{', '.join(f'{_plain(key)}: {_plain(item)}' for key, item in value.items())}]"
    return type(value).__qualname__
