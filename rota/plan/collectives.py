"""The fast lowering: from one layout to another by the cheapest collectives that a search over layouts finds.

If the same devices hold the tensor before and after, one box each, the search goes over tuples of boxes. Its moves are
the collectives, each over a partition of the devices into groups; the partitions come from the two layouts, as the
devices that differ only in some of their coordinates, so that it does not matter how devices are numbered. Between
different devices, a collective before or after the sends may save some of them. Whatever is found is measured against
the reference lowering and taken only if it moves no more.

In here a box is a tuple of int ranges, a block: shares are scaled to whole numbers and come last. Fractions are too
slow for a search.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from rota.plan.box import Box, Range, even_widths
from rota.plan.layout import Kind, Layout, Piece, Step, canonical
from rota.plan.reference import lower_reference

_Block = tuple[Range, ...]
_State = tuple[_Block, ...]
"""The block of each device, in the order of device numbers."""
_Groups = tuple[tuple[int, ...], ...]
"""Positions in a state."""
_Placed = tuple[tuple[int, _Block], ...]
"""Blocks on devices."""

_MOST_BLOCKS = 1280
"""The search gives up after states with so many in all: 40 states of 32 devices.

Of all pairs of layouts with up to two axes, none needs more than 33; to see that there is no way can take hundreds.
"""

_LOCAL_LATENCIES = 0.01
"""A local copy's time, in latencies of a message: enough to prefer fewer of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What a communication costs: each one the latency, and each byte that a device receives."""

    latency_s: float = 20e-6
    bandwidth_bytes_per_s: float = 10e9


DEFAULT_LINK = Link()


def lower(source: Layout, target: Layout, *, element_bytes: int = 4, link: Link = DEFAULT_LINK) -> tuple[Step, ...]:
    """The steps that turn the source into the target, receiving no more elements than those of `lower_reference`."""
    return _lower(canonical(source), canonical(target), element_bytes, link)


@functools.lru_cache(maxsize=4096)
def _lower(source: Layout, target: Layout, element_bytes: int, link: Link) -> tuple[Step, ...]:
    if set(target) <= set(source):
        return ()
    if any(piece.box.size == 0 for piece in (*source, *target)):
        return lower_reference(source, target)
    return _Lowering(source, target, _Price.of(link, element_bytes)).steps()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Price:
    latency_s: float
    element_s: float

    @classmethod
    def of(cls, link: Link, element_bytes: int) -> _Price:
        return cls(latency_s=link.latency_s, element_s=element_bytes / link.bandwidth_bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Cost:
    """In the order in which they count against the reference: how much arrives in all, and the time."""

    elements: int = 0
    time_s: float = 0.0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(elements=self.elements + other.elements, time_s=self.time_s + other.time_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    """One kind of step, at the same time in all groups; of a local move, each device is a group."""

    kind: Kind
    groups: _Groups
    before: _State
    after: _State

    def cost(self, price: _Price) -> _Cost:
        if self.kind is Kind.LOCAL:
            return _Cost(time_s=_LOCAL_LATENCIES * price.latency_s)
        elements, most = 0, 0.0
        for group in self.groups:
            if self.kind is Kind.ALL_REDUCE:
                total = 2 * (len(group) - 1) * _size(self.after[group[0]])
                elements += total
                most = max(most, total / len(group))
            else:
                received = [self._received(position, len(group)) for position in group]
                elements += sum(received)
                most = max(most, *received)
        return _Cost(elements=elements, time_s=price.latency_s + most * price.element_s)

    def _received(self, position: int, count: int) -> int:
        after = self.after[position]
        if self.kind is Kind.REDUCE_SCATTER:
            return (count - 1) * _size(after)
        common = _intersect(self.before[position], after)
        return _size(after) - (_size(common) if common else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tiling:
    """How the blocks of each group form one: all the same (no dim), or one after the other along a dim."""

    dim: int | None
    groups: _Groups
    """Each in the order of its blocks."""
    wholes: _State
    """For each group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Route:
    """A way from a layout to another: moves, or sends between moves."""

    cost: _Cost
    first: tuple[_Move, ...] = ()
    sends: tuple[_Placed, _Placed] | None = None
    last: tuple[_Move, ...] = ()


class _Sums:
    """Which blocks are sums of shares that the source has.

    Only of other blocks may the value be given to their first sub-share: the sub-shares of a sum have values already.
    """

    def __init__(self, held: _Placed) -> None:
        self._held = tuple({block for _, block in held})
        self._known: dict[_Block, bool] = {}

    def is_sum(self, block: _Block) -> bool:
        if block not in self._known:
            self._known[block] = any(
                not _covers(other[-1], block[-1]) and _intersect(other, block) is not None for other in self._held
            )
        return self._known[block]


class _Lowering:
    """One pair of layouts, in whole numbers."""

    def __init__(self, source: Layout, target: Layout, price: _Price) -> None:
        self._source, self._target, self._price = source, target, price
        shares = {edge for piece in (*source, *target) for edge in piece.box.share}
        self._scale = math.lcm(*(edge.denominator for edge in shares))
        self._boxes: dict[_Block, Box] = {}
        self._held = self._placed(source)
        self._wanted = self._placed(target)
        self._merged = _merged(self._held)
        self._sums = _Sums(self._held)
        self._value = len(self._wanted[0][1]) - 1

    def steps(self) -> tuple[Step, ...]:
        """The best steps."""
        reference = self._reference_cost()
        if reference is None:
            return lower_reference(self._source, self._target)
        before, after = _one_each(self._merged), _one_each(_hulls(self._wanted, self._sums))
        route: _Route | None = None
        least = 0
        if before is not None and after is not None and before.keys() == after.keys():
            start, goal = tuple(before.values()), tuple(after.values())
            least = sum(map(_lacking, start, goal))
            route = self._search(start, goal, reference.elements)
        if route is None or route.cost.elements > least:
            other = self._with_sends(before, after, reference.elements)
            if route is None or (other is not None and other.cost.time_s < route.cost.time_s):
                route = other
        steps = self._emit(route, after) if route is not None and route.cost < reference else None
        return lower_reference(self._source, self._target) if steps is None else steps

    # --- In and out of whole numbers -------------------------------------------------------------------------------

    def _placed(self, layout: Layout) -> _Placed:
        found = []
        for piece in layout:
            low, high = (int(edge * self._scale) for edge in piece.box.share)
            block = (*piece.box.ranges, (low, high))
            self._boxes[block] = piece.box
            found.append((piece.device, block))
        return tuple(found)

    def _piece(self, device: int, block: _Block) -> Piece:
        box = self._boxes.get(block)
        if box is None:
            low, high = block[-1]
            share = (Fraction(low, self._scale), Fraction(high, self._scale))
            box = self._boxes[block] = Box(ranges=block[:-1], share=share)
        return Piece(device=device, box=box)

    def _layout(self, placed: Iterable[tuple[int, _Block]]) -> Layout:
        return tuple(self._piece(device, block) for device, block in placed)

    # --- The reference, without its steps --------------------------------------------------------------------------

    def _reference_cost(self) -> _Cost | None:
        """What the reference costs; None if only the reference will do."""
        distinct = {block for _, block in self._held}
        if any(_intersect(one, other) for one, other in itertools.combinations(distinct, 2)):
            return None
        return self._sends_cost(self._held, self._wanted)

    def _sends_cost(self, held: _Placed, wanted: _Placed) -> _Cost | None:
        """What the reference's sends cost between layouts without overlaps; None if they do not suffice."""
        there = set(held)
        replicas: dict[_Block, list[int]] = {}
        for device, block in held:
            replicas.setdefault(block, []).append(device)
        origins: dict[tuple[int, _Block], int] = {}
        for turn, (device, block) in enumerate(placed for placed in wanted if placed not in there):
            volume = 0
            for other, devices in replicas.items():
                if (common := _intersect(block, other)) is not None:
                    volume += _volume(common)
                    if device not in devices:
                        origins.setdefault((device, common), devices[turn % len(devices)])
            if volume != _volume(block):
                return None
        return _Cost(elements=sum(_size(block) for _, block in origins), time_s=self._sends_time_s(origins))

    def _sends_time_s(self, origins: dict[tuple[int, _Block], int]) -> float:
        """The time of the busiest device: its messages begin one after the other, and bytes flow both ways at once."""
        messages: dict[int, int] = {}
        received: dict[int, int] = {}
        sent: dict[int, int] = {}
        for (device, block), origin in origins.items():
            received[device] = received.get(device, 0) + _size(block)
            sent[origin] = sent.get(origin, 0) + _size(block)
            for end in (device, origin):
                messages[end] = messages.get(end, 0) + 1
        return max(
            (
                count * self._price.latency_s
                + max(received.get(device, 0), sent.get(device, 0)) * self._price.element_s
                for device, count in messages.items()
            ),
            default=0.0,
        )

    # --- The same devices: a search --------------------------------------------------------------------------------

    def _search(self, start: _State, goal: _State, most_elements: int) -> _Route | None:
        """The fastest moves that receive no more than so many elements (A*)."""
        moves = _Moves(start, goal, self._sums, self._dims_worth_cutting())
        order = itertools.count()
        best: dict[_State, float] = {start: 0.0}
        queue: list[tuple[float, int, _State, _Cost, tuple[_Move, ...]]] = [(0.0, next(order), start, _Cost(), ())]
        held = [set(blocks) for blocks in _by_device(self._held).values()]
        states_left = _MOST_BLOCKS // len(start)
        while queue and states_left > 0:
            _, _, state, cost, path = heapq.heappop(queue)
            if state == goal:
                return _Route(cost=cost, first=path)
            if cost.time_s > best[state]:
                continue
            states_left -= 1
            for move in moves.all(state):
                if move.kind is not Kind.LOCAL and _makes_again(move, path, held):
                    continue
                total = cost + move.cost(self._price)
                if total.time_s >= best.get(move.after, math.inf):
                    continue
                # What a device needs and does not have must arrive, whatever the way.
                lacking = list(map(_lacking, move.after, goal))
                if total.elements + sum(lacking) > most_elements:
                    continue
                best[move.after] = total.time_s
                rest_s = self._price.latency_s + max(lacking) * self._price.element_s if any(lacking) else 0.0
                heapq.heappush(queue, (total.time_s + rest_s, next(order), move.after, total, (*path, move)))
        return None

    # --- Other devices: sends, and a collective on either side -----------------------------------------------------

    def _with_sends(
        self, before: dict[int, _Block] | None, after: dict[int, _Block] | None, most_elements: int
    ) -> _Route | None:
        """The fastest of: at most one collective among the source's devices, sends, at most one among the target's."""
        starts: list[tuple[tuple[_Move, ...], _Placed]] = [((), self._held)]
        if self._merged != self._held and self._keeps_sums(self._merged):
            starts.append(((), self._merged))
        ends: list[tuple[tuple[_Move, ...], _Placed]] = [((), self._wanted)]
        dims = self._dims_worth_cutting()
        if before is not None:
            for move in _reductions(tuple(before.values()), dims, hints=self._wanted):
                start = tuple(zip(before, move.after, strict=True))
                if self._keeps_sums(start):
                    starts.append(((move,), start))
        if after is not None:
            hints = tuple(placed for _, layout in starts for placed in layout)
            if after.items().isdisjoint(self._held):
                for move in _gathers(tuple(after.values()), dims, hints=hints):
                    ends.append(((move,), tuple(zip(after, move.before, strict=True))))
        best: _Route | None = None
        for (first, held), (last, wanted) in itertools.product(starts, ends):
            cost = sum((move.cost(self._price) for move in (*first, *last)), _Cost())
            if cost.elements > most_elements or (best is not None and cost.time_s >= best.cost.time_s):
                continue
            sends = self._sends_cost(held, wanted)
            if sends is None or cost.elements + sends.elements > most_elements:
                continue
            cost += sends
            if best is None or cost.time_s < best.cost.time_s:
                best = _Route(cost=cost, first=first, sends=(held, wanted), last=last)
        return best

    def _keeps_sums(self, held: _Placed) -> bool:
        """Whether no target needs a part of a sum that has been formed."""
        wanted = {block for _, block in self._wanted}
        return not any(
            self._sums.is_sum(block) and not _covers(other[-1], block[-1]) and _intersect(block, other)
            for block in {block for _, block in held}
            for other in wanted
        )

    def _dims_worth_cutting(self) -> tuple[int, ...]:
        """Those that are cut anyway, and of the others a long one, best a multiple of the devices."""
        blocks = [block for _, block in (*self._held, *self._wanted)]
        cut = {dim for dim in range(self._value) if len({block[dim] for block in blocks}) > 1}
        whole = [stop - start for start, stop in blocks[0][: self._value]]
        count = max(len({device for device, _ in placed}) for placed in (self._held, self._wanted))
        free = [dim for dim in range(self._value) if dim not in cut]
        longest = sorted(free, key=lambda dim: (whole[dim] % count != 0, -whole[dim]))[:1]
        return tuple(sorted({*cut, *longest}))

    # --- Steps -----------------------------------------------------------------------------------------------------

    def _emit(self, route: _Route, after: dict[int, _Block] | None) -> tuple[Step, ...] | None:
        """A route's steps; None if a collective would make a piece a second time."""
        steps = list(self._merges())
        steps.extend(self._move_steps(route.first, tuple(dict(self._merged))))
        if route.sends is not None:
            steps.extend(lower_reference(*(self._layout(placed) for placed in route.sends)))
        if after is not None:
            steps.extend(self._move_steps(route.last, tuple(after)))
            steps.extend(self._cuts_of_merged(after))
        return _only_needed(steps, self._source, self._target)

    def _merges(self) -> Iterator[Step]:
        for device, block in self._merged:
            parts = [(owner, part) for owner, part in self._held if owner == device and _contains(block, part)]
            if len(parts) > 1:
                yield Step(kind=Kind.LOCAL, inputs=self._layout(parts), outputs=(self._piece(device, block),))

    def _cuts_of_merged(self, after: dict[int, _Block]) -> Iterator[Step]:
        for piece in self._target:
            merged = self._piece(piece.device, after[piece.device])
            if piece != merged:
                yield Step(kind=Kind.LOCAL, inputs=(merged,), outputs=(piece,))

    def _move_steps(self, moves: Sequence[_Move], devices: tuple[int, ...]) -> Iterator[Step]:
        for local, several in itertools.groupby(moves, key=lambda move: move.kind is Kind.LOCAL):
            run = list(several)
            if local:  # slices of slices are slices
                last = run[-1]
                groups = tuple((position,) for position in range(len(devices)))
                run = [_Move(kind=Kind.LOCAL, groups=groups, before=run[0].before, after=last.after)]
            for move in run:
                for group in move.groups:
                    if any(move.before[position] != move.after[position] for position in group):
                        yield Step(
                            kind=move.kind,
                            inputs=self._layout((devices[position], move.before[position]) for position in group),
                            outputs=self._layout((devices[position], move.after[position]) for position in group),
                        )


@dataclass(slots=True)
class _Moves:
    """The moves of a search between two states."""

    start: _State
    goal: _State
    sums: _Sums
    dims: tuple[int, ...]
    """Those to cut."""
    partitions: tuple[_Groups, ...] = field(init=False)
    value: int = field(init=False)

    def __post_init__(self) -> None:
        self.value = len(self.start[0]) - 1
        self.partitions = _common_partitions(self.start, self.goal)

    def all(self, state: _State) -> Iterator[_Move]:
        """From a state, one step in each of some groups."""
        if all(
            _contains(held, wanted) and (held[-1] == wanted[-1] or not self.sums.is_sum(held))
            for held, wanted in zip(state, self.goal, strict=True)
        ):
            yield _Move(kind=Kind.LOCAL, groups=(), before=state, after=self.goal)
            return  # there is no better move
        for groups in self.partitions:
            tiling = _tiling(state, groups)
            if tiling is None:
                continue
            if tiling.dim is None:
                yield from self._scatters(Kind.LOCAL, state, tiling)
            elif tiling.dim == self.value:
                yield _together(Kind.ALL_REDUCE, state, tiling)
                yield from self._scatters(Kind.REDUCE_SCATTER, state, tiling)
            else:
                yield _together(Kind.ALL_GATHER, state, tiling)
                yield from self._scatters(Kind.ALL_TO_ALL, state, tiling)

    def _scatters(self, kind: Kind, state: _State, tiling: _Tiling) -> Iterator[_Move]:
        for dim in self.dims:
            if dim != tiling.dim:
                yield from self._scatter(kind, state, tiling, dim)
        if kind is Kind.LOCAL and not any(map(self.sums.is_sum, tiling.wholes)):
            yield from self._scatter(kind, state, tiling, self.value)

    def _scatter(self, kind: Kind, state: _State, tiling: _Tiling, dim: int) -> Iterator[_Move]:
        """Cut each group's whole along a dim, as the goal is cut if that can be."""
        groups = tiling.groups
        ordered = tuple(tuple(sorted(group, key=lambda position: self.goal[position][dim])) for group in groups)
        if kind is Kind.ALL_TO_ALL and ordered != groups:
            return  # a group has one order, for what it reads and for what it writes
        edges = self._edges(ordered, tiling.wholes, dim)
        if edges is None:
            return
        after = list(state)
        for group, whole, cuts in zip(ordered, tiling.wholes, edges, strict=True):
            for position, cut in zip(group, itertools.pairwise(cuts), strict=True):
                after[position] = _with_range(whole, dim, cut)
        yield _Move(kind=kind, groups=ordered, before=state, after=tuple(after))

    def _edges(self, groups: _Groups, wholes: _State, dim: int) -> list[Sequence[int]] | None:
        """Where to cut each whole."""
        exact = [self._goal_edges(group, whole[dim], dim) for group, whole in zip(groups, wholes, strict=True)]
        found = [edges for edges in exact if edges is not None]
        if len(found) == len(groups):
            return found
        # Groups that cut the same range must cut it alike, or later moves find nothing that tiles.
        bounds: dict[Range, list[Range]] = {}
        for group, whole in zip(groups, wholes, strict=True):
            start, stop = whole[dim]
            limits = bounds.setdefault(whole[dim], [(start, stop)] * (len(group) - 1))
            for i, (one, other) in enumerate(itertools.pairwise(group)):
                low, high = self.goal[one][dim][1], self.goal[other][dim][0]
                if low <= high:
                    limits[i] = (max(limits[i][0], low), min(limits[i][1], high))
        edges_of = {whole: _edges_within(whole, limits) for whole, limits in bounds.items()}
        result: list[Sequence[int]] = []
        for whole in wholes:
            edges = edges_of[whole[dim]]
            if edges is None or (dim == self.value and any(low != high for low, high in bounds[whole[dim]])):
                return None
            result.append(edges)
        return result

    def _goal_edges(self, group: tuple[int, ...], whole: Range, dim: int) -> Sequence[int] | None:
        ranges = [self.goal[position][dim] for position in group]
        edges = [ranges[0][0], *(stop for _, stop in ranges)]
        tile = all(one == start for one, (start, _) in zip(edges, ranges, strict=False))
        return edges if tile and (edges[0], edges[-1]) == whole else None


def _edges_within(whole: Range, limits: list[Range]) -> Sequence[int] | None:
    """Even cuts of a range, moved to within the limits of each where these leave a choice; None if it is too short."""
    start, stop = whole
    count = len(limits) + 1
    if stop - start < count:
        return None
    even = list(itertools.accumulate(even_widths(stop - start, count), initial=start))
    moved = [start, *(min(max(edge, low), high) for edge, (low, high) in zip(even[1:], limits, strict=False)), stop]
    return moved if all(one < other for one, other in itertools.pairwise(moved)) else even


def _makes_again(move: _Move, path: Sequence[_Move], held: Sequence[set[_Block]]) -> bool:
    """Whether a device gets a block that it has had before: then it need not take part."""
    return any(
        block in held[position] or any(block == earlier.before[position] for earlier in path)
        for position, block in enumerate(move.after)
    )


def _together(kind: Kind, state: _State, tiling: _Tiling) -> _Move:
    """All of a group's devices get its whole."""
    after = list(state)
    for group, whole in zip(tiling.groups, tiling.wholes, strict=True):
        for position in group:
            after[position] = whole
    return _Move(kind=kind, groups=tiling.groups, before=state, after=tuple(after))


def _reductions(state: _State, dims: Iterable[int], *, hints: _Placed) -> Iterator[_Move]:
    """All-reduces and reduce-scatters of partial sums."""
    value = len(state[0]) - 1
    for groups in _partitions(state):
        tiling = _tiling(state, groups)
        if tiling is not None and tiling.dim == value:
            yield _together(Kind.ALL_REDUCE, state, tiling)
            for dim in dims:
                after = _cut_like(tiling, state, dim, hints)
                if after is not None:
                    yield _Move(kind=Kind.REDUCE_SCATTER, groups=tiling.groups, before=state, after=after)


def _gathers(state: _State, dims: Iterable[int], *, hints: _Placed) -> Iterator[_Move]:
    """All-gathers that end in a state."""
    for groups in _partitions(state):
        tiling = _tiling(state, groups)
        if tiling is not None and tiling.dim is None:
            for dim in dims:
                before = _cut_like(tiling, state, dim, hints)
                if before is not None:
                    yield _Move(kind=Kind.ALL_GATHER, groups=groups, before=before, after=state)


def _cut_like(tiling: _Tiling, state: _State, dim: int, hints: _Placed) -> _State | None:
    """Each group's whole cut along a dim: as other blocks are cut, if they are cut in as many, or else evenly."""
    ranges = sorted({block[dim] for _, block in hints})
    cut = list(state)
    for group, whole in zip(tiling.groups, tiling.wholes, strict=True):
        start, stop = whole[dim]
        if stop - start < len(group):
            return None
        inside = [one for one in ranges if start <= one[0] and one[1] <= stop]
        edges = [start, *(end for _, end in inside)]
        if (
            len(inside) != len(group)
            or edges[-1] != stop
            or any(a != b[0] for a, b in zip(edges, inside, strict=False))
        ):
            edges = list(itertools.accumulate(even_widths(stop - start, len(group)), initial=start))
        for position, part in zip(group, itertools.pairwise(edges), strict=True):
            cut[position] = _with_range(whole, dim, part)
    return tuple(cut)


def _common_partitions(start: _State, goal: _State) -> tuple[_Groups, ...]:
    """The partitions of both states, and those into devices that are in a group together in both."""
    ours, theirs = _partitions(start), _partitions(goal)
    found = dict.fromkeys((*ours, *theirs))
    for one, other in itertools.product(ours, theirs):
        where = {position: i for i, group in enumerate(other) for position in group}
        both = [_grouped(group, [where[position] for position in group]) for group in one]
        groups = tuple(sorted(itertools.chain.from_iterable(both)))
        if _is_useful(groups):
            found[groups] = None
    return tuple(found)


def _partitions(state: _State) -> tuple[_Groups, ...]:
    """For each choice of coordinates, the devices that differ in no others. A replica's number is a coordinate, too."""
    seen: dict[_Block, int] = {}
    coordinates: list[tuple[object, ...]] = []
    for block in state:
        number = seen[block] = seen.get(block, -1) + 1
        coordinates.append((*block, number))
    varying = [i for i, values in enumerate(zip(*coordinates, strict=True)) if len(set(values)) > 1]
    found: dict[_Groups, None] = {}
    for count in range(len(varying)):
        for kept in itertools.combinations(varying, count):
            keys = [tuple(values[i] for i in kept) for values in coordinates]
            groups = _grouped(range(len(state)), keys)
            if _is_useful(groups):
                found[groups] = None
    return tuple(found)


def _grouped(positions: Iterable[int], keys: Iterable[object]) -> _Groups:
    groups: dict[object, list[int]] = {}
    for position, key in zip(positions, keys, strict=True):
        groups.setdefault(key, []).append(position)
    return tuple(map(tuple, groups.values()))


def _is_useful(groups: _Groups) -> bool:
    return len(groups[0]) > 1 and all(len(group) == len(groups[0]) for group in groups)


def _tiling(state: _State, groups: _Groups) -> _Tiling | None:
    """How the groups' blocks tile, if all do in the same way."""
    dims: set[int | None] = set()
    ordered: list[tuple[int, ...]] = []
    wholes: list[_Block] = []
    for group in groups:
        blocks = [state[position] for position in group]
        first, *others = blocks
        differing = [d for d in range(len(first)) if any(other[d] != first[d] for other in others)]
        if len(differing) > 1:
            return None
        dim = differing[0] if differing else None
        dims.add(dim)
        if len(dims) > 1:
            return None
        if dim is not None:
            group = tuple(sorted(group, key=lambda position: state[position][dim]))
            ranges = [state[position][dim] for position in group]
            if any(one[1] != other[0] for one, other in itertools.pairwise(ranges)):
                return None
            first = _with_range(first, dim, (ranges[0][0], ranges[-1][1]))
        ordered.append(group)
        wholes.append(first)
    return _Tiling(dim=dims.pop(), groups=tuple(ordered), wholes=tuple(wholes))


def _merged(placed: _Placed) -> _Placed:
    """The same with fewer blocks: those of a device are put together where they tile a larger one."""
    return tuple((device, block) for device, own in _by_device(placed).items() for block in _coalesced(own))


def _coalesced(blocks: list[_Block]) -> list[_Block]:
    if len(blocks) > 1 and _tile(blocks, _hull(blocks)):
        return [_hull(blocks)]
    for one, other in itertools.combinations(blocks, 2):
        both = _hull((one, other))
        if _tile((one, other), both):
            return _coalesced([both, *(block for block in blocks if block not in (one, other))])
    return blocks


def _hulls(placed: _Placed, sums: _Sums) -> _Placed:
    """The same, but of blocks that tile one, or lie within one of them, only that one, if they can be cut from it."""
    found: list[tuple[int, _Block]] = []
    for device, own in _by_device(placed).items():
        hull = _hull(own)
        whole = hull in own or _tile(own, hull)
        if whole and (all(block[-1] == hull[-1] for block in own) or not sums.is_sum(hull)):
            found.append((device, hull))
        else:
            found.extend((device, block) for block in own)
    return tuple(found)


def _one_each(placed: _Placed) -> dict[int, _Block] | None:
    """The block of each device, if none has several."""
    blocks = dict(placed)
    return dict(sorted(blocks.items())) if len(blocks) == len(placed) else None


def _by_device(placed: _Placed) -> dict[int, list[_Block]]:
    blocks: dict[int, list[_Block]] = {}
    for device, block in placed:
        blocks.setdefault(device, []).append(block)
    return blocks


def _hull(blocks: Iterable[_Block]) -> _Block:
    return tuple((min(r[0] for r in ranges), max(r[1] for r in ranges)) for ranges in zip(*blocks, strict=True))


def _tile(blocks: Sequence[_Block], whole: _Block) -> bool:
    return sum(map(_volume, blocks)) == _volume(whole) and not any(
        _intersect(one, other) for one, other in itertools.combinations(blocks, 2)
    )


def _only_needed(steps: Iterable[Step], source: Layout, target: Layout) -> tuple[Step, ...] | None:
    """The steps without those whose outputs are there already, or are never read; None if some outputs are there."""
    there = set(source)
    fresh = []
    for step in steps:
        if there.isdisjoint(step.outputs):
            fresh.append(step)
            there.update(step.outputs)
        elif not there.issuperset(step.outputs):
            return None
    read = set(target) - set(source)
    needed = []
    for step in reversed(fresh):
        if not read.isdisjoint(step.outputs):
            needed.append(step)
            read.update(step.inputs)
    return tuple(reversed(needed))


def _with_range(block: _Block, dim: int, new: Range) -> _Block:
    return (*block[:dim], new, *block[dim + 1 :])


def _intersect(one: _Block, other: _Block) -> _Block | None:
    common = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start = a if a > c else c
        stop = b if b < d else d
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def _covers(outer: Range, inner: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _contains(outer: _Block, inner: _Block) -> bool:
    return all(map(_covers, outer, inner))


def _lacking(held: _Block, wanted: _Block) -> int:
    """How many elements must at least arrive at a device that needs a block."""
    if held == wanted:
        return 0
    common = _intersect(held, wanted) if _covers(held[-1], wanted[-1]) else None
    return _size(wanted) - (_size(common) if common else 0)


def _size(block: _Block) -> int:
    size = 1
    for start, stop in block[:-1]:
        size *= stop - start
    return size


def _volume(block: _Block) -> int:
    return _size(block) * (block[-1][1] - block[-1][0])
