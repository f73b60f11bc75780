"""Splits nested training state into tensors and JSON, and puts it together again, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rota.errors import CheckpointError

# JSON has neither tensors, tuples nor keys other than strings; these marks stand for them.
_TENSOR, _TUPLE, _PAIRS = "$tensor", "$tuple", "$pairs"
_MARKS = {_TENSOR, _TUPLE, _PAIRS}


def flatten(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The tree as JSON values, and the tensors it refers to by path. Tensors that share memory are listed once."""
    tensors: dict[str, torch.Tensor] = {}
    known: dict[tuple[Any, ...], str] = {}

    def walk(node: Any, path: str) -> Any:
        if node is None or isinstance(node, bool | str):
            return node
        if isinstance(node, torch.Tensor):
            if node.layout is not torch.strided or node.is_quantized:
                raise _refusal(path, f"{str(node.layout).removeprefix('torch.')} tensor")
            node = node.detach().resolve_conj().resolve_neg()
            identity = (node.data_ptr(), node.shape, node.stride(), node.dtype, node.device)
            if node.numel() and identity in known:
                return {_TENSOR: known[identity]}
            while path in tensors:  # the keys "a" -> "b" and "a.b" give one path
                path += "'"
            known[identity] = path
            tensors[path] = node
            return {_TENSOR: path}
        if type(node) is int or type(node) is float:
            return node
        if isinstance(node, int):  # IntEnum and the like compare equal to what is kept
            return int(node)
        if isinstance(node, float):
            return float(node)
        if isinstance(node, np.generic | np.ndarray) and node.ndim == 0 and not isinstance(node.item(), np.generic):
            return walk(node.item(), path)
        if isinstance(node, dict):
            if all(isinstance(key, str) for key in node) and not _MARKS & node.keys():
                return {key: walk(item, f"{path}.{key}") for key, item in node.items()}
            return {_PAIRS: [[walk(key, path), walk(item, f"{path}.{key}")] for key, item in node.items()]}
        if isinstance(node, list | tuple):
            items = [walk(item, f"{path}.{i}") for i, item in enumerate(node)]
            return items if isinstance(node, list) else {_TUPLE: items}
        raise _refusal(path, type(node).__name__)

    return walk(tree, "state"), tensors


def _refusal(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a {what}, which a checkpoint cannot hold; keep dense tensors, numbers, strings, lists, tuples and "
        "dicts in state_dict()"
    )


def unflatten(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that `flatten` was given."""
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if _TENSOR in skeleton:
        return tensors[skeleton[_TENSOR]]
    if _TUPLE in skeleton:
        return tuple(unflatten(item, tensors) for item in skeleton[_TUPLE])
    if _PAIRS in skeleton:
        return {unflatten(key, tensors): unflatten(item, tensors) for key, item in skeleton[_PAIRS]}
    return {key: unflatten(item, tensors) for key, item in skeleton.items()}
