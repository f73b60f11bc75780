"""One order over compute and communication together, by simulating devices that always take the best ready node.

A device prefers backward to forward and an early micro-batch to a late one. On a pipeline that gives one forward, one
backward. The user's own wishes are edges that the order must respect.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rota.errors import CycleError
from rota.graph.cost import work_of
from rota.plan.plan import At, Part, Plan
from rota.plan.program import ONCE, Node, NodeKind, Segment, Value
from rota.plan.segments import Draft, contradiction, find_cycle

_EXCHANGE_COST = 1.0


def order_nodes(plan: Plan, drafts: list[Draft], nodes: list[Node]) -> list[Node]:
    """The nodes in the order in which they run."""
    follows, waiting, lazy = _edges(plan, drafts, nodes)
    costs = [segment_cost(plan, draft) for draft in drafts]
    ready: list[list[tuple[int, int, int, int]]] = [[] for _ in range(plan.devices)]
    busy = [False] * plan.devices
    events: list[tuple[float, int, int]] = []
    found: list[Node] = []
    count = 0

    fetched: set[int] = set()

    def fetch(index: int) -> None:
        """Put what brings stored values to a node right before it."""
        for other in lazy.get(index, ()):
            if other not in fetched:
                fetched.add(other)
                fetch(other)
                found.append(nodes[other])

    def release(index: int, now: float) -> None:
        nonlocal count
        node = nodes[index]
        if node.kind is NodeKind.EXCHANGE:
            fetch(index)
            found.append(node)
            heapq.heappush(events, (now + _EXCHANGE_COST, count, index))
            count += 1
        else:
            backward = node.kind is NodeKind.BACKWARD
            rank = drafts[node.segment].rank
            heapq.heappush(ready[node.devices[0]], (0 if backward else 1, node.microbatch, rank, index))

    def start(now: float, devices: Sequence[int]) -> None:
        nonlocal count
        for device in devices:
            if busy[device] or not ready[device]:
                continue
            index = heapq.heappop(ready[device])[-1]
            busy[device] = True
            node = nodes[index]
            fetch(index)
            found.append(node)
            cost = costs[node.segment] * (2 if node.kind is NodeKind.BACKWARD else 1)
            heapq.heappush(events, (now + cost, count, index))
            count += 1

    fetchers = {other for others in lazy.values() for other in others}
    for index, number in enumerate(waiting):
        if number == 0 and index not in fetchers:
            release(index, 0.0)
    start(0.0, range(plan.devices))
    while events:
        now = events[0][0]
        touched: set[int] = set()
        while events and events[0][0] == now:
            _, _, index = heapq.heappop(events)
            node = nodes[index]
            if node.kind is not NodeKind.EXCHANGE:
                busy[node.devices[0]] = False
                touched.add(node.devices[0])
            for other in follows[index]:
                waiting[other] -= 1
                if waiting[other] == 0:
                    release(other, now)
                    touched.update(nodes[other].devices)
        start(now, sorted(touched))
    if len(found) < len(nodes):
        left = {i for i, number in enumerate(waiting) if number > 0}
        cycle = find_cycle(left, lambda index: [other for other in follows[index] if other in left])
        wished = set(_wished(plan, drafts, *_tables(nodes)))
        raise CycleError(
            contradiction([_name(nodes[index], drafts) for index in cycle], [one in wished for one in pairwise(cycle)])
        )
    return found


def segment_cost(plan: Plan, draft: Draft) -> float:
    """A rough cost of a segment: its products, and what it touches."""
    total = 0.0
    for site in draft.sites:
        work = work_of(plan.refined, site.op.name, site.ranges)
        total += max(work.flops, 4 * work.touched_bytes)
    return max(total, 1.0)


def _edges(
    plan: Plan, drafts: list[Draft], nodes: list[Node]
) -> tuple[list[list[int]], list[int], dict[int, list[int]]]:
    """Who waits for whom, and for each node the exchanges of stored values that are put off until it needs them."""
    writers: dict[tuple[int, Value], list[int]] = {}
    for index, node in enumerate(nodes):
        for key in written(node):
            writers.setdefault(key, []).append(index)
    forward, backward = _tables(nodes)
    follows: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)

    def edge(first: int, second: int) -> None:
        follows[first].append(second)
        waiting[second] += 1

    lazy: dict[int, list[int]] = {}
    is_lazy: set[int] = set()
    needs = [{other for key in read(node) for other in writers.get(key, ())} for node in nodes]
    for index, node in enumerate(nodes):  # the steps of a flow follow each other
        if node.kind is NodeKind.EXCHANGE and needs[index] <= is_lazy:
            is_lazy.add(index)
    for index, node in enumerate(nodes):
        needed = needs[index]
        if is_lazy and not needed.isdisjoint(is_lazy):
            lazy[index] = sorted(needed & is_lazy)
            needed = needed - is_lazy
        if node.kind is NodeKind.BACKWARD:
            needed.add(forward[(node.segment, node.microbatch)])
        needed.discard(index)
        for other in needed:
            edge(other, index)
    for first, second in _wished(plan, drafts, forward, backward):
        if first != second:
            edge(first, second)
    if plan.in_order:  # that of the segments
        for early, late in itertools.pairwise(sorted(forward)):
            edge(forward[early], forward[late])
        for early, late in itertools.pairwise(sorted(backward)):
            edge(backward[late], backward[early])
    return follows, waiting, lazy


_Table = dict[tuple[int, int], int]
"""A segment and a micro-batch -> the node that runs it."""


def _tables(nodes: list[Node]) -> tuple[_Table, _Table]:
    """Forward and backward."""
    tables: dict[NodeKind, _Table] = {kind: {} for kind in NodeKind}
    for index, node in enumerate(nodes):
        tables[node.kind][(node.segment, node.microbatch)] = index
    return tables[NodeKind.FORWARD], tables[NodeKind.BACKWARD]


def _wished(plan: Plan, drafts: list[Draft], forward: _Table, backward: _Table) -> Iterator[tuple[int, int]]:
    if not plan.order_edges:
        return
    of_part: dict[Part, list[Segment]] = {}
    for draft in drafts:
        for site in draft.sites:
            of_part.setdefault(site.part, []).append(draft.segment)

    def nodes_of(moment: At) -> dict[int, int]:
        table = backward if moment.backward else forward
        found = {}
        for segment in of_part.get(moment.part, ()):
            for m in [ONCE, *range(plan.microbatches)]:
                if (segment.index, m) in table and moment.microbatch in (None, m):
                    found[m] = table[(segment.index, m)]
        return found

    for first, second in plan.order_edges:
        one, other = nodes_of(first), nodes_of(second)
        for moment, found in ((first, one), (second, other)):
            if not found:
                raise CycleError(
                    f"{moment.part} cannot be ordered: it has no {_pass(moment)} pass in this plan; take its order "
                    "out, or if a strategy gave it, choose another one, or other micro-batches"
                )
        if (first.backward or second.backward) and any(node in other.values() for node in one.values()):
            raise CycleError(
                f"{first.part} and {second.part} are computed in one go; put them into groups of their own"
            )
        if first.microbatch is None and second.microbatch is None:
            for m in one.keys() & other.keys():
                yield one[m], other[m]
        else:
            for a in one.values():
                for b in other.values():
                    yield a, b


def _pass(moment: At) -> str:
    return "backward" if moment.backward else "forward"


def read(node: Node) -> Iterator[tuple[int, Value]]:
    """What a node needs, and on which device."""
    if node.kind is NodeKind.EXCHANGE:
        assert node.step is not None
        for piece, value in zip(node.step.inputs, node.reads, strict=True):
            if value is not None:
                yield piece.device, value
        return
    device = node.devices[0]
    for value in node.reads:
        if value is not None:
            yield device, value
    for values in node.gradients:
        for value in values:
            yield device, value


def written(node: Node) -> Iterator[tuple[int, Value]]:
    """What a node makes or adds to, and on which device."""
    if node.kind is NodeKind.EXCHANGE:
        assert node.step is not None
        for piece, value in zip(node.step.outputs, node.makes, strict=True):
            yield piece.device, value
        return
    device = node.devices[0]
    for value in node.makes:
        yield device, value
    for added in node.adds:
        if added is not None:
            yield device, added


def _name(node: Node, drafts: list[Draft]) -> str:
    when = "" if node.microbatch == ONCE else f" of micro-batch {node.microbatch}"
    if node.kind is NodeKind.EXCHANGE:
        return f"moving {node.makes[0].name}{when}"
    return f"{node.kind} {drafts[node.segment].sites[0].part}{when}"
