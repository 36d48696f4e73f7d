"""Replaced: a module called with other tensors in the places of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def called_with(
    module: nn.Module, tensors: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """What the module returns with these tensors. Afterwards it has its own again.

    tensors: by name, as in `named_parameters()`; a tensor that other names share is replaced there, too

    Asked to find other names itself (`tie_weights=True`, its default), torch 2.13 does not restore a module that is
    registered under two names: the given tensors stay its parameters. So each place is named here, once.
    """
    own = {id(t): name for name, t in [*module.named_parameters(), *module.named_buffers()]}
    places = {
        f"{prefix}.{name}".lstrip("."): tensors[own[id(t)]]
        for prefix, part in module.named_modules()  # each module once
        for name, t in [*part._parameters.items(), *part._buffers.items()]
        if t is not None and own[id(t)] in tensors
    }
    return functional_call(module, places, tuple(args), dict(kwargs or {}), tie_weights=False)


__all__ = ["called_with"]
