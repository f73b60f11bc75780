"""Folds names that repeat over layers into patterns, so that what is the same for all of them is told once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")
_HOLE = "\0"
_LONGEST_LIST = 44


@dataclass(frozen=True, kw_only=True)
class Row:
    """Things that are told in one line."""

    pattern: str
    """Their names: ``blocks.{0-11}.fc1.linear``."""
    names: tuple[str, ...]
    same: Hashable
    """Rows in which this is equal may become one for a whole module."""
    near: Hashable = None
    """Rows in which this is equal may become one if they follow each other; by default as `same`."""
    items: tuple[int, ...]
    """Whatever the caller numbers, in order."""


def template(name: str) -> tuple[str, tuple[int, ...]]:
    """A name without the numbers in it, and these."""
    return _NUMBER.sub(_HOLE, name), tuple(int(one) for one in _NUMBER.findall(name))


def fold(names: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Patterns that stand for exactly these names, each with the names that it stands for, in order."""
    by_template: dict[str, dict[tuple[int, ...], str]] = {}
    for name in names:
        text, numbers = template(name)
        by_template.setdefault(text, {})[numbers] = name
    found = []
    for text, named in by_template.items():
        for rectangle in _rectangles(list(named)):
            members = tuple(name for numbers, name in named.items() if _within(numbers, rectangle))
            found.append((_fill(text, rectangle), members))
    return found


def fold_loosely(texts: Sequence[str]) -> str:
    """One sentence for sentences that differ only in numbers: each number becomes the range of its values."""
    text = template(texts[0])[0]
    columns = zip(*(template(one)[1] for one in texts), strict=True)
    return _fill(text, [tuple(sorted(set(column))) for column in columns])


def collapse(rows: Sequence[Row]) -> list[Row]:
    """Fewer rows that say the same: one for a module of which all is the same, and for equal neighbours."""
    deepest = max((len(_path(row.pattern)) for row in rows), default=0)
    universe = [
        Counter(".".join(name.split(".")[:depth]) for row in rows for name in row.names) for depth in range(deepest + 1)
    ]
    root = _Branch()
    for row in rows:
        root.add(_path(row.pattern), row)
    return list(_collapsed(root, (), universe))


def ranges(numbers: Iterable[int]) -> str:
    """0-3,6."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# ---- numbers ----


def _rectangles(points: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Products of sets that hold exactly these points: neighbours along the last number are joined first."""
    found: list[tuple[tuple[int, ...], ...]] = [tuple((number,) for number in point) for point in points]
    for axis in reversed(range(len(points[0]))):
        joined: dict[tuple[tuple[int, ...], ...], set[int]] = {}
        for one in found:
            joined.setdefault((*one[:axis], *one[axis + 1 :]), set()).update(one[axis])
        found = [(*rest[:axis], tuple(sorted(values)), *rest[axis:]) for rest, values in joined.items()]
    return found


def _within(numbers: tuple[int, ...], rectangle: tuple[tuple[int, ...], ...]) -> bool:
    return all(number in values for number, values in zip(numbers, rectangle, strict=True))


def _fill(text: str, columns: Sequence[tuple[int, ...]]) -> str:
    pieces = text.split(_HOLE)
    holes = [str(values[0]) if len(values) == 1 else "{" + ranges(values) + "}" for values in columns]
    return "".join(piece + hole for piece, hole in zip(pieces, [*holes, ""], strict=True))


# ---- modules ----


@dataclass
class _Branch:
    """Rows by the components of their patterns."""

    children: dict[str, _Branch] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, path: Sequence[str], row: Row) -> None:
        if path:
            self.children.setdefault(path[0], _Branch()).add(path[1:], row)
        else:
            self.rows.append(row)

    def all_rows(self) -> Iterator[Row]:
        yield from self.rows
        for child in self.children.values():
            yield from child.all_rows()


def _path(pattern: str) -> list[str]:
    return pattern.split(".")


def _collapsed(branch: _Branch, path: tuple[str, ...], universe: Sequence[Counter[str]]) -> Iterator[Row]:
    rows = list(branch.all_rows())
    if len(rows) == 1:
        yield rows[0]
        return
    if len({row.same for row in rows}) == 1 and _is_all(rows, len(path), universe):
        yield _joined(rows, ".".join((*path, "*")))
        return
    waiting: list[Row] = []
    for row in [
        *branch.rows,
        *(one for part, child in branch.children.items() for one in _collapsed(child, (*path, part), universe)),
    ]:
        if waiting and not (_is_plain(row) and _is_plain(waiting[-1]) and _near(row) == _near(waiting[-1])):
            yield _listed(waiting, path)
            waiting = []
        waiting.append(row)
    if waiting:
        yield _listed(waiting, path)


def _is_all(rows: Sequence[Row], depth: int, universe: Sequence[Counter[str]]) -> bool:
    """Whether nothing else has a name that begins like these."""
    own = Counter(".".join(name.split(".")[:depth]) for row in rows for name in row.names)
    return all(universe[depth][prefix] == count for prefix, count in own.items())


def _near(row: Row) -> Hashable:
    return row.same if row.near is None else row.near


def _is_plain(row: Row) -> bool:
    """Not yet one for several."""
    return not row.pattern.endswith(("*", "}"))


def _listed(rows: Sequence[Row], path: tuple[str, ...]) -> Row:
    if len(rows) == 1:
        return rows[0]
    prefix = "".join(f"{part}." for part in path)
    shown: list[str] = []
    for row in rows:
        name = row.pattern.removeprefix(prefix)
        if shown and sum(len(one) + 1 for one in shown) + len(name) > _LONGEST_LIST:
            shown.append("...")
            break
        shown.append(name)
    return _joined(rows, prefix + "{" + ",".join(shown) + "}")


def _joined(rows: Sequence[Row], pattern: str) -> Row:
    return replace(
        rows[0],
        pattern=pattern,
        names=tuple(name for row in rows for name in row.names),
        items=tuple(item for row in rows for item in row.items),
    )
