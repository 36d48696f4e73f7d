"""The structure of a batch: which parts it has, and the same structure with other parts.

Batches are tensors in lists, tuples, named tuples, mappings (transformers' BatchEncoding is a UserDict) and
dataclasses, in any nesting. A structure keeps its type where the type can be copied; a mapping that cannot be copied
becomes a dict.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def named_parts(node: object) -> dict[Any, Any] | None:
    """The parts of a mapping or a dataclass by name; None for anything else."""
    if isinstance(node, Mapping):
        return dict(node.items())
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return None


def rebuilt(node: Any, parts: Mapping[Any, Any]) -> Any:
    """A copy of a mapping or a dataclass with these parts."""
    if isinstance(node, MutableMapping):
        made = copy.copy(node)
        for name, value in parts.items():
            made[name] = value
        return made
    if isinstance(node, Mapping):
        return dict(parts)
    made = copy.copy(node)
    for name, value in parts.items():
        object.__setattr__(made, name, value)  # a frozen one, too
    return made


def plain(node: Any) -> Any:
    """The batch with every mapping and dataclass as (name of its type, dict), for comparison by structure."""
    parts = named_parts(node)
    if parts is not None:
        return type(node).__qualname__, {name: plain(value) for name, value in parts.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node).__qualname__, tuple(plain(value) for value in node)
    if isinstance(node, list | tuple):
        return type(node)(plain(value) for value in node)
    return node


def moved(node: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on this device."""
    return _over_tensors(node, lambda tensor: tensor.to(device))


def _over_tensors(node: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(node, Tensor | torch.nn.utils.rnn.PackedSequence):
        return change(node)
    parts = named_parts(node)
    if parts is not None:
        return rebuilt(node, {name: _over_tensors(value, change) for name, value in parts.items()})
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_over_tensors(value, change) for value in node))
    if type(node) in (list, tuple):
        return type(node)(_over_tensors(value, change) for value in node)
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, node)
