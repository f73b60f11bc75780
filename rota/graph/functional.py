"""Rewrites an exported FX graph into ops that change nothing they read; in-place ops and no_grad are resolved."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from rota.errors import CaptureError
from rota.graph.checkpointed import checkpoint_of
from rota.graph.graph import Op, Ref, Role, Tensor, refs
from rota.graph.recorded import Record, record_of

# They check or copy what cannot change.
_DROPPED = {"_assert_tensor_metadata", "sym_constrain_range_for_size", "_assert_scalar"}
_SAME = {"lift_fresh_copy", "lift_fresh", "alias"}

# Views through which a tensor may be written: the op that puts the written part back.
_SCATTERS = {"slice": "aten.slice_scatter.default", "select": "aten.select_scatter.default"}
_NO_GRADIENT = {"detach"}
_WITH_STATISTICS = {"batch_norm", "instance_norm"}
_TRAINED_NORM = "aten._native_batch_norm_legit_functional.default"


@dataclass
class _View:
    """A node that shows a part of another."""

    base: Node
    kind: str
    arguments: tuple[Any, ...]
    version: int
    """Of the base, when the view was made."""


class Builder:
    """Walks an FX graph in order and collects tensors and ops; a tensor never changes, a node's tensor may."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self._values: dict[Node, Any] = {}
        """node -> Ref, a tuple of them, or a plain value"""
        self._views: dict[Node, _View] = {}
        self._versions: dict[Node, int] = {}
        self._regions: dict[Node, Any] = {}
        """A call of a region, such as one under no_grad -> the nodes in it that it returns."""
        self._written: dict[str, str] = {}
        self._sources: dict[Node, Tensor] = {}
        self._names: dict[str, int] = {}
        self._record = Record()
        """Of the node that is looked at."""

    def declare(self, node: Node, tensor: Tensor) -> None:
        """A placeholder stands for this tensor; tied parameters have one tensor and several placeholders."""
        self.tensors.setdefault(tensor.name, tensor)
        self._values[node] = Ref(name=tensor.name)
        self._sources[node] = tensor

    def run(self, module: GraphModule) -> None:
        """Take in every node."""
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                self._values[node] = getattr(module, str(node.target))

    def value(self, node: Node) -> Any:
        """What a node stands for now."""
        view = self._views.get(node)
        if view is not None and view.kind == "same":
            return self.value(view.base)
        if view is not None and self._versions.get(self._root(view.base), 0) != view.version:
            raise CaptureError(
                f"the model cannot be captured: it writes into a tensor and then reads an older view of it ({node}); "
                "write the result into a new tensor instead"
            )
        return self._values[node]

    def updates(self) -> dict[str, str]:
        """buffer -> the tensor that holds its value afterwards."""
        return dict(self._written)

    # ---- calls ----

    def _call(self, node: Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node)
            if source in self._regions:
                inner = self._regions[source][index]
                if isinstance(inner, Node):
                    self._alias(node, inner)  # a write to it is a write to what the region was given
                return
            self._values[node] = self.value(source)[index]
            if source in self._views:
                self._views[node] = self._views[source]
            return
        name = getattr(node.target, "__name__", str(node.target))
        if name.startswith("wrap_with_set_grad_enabled"):
            _, inner, *arguments = node.args
            self._inline(node, inner, arguments)
        elif name.startswith("wrap_with_autocast"):
            _, _, _, _, inner, *arguments = node.args
            self._inline(node, inner, arguments)
        elif isinstance(node.target, torch._ops.OpOverload):
            self._record = record_of(node)
            self._aten(node, node.target)
        elif str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            raise CaptureError("the model cannot be captured: it uses torch.func (such as vmap, grad or jvp)")
        else:
            raise CaptureError(f"the model cannot be captured: it calls {name}, which is not an op of PyTorch")

    def _inline(self, node: Node, inner: Any, arguments: list[Any]) -> None:
        """Take in the nodes of a region; each has a record of the modes that it is in."""
        module = self._values[inner]
        places = [one for one in module.graph.nodes if one.op == "placeholder"]
        for place, argument in zip(places, arguments, strict=True):
            if isinstance(argument, Node):
                self._alias(place, argument)
            else:
                self._values[place] = self._resolve(argument)
        self.run(module)
        (output,) = (one for one in module.graph.nodes if one.op == "output")
        self._regions[node] = output.args[0]

    def _aten(self, node: Node, target: torch._ops.OpOverload) -> None:
        kind = target._schema.name.removeprefix("aten::")
        if kind in _DROPPED:
            return
        if any(one and name.startswith("sparse") for name, one in _named_arguments(node, target)):
            raise CaptureError(f"the model cannot be captured: {module_of(node) or kind} has sparse gradients")
        if kind in _SAME or (kind == "dropout" and not _drops(node, kind)):
            self._same(node, _first(node))
            return
        if kind.startswith("__"):  # the operators, such as __and__
            kind = kind.strip("_")
        if kind.endswith("_"):
            self._write(node, target, kind)
            return
        if kind in _WITH_STATISTICS and self._updates_statistics(node, kind):
            return
        if any(one.alias_info is not None and one.alias_info.is_write for one in target._schema.arguments):
            self._write_out(node, target, kind)
            return
        base = _base_of(node)
        if base is not None and _is_whole(node, base) and kind not in _NO_GRADIENT:
            self._same(node, base)  # to, contiguous, reshape, x[:], ... that give the tensor itself
            return
        self._values[node] = self._emit(node, str(target), kind)
        if base is not None:
            version = self._versions.get(self._root(base), 0)
            self._views[node] = _View(base=base, kind=kind, arguments=node.args[1:], version=version)

    def _same(self, node: Node, base: Node) -> None:
        """A node shows all of another one: the tensor itself, or one without its gradient, as a view under no_grad."""
        value = self.value(base)
        if not self.tensors[value.name].requires_grad or self._record.with_grad or _gives_itself(node, base):
            self._alias(node, base)
            return
        self._values[node] = self._emit(node, "aten.detach.default", "detach", args=(value,), like=base)
        version = self._versions.get(self._root(base), 0)
        self._views[node] = _View(base=base, kind="detach", arguments=(), version=version)

    def _alias(self, node: Node, base: Node) -> None:
        """A node is another one under a second name."""
        version = self._versions.get(self._root(base), 0)
        self._views[node] = _View(base=base, kind="same", arguments=(), version=version)
        self._values[node] = self.value(base)

    def _updates_statistics(self, node: Node, kind: str) -> bool:
        """A norm in training that updates its running statistics becomes one that makes new ones."""
        arguments = [self._resolve(one) for one in node.args]
        statistics = arguments[3:5]
        if not arguments[5] or not all(isinstance(one, Ref) for one in statistics):
            return False
        if kind != "batch_norm":
            raise CaptureError(f"the model cannot be captured: {kind} updates its running statistics")
        # PyTorch's backward reads the statistics where they are, not as they were.
        reads = {one.name for one in statistics}
        if any(reads & set(op.inputs) and self._has_gradient(op) and op.target != _TRAINED_NORM for op in self.ops):
            raise CaptureError(
                f"the model cannot be captured: {module_of(node) or kind} runs in eval mode and then in train mode "
                "within a step, which changes the statistics that the backward pass of the first reads"
            )
        name = self._name(node, kind)
        made = self._declare_result(name, node.meta["val"], kind, tuple(refs(arguments)))
        new = []
        for old, label in zip(statistics, ("running_mean", "running_var"), strict=True):
            tensor = replace(self.tensors[old.name], name=f"{name}.{label}", role=Role.ACTIVATION)
            self.tensors[tensor.name] = tensor
            new.append(tensor.name)
        self._append(node, name, kind, _TRAINED_NORM, tuple(arguments[:8]), {}, (made, None, None, *new))
        self._values[node] = Ref(name=made or "")
        for source, tensor_name in zip(node.args[3:5], new, strict=True):
            assert isinstance(source, Node)
            self._replace(source, Ref(name=tensor_name), node)
        return True

    def _write(self, node: Node, target: torch._ops.OpOverload, kind: str) -> None:
        """An in-place op becomes one that makes a new tensor, which stands for the old one from here on."""
        written = node.args[0]
        if not isinstance(written, Node):
            raise CaptureError(f"the model cannot be captured: {target} writes into several tensors at once")
        if kind == "detach_" and not self.tensors[self.value(written).name].requires_grad:
            self._alias(node, written)  # as for every tensor that the model's code makes of numbers
            return
        if kind == "copy_":
            new = self._copied(node)
        else:
            if _shape_of(node) != _shape_of(written):
                raise CaptureError(f"the model cannot be captured: {kind} changes the shape of a tensor in place")
            new = self._emit(
                node, _functional(kind[:-1], target._schema.arguments), kind[:-1], args=self._given(node, target)
            )
            into = self.tensors[self.value(written).name].dtype
            if any(self.tensors[name].dtype != into for name in self.ops[-1].inputs):
                # What is written keeps its type, whatever the op would make of its inputs.
                args = (new, getattr(torch, into))
                new = self._emit(node, "aten.to.dtype", "to", args=args, like=written)
        self._values[node] = new
        self._replace(written, new, node)
        self._alias(node, written)

    def _given(self, node: Node, target: torch._ops.OpOverload) -> tuple[Any, ...]:
        """The positional arguments, with the defaults that were left out: the op's twin may have none."""
        left = target._schema.arguments[len(node.args) :]
        defaults = [one.default_value for one in left if not one.kwarg_only and one.name not in node.kwargs]
        return (*(self._resolve(one) for one in node.args), *defaults)

    def _write_out(self, node: Node, target: torch._ops.OpOverload, kind: str) -> None:
        """An op that writes into its `out` becomes one that makes a new tensor."""
        into = node.kwargs.get("out")
        rest = [one for one in target._schema.arguments if one.name != "out"]
        if not isinstance(into, Node) or any(one.alias_info is not None and one.alias_info.is_write for one in rest):
            raise CaptureError(f"the model cannot be captured: {target} writes into its arguments")
        kwargs = {name: self._resolve(one) for name, one in node.kwargs.items() if name != "out"}
        args = tuple(self._resolve(one) for one in node.args)
        new = self._emit(node, _functional(kind, rest), kind, args=args, like=into, kwargs=kwargs)
        self._values[node] = new
        self._replace(into, new, node)
        self._alias(node, into)

    def _copied(self, node: Node) -> Any:
        """What is copied, in the shape and type of what it is copied into (aten.copy cannot be differentiated)."""
        source, into = self._resolve(node.args[1]), self.tensors[self._resolve(node.args[0]).name]
        found = self.tensors[source.name]
        if found.dtype != into.dtype:
            dtype = getattr(torch, into.dtype)
            source = self._emit(node, "aten.to.dtype", "to", args=(source, dtype), like=_first(node))
        if found.shape != into.shape:
            shape = list(into.shape)
            source = self._emit(node, "aten.expand.default", "expand", args=(source, shape), like=_first(node))
        return source

    def _has_gradient(self, op: Op) -> bool:
        return any(one is not None and self.tensors[one].requires_grad for one in op.outputs)

    def _replace(self, written: Node, new: Any, at: Node) -> None:
        view = self._views.get(written)
        detaches = getattr(at.target, "__name__", "").startswith("detach_")
        if not self._record.with_grad and not detaches and self.tensors[self.value(written).name].requires_grad:
            raise CaptureError(
                f"the model cannot be captured: {at.target} writes under torch.no_grad() into a tensor that has a "
                "gradient, which PyTorch keeps as it was; write the result into a new tensor instead, as in "
                "h + (h.round() - h).detach()"
            )
        if view is None or view.kind == "same":
            base = written if view is None else view.base
            self._values[written] = new
            if view is not None:
                self._replace(base, new, at)
                view.version = self._versions.get(self._root(base), 0)
                return
            self._versions[written] = self._versions.get(written, 0) + 1
            source = self._sources.get(written)
            if source is not None:
                self._note_source(source, new)
            return
        if view.kind not in _SCATTERS:
            raise CaptureError(
                f"the model cannot be captured: {at.target} writes through a {view.kind} into another tensor; "
                "write the result into a new tensor instead"
            )
        base_value = self.value(view.base)
        if self.tensors[base_value.name].dtype.startswith("complex"):
            raise CaptureError(
                "the model cannot be captured: it writes into a part of a complex tensor, which PyTorch cannot "
                "differentiate as an op; put the parts together with torch.cat, or pad, instead"
            )
        args = (base_value, new, *view.arguments)
        put_back = self._emit(at, _SCATTERS[view.kind], f"{view.kind}_scatter", args=args, like=view.base)
        self._values[written] = new
        self._replace(view.base, put_back, at)
        view.version = self._versions.get(self._root(view.base), 0)

    def _note_source(self, source: Tensor, new: Any) -> None:
        if source.role is not Role.BUFFER:
            raise CaptureError(f"the model cannot be captured: it writes into its {source.role} {source.name}")
        self._written[source.name] = new.name

    def _root(self, node: Node) -> Node:
        while node in self._views:
            node = self._views[node].base
        return node

    # ---- ops ----

    def _emit(
        self,
        node: Node,
        target: str,
        kind: str,
        *,
        args: tuple[Any, ...] | None = None,
        like: Node | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args = tuple(self._resolve(one) for one in node.args) if args is None else args
        if kwargs is None:
            kwargs = {name: self._resolve(one) for name, one in node.kwargs.items()} if like is None else {}
        name = self._name(node, kind)
        inputs = tuple(dict.fromkeys(refs([*args, *kwargs.values()])))
        results = (like or node).meta["val"]
        several = isinstance(results, tuple | list)
        made = [
            self._declare_result(f"{name}.{i}" if several else name, value, kind, inputs, place=i)
            for i, value in enumerate(results if several else [results])
        ]
        self._append(node, name, kind, target, args, kwargs, tuple(made))
        values = [Ref(name=one) if one is not None else None for one in made]
        return tuple(values) if several else values[0]

    def _name(self, node: Node, kind: str) -> str:
        module = module_of(node)
        return self._unique(f"{module}.{kind}" if module else kind)

    def _append(
        self,
        node: Node,
        name: str,
        kind: str,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[str | None, ...],
    ) -> None:
        inputs = tuple(dict.fromkeys(refs([*args, *kwargs.values()])))
        # What makes a new float of one with a gradient, without one, is in a region that torch.export may have lost.
        lost = self._record.differentiable == (False,) and any(self._lacks_gradient(one, kind) for one in outputs)
        with_grad = self._record.with_grad and not (lost and any(self.tensors[one].requires_grad for one in inputs))
        self.ops.append(
            Op(
                name=name,
                kind=kind,
                target=target,
                args=args,
                kwargs=kwargs,
                inputs=inputs,
                outputs=outputs,
                module=module_of(node),
                with_grad=with_grad,
                autocast=self._record.autocast,
                checkpoint=checkpoint_of(node),
            )
        )

    def _lacks_gradient(self, output: str | None, kind: str) -> bool:
        return output is not None and kind not in _NO_GRADIENT and _is_differentiable(self.tensors[output].dtype)

    def _declare_result(
        self, name: str, value: Any, kind: str, inputs: tuple[str, ...], *, place: int = 0
    ) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        if any(not isinstance(size, int) for size in value.shape):
            raise CaptureError(f"the model cannot be captured: the shape of what {name} makes depends on values")
        wanted = any(self.tensors[one].requires_grad for one in inputs) and kind not in _NO_GRADIENT
        known = self._record.differentiable
        traced = known[place] if place < len(known) else self._record.with_grad
        dtype = str(value.dtype).removeprefix("torch.")
        self.tensors[name] = Tensor(
            name=name,
            shape=tuple(int(size) for size in value.shape),
            dtype=dtype,
            role=Role.ACTIVATION,
            requires_grad=_is_differentiable(dtype) and wanted and traced,
        )
        return name

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            value = self.value(argument)
            if value is None:
                raise CaptureError("the model cannot be captured: a number is computed from values, as by .item()")
            return value
        if isinstance(argument, list | tuple):
            return type(argument)(self._resolve(item) for item in argument)
        if isinstance(argument, slice):
            raise CaptureError("the model cannot be captured: an op has a slice for an argument")
        return argument

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else f"{name}_{count}"


def _is_differentiable(dtype: str) -> bool:
    kind = getattr(torch, dtype)
    return bool(kind.is_floating_point or kind.is_complex)


def _named_arguments(node: Node, target: torch._ops.OpOverload) -> Iterator[tuple[str, Any]]:
    """The arguments of a call, by the names that the op gives them."""
    yield from zip((one.name for one in target._schema.arguments), node.args, strict=False)
    yield from node.kwargs.items()


def _base_of(node: Node) -> Node | None:
    """The input whose memory a node shows, if it makes no memory of its own."""
    made = _memory(node)
    return next((one for one in node.all_input_nodes if made is not None and _memory(one) == made), None)


def _memory(node: Node) -> int | None:
    value = node.meta.get("val")
    value = value[0] if isinstance(value, tuple | list) and value else value
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _gives_itself(node: Node, base: Node) -> bool:
    """Whether an op gives the very tensor that it reads; a view of all of it is another one."""

    def stand_in(one: Node) -> Any:
        value = one.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    given = {one: stand_in(one) for one in node.all_input_nodes}
    keywords = {name: "meta" if name == "device" else one for name, one in node.kwargs.items()}
    args, kwargs = map_arg((node.args, keywords), given.__getitem__)
    with torch.no_grad():
        assert callable(node.target)
        return node.target(*args, **kwargs) is given[base]


def _is_whole(node: Node, base: Node) -> bool:
    """Whether a node shows all of another one, as it is."""
    one, other = node.meta["val"], base.meta["val"]
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype


def _drops(node: Node, kind: str) -> bool:
    """Whether a dropout drops anything; if not, it gives its input itself."""
    return kind == "dropout" and bool(node.args[2]) and bool(node.args[1] != 0.0)


def _functional(kind: str, arguments: Sequence[Any]) -> str:
    """The op that makes a new tensor where another one writes into one: of the same arguments."""
    wanted = [(one.name, _plain_type(one)) for one in arguments]
    for packet in (kind, f"{kind}_functional"):
        for name in getattr(torch.ops.aten, packet).overloads() if hasattr(torch.ops.aten, packet) else []:
            schema = getattr(getattr(torch.ops.aten, packet), name)._schema
            mutable = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
            if not mutable and [(one.name, _plain_type(one)) for one in schema.arguments] == wanted:
                return f"aten.{packet}.{name}"
    raise CaptureError(f"the model cannot be captured: there is no {kind} that makes a new tensor")


def _plain_type(argument: Any) -> str:
    """The type of an argument, whether it is written or not: Tensor(a!) is a Tensor."""
    return re.sub(r"\(.*?\)", "", str(argument.type))


def _shape_of(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return tuple(value.shape), tuple(value.stride())


def _first(node: Node) -> Node:
    first = node.args[0]
    assert isinstance(first, Node)
    return first


def module_of(node: Node) -> str:
    """The path of the innermost module that the op belongs to."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("model").removeprefix(".")


def overload(target: str) -> Callable[..., Any]:
    """The function of an op's target, such as aten.add.Tensor."""
    function: Any = torch.ops
    for part in target.split("."):
        function = getattr(function, part)
    return function  # type: ignore[no-any-return]
