"""Kinds of devices by their makers' figures, and what ops and communications cost on them.

Peak rates, bandwidths and memories are those of NVIDIA's data sheets, dense (without sparsity), for the SXM form where
there are several. Links are per direction: NVLink where devices of a node have it all to all, else PCIe. What a device
costs per hour is in no data sheet: a cluster file says it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rota.errors import InputError

if TYPE_CHECKING:
    from rota.plan.costs import Costs

Arithmetic = Literal["half", "tf32", "float32", "float64"]
"""How products are computed; half is float16 or bfloat16."""

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """Peak figures of a device."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    half_flops: float
    tf32_flops: float
    """As float32 where there are no such units."""
    float32_flops: float
    float64_flops: float
    link_bytes_per_s: float
    """To another device of its node, in each direction."""

    def flops(self, arithmetic: Arithmetic) -> float:
        """Per second, at most."""
        rates = {
            "half": self.half_flops,
            "tf32": self.tf32_flops,
            "float32": self.float32_flops,
            "float64": self.float64_flops,
        }
        return rates[arithmetic]


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What of the peak is reached, and what comes on top: assumptions, the same for all kinds, stated once here."""

    tensor_products: float = 0.65
    """Products on tensor cores: large ones reach 0.6 to 0.8 of peak."""
    plain_products: float = 0.85
    """Products in float32 and float64 without them."""
    memory: float = 0.8
    """Ops that read and write."""
    link: float = 0.75
    """NCCL's large messages between devices of a node, and between nodes."""
    op_s: float = 5e-6
    """To launch an op, however small."""
    launch_s: float = 5e-6
    """To launch a collective."""
    latency_s: float = 1e-5
    """Of a collective between two devices; more devices take as much again for each."""
    backward: float = 2.0
    """Of the time of the forward run."""
    updates: float = 1.0
    """How much of the time counts in which the optimizer updates parameters."""
    copies: float = 1.0
    """How much of the time counts in which gradients are added up and parts are put together."""
    overlap_share: float = 0.1
    """How much of a device a collective takes that runs beside its computation."""
    usable_memory: float = 0.92
    """What the driver, the libraries and holes in the allocator leave."""


USUAL = Reach()
PEAK = Reach(
    tensor_products=1.0,
    plain_products=1.0,
    memory=1.0,
    link=1.0,
    updates=0.0,
    copies=0.0,
    overlap_share=0.0,
    usable_memory=1.0,
)
"""Nothing lost but the launches; the optimizer and copies left out."""


def _gpu(
    name: str, gib: int, memory: float, half: float, tf32: float, single: float, double: float, link: float
) -> DeviceKind:
    """In GiB, GB/s and TFLOPS, as the data sheets have them."""
    return DeviceKind(
        name=name,
        memory_bytes=gib * _GIB,
        memory_bytes_per_s=memory * 1e9,
        half_flops=half * 1e12,
        tf32_flops=tf32 * 1e12,
        float32_flops=single * 1e12,
        float64_flops=double * 1e12,
        link_bytes_per_s=link * 1e9,
    )


# Where a sheet does not say what float64 does, it is the part of float32 that the generation has units for.
_GPUS = (
    _gpu("V100-32GB", 32, 900, 125, 15.7, 15.7, 7.8, 150),
    _gpu("A100-40GB", 40, 1555, 312, 156, 19.5, 9.7, 300),
    _gpu("A100-80GB", 80, 2039, 312, 156, 19.5, 9.7, 300),
    _gpu("H100-80GB", 80, 3350, 989, 494, 67, 34, 450),
    _gpu("T4", 16, 300, 65, 8.1, 8.1, 8.1 / 32, 16),
    _gpu("L4", 24, 300, 121, 60, 30.3, 30.3 / 64, 32),
    _gpu("A10G", 24, 600, 70, 35, 35, 35 / 64, 32),
    _gpu("RTX3090", 24, 936, 71, 35.6, 35.6, 35.6 / 64, 32),
    _gpu("RTX4090", 24, 1008, 165.2, 82.6, 82.6, 82.6 / 64, 32),
)

CPU = DeviceKind(
    name="cpu",
    memory_bytes=4 * _GIB,
    memory_bytes_per_s=6e9,
    half_flops=2.5e10,
    tf32_flops=2.5e10,
    float32_flops=2.5e10,
    float64_flops=1.25e10,
    link_bytes_per_s=4e9,
)
"""One core of a server, roughly; there is no data sheet that would hold for all."""

KINDS: Mapping[str, DeviceKind] = {kind.name: kind for kind in (*_GPUS, CPU)}


def find_kind(name: str, known: Mapping[str, DeviceKind] = KINDS) -> DeviceKind:
    """By its name in any case; InputError with what there is, and what may have been meant."""
    by_case = {one.casefold(): one for one in known}
    if name.casefold() in by_case:
        return known[by_case[name.casefold()]]
    near = difflib.get_close_matches(name.casefold(), by_case, n=1, cutoff=0.5)
    meant = f"; did you mean {by_case[near[0]]}" if near else ""
    raise InputError(f"there is no device kind {name!r}{meant} (known: {', '.join(known)})")


def usable_bytes(kind: DeviceKind, reach: Reach = USUAL) -> int:
    """What tensors may take of a device's memory. On a CPU rota's workers are given all of it."""
    return kind.memory_bytes if kind.name == CPU.name else int(kind.memory_bytes * reach.usable_memory)


def arithmetic_of(precision: str, *, float32_matmul: str = "highest") -> Arithmetic:
    """How products of a task are computed; `float32_matmul` is what `torch.get_float32_matmul_precision` says."""
    if precision == "float32":
        return "float32" if float32_matmul == "highest" else "tf32"
    return "float64" if precision == "float64" else "half"


def costs_of(
    kind: DeviceKind,
    *,
    arithmetic: Arithmetic = "float32",
    reach: Reach = USUAL,
    link_bytes_per_s: float | None = None,
    latency_s: float | None = None,
    byte_share: float = 1.0,
    moments: float = 2.0,
) -> Costs:
    """What things cost on devices of a kind, for the simulator.

    An op takes its launch, its products at the rate of its arithmetic and the bytes that it touches, one after another;
    convolutions in float32 use TF32, as PyTorch does unless told otherwise. The link is that of the node, unless
    another is given. `byte_share` is for graphs that stand for another precision: how much of a byte each counts. The
    optimizer reads parameters and gradients and writes parameters, and reads and writes its `moments`, two for Adam.
    """
    from rota.plan.collectives import Link
    from rota.plan.costs import Calibration, Costs, LinkCost, Rate
    from rota.plan.layout import Kind

    byte_s = byte_share / (kind.memory_bytes_per_s * reach.memory)
    bandwidth = (link_bytes_per_s or kind.link_bytes_per_s) * reach.link / byte_share
    latency_s = reach.latency_s if latency_s is None else latency_s

    def rate(how: Arithmetic) -> Rate:
        reached = reach.tensor_products if kind.flops(how) > kind.float32_flops else reach.plain_products
        return Rate(op_s=reach.op_s, flop_s=1 / (kind.flops(how) * reached), byte_s=byte_s, backward=reach.backward)

    folded = rate("tf32" if arithmetic == "float32" else arithmetic)
    cost = LinkCost(group=2, launch_s=reach.launch_s, launch_byte_s=0.0, latency_s=latency_s, byte_s=1 / bandwidth)
    kinds = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.SEND)
    return Costs(
        link=Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth),
        calibration=Calibration(
            calls={},
            rates=dict.fromkeys(("conv1d", "conv2d", "conv3d"), folded) if folded != rate(arithmetic) else {},
            rest=rate(arithmetic),
            copy_byte_s=reach.copies * 3 * byte_s,
            assemble_byte_s=reach.copies * 2 * byte_s,
            links=dict.fromkeys(kinds, (cost,)),
            overlap_share=reach.overlap_share,
            optimizer=((0, 0.0), (_GIB, _GIB * reach.updates * (3 + 2 * moments) * byte_s)),
        ),
    )
