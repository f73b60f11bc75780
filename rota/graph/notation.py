"""The dim notation of rules: how the dims of an op's inputs and outputs belong together.

``* k+, n k+, n? -> * n`` is a linear layer. Each word is a dim: equal words are the same index. A ``+`` behind it:
it is summed over, so cutting it leaves partial sums. ``^``: it cannot be cut. ``.`` is a dim that cannot be cut and has
nothing to do with others. ``*`` stands for any number of leading dims, aligned at the right like broadcasting. An
input with ``?`` at its end is added once to the result: where a summed dim is cut, only the first part reads it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rota.errors import RuleError

Letters = tuple[str, ...]
"""The words of one tensor dim, which is their product, outermost first; none for a dim of size one."""

Shape = tuple[int, ...]

_WORD = re.compile(r"\*|\.|[A-Za-z][A-Za-z0-9_]*[+^]?")
_LEADING = re.compile(r"d[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """How the dims of one op belong together, for its actual shapes."""

    reads: tuple[tuple[Letters, ...], ...]
    """For each tensor among the arguments, in order: the words of each of its dims."""
    makes: tuple[tuple[Letters, ...] | None, ...]
    """The same for each output; None for one that nobody reads."""
    sizes: Mapping[str, int]
    reduced: frozenset[str] = frozenset()
    """Summed over: cutting it leaves partial sums."""
    fixed: frozenset[str] = frozenset()
    """Cannot be cut."""
    once: frozenset[int] = frozenset()
    """The reads that are added to the result: only the first part along a summed dim reads them."""
    regroups: bool = False
    """A view: the only read and the only output have the same elements in the same order, and the words follow from
    factoring their shapes."""


@dataclass
class Words:
    """Collects the words of a signature."""

    sizes: dict[str, int] = field(default_factory=dict)
    reduced: set[str] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    _private: itertools.count[int] = field(default_factory=itertools.count)

    def use(self, word: str, size: int) -> Letters:
        """A dim of this size is `word`, with its mark; a dim of size one is broadcast and is none."""
        if word == ".":
            return self.private(size)
        name = _name(word)
        if size == 1:
            return ()
        if self.sizes.setdefault(name, size) != size:
            raise RuleError(f"{name} is {self.sizes[name]} and {size} at the same time")
        if "+" in word:
            self.reduced.add(name)
        if "^" in word:
            self.fixed.add(name)
        return (name,)

    def private(self, size: int) -> Letters:
        """A dim that cannot be cut and has nothing to do with any other."""
        if size == 1:
            return ()
        name = f"_{next(self._private)}"
        self.sizes[name] = size
        self.fixed.add(name)
        return (name,)

    def all(self, words: Sequence[str], shape: Shape) -> tuple[Letters, ...]:
        """The words of a whole tensor."""
        if len(words) != len(shape):
            raise RuleError(f"{' '.join(words) or 'a scalar'} against the shape {list(shape)}")
        return tuple(self.use(word, size) for word, size in zip(words, shape, strict=True))

    def signature(
        self,
        reads: Sequence[tuple[Letters, ...]],
        makes: Sequence[tuple[Letters, ...] | None],
        *,
        once: Sequence[int] = (),
        regroups: bool = False,
    ) -> Signature:
        """All of it."""
        return Signature(
            reads=tuple(reads),
            makes=tuple(makes),
            sizes=dict(self.sizes),
            reduced=frozenset(self.reduced),
            fixed=frozenset(self.fixed),
            once=frozenset(once),
            regroups=regroups,
        )


@dataclass(frozen=True, kw_only=True)
class Notation:
    """A parsed line of dim notation."""

    text: str
    reads: tuple[tuple[str, ...], ...]
    makes: tuple[tuple[str, ...], ...]
    once: frozenset[int]

    def signature(self, reads: Sequence[Shape | None], makes: Sequence[Shape | None]) -> Signature:
        """For actual shapes; None for an optional tensor that is not given."""
        if len(reads) != len(self.reads) or len(makes) != len(self.makes):
            raise RuleError(f"the rule {self.text!r} does not fit {len(reads)} inputs and {len(makes)} outputs")
        given = [(words, shape) for words, shape in zip(self.reads, reads, strict=True) if shape is not None]
        pairs = [*given, *((w, s) for w, s in zip(self.makes, makes, strict=True) if s is not None)]
        leading = max((len(shape) - len(words) + 1 for words, shape in pairs if "*" in words), default=0)
        words = Words()
        try:
            found_reads = [words.all(_spread(w, shape, leading), shape) for w, shape in given]
            found_makes = [
                None if shape is None else words.all(_spread(w, shape, leading), shape)
                for w, shape in zip(self.makes, makes, strict=True)
            ]
        except RuleError as error:
            raise RuleError(f"the rule {self.text!r} does not fit the shapes: {error}") from error
        positions = [i for i, shape in enumerate(reads) if shape is not None]
        once = [positions.index(i) for i in self.once if i in positions]
        return words.signature(found_reads, found_makes, once=once)


@functools.cache
def parse(text: str) -> Notation:
    """Read a line of dim notation."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"the rule {text!r} has no '->'; write it as 'inputs -> outputs', for example '* n, n -> * n'")
    reads = [one.split() for one in left.split(",")] if left.strip() else []
    makes = [one.split() for one in right.split(",")]
    once = frozenset(i for i, words in enumerate(reads) if words and words[-1].endswith("?"))
    for i in once:
        reads[i][-1] = reads[i][-1].removesuffix("?")
    for words in [*reads, *makes]:
        _check_words(words, text)
    _check_marks(reads, makes, text)
    return Notation(text=text, reads=tuple(map(tuple, reads)), makes=tuple(map(tuple, makes)), once=once)


def _check_words(words: list[str], text: str) -> None:
    for word in words:
        if not _WORD.fullmatch(word):
            raise RuleError(f"{word!r} in the rule {text!r} is not a dim; use words, with + or ^ behind them, * or .")
    if words.count("*") > 1:
        raise RuleError(f"the rule {text!r} has two * in one tensor")


def _check_marks(reads: list[list[str]], makes: list[list[str]], text: str) -> None:
    """Each word has one mark, and is in all outputs, or is summed and in none, or cannot be cut."""
    everywhere = set.intersection(*({_name(word) for word in words} for words in makes))
    somewhere = {_name(word) for words in makes for word in words}
    marks: dict[str, str] = {}
    for word in itertools.chain.from_iterable([*reads, *makes]):
        name, mark = _name(word), word[len(_name(word)) :]
        marks[name] = max(marks.get(name, ""), mark)
    if "*" in marks and any(_LEADING.fullmatch(name) for name in marks):
        raise RuleError(f"the rule {text!r} uses d0, d1, ..., which are the names of the dims of *; use other words")
    if "*" in marks and "*" not in everywhere:
        raise RuleError(f"the rule {text!r} has a * that is not in every output; name the dims that are summed")
    for name, mark in marks.items():
        if name in ("*", ".") or mark == "^":
            continue
        if mark == "+" and name in somewhere:
            raise RuleError(f"{name} in the rule {text!r} is summed and yet in an output")
        if mark == "" and name not in everywhere:
            raise RuleError(f"{name} in the rule {text!r} is not in every output; mark it + (summed) or ^ (not cut)")


def _name(word: str) -> str:
    return word.rstrip("+^")


def _spread(words: tuple[str, ...], shape: Shape, leading: int) -> list[str]:
    """The words with * replaced by the names of the leading dims."""
    if "*" not in words:
        return list(words)
    count = len(shape) - len(words) + 1
    if count < 0:
        raise RuleError(f"{' '.join(words)} against the shape {list(shape)}")
    at = words.index("*")
    return [*words[:at], *(f"d{leading - count + i}" for i in range(count)), *words[at + 1 :]]
