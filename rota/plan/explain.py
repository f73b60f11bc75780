"""Tells how a program runs: which op is cut how and where it sits, each communication and why, each device's load."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence

from rota.cluster.device import format_bytes
from rota.plan.box import even_widths
from rota.plan.explanation import Arrangement, Communication, Cut, Explanation, OpGroup, summarise
from rota.plan.folding import Leaf, collapse, ranges
from rota.plan.layout import Kind
from rota.plan.program import Program
from rota.plan.simulate import Simulation

_MOST_WIDTHS = 6
_MOST_GROUPS = 4
_MOST_CLAUSES = 2
_MOST_OF_A_MODULE = 2 / 3

_Table = list[tuple[str, ...]]


def explain(program: Program, simulation: Simulation | None = None) -> str:
    """The text for people."""
    return "\n".join(lines_of(summarise(program, simulation or program.simulate())))


def lines_of(explanation: Explanation) -> list[str]:
    """The text for people, line by line."""
    found = [*_head(explanation), "", *_op_lines(explanation), ""]
    moving = _communication_lines(explanation)
    return [*found, *moving, *([""] if moving else []), *_load_lines(explanation)]


def format_seconds(seconds: float) -> str:
    """A short time for people: 1.2 s, 34.5 ms, 120 us."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.0f} us"


def _head(explanation: Explanation) -> Iterator[str]:
    widths = explanation.microbatch_samples
    devices = _counted(explanation.devices, "device")
    if len(widths) > 1:
        sizes = "-".join(str(width) for width in sorted(set(widths)))
        devices += f", {len(widths)} micro-batches of {sizes} {'sample' if sizes == '1' else 'samples'}"
    else:
        devices += f", one batch of {_counted(widths[0], 'sample')}"
    yield f"plan  {devices}"
    yield f"step  {format_seconds(explanation.step_s)} predicted, {format_bytes(explanation.received_bytes)} received"
    for note in explanation.notes:
        yield f"note  {note}"


def _op_lines(explanation: Explanation) -> list[str]:
    groups = explanation.ops
    leaves = [
        Leaf(name=name, same=(_how(group), group.devices), near=_near(group), item=i)
        for i, group in enumerate(groups)
        for name in group.names
    ]
    table: _Table = [("op", "how it is cut", "on", "ops", "compute")]
    for row in collapse(leaves, most=_MOST_OF_A_MODULE):
        ones = [groups[leaf.item] for leaf in row.leaves]
        share = sum(one.compute_share / len(one.names) for one in ones)
        table.append((row.pattern, _how_all(ones), ranges(ones[0].devices), str(len(row.leaves)), _percent(share)))
    lines = _aligned(table, right=(3, 4))
    if any(row[0].endswith("*") for row in table) and len(table) > 2:
        lines.append("(* stands for what no other line names)")
    return lines


def _near(group: OpGroup) -> Hashable:
    if group.reads_parameter or not group.cuts or all(cut.samples for cut in group.cuts):
        return None
    # Views and the like that hand the same index on: their words for it differ, the cut is one.
    return (group.linked, tuple(cut.ranges for cut in group.cuts), group.devices, group.copies, group.recomputed)


def _how_all(groups: Sequence[OpGroup]) -> str:
    if len({_how(group) for group in groups}) == 1:
        return _how(groups[0])
    words = zip(*([_dim(cut) for cut in group.cuts] for group in groups), strict=True)
    return _how(groups[0], dims=["/".join(dict.fromkeys(column)) for column in words])


def _how(group: OpGroup, *, dims: Sequence[str] | None = None) -> str:
    words = [_cut_words(cut, name=dims[i] if dims else _dim(cut)) for i, cut in enumerate(group.cuts)]
    if any(cut.sums for cut in group.cuts):
        words.append("leaves partial sums")
    if not words:
        words.append("whole" if len(group.parts) == 1 else "replicated")
    elif group.copies != 1:
        words.append(f"{group.copies} copies" if group.copies else "some parts copied")
    if group.recomputed:
        words.append("recomputed")
    return ", ".join(words)


def _dim(cut: Cut) -> str:
    return "samples" if cut.samples else cut.dim


def _cut_words(cut: Cut, *, name: str) -> str:
    tiles = all(a[1] == b[0] for a, b in itertools.pairwise(cut.ranges))
    if not tiles:
        return f"{name} in {len(cut.ranges)} ranges that overlap"
    widths = cut.widths
    if widths == even_widths(sum(widths), len(widths)) and len(set(widths)) == 1:
        return f"{name} cut in {len(widths)}"
    if len(widths) <= _MOST_WIDTHS:
        return f"{name} cut {'+'.join(str(width) for width in widths)}"
    return f"{name} cut in {len(widths)} of {min(widths)}-{max(widths)}"


def _communication_lines(explanation: Explanation) -> list[str]:
    moving = [one for one in explanation.communications if one.groups]
    table: _Table = [("communication", "pass", "from", "to", "by", "on", "tensors", "times", "bytes", "why")]
    for backward, of_parameters in itertools.product((False, True), (False, True)):
        leaves = [
            Leaf(name=name, same=_communication_words(one), item=i)
            for i, one in enumerate(moving)
            if one.backward is backward and one.of_parameters is of_parameters
            for name in one.tensors
        ]
        told = {leaf.name for leaf in leaves}
        known = explanation.parameters if of_parameters else explanation.activations
        for row in collapse(leaves, others=[name for name in known if name not in told], root=False):
            ones = [moving[leaf.item] for leaf in row.leaves]
            at = [one.tensors.index(leaf.name) for one, leaf in zip(ones, row.leaves, strict=True)]
            times = sum(one.times_of_each[i] for one, i in zip(ones, at, strict=True))
            size = format_bytes(sum(one.received_bytes_of_each[i] for one, i in zip(ones, at, strict=True)))
            numbers = (str(len({leaf.name for leaf in row.leaves})), str(times), size)
            table.append((row.pattern, *_communication_words(ones[0]), *numbers, _common([one.why for one in ones])))
    lines = _aligned(table, right=(6, 7, 8)) if len(table) > 1 else []
    local = len(explanation.communications) - len(moving)
    if local:
        what = "tensor is" if local == 1 else "tensors are"
        lines.append(f"{local} more {what} put together from pieces on the same device, which moves nothing")
    return lines


def _communication_words(one: Communication) -> tuple[str, ...]:
    kinds = [kind if count == 1 else f"{count} {kind}" for kind, count in one.steps.items() if kind != Kind.LOCAL.value]
    differ = one.source.devices != one.target.devices
    return (
        "backward" if one.backward else "forward",
        _arrangement_words(one.source, where=differ),
        _arrangement_words(one.target, where=differ),
        " + ".join(kinds),
        _groups_words(one),
    )


def _arrangement_words(arrangement: Arrangement, *, where: bool) -> str:
    words = [_cut_words(cut, name=_dim(cut)) for cut in arrangement.cuts]
    if arrangement.partial_sums:
        words.append(f"{arrangement.partial_sums} partial sums")
    if not words:
        words.append("whole" if len(arrangement.devices) == 1 else "replicated")
    elif arrangement.copies > 1:
        words.append(f"{arrangement.copies} copies")
    return ", ".join(words) + (f" on {ranges(arrangement.devices)}" if where else "")


def _groups_words(one: Communication) -> str:
    devices = ranges(device for group in one.groups for device in group)
    if set(one.steps) <= {Kind.SEND.value, Kind.LOCAL.value} or len(one.groups) == 1:
        return devices
    if len(one.groups) <= _MOST_GROUPS:
        return " | ".join(ranges(group) for group in one.groups)
    return f"{len(one.groups)} groups of {devices}"


def _common(texts: Sequence[str]) -> str:
    """What sentences have in common, clause by clause; a clause in which they name different ops becomes dots."""
    if len(set(texts)) == 1:
        return texts[0]
    found: list[str] = []
    for clauses in itertools.zip_longest(*(text.split("; ") for text in texts), fillvalue=""):
        told = list(dict.fromkeys(" ".join(_without_names(clause)) for clause in clauses))
        if len(told) <= _MOST_CLAUSES:
            found.append(" / ".join(one for one in told if one))
    return "; ".join(clause for clause in found if clause and not clause.endswith("..."))


def _without_names(clause: str) -> Iterator[str]:
    """The words of a clause, with dots for each list of ops."""
    dots = False
    for word in clause.split():
        is_name = "." in word
        if not is_name or not dots:
            yield "..." if is_name else word
        dots = is_name


def _load_lines(explanation: Explanation) -> list[str]:
    table: _Table = [("device", "stored", "peak", "computes", "communicates", "idle")]
    step_s = explanation.step_s or 1.0
    alike: dict[tuple[str, ...], list[int]] = {}
    for load in explanation.loads:
        words = (
            format_bytes(load.stored_bytes),
            format_bytes(load.peak_bytes),
            *(f"{format_seconds(s)} ({_percent(s / step_s)})" for s in (load.busy_s, load.moving_s, load.idle_s)),
        )
        alike.setdefault(words, []).append(load.device)
    table += [(ranges(devices), *words) for words, devices in alike.items()]
    return _aligned(table, right=(1, 2, 3, 4, 5))


def _percent(share: float) -> str:
    return "<1%" if 0.0005 <= share < 0.005 else f"{share:.0%}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _aligned(table: _Table, *, right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
