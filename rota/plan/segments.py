"""Groups the sites of each device into segments: the longest runs of ops between two communications."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rota.errors import CycleError
from rota.graph.graph import Role
from rota.graph.positional import is_random
from rota.graph.rules import occurrences
from rota.plan.box import Box
from rota.plan.dependency import Flow, Site, Tie, Wiring
from rota.plan.plan import Part
from rota.plan.program import ONCE, Call, Entry, Exit, Segment, Source


@dataclass(kw_only=True, slots=True, eq=False)
class Draft:
    """A segment with what it was made of."""

    segment: Segment
    rank: int
    """Of several that can run, the one with the lowest rank does: groups that have begun come to their end."""
    sites: tuple[Site, ...]
    entries: tuple[tuple[Site, int, Tie], ...]
    """For each entry, a use that it serves."""
    exits: tuple[tuple[Site, int], ...]
    """For each exit, who makes it and as which output."""


_Key = tuple[int, int, bool, tuple[int, ...], int]
"""Device, context, whether it has a gradient, groups, level."""


@dataclass(kw_only=True, slots=True)
class _Growing:
    key: _Key
    sites: list[Site] = field(default_factory=list)


def draft_segments(wiring: Wiring) -> list[Draft]:
    """All segments of a plan, in an order in which each reads only from those before it."""
    keys = _keys(wiring)
    groups: dict[_Key, _Growing] = {}
    of_site: dict[int, _Growing] = {}
    for index, key in keys.items():
        group = groups.setdefault(key, _Growing(key=key))
        group.sites.append(wiring.sites[index])
        of_site[index] = group
    grown = sorted(groups.values(), key=lambda group: (group.key[4], group.sites[0].index))
    ranks = _ranks(grown)
    return [_build(wiring, index, ranks[index], group, of_site) for index, group in enumerate(grown)]


def _keys(wiring: Wiring) -> dict[int, _Key]:
    """The segment of each site: the earliest that it can be in, but that of its readers within its groups."""
    order = _site_order(wiring)
    before = _order_edges(wiring)
    keys: dict[int, _Key] = {}
    latest: _Key | None = None
    settled: set[int] = set()
    """Those that stay where they are."""
    for site in order:
        kind = (site.device, site.context, site.grad, wiring.plan.groups_of(site.part))
        level = 0
        for i, name in enumerate(occurrences(site.op)):
            if site.reads[i] is None or name not in wiring.makers:
                continue
            direct = wiring.ties[(site.index, i)].direct
            for maker in _makers(wiring, site, i, name):
                same = direct and keys[maker.index][:4] == kind
                level = max(level, keys[maker.index][4] + (0 if same else 1))
        for other in before.get(site.index, ()):
            level = max(level, keys[other][4] + 1)
        if wiring.plan.in_order and (site.grad or is_random(site.op)):
            if latest is not None:
                level = max(level, latest[4] + (latest[:4] != kind))
            latest = (*kind, level)
            settled.add(site.index)
        keys[site.index] = (*kind, level)
    settled |= {index for others in before.values() for index in others}
    for site in reversed(order):
        key = keys[site.index]
        if key[3] and site.index not in settled:
            levels = [keys[reader.index][4] for reader in _direct_readers(wiring, site, keys)]
            keys[site.index] = (*key[:4], min(levels, default=key[4]))
    return {site.index: keys[site.index] for site in order}


def _direct_readers(wiring: Wiring, site: Site, keys: Mapping[int, _Key]) -> list[Site]:
    """Who reads what a site makes, if all of them are in its groups and nobody else wants it; else nobody."""
    found = []
    for name, box in zip(site.op.outputs, site.makes, strict=True):
        if name is None:
            continue
        if name in wiring.results or name == wiring.plan.graph.outputs["loss"]:
            return []
        for reader, read in wiring.readers[name]:
            if (reader.device, reader.context) != (site.device, site.context) or reader.reads[read] != box:
                if wiring.ties[(reader.index, read)].direct:
                    continue  # another part made it
                return []
            if not wiring.ties[(reader.index, read)].direct or keys[reader.index][:4] != keys[site.index][:4]:
                return []
            found.append(reader)
    return found


def _ranks(grown: list[_Growing]) -> dict[int, int]:
    """The place of each segment among all: by where its groups begin, then group by group."""
    begins: dict[tuple[object, ...], int] = {}
    for group in grown:
        *kind, level = group.key
        begins.setdefault(tuple(kind), level)
    order = []
    for index, group in enumerate(grown):
        *kind, level = group.key
        groups = group.key[3]
        order.append((begins[tuple(kind)] if groups else level, groups, level, index))
    return {index: rank for rank, (*_, index) in enumerate(sorted(order))}


def _makers(wiring: Wiring, site: Site, read: int, name: str) -> list[Site]:
    """The sites that must be done before a site can read a tensor."""
    tie, box = wiring.ties[(site.index, read)], site.reads[read]
    assert box is not None
    makers = [(maker, maker.makes[output]) for maker, output in wiring.makers[name]]
    if tie.direct:
        return [
            maker
            for maker, made in makers
            if maker.device == site.device and maker.context == site.context and made == box
        ]
    # What is exchanged may wait for all of its group, in either pass: nothing of it may be in one segment.
    everywhere = tie.forward is None or tie.forward.crossing
    return [maker for maker, _ in makers if everywhere or maker.context in (site.context, ONCE)]


def _order_edges(wiring: Wiring) -> dict[int, list[int]]:
    """For each site the sites that the user wants before it, in the forward pass of the same micro-batch."""
    of_part: dict[Part, list[Site]] = {}
    for site in wiring.sites:
        of_part.setdefault(site.part, []).append(site)
    edges: dict[int, list[int]] = {}
    for first, second in wiring.plan.order_edges:
        if first.backward or second.backward or first.microbatch != second.microbatch:
            continue
        for one in of_part.get(first.part, ()):
            for other in of_part.get(second.part, ()):
                if one.context == other.context or ONCE in (one.context, other.context):
                    edges.setdefault(other.index, []).append(one.index)
    return edges


def _site_order(wiring: Wiring) -> list[Site]:
    """The sites in an order that respects the data flow and the user's wishes, else that of the graph."""
    before = _order_edges(wiring)
    if not before:
        return list(wiring.sites)
    follows: dict[int, list[int]] = {}
    waiting = dict.fromkeys(range(len(wiring.sites)), 0)
    for site in wiring.sites:
        needed = set(before.get(site.index, ()))
        for i, name in enumerate(occurrences(site.op)):
            if site.reads[i] is not None and name in wiring.makers:
                needed |= {maker.index for maker in _makers(wiring, site, i, name)}
        for other in needed:
            follows.setdefault(other, []).append(site.index)
        waiting[site.index] = len(needed)
    ready = [index for index, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    found: list[Site] = []
    while ready:
        index = heapq.heappop(ready)
        found.append(wiring.sites[index])
        for other in follows.get(index, ()):
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, other)
    if len(found) < len(wiring.sites):
        left = {index for index, count in waiting.items() if count > 0}
        cycle = find_cycle(left, lambda index: [other for other in follows.get(index, ()) if other in left])
        raise CycleError(
            contradiction(
                [str(wiring.sites[index].part) for index in cycle],
                [first in before.get(second, ()) for first, second in itertools.pairwise(cycle)],
            )
        )
    return found


_SHORT = 6


def contradiction(names: Sequence[str], wished: Sequence[bool]) -> str:
    """What is wrong with a cycle, and what to do. Each of the names is to come before the next, by the plan's wish
    or because the next needs it."""
    around = len(wished)
    first = next((i for i, by_plan in enumerate(wished) if by_plan), 0)
    names = [names[(first + i) % around] for i in range(around + 1)]
    orders = [
        f"{one} to run before {other}"
        for i, (one, other) in enumerate(itertools.pairwise(names))
        if wished[(first + i) % around]
    ]
    otherwise = "if a strategy gave it, choose another one, or other micro-batches"
    if not orders:
        words = f"{names[0]} and {names[1]} wait for each other; do not group them with others, and {otherwise}"
    elif len(orders) == 1:
        words = f"the plan orders {orders[0]}, which needs it done first; take this order out, or {otherwise}"
    else:
        words = f"the plan orders {orders[0]}, and {orders[1]}, against that; take one of them out, or {otherwise}"
    return f"{words}: {' -> '.join(names)}" if len(orders) == 1 and around <= _SHORT else words


def find_cycle(nodes: set[int], next_of: Callable[[int], list[int]]) -> list[int]:
    """A cycle among nodes all of which wait for another one; its first node is repeated at the end."""
    path: list[int] = []
    seen: set[int] = set()
    blocked: set[int] = set()

    def walk(node: int) -> list[int] | None:
        stack = [(node, iter(next_of(node)))]
        path.append(node)
        seen.add(node)
        while stack:
            here, rest = stack[-1]
            for other in rest:
                if other in seen:
                    return [*path[path.index(other) :], other]
                if other not in blocked:
                    path.append(other)
                    seen.add(other)
                    stack.append((other, iter(next_of(other))))
                    break
            else:
                stack.pop()
                path.pop()
                seen.discard(here)
                blocked.add(here)
        return None

    for node in sorted(nodes):
        if node not in blocked:
            cycle = walk(node)
            if cycle is not None:
                return cycle
    return []


def _build(wiring: Wiring, index: int, rank: int, group: _Growing, of_site: Mapping[int, _Growing]) -> Draft:
    device, context, grad, _, _ = group.key
    slots: dict[tuple[int, int], int] = {}
    """(site, output) -> slot"""
    entry_slots: dict[tuple[str, Box, int | None, Flow | None, Flow | None, Box | None], int] = {}
    entries: list[Entry] = []
    entry_uses: list[tuple[Site, int, Tie]] = []
    calls: list[Call] = []
    count = 0
    for site in group.sites:
        reads: list[int] = []
        for i, name in enumerate(occurrences(site.op)):
            box = site.reads[i]
            if box is None:
                continue
            tie = wiring.ties[(site.index, i)]
            maker = _inner_maker(wiring, name, site, box, tie, of_site)
            if maker is not None:
                reads.append(slots[maker])
                continue
            coordinate = wiring.coordinate(site, i) if context != ONCE else None
            share = next(iter(tie.contribution.values()), None) if tie.backward else None
            key = (name, box, coordinate, tie.forward, tie.backward, share)
            if key not in entry_slots:
                role = wiring.plan.graph.tensors[name].role
                entry_slots[key] = count
                entries.append(
                    Entry(
                        slot=count,
                        tensor=name,
                        box=box,
                        source=_source(role),
                        coordinate=coordinate,
                        grad=tie.backward is not None,
                        again=tie.again is not None,
                    )
                )
                entry_uses.append((site, i, tie))
                count += 1
            reads.append(entry_slots[key])
        makes: list[int | None] = []
        for i, output in enumerate(site.op.outputs):
            if output is None:
                makes.append(None)
            else:
                slots[(site.index, i)] = count
                makes.append(count)
                count += 1
        calls.append(
            Call(
                op=site.op.name,
                ranges=site.ranges,
                reads=tuple(reads),
                makes=tuple(makes),
                shifted=wiring.microbatches.running[site.op.name].dim if context != ONCE else None,
                offsets=wiring.microbatches.offsets_of(site.op.name) if context != ONCE else None,
            )
        )
    exits, exit_sites = _exits(wiring, group, of_site, slots)
    segment = Segment(
        index=index,
        device=device,
        context=context,
        grad=grad,
        recompute=grad and wiring.plan.is_recomputed(group.sites[0].part),
        calls=tuple(calls),
        entries=tuple(entries),
        exits=tuple(exits),
        slots=count,
        drops=_drops(calls, exits),
    )
    return Draft(
        segment=segment, rank=rank, sites=tuple(group.sites), entries=tuple(entry_uses), exits=tuple(exit_sites)
    )


def _source(role: Role) -> Source:
    if role in (Role.PARAMETER, Role.BUFFER):
        return Source.STORED
    return Source.FREE if role in (Role.INPUT, Role.CONSTANT) else Source.VALUE


def _inner_maker(
    wiring: Wiring, name: str, site: Site, box: Box, tie: Tie, of_site: Mapping[int, _Growing]
) -> tuple[int, int] | None:
    """Who makes what a site reads, if that is inside of the same segment."""
    if not tie.direct:
        return None
    for maker, output in wiring.makers[name]:
        if maker.device == site.device and maker.context == site.context and maker.makes[output] == box:
            return (maker.index, output) if of_site[maker.index] is of_site[site.index] else None
    return None


def _exits(
    wiring: Wiring, group: _Growing, of_site: Mapping[int, _Growing], slots: Mapping[tuple[int, int], int]
) -> tuple[list[Exit], list[tuple[Site, int]]]:
    exits: list[Exit] = []
    sites: list[tuple[Site, int]] = []
    for site in group.sites:
        for i, name in enumerate(site.op.outputs):
            box = site.makes[i]
            if name is None or box is None or not _leaves(wiring, name, site, box, of_site):
                continue
            exits.append(Exit(slot=slots[(site.index, i)], tensor=name, box=box, grad=name in wiring.differentiated))
            sites.append((site, i))
    return exits, sites


def _leaves(wiring: Wiring, name: str, site: Site, box: Box, of_site: Mapping[int, _Growing]) -> bool:
    """Whether anybody outside of the segment reads what a site makes."""
    if name in wiring.results or name == wiring.plan.graph.outputs["loss"]:
        return True
    readers = wiring.readers[name]
    for reader, read in readers:
        tie = wiring.ties[(reader.index, read)]
        if tie.direct:
            inside = of_site[reader.index] is of_site[site.index]
            if not inside and reader.device == site.device and reader.reads[read] == box:
                return True
        elif tie.forward is not None and (tie.forward.crossing or tie.forward.context == site.context):
            return True
    return False


def _drops(calls: list[Call], exits: list[Exit]) -> tuple[tuple[int, ...], ...]:
    """For each call the slots that are read for the last time by it, or made and never read."""
    kept = {one.slot for one in exits}
    last: dict[int, int] = {}
    for i, call in enumerate(calls):
        for slot in (*call.reads, *(one for one in call.makes if one is not None)):
            last[slot] = i
    drops: list[list[int]] = [[] for _ in calls]
    for slot, i in last.items():
        if slot not in kept:
            drops[i].append(slot)
    return tuple(tuple(one) for one in drops)
