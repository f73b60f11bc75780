"""Programs by the shape of the batch: a smaller last one, or another length, is compiled when it comes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from rota.errors import InputError, PlanError
from rota.graph.batch import skeleton_of, tensors_in
from rota.graph.capture import Loss, capture
from rota.graph.graph import Graph
from rota.graph.refine import Refined
from rota.plan.layout import Layout, Piece
from rota.plan.plan import Plan
from rota.plan.program import Program
from rota.runtime.pieces import box_of_dims, dim_ranges
from rota.threads import safe_point


class Programs:
    """The programs of one model under one strategy, for all the shapes and modes that come up.

    Parameters and buffers stay where the first program keeps them: what they are used for changes from batch to batch,
    where they are does not. A batch that the strategy refuses, such as a last one with too few samples, is computed on
    one device.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        strategy: Callable[[Graph], Plan],
        *,
        most: int = 32,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._model = model
        self._loss = loss
        self._strategy = strategy
        self._most = most
        self._notice = notice
        self._known: OrderedDict[Any, Program] = OrderedDict()
        self._graphs: dict[Any, Graph] = {}
        self._first: Program | None = None
        self._first_key: Any = None
        self.compiled = 0
        """How many programs were compiled so far."""

    def of(self, batch: Any, *, backward: bool = True, graph: Graph | None = None) -> Program:
        """The program for a batch, in the modes (train or eval) that the model is in, and with what it trains now."""
        modes = tuple(module.training for module in self._model.modules())
        trained = tuple(parameter.requires_grad for parameter in self._model.parameters())
        key = (modes, trained, backward, shape_of(batch))
        if key not in self._known:
            self._graphs[key] = graph = graph or capture(self._model, batch, self._loss)
            self._keep(key, self._compile(graph, backward))
            if len(self._known) > self._most:
                gone, _ = self._known.popitem(last=False)
                if gone != self._first_key:
                    del self._graphs[gone]
        self._known.move_to_end(key)
        return self._known[key]

    def _keep(self, key: Any, program: Program) -> None:
        self._known[key] = program
        if self._first is None:
            self._first, self._first_key = program, key
        self.compiled += 1

    @property
    def first(self) -> Program:
        """The one that says where parameters are."""
        assert self._first is not None
        return self._first

    def under(self, strategy: Callable[[Graph], Plan]) -> Programs:
        """For the same shapes and modes, as many as there are so far, under another strategy; none is compiled yet."""
        made = Programs(self._model, self._loss, strategy, most=self._most, notice=self._notice)
        made._graphs = {key: self._graphs[key] for key in dict.fromkeys([self._first_key, *self._known])}
        return made

    def compile_all(self) -> None:
        """Compile for all shapes and modes that are known of; it may be done in an owned thread, which may stop it."""
        for key, graph in self._graphs.items():
            safe_point()
            _, _, backward, _ = key
            self._keep(key, self._compile(graph, backward))

    def _compile(self, graph: Graph, backward: bool) -> Program:
        first = self._first
        if first is None:
            return self._strategy(graph).compile()
        try:
            return _kept_in_place(self._strategy(graph), first, backward).compile()
        except (InputError, PlanError) as error:
            self._notice(f"a batch of another shape is computed on one device, because {error}")
            plan = Plan(graph, devices=first.devices)
            plan.assign(graph.ops, 0)
            return _kept_in_place(plan, first, backward).compile()


def _kept_in_place(plan: Plan, first: Program, backward: bool) -> Plan:
    """The plan with everything stored where the first program has it."""
    for name, layout in first.stored.items():
        if name in plan.graph.tensors:
            here = _same_pieces(name, layout, first.refined, plan.refined)
            plan.store(name, here, gather="use" if name in plan.gathered_for_use else "step")
    if not backward:
        plan.forward_only()
    return plan


def _same_pieces(name: str, layout: Layout, there: Refined, here: Refined) -> Layout:
    """A layout in the factors that another graph takes the same tensor apart into."""
    if there.factors[name] == here.factors[name]:
        return layout
    found = []
    for piece in layout:
        ranges = dim_ranges(there.factors[name], piece.box)
        box = None if ranges is None else box_of_dims(here.factors[name], ranges)
        if box is None:
            raise InputError(f"the views of {name} differ from those of the first batch")
        found.append(Piece(device=piece.device, box=box))
    return tuple(found)


def shape_of(batch: Any) -> tuple[Any, ...]:
    """What a program depends on: the tree of a batch, and the shape and type of each tensor in it."""
    return (skeleton_of(batch), tuple(tuple(tensor.shape) for tensor in tensors_in(batch)))
