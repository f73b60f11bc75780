"""Finds the dims along which a whole graph can be cut, by factoring each tensor dim as the views that read it do.

A linear layer that makes queries, keys and values at once has an output dim of size 3 * heads * width. No range of it
is "the first half of the heads". Seen as three dims it is one: the factors that the model's own views give. Refining
carries these factors through every op, to weights and biases too, until each view is a mere regrouping of factors.
Boxes count in factors: a box of the weight above is a range of each of (3, heads, width) and of the input dim.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rota.graph.graph import Graph, Op
from rota.graph.notation import Shape, Signature
from rota.graph.rules import Case, case_of, occurrences, signature_of

Factors = tuple[tuple[int, ...], ...]
"""The factors of each dim of a tensor, outermost first; a dim of size one has none."""

_Node = tuple[str, str, object]
"""("tensor", name, dim) or ("op", name, word)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """A dim of an op along which it may be cut, or why not."""

    name: str
    """The word of its rule; ``n.1`` for the second factor of n."""
    size: int
    reduced: bool
    """Cutting it leaves partial sums."""
    fixed: bool
    """It cannot be cut."""
    family: int
    """Dims of one family are the same index, carried through the graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The dims of one op, and where each of them is in the tensors that it reads and makes."""

    dims: Mapping[str, Dim]
    reads: tuple[tuple[str, ...], ...]
    """For each read: the dims of its factors, in order."""
    makes: tuple[tuple[str, ...] | None, ...]
    once: frozenset[int]

    def can_cut(self, dim: Dim) -> bool:
        """Whether the op can be cut along a dim: it is summed over, or all outputs have it."""
        return not dim.fixed and (dim.reduced or all(names is None or dim.name in names for names in self.makes))


@dataclass(frozen=True, kw_only=True)
class Refined:
    """A graph with its factors."""

    graph: Graph
    factors: Mapping[str, Factors]
    frames: Mapping[str, Frame]
    """op -> its dims"""
    families: Mapping[str, tuple[int, ...]]
    """tensor -> the family of each of its factors"""
    cases: Mapping[str, Case]

    def shape(self, tensor: str) -> Shape:
        """The sizes of all factors of a tensor, which is what its boxes count in."""
        return tuple(size for dim in self.factors[tensor] for size in dim)

    @property
    def samples(self) -> int | None:
        """How many samples the batch has, as far as they can be told apart; None without any."""
        families = self.batch_families()
        for name in self.graph.inputs:
            for size, family in zip(self.shape(name), self.families[name], strict=True):
                if family in families:
                    return size
        return None

    def batch_families(self) -> frozenset[int]:
        """The families of the samples: the outermost factor of the first dim of the batch's tensors."""
        first = [self.factors[name][0] for name in self.graph.inputs if self.factors[name] and self.factors[name][0]]
        return frozenset(
            self.families[name][0]
            for name in self.graph.inputs
            if self.factors[name] and self.factors[name][0] and self.factors[name][0][0] == first[0][0]
        )


def local_shape(factors: Factors, widths: Sequence[int]) -> Shape:
    """The shape of a tensor of which only so much of each factor is there."""
    rest = iter(widths)
    return tuple(math.prod(next(rest) for _ in dim) for dim in factors)


def refine(graph: Graph) -> Refined:
    """The factors of all tensors, and the dims of all ops."""
    cases = {op.name: case_of(op, graph.tensors) for op in graph.ops}
    signatures = {op.name: signature_of(cases[op.name]) for op in graph.ops}
    chains = _Chains()
    for tensor in graph.tensors.values():
        for dim, size in enumerate(tensor.shape):
            chains.add(("tensor", tensor.name, dim), size)
    for op in graph.ops:
        for word, size in signatures[op.name].sizes.items():
            chains.add(("op", op.name, word), size)
        for left, right in _relations(op, signatures[op.name], cases[op.name]):
            chains.relate(left, right)
    chains.settle()
    factors = {
        tensor.name: tuple(chains.factors(("tensor", tensor.name, dim)) for dim in range(len(tensor.shape)))
        for tensor in graph.tensors.values()
    }
    named = {op.name: _Naming(op, signatures[op.name], cases[op.name], chains, factors) for op in graph.ops}
    families = _families(graph, named, factors)
    frames = {name: one.frame(families) for name, one in named.items()}
    of_tensors = {
        name: tuple(families[("tensor", name, i)] for i in range(sum(len(dim) for dim in dims)))
        for name, dims in factors.items()
    }
    return Refined(graph=graph, factors=factors, frames=frames, families=of_tensors, cases=cases)


# ---- factoring ----


class _Chains:
    """For each dim its chain of suffix products, 1 | ... | size: the borders between its factors."""

    def __init__(self) -> None:
        self._size: dict[_Node, int] = {}
        self._chain: dict[_Node, frozenset[int]] = {}
        self._relations: list[tuple[tuple[_Node, ...], tuple[_Node, ...]]] = []
        self._of_node: dict[_Node, list[int]] = {}
        self._broken: set[int] = set()
        self._index: dict[tuple[tuple[_Node, ...], tuple[_Node, ...]], int] = {}

    def add(self, node: _Node, size: int) -> None:
        self._size[node] = size
        self._chain[node] = frozenset((1, size))

    def relate(self, left: tuple[_Node, ...], right: tuple[_Node, ...]) -> None:
        """Two lists of dims have the same elements in the same order."""
        index = self._index.setdefault((left, right), len(self._relations))
        if any(self._size[node] == 0 for node in (*left, *right)):
            self._broken.add(index)  # nothing has no factors
        if index == len(self._relations):
            self._relations.append((left, right))
            for node in {*left, *right}:
                self._of_node.setdefault(node, []).append(index)

    def holds(self, left: tuple[_Node, ...], right: tuple[_Node, ...]) -> bool:
        """Whether the factors of both sides agree."""
        return self._index[(left, right)] not in self._broken

    def factors(self, node: _Node) -> tuple[int, ...]:
        """Outermost first."""
        if self._size[node] == 0:
            return (0,)
        chain = sorted(self._chain[node], reverse=True)
        return tuple(big // small for big, small in itertools.pairwise(chain))

    def settle(self) -> None:
        """Carry borders along all relations until nothing changes."""
        waiting = deque(range(len(self._relations)))
        queued = set(waiting)
        while waiting:
            index = waiting.popleft()
            queued.discard(index)
            if index in self._broken:
                continue
            for node in self._carry(index):
                for other in self._of_node[node]:
                    if other not in queued:
                        queued.add(other)
                        waiting.append(other)

    def _carry(self, index: int) -> list[_Node]:
        left, right = self._relations[index]
        borders = self._borders(left) | self._borders(right)
        ordered = sorted(borders)
        if any(big % small for small, big in itertools.pairwise(ordered)):
            self._broken.add(index)  # such as 2 * 3 seen as 3 * 2: no common factors
            return []
        changed = []
        for side in (left, right):
            inner = 1
            for node in reversed(side):
                size = self._size[node]
                chain = frozenset(one // inner for one in borders if inner <= one <= inner * size)
                if chain != self._chain[node]:
                    self._chain[node] = chain
                    changed.append(node)
                inner *= size
        return changed

    def _borders(self, side: tuple[_Node, ...]) -> set[int]:
        found = {1}
        inner = 1
        for node in reversed(side):
            found |= {inner * one for one in self._chain[node]}
            inner *= self._size[node]
        return found


def _relations(op: Op, signature: Signature, case: Case) -> Iterator[tuple[tuple[_Node, ...], tuple[_Node, ...]]]:
    if signature.regroups:
        read, made = occurrences(op)[0], op.outputs[0]
        if made is not None:
            for left, right in _groups(case.reads[0], case.made):
                yield tuple(("tensor", read, i) for i in left), tuple(("tensor", made, i) for i in right)
        return
    for name, words in _tensors(op, signature):
        for dim, letters in enumerate(words):
            if letters:
                yield (("tensor", name, dim),), tuple(("op", op.name, word) for word in letters)


def _tensors(op: Op, signature: Signature) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
    yield from zip(occurrences(op), signature.reads, strict=True)
    for name, words in zip(op.outputs, signature.makes, strict=True):
        if name is not None and words is not None:
            yield name, words


def _broken_words(op: Op, signature: Signature, chains: _Chains) -> set[str]:
    """The words that some tensor has in other factors: they cannot be cut, since that tensor would stay whole."""
    return {
        word
        for name, words in _tensors(op, signature)
        for dim, letters in enumerate(words)
        if letters and not signature.regroups
        if not chains.holds((("tensor", name, dim),), tuple(("op", op.name, word) for word in letters))
        for word in letters
    }


def _groups(left: Shape, right: Shape) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The smallest groups of dims with equal products, without the dims of size one."""
    if 0 in left or 0 in right:
        return
    ones = [i for i, size in enumerate(left) if size != 1], [i for i, size in enumerate(right) if size != 1]
    i = j = 0
    while i < len(ones[0]) and j < len(ones[1]):
        first, second = i, j
        one, other = left[ones[0][i]], right[ones[1][j]]
        while one != other:
            if one < other:
                i += 1
                one *= left[ones[0][i]]
            else:
                j += 1
                other *= right[ones[1][j]]
        i, j = i + 1, j + 1
        yield tuple(ones[0][first:i]), tuple(ones[1][second:j])


# ---- naming ----


class _Naming:
    """Gives each factor of an op's tensors the name of the op's dim that it is."""

    def __init__(
        self, op: Op, signature: Signature, case: Case, chains: _Chains, factors: Mapping[str, Factors]
    ) -> None:
        self.op = op
        self._signature = signature
        self.sizes: dict[str, int] = {}
        self._fixed: set[str] = set()
        self._reduced: set[str] = set()
        self._unlinked = 0
        self._broken = _broken_words(op, signature, chains)
        self.tensors = [(name, read) for read, name in enumerate(occurrences(op))]
        if signature.regroups:
            self.reads, self.makes = self._regrouped(case, chains, factors)
        else:
            self.reads = [
                self._named(name, words, chains, factors)
                for name, words in zip(occurrences(op), signature.reads, strict=True)
            ]
            self.makes = [
                None if name is None or words is None else self._named(name, words, chains, factors)
                for name, words in zip(op.outputs, signature.makes, strict=True)
            ]

    def frame(self, families: Mapping[_Node, int]) -> Frame:
        """With the family of each dim."""
        dims = {
            name: Dim(
                name=name,
                size=size,
                reduced=name in self._reduced,
                fixed=name in self._fixed,
                family=families[("op", self.op.name, name)],
            )
            for name, size in self.sizes.items()
        }
        return Frame(dims=dims, reads=tuple(self.reads), makes=tuple(self.makes), once=self._signature.once)

    def _named(
        self, tensor: str, words: Sequence[tuple[str, ...]], chains: _Chains, factors: Mapping[str, Factors]
    ) -> tuple[str, ...]:
        names: list[str] = []
        for dim, letters in enumerate(words):
            nodes: tuple[_Node, ...] = tuple(("op", self.op.name, word) for word in letters)
            if letters and chains.holds((("tensor", tensor, dim),), nodes):
                for word in letters:
                    names += self._word(word, chains.factors(("op", self.op.name, word)))
            else:
                names += self._private(factors[tensor][dim])
        return tuple(names)

    def _word(self, word: str, sizes: tuple[int, ...]) -> list[str]:
        names = [word] if len(sizes) == 1 else [f"{word}.{i}" for i in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            self.sizes[name] = size
            if word in self._signature.reduced:
                self._reduced.add(name)
            if word in self._signature.fixed or word in self._broken:
                self._fixed.add(name)
        return names

    def _private(self, sizes: Iterable[int]) -> list[str]:
        names = []
        for size in sizes:
            name = f"_x{self._unlinked}"
            self._unlinked += 1
            self.sizes[name] = size
            self._fixed.add(name)
            names.append(name)
        return names

    def _regrouped(
        self, case: Case, chains: _Chains, factors: Mapping[str, Factors]
    ) -> tuple[list[tuple[str, ...]], list[tuple[str, ...] | None]]:
        read, made = occurrences(self.op)[0], self.op.outputs[0]
        assert made is not None
        of_read: dict[int, list[str]] = {}
        of_made: dict[int, list[str]] = {}
        count = 0
        for left, right in _groups(case.reads[0], case.made):
            nodes = (
                tuple[_Node, ...](("tensor", read, i) for i in left),
                tuple[_Node, ...](("tensor", made, i) for i in right),
            )
            if not chains.holds(*nodes):
                of_read |= {i: self._private(factors[read][i]) for i in left}
                of_made |= {i: self._private(factors[made][i]) for i in right}
                continue
            sizes = [size for i in left for size in factors[read][i]]
            names = [f"v{count + i}" for i in range(len(sizes))]
            count += len(sizes)
            self.sizes |= dict(zip(names, sizes, strict=True))
            for side, dims, tensor in ((of_read, left, read), (of_made, right, made)):
                rest = iter(names)
                for i in dims:
                    side[i] = [next(rest) for _ in factors[tensor][i]]
        flat = [
            tuple(name for i in range(len(shape)) for name in side.get(i, []))
            for side, shape in ((of_read, case.reads[0]), (of_made, case.made))
        ]
        return [flat[0]], [flat[1]]


def _families(graph: Graph, named: Mapping[str, _Naming], factors: Mapping[str, Factors]) -> dict[_Node, int]:
    """Numbers for the dims that are the same index throughout the graph."""
    parent: dict[_Node, _Node] = {}

    def find(node: _Node) -> _Node:
        root = node
        while parent.setdefault(root, root) != root:
            root = parent[root]
        while parent[node] != root:
            parent[node], node = root, parent[node]
        return root

    for name, dims in factors.items():
        for i in range(sum(len(dim) for dim in dims)):
            find(("tensor", name, i))
    for op in graph.ops:
        one = named[op.name]
        for name in one.sizes:
            find(("op", op.name, name))
        pairs = [*zip(occurrences(op), one.reads, strict=True), *zip(op.outputs, one.makes, strict=True)]
        for tensor, names in pairs:
            if tensor is None or names is None:
                continue
            for i, name in enumerate(names):
                a, b = find(("tensor", tensor, i)), find(("op", op.name, name))
                if a != b:
                    parent[a] = b
    numbers: dict[_Node, int] = {}
    return {node: numbers.setdefault(find(node), len(numbers)) for node in list(parent)}
