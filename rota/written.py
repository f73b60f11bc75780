"""Strategies as the user writes them: names, knobs and products. What the names mean is not known here."""

from __future__ import annotations

import ast

from rota.errors import InputError
from rota.given import quoted

_LONGEST = 1000
"""Characters; more are no strategy, and take Python's parser long."""


def parsed(text: str) -> ast.expr:
    """The names, calls and products of a strategy's text; InputError for any other text."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise _unreadable(text)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable(text) from None
    _check(tree, text)
    return tree


def check_readable(text: str) -> None:
    """InputError if a text can be no strategy, whatever strategies there are."""
    parsed(text)


def _check(tree: ast.expr, text: str) -> None:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult):
        _check(tree.left, text)
        _check(tree.right, text)
    elif not isinstance(tree, ast.Name) and not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)):
        raise _unreadable(text)


def _unreadable(text: object) -> InputError:
    return InputError(
        f"the strategy {quoted(text)} cannot be read; write a name such as tensor, or data(2) * tensor(2)"
    )
