"""PyTorch's own DistributedDataParallel and FSDP2 as strategies: for models that cannot be captured, and as peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rota.errors import InputError
from rota.given import check_fields
from rota.graph.graph import Graph
from rota.plan.plan import Plan
from rota.strategies.base import register

if TYPE_CHECKING:
    from rota.runtime.executor import Executor, Parts
    from rota.runtime.gang import Gang


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A module stays as it is and is wrapped; there is no plan that could be looked at."""

    kind: Literal["ddp", "fsdp2"]
    find_unused: bool = False
    """For DistributedDataParallel: whether a step may leave parameters unused."""

    def __post_init__(self) -> None:
        check_fields(self, "torch_ddp" if self.kind == "ddp" else "torch_fsdp2")

    def __call__(self, graph: Graph, devices: int) -> Plan:
        """There is none."""
        raise InputError(f"{self} is PyTorch's own and has no plan to explain; use data or zero")

    def execute(self, parts: Parts, batch: Any, *, gang: Gang, notice: Callable[[str], None]) -> Executor:
        """What runs the batches."""
        from rota.runtime.wrapped import Wrapped

        return Wrapped(parts, batch, gang=gang, wrapper=self, notice=notice)

    def __str__(self) -> str:
        """As the user writes it."""
        return f"torch_{self.kind}" + ("(find_unused=True)" if self.find_unused else "")


def torch_ddp(*, find_unused: bool = False) -> Wrapper:
    """torch.nn.parallel.DistributedDataParallel."""
    return Wrapper(kind="ddp", find_unused=find_unused)


def torch_fsdp2() -> Wrapper:
    """torch.distributed.fsdp.fully_shard, layer by layer."""
    return Wrapper(kind="fsdp2")


register("torch_ddp", torch_ddp)
register("torch_fsdp2", torch_fsdp2)
