"""Folds names that repeat over layers into patterns, so that what is the same for all of them is told once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")
_HOLE = "\0"
_LONGEST_LIST = 50


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """Something with a name, of which something is to be told."""

    name: str
    same: Hashable
    """What is told; those of which the same is told may share a row."""
    near: Hashable = None
    """Neighbours in which this is equal may share a row too; by default as `same`."""
    item: int
    """A number of the caller's; rows come in its order."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is told in one line."""

    pattern: str
    """``blocks.{0-11}.fc1.linear``, ``blocks.*`` or ``blocks.0.{view,permute}``."""
    leaves: tuple[Leaf, ...]


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


def collapse(leaves: Iterable[Leaf], *, others: Iterable[str] = (), most: float = 1.0, root: bool = True) -> list[Row]:
    """Few rows that tell everything.

    A module of which at least this share is the same gets one row, ``blocks.*``; it stands for all of the module that
    no other row names. `others` are names of which nothing is told, so that no such row may stand for them. Without
    `root`, there is no row ``*``.
    """
    top = _Branch()
    counted: set[tuple[str, Hashable]] = set()
    for leaf in leaves:
        # What is told of one name again does not make its module one of several names.
        top.add(leaf.name.split("."), leaf.same, leaf, count=0 if (leaf.name, leaf.same) in counted else 1)
        counted.add((leaf.name, leaf.same))
    for name in others:
        top.add(name.split("."), None, None, count=1)
    entries: list[_Entry] = []
    _collect(top, (), None, entries, most=most, root=root)
    alike: dict[Hashable, dict[str, list[Leaf]]] = {}
    for entry in entries:
        alike.setdefault((template(entry.pattern)[0], entry.same), {}).setdefault(entry.pattern, []).extend(
            entry.leaves
        )
    rows = [
        Row(pattern=pattern, leaves=tuple(leaf for name in names for leaf in by_pattern[name]))
        for by_pattern in alike.values()
        for pattern, names in fold(by_pattern)
    ]
    rows.sort(key=lambda row: min(leaf.item for leaf in row.leaves))
    return list(_neighbours_joined(rows))


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
    """A module, or a name: what it holds, and how often each thing is told below it."""

    children: dict[str, _Branch] = field(default_factory=dict)
    leaves: list[Leaf] = field(default_factory=list)
    told: Counter[Hashable] = field(default_factory=Counter)

    def add(self, path: Sequence[str], same: Hashable, leaf: Leaf | None, *, count: int) -> None:
        if path:
            self.told[same] += count
            self.children.setdefault(path[0], _Branch()).add(path[1:], same, leaf, count=count)
        elif leaf is not None:
            self.leaves.append(leaf)


@dataclass
class _Entry:
    """A name or a module, and what it stands for."""

    pattern: str
    same: Hashable
    leaves: list[Leaf] = field(default_factory=list)


def _collect(
    branch: _Branch, path: tuple[str, ...], above: _Entry | None, entries: list[_Entry], *, most: float, root: bool
) -> None:
    """Add the entries of a module; what is told by the entry of a module above it goes there."""
    for leaf in branch.leaves:
        if above is not None and above.same == leaf.same:
            above.leaves.append(leaf)
        else:
            entries.append(_Entry(leaf.name, leaf.same, [leaf]))
    ((same, count),) = branch.told.most_common(1) or [(None, 0)]
    total = branch.told.total()
    alike = same is not None and total > 1 and count >= most * total
    if alike and (path or root) and (above is None or above.same != same):
        above = _Entry(".".join((*path, "*")), same)
        entries.append(above)
    for name, child in branch.children.items():
        _collect(child, (*path, name), above, entries, most=most, root=root)


def _neighbours_joined(rows: Iterable[Row]) -> Iterator[Row]:
    waiting: list[Row] = []
    for row in rows:
        if waiting and not _fits(waiting, row):
            yield _listed(waiting)
            waiting = []
        waiting.append(row)
    if waiting:
        yield _listed(waiting)


def _fits(rows: Sequence[Row], row: Row) -> bool:
    """Whether a row can be listed with others: it is like them, none is a module's, and the list stays short."""
    if any(one.pattern.endswith(("*", "}")) for one in (rows[-1], row)) or _near(rows[-1]) != _near(row):
        return False
    names = _split_prefix([*rows, row])[1]
    if any("{" in name for name in names):  # layers that are not the same ones
        return False
    return len(",".join(names)) <= _LONGEST_LIST


def _near(row: Row) -> Hashable:
    leaf = row.leaves[0]
    return leaf.same if leaf.near is None else leaf.near


def _listed(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    prefix, names = _split_prefix(rows)
    pattern = prefix + "{" + ",".join(names) + "}"
    return Row(pattern=pattern, leaves=tuple(leaf for row in rows for leaf in row.leaves))


def _split_prefix(rows: Sequence[Row]) -> tuple[str, list[str]]:
    """The modules that all rows are in, and their names within."""
    paths = [row.pattern.split(".") for row in rows]
    depth = 0
    while all(len(path) > depth + 1 and path[depth] == paths[0][depth] for path in paths):
        depth += 1
    return "".join(f"{part}." for part in paths[0][:depth]), [".".join(path[depth:]) for path in paths]
