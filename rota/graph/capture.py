"""Turns an nn.Module, a loss function and an example batch into a Graph, by torch.export."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from rota.errors import CaptureError, InputError, RotaError
from rota.graph.batch import check_leaves, leaves_of, skeleton_of, with_tensors
from rota.graph.checkpointed import marking
from rota.graph.functional import Builder, module_of
from rota.graph.graph import Graph, Ref, Role, Tensor
from rota.graph.normalise import normalise
from rota.graph.recorded import Watched, check_dense, recording
from rota.graph.traceable import traceable_losses
from rota.task import check_call, check_loss_function

_PREFIX = "model."
_ASSIGNED = "assigned buffer "
_LIBRARY_AUTOGRAD = "torch._library.autograd"
"""Where PyTorch makes the autograd.Function of a custom op."""

ASKS = (
    "the model's code asks whether it is being traced: where it takes another way then, as transformers' attention "
    "does, the captured one adds up in another order, and results equal those of plain PyTorch but for rounding"
)

Loss = Callable[[torch.nn.Module, Any], Any]


def capture(model: torch.nn.Module, batch: Any, loss: Loss) -> Graph:
    """The graph of one training or validation step, in the mode that the model is in.

    The model may be on the meta device: nothing is computed. A model whose code branches on values in train mode is
    captured in eval mode, with its dropout turned on afterwards; `Graph.notes` says so.
    """
    check_model(model)
    _check_loss(loss)
    _check_hooks(model)
    modes = {module: module.training for module in model.modules()}
    try:
        with _heard_asking() as asking:
            graph = _captured(model, batch, loss)
    except RotaError:
        raise
    except Exception as error:  # the model's code, torch.export and its graph may hold anything
        raise CaptureError(f"the model cannot be captured: {_reason(error)}") from error
    finally:  # the loss may have switched them, and ended half way
        for module, mode in modes.items():
            module.training = mode
    return replace(graph, notes=(*graph.notes, ASKS)) if asking else graph


def check_model(model: object) -> None:
    """InputError for what is no module."""
    if isinstance(model, type):
        raise InputError(f"a model is captured as it is, and {model.__name__} is a class; make one of it first")
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"a model to capture must be a torch.nn.Module, not {type(model).__name__}")


def _check_loss(loss: object) -> None:
    """InputError for what is no function of a model and a batch, as far as can be told before it is called."""
    if not callable(loss):
        raise InputError(f"the loss must be a function, not {type(loss).__name__}; write loss=lambda model, batch: ...")
    check_loss_function("rota.capture", loss)
    check_call("rota.capture", "loss", loss, ("model", "batch"))


def _captured(model: torch.nn.Module, batch: Any, loss: Loss) -> Graph:
    try:
        exported, notes = _export(model, batch, loss)
        return _build(exported, model, batch, notes=notes)
    except CaptureError:
        if not model.training or any(map(_has_statistics, model.modules())):
            raise  # in eval mode a norm would use other statistics
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        exported, notes = _export(model, batch, loss)
    finally:
        for module, mode in modes.items():
            module.training = mode
    _train_dropout(exported, {name for name, module in model.named_modules() if modes[module]})
    note = (
        "the model branches on values in train mode, so it was captured in eval mode with its dropout turned on; "
        "layer drop and dropout inside of attention are left out"
    )
    return _build(exported, model, batch, notes=(note, *notes))


@contextlib.contextmanager
def _heard_asking() -> Iterator[list[str]]:
    """Who asks PyTorch meanwhile whether it traces, besides PyTorch itself."""
    asking: list[str] = []

    def heard(real: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))
            if caller.partition(".")[0] != "torch":
                asking.append(caller)
            return real()

        return answer

    questions = (
        (torch.compiler, ("is_compiling", "is_exporting", "is_dynamo_compiling")),
        (torch.jit, ("is_tracing",)),
    )
    with contextlib.ExitStack() as undoing:
        for module, names in questions:
            for name in names:
                undoing.enter_context(mock.patch.object(module, name, heard(getattr(module, name))))
        yield asking


class _Step(torch.nn.Module):
    """What is exported: the model and its loss, as a function of the batch's tensors."""

    def __init__(self, model: torch.nn.Module, loss: Loss, made: Callable[[Sequence[torch.Tensor]], Any]) -> None:
        """`made` is the batch with these tensors: the loss gets the containers that it gets without a capture."""
        super().__init__()
        self.model = model
        self._loss = loss
        self._made = made

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        before = dict(self.model.named_buffers())
        with Watched(self.model):
            result = self._loss(self.model, self._made(tuple(batch.values())))
        outputs = dict(result) if isinstance(result, dict) else {"loss": result}
        # A buffer that was assigned, not written into, is another tensor now.
        assigned = {
            f"{_ASSIGNED}{name}": buffer
            for name, buffer in self.model.named_buffers()
            if name in before and buffer is not before[name]
        }
        return outputs | assigned


def _export(model: torch.nn.Module, batch: Any, loss: Loss) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    """What was traced, and what of it the user should know."""
    step = _Step(model, loss, lambda tensors: with_tensors(batch, tensors))
    step.training = model.training
    try:
        check_leaves(batch)
        check_dense([leaf for _, leaf in leaves_of(batch, "")], "its batch has")
        with _quietly(), _refusing_own_gradients(), traceable_losses(), recording(), marking() as notes:
            return torch.export.export(step, (_inputs(batch),), strict=False), tuple(notes)
    except Exception as error:  # whatever the model's code or torch.export raises
        raise CaptureError(f"the model cannot be captured: {_reason(error)}") from error


def _inputs(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch, named by their places; one that comes twice need not do so in other batches."""
    found: dict[str, torch.Tensor] = {}
    seen = set[int]()
    for where, leaf in leaves_of(batch, ""):
        if isinstance(leaf, torch.Tensor):
            place = re.sub(r"\W+", "_", where).strip("_")
            found[f"{place}_{len(found)}" if place in found else place] = leaf.clone() if id(leaf) in seen else leaf
            seen.add(id(leaf))
    return found


def _reason(error: Exception) -> str:
    """In one line. What Python itself raises is mostly a mistake in the user's code: so say which, and where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, DataDependentOutputException):
        return f"it reads the values of a tensor, or branches on them ({error.func}){_place(error)}"
    if isinstance(error, GuardOnDataDependentSymNode):
        return f"it branches on the values of a tensor{_place(error)}"
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape of what {error.func} makes depends on values{_place(error)}"
    if lines and "fake tensor in the exported program constant" in lines[0]:
        return "it uses a tensor that its code makes outside of PyTorch's record, or keeps from an earlier step"
    if type(error).__module__ != "builtins" or isinstance(error, RuntimeError | NotImplementedError):
        told = lines[0] if lines else type(error).__name__
        return told.partition(" Please file an issue")[0] + ("" if isinstance(error, RotaError) else _place(error))
    return f"its code raised {type(error).__name__}{f': {lines[0]}' if lines else ''}{_place(error)}"


def _place(error: Exception) -> str:
    """Where the user's code is that raised it; nothing if it is not the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    place = next((one for one in reversed(frames) if not one.filename.startswith(inside)), None)
    return "" if place is None else f" ({os.path.basename(place.filename)}, line {place.lineno})"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings of torch.export, and the whole graph that it prints when an attempt fails."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _check_hooks(model: torch.nn.Module) -> None:
    """What changes gradients behind the back of the graph cannot be captured."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"the model cannot be captured: {name or 'it'} has a backward hook")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"the model cannot be captured: {name} has a hook on its gradient")


def _has_statistics(module: torch.nn.Module) -> bool:
    return module.training and getattr(module, "running_mean", None) is not None


@contextlib.contextmanager
def _refusing_own_gradients() -> Iterator[None]:
    """The graph has no place for a gradient that is not PyTorch's own: better no capture than wrong gradients."""

    allowed = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == _LIBRARY_AUTOGRAD:  # the op itself is in the graph, and brings its gradient
            return allowed(cls, *args, **kwargs)
        raise CaptureError(f"it uses {cls.__name__}, a torch.autograd.Function with its own backward")

    def refuse_hook(tensor: torch.Tensor, hook: Any) -> Any:
        raise CaptureError("it registers a hook on the gradient of a tensor")

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(refuse)),
        mock.patch.object(torch.Tensor, "register_hook", refuse_hook),
    ):
        yield


def _train_dropout(exported: torch.export.ExportedProgram, trained: set[str]) -> None:
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.target == torch.ops.aten.dropout.default and module_of(node) in trained:
                    node.args = (node.args[0], node.args[1], True)


def _build(
    exported: torch.export.ExportedProgram, model: torch.nn.Module, batch: Any, *, notes: tuple[str, ...]
) -> Graph:
    aliases = dict(_tied(model))
    builder = Builder()
    inputs: list[str] = []
    constants: dict[str, torch.Tensor] = {}
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind is InputKind.CUSTOM_OBJ:
            raise CaptureError(
                "the model cannot be captured: it uses an object of PyTorch's that is not a tensor, such as a "
                "torch.Generator; draw random numbers without a generator of your own"
            )
        if not isinstance(value, torch.Tensor):  # a number or a string of the batch, already part of the ops
            continue
        target = (spec.target or "").removeprefix(_PREFIX)
        if spec.kind is InputKind.USER_INPUT:
            name, role = node.name, Role.INPUT
            if 0 in value.shape:
                raise CaptureError("a tensor of the batch is empty; capture the model with at least one sample")
            inputs.append(name)
        elif spec.kind is InputKind.PARAMETER:
            name, role = aliases.get(target, target), Role.PARAMETER
        elif spec.kind is InputKind.BUFFER:
            name, role = aliases.get(target, target), Role.BUFFER
        else:
            name, role = f"constant.{node.name}", Role.CONSTANT
            constants[name] = exported.constants[spec.target or ""]
        trained = role is Role.PARAMETER and model.get_parameter(target).requires_grad
        builder.declare(node, _tensor(name, value, role, requires_grad=trained))
    builder.run(exported.graph_module)
    outputs, numbers = _outputs(exported, builder)
    assigned = {name: outputs.pop(name) for name in list(outputs) if name.startswith(_ASSIGNED)}
    updates = builder.updates() | {
        aliases.get(name.removeprefix(_ASSIGNED), name.removeprefix(_ASSIGNED)): new for name, new in assigned.items()
    }
    if model.training and not builder.tensors[outputs["loss"]].requires_grad:
        raise CaptureError(
            "the model cannot be captured: its loss has no gradient, so that nothing would be trained; compute it from "
            "what trained parameters (requires_grad) make, without detach(), no_grad() or rounding in between"
        )
    _check_updates(builder, updates)
    graph = Graph(
        tensors=builder.tensors,
        ops=tuple(builder.ops),
        inputs=tuple(inputs),
        outputs=outputs,
        numbers=numbers,
        aliases=aliases,
        updates=updates,
        constants=constants,
        batch=skeleton_of(batch),
        notes=notes,
    )
    return normalise(graph)


def _check_updates(builder: Builder, updates: Mapping[str, str]) -> None:
    """PyTorch runs a checkpoint twice, and so updates twice what is in it; a graph runs once."""
    inside = {name for op in builder.ops if op.checkpoint for name in op.outputs}
    for buffer, new in updates.items():
        if new in inside:
            raise CaptureError(
                f"the model cannot be captured: it updates {buffer} inside of torch.utils.checkpoint, and PyTorch does "
                "that once more when it computes it again; leave this module out of the checkpoint, or train it on one "
                "device, as it is"
            )


def _outputs(exported: torch.export.ExportedProgram, builder: Builder) -> tuple[dict[str, str], dict[str, float]]:
    (result,) = (node for node in exported.graph.nodes if node.op == "output")
    names = pytree.tree_unflatten(
        [builder.value(one) if isinstance(one, torch.fx.Node) else one for one in result.args[0]],
        exported.call_spec.out_spec,
    )
    outputs = {name: ref.name for name, ref in names.items() if isinstance(ref, Ref)}
    if "loss" not in outputs or builder.tensors[outputs["loss"]].shape not in ((), (1,)):
        raise CaptureError("the loss function must return a scalar tensor, or a dict with one as 'loss'")
    numbers = {
        name: float(value)
        for name, value in names.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return outputs, numbers


def _tied(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Each other name of a tied parameter or buffer, and its first name."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if first.setdefault(id(tensor), name) != name:
            yield name, first[id(tensor)]


def _tensor(name: str, value: torch.Tensor, role: Role, *, requires_grad: bool) -> Tensor:
    return Tensor(
        name=name,
        shape=tuple(int(size) for size in value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        role=role,
        requires_grad=requires_grad,
    )
