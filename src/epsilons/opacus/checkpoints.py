"""Checkpoints in the format of Opacus: weights, the optimizer's state, and what was spent."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from typing import IO, Any, BinaryIO

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import EpsilonsWarning, InputError
from .accountant import Accountant

Path = str | os.PathLike[str] | BinaryIO | IO[bytes]


def save(
    path: Path,
    module: nn.Module,
    optimizer: Optimizer | None,
    accountant: Accountant,
    more: Mapping[str, Any] | None,
    of_module: Mapping[str, Any] | None,
    of_torch: Mapping[str, Any] | None,
) -> None:
    """Write a checkpoint that Opacus can load."""
    checkpoint: dict[str, Any] = dict(more or {})
    checkpoint["module_state_dict"] = module.state_dict(**(of_module or {}))
    checkpoint["privacy_accountant_state_dict"] = accountant.state_dict()
    if optimizer is not None:
        checkpoint["optimizer_state_dict"] = optimizer.state_dict()
    torch.save(checkpoint, path, **(of_torch or {}))


def load(
    path: Path,
    module: nn.Module,
    optimizer: Optimizer | None,
    accountant: Accountant,
    of_module: Mapping[str, Any] | None,
    of_torch: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Read a checkpoint, of this function or of Opacus; the content without the optimizer's state.

    Raises InputError for a file that is no such checkpoint, or holds more than tensors and plain values.
    """
    try:
        checkpoint = torch.load(path, **({"weights_only": True} | dict(of_torch or {})))
    except pickle.UnpicklingError as error:
        raise InputError(
            "The checkpoint holds objects that run code when they are loaded. If you trust the file: "
            "load_checkpoint(…, torch_load_kwargs={'weights_only': False})."
        ) from error
    missing = {"module_state_dict", "privacy_accountant_state_dict"} - set(checkpoint)
    if missing:
        raise InputError(f"This is not a checkpoint of a private run: it has no {', '.join(sorted(missing))}.")
    state = checkpoint.pop("optimizer_state_dict", None)
    if (optimizer is None) != (state is None):
        given, held = ("no optimizer", "one") if optimizer is None else ("an optimizer", "none")
        text = f"Got {given}, and the checkpoint holds the state of {held}: the optimizer's state is not loaded."
        warnings.warn(text, EpsilonsWarning, stacklevel=3)
    module.load_state_dict(checkpoint["module_state_dict"], **(of_module or {}))
    if optimizer is not None and state is not None:
        optimizer.load_state_dict(state)
    accountant.load_state_dict(checkpoint["privacy_accountant_state_dict"])
    return dict(checkpoint)
