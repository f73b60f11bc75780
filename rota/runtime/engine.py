"""Runs one device's part of a program in its own process; the others run theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from rota.plan.box import Box
from rota.plan.program import NodeKind, Program
from rota.runtime import comm
from rota.runtime.buckets import BUCKET_BYTES, buckets_of
from rota.runtime.device_run import DeviceRun, check_state
from rota.runtime.exchanges import Exchanges, instructions_of
from rota.runtime.fused import fuse


class Engine:
    """One device of a program, among its peers."""

    def __init__(
        self,
        program: Program,
        state: Mapping[str, torch.Tensor] | None,
        *,
        rank: int,
        beside: Engine | None = None,
        groups: comm.Groups | None = None,
        seed: int = 0,
        plain_random: bool = False,
        compiled: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Without a state it has no pieces until `take`, and meets nobody: it may be made beside another that runs."""
        self.program = program
        self.rank = rank
        self.device = DeviceRun(program, rank, seed=seed, plain_random=plain_random, compiled=compiled)
        self._graph = program.refined.graph
        self._instructions = instructions_of(program, rank, buckets_of(program, most_bytes=bucket_bytes))
        self._groups = groups or comm.Groups()
        self._exchanges = Exchanges(self.device, self._groups, self._instructions)
        self._clip_s = 0.0
        self._optimizer: torch.optim.Optimizer | None = None
        if state is None:
            self.device.prepare()
            return
        self._groups.prepare(program)
        held: frozenset[str] = frozenset()
        if beside is not None:  # another program of the same model on the same pieces
            self.device.adopt(beside.device)
            held = frozenset(beside.program.stored)
        state = check_state(program, state, held=held)
        for name in program.stored:
            if name not in held:
                self.device.load(name, state[name].detach())

    def take(self, pieces: Mapping[tuple[str, Box], torch.Tensor]) -> None:
        """Have these pieces of parameters and buffers from now on; every process calls it at the same time."""
        self._groups.prepare(self.program)
        for (name, box), tensor in pieces.items():
            self.device.put(name, box, tensor)

    @property
    def waited_s(self) -> float:
        """What was spent waiting for other processes, so far."""
        return self._exchanges.waited_s + self._clip_s

    # ---- a step ----

    def execute(self, batch: Any, *, step: int = 0) -> None:
        """Run this device's nodes; gradients and results stay here."""
        device, exchanges = self.device, self._exchanges
        device.begin(batch, step=step)
        exchanges.begin()
        for one in self._instructions:
            node = one.node
            if node.kind is NodeKind.EXCHANGE:
                exchanges.exchange(one)
            else:
                exchanges.post_receives(one.index)
                exchanges.settle(node)
                (device.forward if node.kind is NodeKind.FORWARD else device.backward)(node)
            if one.frees:
                for value in one.frees:
                    exchanges.wait(value)
                device.drop(one.frees)
        exchanges.end()
        device.end()

    def outputs(self) -> dict[str, torch.Tensor]:
        """The metrics that ended up on this device."""
        found = {}
        for metric, name in self._graph.outputs.items():
            result = self.program.results.get(name)
            if result is not None and result.device == self.rank:
                found[metric] = self.device.values[result.value]
        return found

    def gives_free_output(self, metric: str) -> bool:
        """Whether this device tells a metric that none computes: a constant, a tensor of the batch, or a parameter."""
        name = self._graph.outputs[metric]
        if name in self.program.results:
            return False
        return self.rank == (self.program.stored[name][0].device if name in self.program.stored else 0)

    def free_output(self, metric: str) -> torch.Tensor:
        """Such a metric, on a device that has it."""
        name = self._graph.outputs[metric]
        if name in self.program.stored:
            return self.device.stored(name, self.program.stored[name][0].box)
        return self.device.free(name)

    def train(self, batch: Any, *, step: int = 0, max_norm: float | None = None) -> dict[str, torch.Tensor]:
        """One step of training; the metrics that ended up on this device."""
        # Gradients are dropped now and not after the last step: memory that goes back to the system comes back slowly.
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        outputs = self.run(batch, step=step)
        self.device.hand_over_gradients()
        self.clip(max_norm)
        if self._optimizer is not None:
            self._optimizer.step()
        return outputs

    def run(self, batch: Any, *, step: int = 0) -> dict[str, torch.Tensor]:
        """Run a batch; the metrics that ended up on this device. Gradients wait until they are handed over."""
        self.device.clear()
        self.execute(batch, step=step)
        return self.outputs()

    def clip(self, max_norm: float | None) -> None:
        """Scale the gradients so that their norm over all devices is at most this."""
        if max_norm is not None:
            squares = self.device.squared_gradients()
            began_s = time.perf_counter()
            dist.all_reduce(squares)
            self._clip_s += time.perf_counter() - began_s
            self.device.clip(squares.sqrt(), max_norm)

    def optimize(self, make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]) -> None:
        """Give this device an optimizer over its pieces."""
        pieces = [parameter for _, _, parameter in self.device.parameters()]
        self._optimizer = fuse(make(pieces)) if pieces else None
